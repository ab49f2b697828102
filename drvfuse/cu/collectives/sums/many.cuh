// SPDX-License-Identifier: Apache-2.0
// The packs of several tensors that one call reduces, as one sequence.
//
// Tensor t has packs [first[t], first[t + 1]) of the sequence, and its last pack may be partial. So no pack has
// elements of two tensors, and each element is summed as in a call for its tensor alone. Tensors without elements are
// left out. DRVFUSE_MANY is the maximum number of tensors in a call, a power of two.
#pragma once
#include "collectives/sums/packs.cuh"

constexpr int MOST_TENSORS = DRVFUSE_MANY;

struct ManyCall {
    const void* inputs[MOST_TENSORS];
    void* outputs[MOST_TENSORS];
    i64 counts[MOST_TENSORS];  // the number of elements of each tensor
    i64 first[MOST_TENSORS];   // the index of each tensor's first pack; 2^62 for entries without a tensor
};

// Returns the index of the tensor to which pack `index` of the sequence belongs.
__device__ __forceinline__ int tensor_of(const ManyCall& many, i64 index) {
    int found = 0;
#pragma unroll
    for (int step = MOST_TENSORS / 2; step > 0; step /= 2) {
        if (index >= many.first[found + step]) found += step;
    }
    return found;
}

// Loads pack `index` of the sequence, from this rank's inputs.
__device__ __forceinline__ void load_of_many(InPack& pack, const ManyCall& many, i64 index) {
    const int tensor = tensor_of(many, index);
    load_input(pack, many.inputs[tensor], index - many.first[tensor], many.counts[tensor]);
}

// Stores pack `index` of the sequence to this rank's outputs.
__device__ __forceinline__ void store_of_many(const ManyCall& many, i64 index, const OutPack& pack) {
    const int tensor = tensor_of(many, index);
    store_output(many.outputs[tensor], index - many.first[tensor], many.counts[tensor], pack);
}
