// SPDX-License-Identifier: Apache-2.0
// What cu/gemv_partial_norm.cu is compiled for and called with, and which rows a block has.
#pragma once
#include "fp8_rows.cuh"
#include "scratch.cuh"

using Act = DRVFUSE_ACT_DTYPE;
using Weight = DRVFUSE_WEIGHT_DTYPE;
using Gamma = DRVFUSE_GAMMA_DTYPE;
using Out = DRVFUSE_OUT_DTYPE;

constexpr int M = DRVFUSE_M;                      // rows of act
constexpr int WARPS_A_ROW = DRVFUSE_WARPS_A_ROW;
constexpr int TEAMS = DRVFUSE_TEAMS;              // of warps that share a row, in a block
constexpr int PACKS = DRVFUSE_PACKS;              // of a row that a lane has at a time: 1, 2 or 4
constexpr int SLOTS = DRVFUSE_SLOTS;              // rows that a lane has at a time
constexpr int SUM_LANES = DRVFUSE_SUM_LANES;      // a power of two, as many as a row has groups, but 32 at most
constexpr int ACCESS = DRVFUSE_ACCESS;            // bytes of an access that all rows of the weight are aligned to
constexpr bool CHUNKED = DRVFUSE_CHUNKED;         // a team comes back to a row
constexpr bool DEPENDENT = DRVFUSE_DEPENDENT;     // launched with PDL
constexpr bool ACT_ALIGNED = DRVFUSE_ACT_ALIGNED;
constexpr bool NORM_ALIGNED = DRVFUSE_NORM_ALIGNED;  // gamma and normed, to 4 elements
enum class Scales { none, tensor, row, group };
constexpr Scales SCALES = Scales::DRVFUSE_SCALES;

constexpr int W = 16 / sizeof(Weight);  // elements of a pack
constexpr int WARPS = WARPS_A_ROW * TEAMS;
constexpr int STEP = SLOTS * TEAMS;  // rows between barriers
constexpr int SCALE_GROUP = 128;
constexpr bool EXACT = sizeof(Act) < 4 && sizeof(Weight) < 4;
constexpr bool RESIDENT = M == 1 && !CHUNKED && PACKS * W <= 32;  // act in registers
constexpr int TOGETHER = RESIDENT ? SLOTS : 2;                    // rows whose sums are reduced together
constexpr int SUMS = TOGETHER * PACKS;
constexpr int VALUES = SUMS > 8 ? 16 : SUMS > 4 ? 8 : SUMS > 2 ? 4 : SUMS;
static_assert(SUMS <= 16 && SLOTS % TOGETHER == 0, "plan");

// What the first loads need comes first: a kernel's parameters are fetched by lines.
struct GemvParams {
    const Weight* weight;
    i64 weight_step;  // between rows in bytes, below 2^32
    int columns;      // K
    int n_normed, n_unnormed;
    int blocks;                                            // all but a last one that finishes
    int normed_blocks, normed_share, normed_more;          // the first ones: as many normed rows each, the first ones 1 more
    int unnormed_blocks, unnormed_share, unnormed_more;    // the same of the other rows, counted from the end
    int last_normed, last_unnormed;                        // of the last block
    int early_trigger;
    const Act* act;
    i64 act_stride;  // in elements
    const float* scales;
    int groups;  // of a row
    int chunks;  // how often a team comes to a row
    Out* normed;
    Out* unnormed;
    u64* words;
    const Gamma* gamma;
    u32* finish_counter;  // the caller's, or that of the workspace
    Scratch scratch;
    int padded;   // n_normed rounded up to 4
    int stashed;  // shared memory holds what the last block normalises
    float eps;
};

// Normed rows of the block, and its other rows.
struct Rows {
    int normed_first, normed, unnormed_first, unnormed;
};

// `count` rows of the weight from `row` on; a step takes no more than STEP of them.
struct Step {
    int row, count;
};

__device__ __forceinline__ Rows rows_of_block(const GemvParams& p) {
    const int b = blockIdx.x, from_end = p.blocks - 1 - b;
    if (from_end < 0) {
        return {p.n_normed - p.last_normed, p.last_normed, p.n_unnormed - p.last_unnormed, p.last_unnormed};
    }
    Rows rows = {0, 0, 0, 0};
    if (b < p.normed_blocks) {
        rows.normed_first = b * p.normed_share + min(b, p.normed_more);
        rows.normed = p.normed_share + (b < p.normed_more);
    }
    if (from_end < p.unnormed_blocks) {
        rows.unnormed = p.unnormed_share + (from_end < p.unnormed_more);
        rows.unnormed_first =
            p.n_unnormed - from_end * p.unnormed_share - min(from_end, p.unnormed_more) - rows.unnormed;
    }
    return rows;
}
