// SPDX-License-Identifier: Apache-2.0
// The reduction of one row that a team of threads holds in registers. A team is a block, or a group of lanes of a warp,
// of a size that is known at compile time. The tree is that of reduce.cuh. The butterflies of reduce.cuh also add
// absent packs, which are +0; this file leaves them out, which gives the same bits, since no sum is -0.
//
// Pack i * threads + t of the row belongs to thread t of the team. Every thread of the block, or of the warp, calls
// reduce_row. If a group of lanes holds a row, the number of packs of a thread is a power of two.
//
// Memory ordering. A block has two sets of shared words and uses them alternately, as in reduce.cuh. Lanes exchange
// values by shuffles only.
#pragma once
#include "common/reduce.cuh"

namespace team_detail {
__device__ constexpr int power_of_two(int least) {
    int power = 1;
    while (power < least) power *= 2;
    return power;
}

// Adds each of N values over the 32 lanes; lane l returns the sum of value l / (32 / N). In each step a lane passes
// half of its values to another lane, until it has one value.
template <int N>
__device__ __forceinline__ float butterfly_sums(const float (&values)[N], u32 lane) {
    static_assert(power_of_two(N) == N && N <= 32, "a share of the lanes for each");
    float own[N];
#pragma unroll
    for (int i = 0; i < N; ++i) own[i] = values[i];
#pragma unroll
    for (int half = N / 2, mask = 16; half > 0; half /= 2, mask /= 2) {
        const bool upper = lane & mask;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const float kept = upper ? own[i + half] : own[i], given = upper ? own[i] : own[i + half];
            own[i] = __fadd_rn(kept, __shfl_xor_sync(0xffffffffu, given, mask));
        }
    }
    return butterfly_sum<16 / N>(own[0]);
}
}  // namespace team_detail

template <int Warps>
struct BlockScratch {
    float sums[2][MAX_GROUPS];
    u32 maxima[2][Warps];

    __device__ __forceinline__ void init() {}
    __device__ __forceinline__ void expect(u32, u32) {}
    static __device__ __forceinline__ u32 block() { return 0; }
};

// The reduce_row of reduce.cuh for a block of `Warps` warps.
template <int Warps, int PACKS>
__device__ __forceinline__ RowStatistics reduce_row(BlockScratch<Warps>& scratch, u32 row,
                                                    const float (&squares)[PACKS], u32 maximum) {
    constexpr int groups = PACKS * Warps;
    static_assert(groups <= MAX_GROUPS, "they have room");
    const u32 lane = threadIdx.x % 32;
    const u32 warp = threadIdx.x / 32;
    const u32 set = FAULT("norm-scratch-reused") ? 0 : row % 2;
    const float own = team_detail::butterfly_sums(squares, lane);
    if (lane % (32 / PACKS) == 0) scratch.sums[set][lane / (32 / PACKS) * Warps + warp] = own;
    maximum = ptx::warp_max(maximum);
    if (lane == 0) scratch.maxima[set][warp] = maximum;
    __syncthreads();
    constexpr int lanes = groups < 32 ? team_detail::power_of_two(groups) : 32;
    float sum = 0.0f;
#pragma unroll
    for (int first = 0; first < groups; first += 32) {
        const u32 group = first + lane % lanes;
        if (groups % lanes == 0 || group < groups) sum = __fadd_rn(sum, scratch.sums[set][group]);
    }
    maximum = lane < Warps ? scratch.maxima[set][lane] : 0;
    return {butterfly_sum<lanes / 2>(sum), __uint_as_float(ptx::warp_max(maximum))};
}

// The scratch for rows of at most 32 packs: an aligned group of `Lanes` lanes, a power of two, holds a row. This
// scratch is empty.
template <int Lanes>
struct LaneScratch {
    __device__ __forceinline__ void init() {}
    __device__ __forceinline__ void expect(u32, u32) {}
    static __device__ __forceinline__ u32 block() { return 0; }
};

template <int Lanes, int PACKS>
__device__ __forceinline__ RowStatistics reduce_row(LaneScratch<Lanes>&, u32, const float (&squares)[PACKS],
                                                    u32 maximum) {
    static_assert(team_detail::power_of_two(PACKS) == PACKS && Lanes * PACKS <= 32, "a group of packs, or less");
    float own[PACKS];
#pragma unroll
    for (int i = 0; i < PACKS; ++i) own[i] = squares[i];
#pragma unroll
    for (int half = PACKS / 2; half > 0; half /= 2) {
#pragma unroll
        for (int i = 0; i < half; ++i) own[i] = __fadd_rn(own[i], own[i + half]);
    }
#pragma unroll
    for (int mask = Lanes / 2; mask > 0; mask /= 2) maximum = max(maximum, __shfl_xor_sync(0xffffffffu, maximum, mask));
    return {butterfly_sum<Lanes / 2>(own[0]), __uint_as_float(maximum)};
}
