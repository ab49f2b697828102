// SPDX-License-Identifier: Apache-2.0
// What the all-reduce kernels share: their parameters, and how they load and store packs of the tensor.
#pragma once
#include "collectives/sums/epilogue.cuh"
#include "collectives/shared/kernel.cuh"

constexpr i64 IN_BYTES = sizeof(InPack);
constexpr i64 OUT_BYTES = sizeof(OutPack);

struct AllreduceParams {
    Call call;
    void* output;
    i64 count;        // elements in this launch
    i64 first;        // index in the tensor of the first element of this launch
    i64 columns;      // the tensor's last dimension, for the epilogue
    i64 chunk_packs;  // packs of a chunk or round (see each kernel's Layout); unused by one_stage without staging
};

// Loads pack `index` of a tensor of `count` elements. The last pack may be partial.
__device__ __forceinline__ void load_input(InPack& pack, const void* tensor, i64 index, i64 count) {
    const char* address = static_cast<const char*>(tensor) + index * IN_BYTES;
    if (RAGGED && count - index * W < W) {
        load_elements(pack, address, count - index * W);
    } else {
        load_pack(pack, address);
    }
}

__device__ __forceinline__ void store_output(void* tensor, i64 index, i64 count, const OutPack& pack) {
    char* address = static_cast<char*>(tensor) + index * OUT_BYTES;
    if (RAGGED && count - index * W < W) {
        store_elements(address, pack, count - index * W);
    } else {
        store_pack(address, pack);
    }
}

// Returns output pack `index`: applies the epilogue to the sum, and rounds it.
__device__ __forceinline__ OutPack finish_pack(const AllreduceParams& p, i64 index, float (&sum)[W],
                                               const Epilogue& apply) {
    const i64 first = p.first + index * W;
    apply_epilogue(sum, first, first, p.first + p.count, p.columns, p.call.rank, apply);
    OutPack pack;
    from_float(pack, sum);
    return pack;
}
