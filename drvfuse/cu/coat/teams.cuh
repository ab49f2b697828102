// SPDX-License-Identifier: Apache-2.0
// Teams of warps. A team holds one row in registers and adds values over the row.
//
// Division. A block has TEAMS teams of TEAM_WARPS warps each; a team works on one row at a time. A row consists of
// segments of 512 columns, and a segment of 32 packs of 16 columns. Pack i of lane l of the team's warp m has columns
// 16 * l to 16 * l + 15 of segment i * TEAM_WARPS + m. A thread has PACKS packs.
//
// Order of a sum. The caller adds the elements of each pack. Then the 32 packs of a segment are added by butterfly, and
// the segments in order from +0. So the order depends only on the number of columns.
//
// Memory ordering. All threads of a team call `sum` and `any` together. Warps of a team exchange the sums of segments
// through shared memory: they store them, pass the team's named barrier, and load them. Two sets of words are used
// alternately, so one barrier per call of `sum` suffices: a warp that stores to a set has passed the barrier of the
// previous call, and every warp arrived at that barrier after it had loaded the words that the set held two calls
// before.
#pragma once
#include "common/fp8_rows.cuh"
#include "ptx/special.cuh"
#include "ptx/threads.cuh"

constexpr int TEAM_WARPS = DRVFUSE_TEAM_WARPS;    // warps of a team
constexpr int TEAMS = DRVFUSE_TEAMS;              // teams of a block
constexpr int PACKS = DRVFUSE_PACKS;              // packs of a row that a thread holds
constexpr int THREADS = 32 * TEAM_WARPS * TEAMS;  // threads of a block

// The shared memory of a block through which the warps of its teams exchange sums.
struct TeamScratch {
    float sums[2][TEAMS][PACKS * TEAM_WARPS];  // [set][team][segment of the row]
};

// This thread's place in its team.
struct Team {
    int lane = threadIdx.x % 32;                 // the thread's lane in its warp
    int member = threadIdx.x / 32 % TEAM_WARPS;  // the index of the warp in its team
    int index = threadIdx.x / 32 / TEAM_WARPS;   // the index of the team in its block
    u32 set = 0;                                 // the set of TeamScratch::sums that the next sum uses

    // The first column of this thread's pack `i`.
    __device__ __forceinline__ int column(int i) const { return ((i * TEAM_WARPS + member) * 32 + lane) * PACK; }

    // Returns the sum over the row, where own[i] is this thread's value for its pack i: 0 if the pack does not exist.
    // Overwrites `own`.
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
        float* sums = scratch.sums[set][index];
        set ^= 1;
        if (lane == 0) {
#pragma unroll
            for (int i = 0; i < PACKS; ++i) sums[i * TEAM_WARPS + member] = own[i];
        }
        ptx::bar_sync(1 + index, 32 * TEAM_WARPS);
#pragma unroll
        for (int i = 0; i < PACKS * TEAM_WARPS; ++i) total = __fadd_rn(total, sums[i]);
        return total;
    }

    // Whether `own` is true for at least one thread of the team.
    __device__ __forceinline__ bool any(bool own) const {
        if constexpr (TEAM_WARPS == 1) return __any_sync(0xffffffffu, own);
        return ptx::bar_any(1 + index, 32 * TEAM_WARPS, own);
    }
};

// A thread's packs of an FP8 row. Elements and scales that do not exist are 0.
struct Fp8Row {
    u32 word[PACKS][4];  // the 16 elements of each pack
    u16 scale[PACKS];    // the bf16 bits of each pack's scale

    // Loads a row with elements `x` and group scales `scales`; `columns` is 0 for a row that does not exist.
    template <int QB, bool ALIGNED>
    __device__ __forceinline__ void load(const Team& team, const u8* x, const u16* scales, int columns) {
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            const int column = team.column(i);
            scale[i] = 0;
            clear(word[i]);
            if (column >= columns) continue;
            if constexpr (ALIGNED) {
                ptx::load_once_v4(word[i], x + column);
            } else {
                load_bytes<PACK>(word[i], x + column, columns - column, false);
            }
            scale[i] = scales[column / QB];
        }
    }

    // Hides from the compiler that the words of pack `i` keep their values. Otherwise the compiler would keep the fp32
    // values that it has computed from them until the next use, in four times as many registers.
    __device__ __forceinline__ void forget(int i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) ptx::forget(word[i][j]);
    }
};

// Loads the values of 16 columns from `column` on, of an array with one value per column. Values beyond the last column
// are 0.
template <bool ALIGNED, typename T>
__device__ __forceinline__ void load_columns(Pack<T, PACK>& pack, const T* values, int column, int columns) {
    clear(pack.word);
    if (column >= columns) return;
    if constexpr (ALIGNED) {
        load_pack(pack, values + column);
    } else {
        load_elements<T, PACK>(pack, values + column, columns - column);
    }
}
