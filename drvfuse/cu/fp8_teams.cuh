// SPDX-License-Identifier: Apache-2.0
// Teams: TEAM_WARPS warps that hold a row in registers, PACKS packs of 16 elements a thread, and add over it.
//
// The order of a sum is a tree on the columns alone, the one of fp8_rmsnorm_forward.cu: lane l of segment k (512
// columns) adds its packs of segments k, k + 8, ... in order from +0; butterfly over the lanes, then over the 8 segments.
// A warp holds segments of 8 / TEAM_WARPS remainders, its slots; short rows have fewer.
//
// All threads of a team call `sum` alike. A team has a barrier of its own, and two sets of words in turn: a warp is
// overtaken by one sum at most, as the next has a barrier.
#pragma once
#include "fp8_rows.cuh"

constexpr int TEAM_WARPS = DRVFUSE_TEAM_WARPS;
constexpr int TEAMS = DRVFUSE_TEAMS;
constexpr int SLOTS = DRVFUSE_SLOTS;
constexpr int PACKS = DRVFUSE_ROUNDS * SLOTS;
constexpr int THREADS = 32 * TEAM_WARPS * TEAMS;

struct TeamScratch {
    float sums[2][TEAMS][8];
};

struct Team {
    int lane = threadIdx.x % 32;
    int member = threadIdx.x / 32 % TEAM_WARPS;
    int index = threadIdx.x / 32 / TEAM_WARPS;
    u32 turn = 0;

    // First column of this thread's pack `i`; packs of one slot are i, i + SLOTS, ...
    __device__ __forceinline__ int column(int i) const {
        return ((i / SLOTS * 8 + i % SLOTS * TEAM_WARPS + member) * 32 + lane) * PACK;
    }

    __device__ __forceinline__ float sum(TeamScratch& scratch, float (&slots)[SLOTS]) {
#pragma unroll
        for (int mask = 16; mask > 0; mask /= 2) {
#pragma unroll
            for (int i = 0; i < SLOTS; ++i) {
                slots[i] = __fadd_rn(slots[i], __shfl_xor_sync(0xffffffffu, slots[i], mask));
            }
        }
        float eight[8];
        if constexpr (TEAM_WARPS == 1) {
#pragma unroll
            for (int i = 0; i < 8; ++i) eight[i] = i < SLOTS ? slots[i < SLOTS ? i : 0] : 0.0f;
        } else {
            float* sums = scratch.sums[turn][index];
            turn ^= 1;
            if (lane == 0) {
#pragma unroll
                for (int i = 0; i < SLOTS; ++i) sums[i * TEAM_WARPS + member] = slots[i];
            }
            asm volatile("bar.sync %0, %1;" ::"r"(1 + index), "r"(32 * TEAM_WARPS) : "memory");
#pragma unroll
            for (int i = 0; i < 8; ++i) eight[i] = i < SLOTS * TEAM_WARPS ? sums[i] : 0.0f;
        }
        return __fadd_rn(__fadd_rn(__fadd_rn(eight[0], eight[4]), __fadd_rn(eight[2], eight[6])),
                         __fadd_rn(__fadd_rn(eight[1], eight[5]), __fadd_rn(eight[3], eight[7])));
    }
};
