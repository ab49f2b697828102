// SPDX-License-Identifier: Apache-2.0
// The ranks' ranges of `total` items (packs or rows): contiguous, in rank order, the first total mod Ranks one longer.
#pragma once

template <typename Int, int Ranks>
struct Partition {
    Int each;
    int extra;

    __device__ __forceinline__ explicit Partition(Int total) : each(total / Ranks), extra(int(total % Ranks)) {}

    __device__ __forceinline__ Int start(int rank) const { return rank * each + (rank < extra ? rank : extra); }

    // How many items of `rank` lie in the chunk that begins `done` items into its range.
    __device__ __forceinline__ Int in_chunk(int rank, Int done, Int chunk) const {
        const Int left = each + (rank < extra) - done;
        return left < 0 ? 0 : left < chunk ? left : chunk;
    }

    __device__ __forceinline__ Int largest() const { return each + (extra > 0); }
};
