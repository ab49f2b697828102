// SPDX-License-Identifier: Apache-2.0
// Teams of TEAM_WARPS warps, which hold a row in registers, PACKS packs of 16 elements in each thread, and add over it.
//
// Pack i of lane l of warp m has the columns from 16 l on of segment i * TEAM_WARPS + m; a segment has 512 columns. The
// order of a sum depends only on the columns: inside each pack, the 32 packs of a segment by butterfly, and the
// segments in order from +0.
//
// All threads of a team call `sum` and `any` together. A team has its own barrier, and two sets of words, which sums
// use in turn: a warp can be at most one sum ahead of another, since each sum has a barrier.
#pragma once
#include "common/fp8_rows.cuh"
#include "ptx/special.cuh"
#include "ptx/threads.cuh"

constexpr int TEAM_WARPS = DRVFUSE_TEAM_WARPS;
constexpr int TEAMS = DRVFUSE_TEAMS;
constexpr int PACKS = DRVFUSE_PACKS;
constexpr int THREADS = 32 * TEAM_WARPS * TEAMS;

struct TeamScratch {
    float sums[2][TEAMS][PACKS * TEAM_WARPS];
};

struct Team {
    int lane = threadIdx.x % 32;
    int member = threadIdx.x / 32 % TEAM_WARPS;
    int index = threadIdx.x / 32 / TEAM_WARPS;
    u32 turn = 0;

    // First column of this thread's pack `i`.
    __device__ __forceinline__ int column(int i) const { return ((i * TEAM_WARPS + member) * 32 + lane) * PACK; }

    // The sum over the row of one value per pack, which must be 0 for packs that do not exist.
    __device__ __forceinline__ float sum(TeamScratch& scratch, float (&own)[PACKS]) {
#pragma unroll
        for (int mask = 16; mask > 0; mask /= 2) {
#pragma unroll
            for (int i = 0; i < PACKS; ++i) own[i] = __fadd_rn(own[i], __shfl_xor_sync(0xffffffffu, own[i], mask));
        }
        float total = 0.0f;
        if constexpr (TEAM_WARPS == 1) {
#pragma unroll
            for (int i = 0; i < PACKS; ++i) total = __fadd_rn(total, own[i]);
            return total;
        }
        float* sums = scratch.sums[turn][index];
        turn ^= 1;
        if (lane == 0) {
#pragma unroll
            for (int i = 0; i < PACKS; ++i) sums[i * TEAM_WARPS + member] = own[i];
        }
        ptx::bar_sync(1 + index, 32 * TEAM_WARPS);
#pragma unroll
        for (int i = 0; i < PACKS * TEAM_WARPS; ++i) total = __fadd_rn(total, sums[i]);
        return total;
    }

    // Whether the condition is true for a thread of the team.
    __device__ __forceinline__ bool any(bool own) const {
        if constexpr (TEAM_WARPS == 1) return __any_sync(0xffffffffu, own);
        return ptx::bar_any(1 + index, 32 * TEAM_WARPS, own);
    }
};

// A thread's packs of a row of FP8, and the bits of their scales. Elements that do not exist are 0.
struct Fp8Row {
    u32 word[PACKS][4];
    u16 scale[PACKS];

    // Loads a row from `x` and group `scales`; `columns` is 0 for a row that does not exist.
    template <int QB, bool ALIGNED>
    __device__ __forceinline__ void load(const Team& team, const u8* x, const u16* scales, int columns) {
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            const int at = team.column(i);
            scale[i] = 0;
            clear(word[i]);
            if (at >= columns) continue;
            if constexpr (ALIGNED) {
                ptx::load_once_v4(word[i], x + at);
            } else {
                load_bytes<PACK>(word[i], x + at, columns - at, false);
            }
            scale[i] = scales[at / QB];
        }
    }

    // Makes the words of a pack unknown to the compiler from here on. Otherwise it would keep values that it has
    // computed from them, in many more registers, until they are needed again.
    __device__ __forceinline__ void forget(int i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) ptx::forget(word[i][j]);
    }
};

// The pack at column `at` of an array that has a value for each column; 0 beyond the last column.
template <bool ALIGNED, typename T>
__device__ __forceinline__ void load_columns(Pack<T, PACK>& pack, const T* values, int at, int columns) {
    clear(pack.word);
    if (at >= columns) return;
    if constexpr (ALIGNED) {
        load_pack(pack, values + at);
    } else {
        load_elements<T, PACK>(pack, values + at, columns - at);
    }
}
