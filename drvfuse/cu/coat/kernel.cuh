// SPDX-License-Identifier: Apache-2.0
// What the kernels of all FP8 ops with group scales begin with: what they are compiled for.
#pragma once
#include "common/fp8_rows.cuh"
#include "sync/pdl.cuh"

using X = DRVFUSE_DTYPE;
using Weight = DRVFUSE_WEIGHT_DTYPE;
constexpr int QB = DRVFUSE_GROUP;          // elements that have a scale
constexpr bool ALIGNED = DRVFUSE_ALIGNED;  // whole packs, 16-byte aligned rows
constexpr u32 NAN_BITS = 0x7fffffff;

// By all threads of a block, in front of the wait for the producer: asks L2 for the weights of some columns. That reads
// nothing, so the kernels in front may still write them.
__device__ __forceinline__ void prefetch_weights(const Weight* weight, int first, int end) {
    constexpr int LINE = 128 / sizeof(Weight);
    for (int at = first + int(threadIdx.x) * LINE; at < end; at += int(blockDim.x) * LINE)
        ptx::prefetch_l2(weight + at);
}
