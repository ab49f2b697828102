// SPDX-License-Identifier: Apache-2.0
// The reduction of one row held by some lanes of a warp, a pack each: the tree of reduce.cuh without its zeros.
//
// Lanes is a power of two up to 32, and aligned groups of so many lanes hold a row each. All lanes of the warp call it.
// A row is the first packs of one group of 32, so the steps of the butterfly over absent packs and groups add +0 to a sum
// that is not -0, and are left out.
#pragma once
#include "common/reduce.cuh"

template <int Lanes>
struct LaneScratch {
    __device__ __forceinline__ void init() {}
    __device__ __forceinline__ void expect(u32, u32) {}
    static __device__ __forceinline__ u32 block() { return 0; }
};

// As that of reduce.cuh.
template <int Lanes>
__device__ __forceinline__ RowStatistics reduce_row(LaneScratch<Lanes>&, u32, const float (&squares)[1], u32 maximum) {
#pragma unroll
    for (int mask = Lanes / 2; mask > 0; mask /= 2) maximum = max(maximum, __shfl_xor_sync(0xffffffffu, maximum, mask));
    return {butterfly_sum<Lanes / 2>(squares[0]), __uint_as_float(maximum)};
}
