// SPDX-License-Identifier: Apache-2.0
// The reduction of one row that a block holds: a sum of squares and a maximum at once, with one block barrier per row.
//
// The tree of the sum is defined on the row's 16-byte packs, so it depends on the columns and the input's type alone:
// inside a pack the squares are added in order from +0; each aligned group of 32 packs is added by butterfly (xor 16,
// 8, 4, 2, 1); of the group sums, lane l adds groups l, l + 32, ... in order from +0, and the 32 lanes are added by
// butterfly. Absent packs and groups count as +0. Here pack j * threads + t belongs to thread t, so a group is the
// packs of one warp with the same j, and every warp computes the last step for itself.
//
// The maximum is of the bits of |x| as an integer. Non-negative floats have the order of their bits, with NaN above
// infinity, so a NaN anywhere makes the maximum a NaN.
//
// Every thread of the block calls reduce_row, with blockDim.x a multiple of 32 up to 1024. Two sets of shared words are
// used alternately: while a warp still reads the words of one row, other warps can only write the words of the next
// row, since no warp passes the barrier of the next row before all have arrived at it.
#pragma once
#include "common/faults.cuh"
#include "common/prelude.cuh"
#include "ptx/threads.cuh"

constexpr int MAX_GROUPS = 128;

struct RowScratch {
    float sums[2][MAX_GROUPS];
    u32 maxima[2][32];

    __device__ __forceinline__ void init() {}

    __device__ __forceinline__ void expect(u32, u32) {}

    // The index of this block among the blocks that share a row.
    static __device__ __forceinline__ u32 block() { return 0; }
};

struct RowStatistics {
    float sum_of_squares;
    float maximum;
};

// Returns the sum over the 32 lanes or, with a `First` below 16, over each aligned group of 2 * First lanes.
template <int First = 16>
__device__ __forceinline__ float butterfly_sum(float value) {
#pragma unroll
    for (int mask = First; mask > 0; mask /= 2) value = __fadd_rn(value, __shfl_xor_sync(0xffffffffu, value, mask));
    return value;
}

// Returns the sum of squares and the largest |x| of a row, over all threads of the block. squares[j] is the sum of
// squares of this thread's pack j, and `maximum` has the bits of the largest |x| of all of its packs. `row` is the
// number of rows that the block has reduced before.
template <int PACKS>
__device__ __forceinline__ RowStatistics reduce_row(RowScratch& scratch, u32 row, const float (&squares)[PACKS],
                                                    u32 maximum) {
    const u32 lane = threadIdx.x % 32;
    const u32 warp = threadIdx.x / 32;
    const u32 warps = blockDim.x / 32;
    const u32 set = FAULT("scratch-reused") ? 0 : row % 2;
    float* sums = scratch.sums[set];
    u32* maxima = scratch.maxima[set];
#pragma unroll
    for (int j = 0; j < PACKS; ++j) {
        float group = butterfly_sum(squares[j]);
        if (lane == 0) sums[j * warps + warp] = group;
    }
    maximum = ptx::warp_max(maximum);
    if (lane == 0) maxima[warp] = maximum;
    __syncthreads();
    float sum = 0.0f;
    for (u32 group = lane; group < PACKS * warps; group += 32) sum = __fadd_rn(sum, sums[group]);
    sum = butterfly_sum(sum);
    maximum = ptx::warp_max(lane < warps ? maxima[lane] : 0);
    return {sum, __uint_as_float(maximum)};
}
