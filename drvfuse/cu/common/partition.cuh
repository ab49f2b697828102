// SPDX-License-Identifier: Apache-2.0
// Divides `total` items (packs or rows) into contiguous ranges, one per rank in rank order. The first total mod Ranks
// ranges have one item more.
#pragma once

template <typename Int, int Ranks>
struct Partition {
    Int each;
    int extra;

    __device__ __forceinline__ explicit Partition(Int total) : each(total / Ranks), extra(int(total % Ranks)) {}

    __device__ __forceinline__ Int start(int rank) const { return rank * each + (rank < extra ? rank : extra); }

    // How many items of rank `rank` lie in the chunk of its range that begins after `done` items.
    __device__ __forceinline__ Int in_chunk(int rank, Int done, Int chunk) const {
        const Int left = each + (rank < extra) - done;
        return left < 0 ? 0 : left < chunk ? left : chunk;
    }

    __device__ __forceinline__ Int largest() const { return each + (extra > 0); }
};
