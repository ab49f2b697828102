// SPDX-License-Identifier: Apache-2.0
// The parts of a tensor that the ranks own in a reduce-scatter: ranges of elements, in packs of the tensor.
//
// A part may begin and end at any element. Packs are those of the whole tensor, which are aligned to 16 bytes, so with
// DRVFUSE_RAGGED the first and the last pack of a part may have elements of other parts. A rank reads and writes only
// its own elements of such a pack, since the owner of the others may write them (in place) at the same time.
#pragma once
#include "collectives/sums/ranges.cuh"

// Elements [begin, end) of a tensor.
struct Range {
    i64 begin, end;
};

struct ScatterParams {
    Call call;
    void* output;     // this rank's part of the output
    i64 columns;      // the tensor's last dimension, for the epilogue
    i64 most_packs;   // packs of the largest part
    i64 chunk_packs;  // packs of each part in a chunk or round; unused by kernels without chunks and rounds
    Range parts[DRVFUSE_MAX_RANKS];  // the parts of all ranks, by rank
};

class Part {
public:
    __device__ __forceinline__ Part(const ScatterParams& p, int rank)
        : begin_(p.parts[rank].begin), end_(p.parts[rank].end), first_(begin_ / W),
          packs_(begin_ < end_ ? (end_ + W - 1) / W - first_ : 0) {}

    __device__ __forceinline__ i64 packs() const { return packs_; }

    // The number of packs in the chunk that begins `done` packs into the part.
    __device__ __forceinline__ i64 in_chunk(i64 done, i64 chunk) const {
        const i64 left = packs_ - done;
        return left < 0 ? 0 : left < chunk ? left : chunk;
    }

    // Brings the translation of the address of pack j into the TLB.
    __device__ __forceinline__ void prefetch(const void* tensor, i64 j) const {
        if (j < packs_) ptx::prefetch_l2(static_cast<const char*>(tensor) + (first_ + j) * IN_BYTES);
    }

    // Loads pack j of the part from a tensor that has all parts.
    __device__ __forceinline__ void load(InPack& pack, const void* tensor, i64 j) const {
        read(pack, static_cast<const char*>(tensor) + (first_ + j) * IN_BYTES, j);
    }

    // Loads the part's own elements of pack j. `address` is that of the whole pack, a multiple of 16.
    template <typename T>
    __device__ __forceinline__ void read(Pack<T, W>& pack, const char* address, i64 j) const {
        const i64 at = (first_ + j) * W;
        if (RAGGED && !whole(at)) {
            load_elements(pack, address, end_ - at, begin_ - at);
        } else {
            load_pack(pack, address);
        }
    }

    // Applies the epilogue to the sum of pack j, rounds it, and stores it to the output.
    __device__ __forceinline__ void store(const ScatterParams& p, i64 j, float (&sum)[W], const Epilogue& apply) const {
        const i64 at = (first_ + j) * W;
        apply_epilogue(sum, at, begin_, end_, p.columns, p.call.rank, apply);
        OutPack pack;
        from_float(pack, sum);
        char* const address = static_cast<char*>(p.output) + (at - begin_) * i64(sizeof(Out));
        if (RAGGED && (!whole(at) || reinterpret_cast<u64>(address) % 16 != 0)) {
            store_elements(address, pack, end_ - at, begin_ - at);
        } else {
            store_pack(address, pack);
        }
    }

private:
    __device__ __forceinline__ bool whole(i64 at) const { return at >= begin_ && at + W <= end_; }

    i64 begin_, end_;  // the elements of the part
    i64 first_;        // the index in the tensor of the part's first pack
    i64 packs_;        // the number of packs with elements of the part
};
