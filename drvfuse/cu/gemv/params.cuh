// SPDX-License-Identifier: Apache-2.0
// The constants that cu/gemv/gemv_partial_norm.cu is compiled with, its parameters, and the rows of a block.
#pragma once
#include "common/fp8_rows.cuh"
#include "sync/scratch.cuh"

using Act = DRVFUSE_ACT_DTYPE;
using Weight = DRVFUSE_WEIGHT_DTYPE;
using Gamma = DRVFUSE_GAMMA_DTYPE;
using Out = DRVFUSE_OUT_DTYPE;
using Bias = DRVFUSE_BIAS_DTYPE;

constexpr int M = DRVFUSE_M;                      // rows of act
constexpr int WARPS_A_ROW = DRVFUSE_WARPS_A_ROW;  // warps of a team, which multiply a row of the weight together
constexpr int TEAMS = DRVFUSE_TEAMS;              // teams of a block; team s % TEAMS multiplies stage s
constexpr int PACKS = DRVFUSE_PACKS;              // 16-byte packs of a row held per lane: 1, 2 or 4
constexpr int STEP = DRVFUSE_STEP;                // rows of a stage
constexpr int NORM_WARPS = DRVFUSE_NORM_WARPS;    // warps that normalise the results of a row of act: a power of two
constexpr int SUM_LANES = DRVFUSE_SUM_LANES;      // lanes that add the groups of a row: a power of two
constexpr int ACCESS = DRVFUSE_ACCESS;            // bytes per access to the weight, whose rows are aligned to ACCESS
constexpr int STAGES = DRVFUSE_STAGES;            // stages in flight
constexpr int SLOTS = DRVFUSE_SLOTS;              // slots for stages: in flight, being multiplied, or being added
constexpr int SUM_WARPS = DRVFUSE_SUM_WARPS;      // warps that add group sums; warp s % SUM_WARPS adds those of stage s
constexpr bool DIRECT = SUM_WARPS == 0;           // each warp computes whole rows, and adds its group sums itself
constexpr bool COPIED = DRVFUSE_COPIED;           // bulk copies bring weights to shared memory
constexpr bool CHUNKED = DRVFUSE_CHUNKED;         // a row has several stages
constexpr bool WHOLE = DRVFUSE_WHOLE;             // every lane has PACKS packs of each row and chunk
constexpr bool DEPENDENT = DRVFUSE_DEPENDENT;     // launched with PDL
constexpr bool ACT_ALIGNED = DRVFUSE_ACT_ALIGNED;    // rows of act are aligned to a pack and consist of whole packs
constexpr bool NORM_ALIGNED = DRVFUSE_NORM_ALIGNED;  // gamma and normed are aligned to 4 elements
enum class Scales { none, tensor, row, group };
constexpr Scales SCALES = Scales::DRVFUSE_SCALES;  // the form of the weight's scales
// The form of act's scales. It is never `tensor`: a single scale is passed as scales of rows that are 0 elements apart.
constexpr Scales ACT_SCALES = Scales::DRVFUSE_ACT_SCALES;
constexpr int ACT_SCALE_GROUP = DRVFUSE_ACT_SCALE_GROUP;  // columns that share a scale of act
constexpr bool BIASED = DRVFUSE_BIASED;                   // a bias is added

constexpr int W = 16 / sizeof(Weight);  // elements of a pack
constexpr int SCALE_GROUP = 128;        // columns that share a scale of the weight
static_assert(ACT_SCALE_GROUP % W == 0, "the columns of a pack have one scale of act");
constexpr bool EXACT = sizeof(Act) < 4 && sizeof(Weight) < 4;  // products of two elements are exact in fp32

// The warps of a block, in this order: those that multiply, those that add, and those that normalise.
constexpr int PRODUCT_WARPS = WARPS_A_ROW * TEAMS;
constexpr int FIRST_SUM_THREAD = 32 * PRODUCT_WARPS;
constexpr int FIRST_NORM_THREAD = FIRST_SUM_THREAD + 32 * SUM_WARPS;
constexpr int THREADS = FIRST_NORM_THREAD + 32 * NORM_WARPS * M;
constexpr int GROUPS = WARPS_A_ROW * PACKS;  // groups of a row in a stage
constexpr int SLICE = GROUPS * 512;          // bytes of a row in a stage
constexpr int PARTS = STEP * M * GROUPS;     // group sums per stage
constexpr int ADDING = DIRECT ? 1 : SUM_WARPS;
static_assert(DIRECT || (SLOTS > STAGES && STAGES % ADDING == 0 && SLOTS % ADDING == 0 && SLOTS % TEAMS == 0),
              "pipeline.cuh");
static_assert(!CHUNKED || SUM_WARPS == 1, "a warp keeps the sums of a row from chunk to chunk");
static_assert(!DIRECT || (WARPS_A_ROW == 1 && M == 1 && !COPIED && !CHUNKED), "products.cuh");
static_assert(!CHUNKED || GROUPS % 32 == 0, "a group has the same lane in all chunks");

// The kernel's parameters. drvfuse/ops/gemv/kernel.py reads this definition. The members that the first copy of weights
// needs come first, since the parameters of a kernel are loaded by cache lines.
struct GemvParams {
    const Weight* weight;     // [N, columns]
    i64 weight_step;          // bytes from one row of the weight to the next, below 2^32
    int columns;              // K
    int n_normed;             // normed rows of the weight: its first rows
    int n_unnormed;           // rows of the weight that are not normed
    int rows_share;           // rows of the weight that every block has
    int rows_more;            // the first `rows_more` blocks have one row more
    int normed_share;         // normed rows of each block
    int normed_more;          // the first `normed_more` blocks have one normed row more
    int chunks;               // stages of a row
    int groups;               // groups of 32 packs of a row
    int early_trigger;        // 1: trigger dependent launches at entry, 0: after the last sums
    int polled_from;          // rows that the last block publishes before it polls; earlier polls would delay its loads
    int unused;               // padding to a multiple of 8 bytes
    const Act* act;           // [M, columns]
    i64 act_stride;           // elements from one row of act to the next
    const float* scales;      // the scales of the weight, in the form SCALES
    Out* normed;              // [M, n_normed]
    Out* unnormed;            // [M, n_unnormed]
    u64* words;               // [M, padded]: the words of the normed sums, in the workspace
    const Gamma* gamma;       // [n_normed]
    u32* finish_counter;      // the caller's, or ScratchState::users of the workspace
    Scratch scratch;          // the workspace's state
    int padded;               // n_normed rounded up to a multiple of 4
    int stashed;              // 1: shared memory keeps the sums times gamma until they are normalised (norm.cuh)
    float epsilon;            // the number added to the mean of squares
    int act_scale_step;       // elements between the scales of two rows of act
    const float* act_scales;  // the scales of act, in the form ACT_SCALES
    const Bias* bias;         // [N], with BIASED
};

// The rows of the weight that a block has: row r of the block is row blockIdx.x + r * gridDim.x of the weight. Normed
// rows (those that give normed columns of y) are the first rows of the weight, so they are the first rows of each block
// too.
struct Rows {
    int count;   // rows of the block
    int normed;  // normed rows of the block

    __device__ __forceinline__ explicit Rows(const GemvParams& p) {
        const int b = blockIdx.x;
        count = p.rows_share + (b < p.rows_more);
        normed = p.normed_share + (b < p.normed_more);
    }

    __device__ __forceinline__ int operator[](int r) const { return blockIdx.x + r * gridDim.x; }
};
