// SPDX-License-Identifier: Apache-2.0
// Teams: TEAM_WARPS warps that hold a row in registers, PACKS packs of 16 elements a thread, and add over it.
//
// The order of a sum is a tree on the columns alone, the one of fp8_rmsnorm_forward.cu: lane l of segment k (512
// columns) adds its packs of segments k, k + 8, ... in order from +0; butterfly over the lanes, then over the 8 segments.
// A warp holds segments of 8 / TEAM_WARPS remainders, its slots; short rows have fewer.
//
// All threads of a team call `sum` and `any` alike. A team has a barrier of its own, and two sets of words in turn: a warp is
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

    // Whether it is true for a thread of the team.
    __device__ __forceinline__ bool any(bool own) const {
        if constexpr (TEAM_WARPS == 1) return __any_sync(0xffffffffu, own);
        u32 result;
        asm volatile(
            "{ .reg .pred in, out; setp.ne.u32 in, %3, 0; bar.red.or.pred out, %1, %2, in; selp.u32 %0, 1, 0, out; }"
            : "=r"(result)
            : "r"(1 + index), "r"(32 * TEAM_WARPS), "r"(u32(own))
            : "memory");
        return result;
    }
};

// A thread's packs of a row of FP8, and the bits of their scales. What does not exist is 0.
struct Fp8Row {
    u32 word[PACKS][4];
    u16 scale[PACKS];

    // From a row's `x` and group `scales`; `columns` is 0 for a row that does not exist.
    template <int QB, bool ALIGNED>
    __device__ __forceinline__ void load(const Team& team, const u8* x, const u16* scales, int columns) {
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            const int at = team.column(i);
            scale[i] = 0;
#pragma unroll
            for (int j = 0; j < 4; ++j) word[i][j] = 0;
            if (at >= columns) continue;
            if constexpr (ALIGNED) {
                stream_pack(word[i], x + at);
            } else {
                load_bytes<PACK>(word[i], x + at, columns - at, false);
            }
            scale[i] = scales[at / QB];
        }
    }

    // The compiler must take the words of a pack from here on as unknown: else it would keep what it has computed from
    // them, which is many times as many registers, until it is needed again.
    __device__ __forceinline__ void forget(int i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(word[i][j]));
    }
};

template <typename T>
__device__ __forceinline__ void forget(Pack<T, PACK>& pack) {
#pragma unroll
    for (int j = 0; j < Pack<T, PACK>::words; ++j) asm volatile("" : "+r"(pack.word[j]));
}

// The pack at column `at` of something that has one value a column; 0 where there are no columns.
template <bool ALIGNED, typename T>
__device__ __forceinline__ void load_columns(Pack<T, PACK>& pack, const T* values, int at, int columns) {
#pragma unroll
    for (int j = 0; j < Pack<T, PACK>::words; ++j) pack.word[j] = 0;
    if (at >= columns) return;
    if constexpr (ALIGNED) {
        load_pack(pack, values + at);
    } else {
        load_elements<T, PACK>(pack, values + at, columns - at);
    }
}
