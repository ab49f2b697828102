// SPDX-License-Identifier: Apache-2.0
// The definitions and parameters of cu/gemv/gemv_partial_norm.cu, and the rows of a block.
#pragma once
#include "common/fp8_rows.cuh"
#include "sync/scratch.cuh"

using Act = DRVFUSE_ACT_DTYPE;
using Weight = DRVFUSE_WEIGHT_DTYPE;
using Gamma = DRVFUSE_GAMMA_DTYPE;
using Out = DRVFUSE_OUT_DTYPE;
using Bias = DRVFUSE_BIAS_DTYPE;

constexpr int M = DRVFUSE_M;  // rows of act
constexpr int WARPS_A_ROW = DRVFUSE_WARPS_A_ROW;
constexpr int TEAMS = DRVFUSE_TEAMS;            // teams of warps that share a row; team s % TEAMS multiplies stage s
constexpr int PACKS = DRVFUSE_PACKS;            // 16-byte packs of a row held per lane: 1, 2 or 4
constexpr int STEP = DRVFUSE_STEP;              // rows of a stage
constexpr int NORM_WARPS = DRVFUSE_NORM_WARPS;  // warps that normalise the results of a row of act: a power of two
constexpr int SUM_LANES = DRVFUSE_SUM_LANES;    // lanes that add the groups of a row: a power of two
constexpr int ACCESS = DRVFUSE_ACCESS;          // the bytes of an access to which all rows of the weight are aligned
constexpr int STAGES = DRVFUSE_STAGES;          // stages in flight
constexpr int SLOTS = DRVFUSE_SLOTS;            // slots for stages in flight, being multiplied or being added
constexpr int SUM_WARPS = DRVFUSE_SUM_WARPS;    // warp s % SUM_WARPS of these adds stage s
constexpr bool DIRECT = SUM_WARPS == 0;         // each warp computes whole rows, and adds its group sums itself
constexpr bool COPIED = DRVFUSE_COPIED;         // the copy engine copies weights to shared memory
constexpr bool CHUNKED = DRVFUSE_CHUNKED;       // a row has several stages
constexpr bool WHOLE = DRVFUSE_WHOLE;           // every lane has a pack of the row at each of its places
constexpr bool DEPENDENT = DRVFUSE_DEPENDENT;   // launched with PDL
constexpr bool ACT_ALIGNED = DRVFUSE_ACT_ALIGNED;
constexpr bool NORM_ALIGNED = DRVFUSE_NORM_ALIGNED;  // gamma and normed are aligned to 4 elements
enum class Scales { none, tensor, row, group };
constexpr Scales SCALES = Scales::DRVFUSE_SCALES;  // the form of the weight's scales
// never `tensor`: one scale for all of act counts as scales of rows with step 0
constexpr Scales ACT_SCALES = Scales::DRVFUSE_ACT_SCALES;
constexpr int ACT_SCALE_GROUP = DRVFUSE_ACT_SCALE_GROUP;  // columns that share a scale of act
constexpr bool BIASED = DRVFUSE_BIASED;

constexpr int W = 16 / sizeof(Weight);  // elements of a pack
constexpr int SCALE_GROUP = 128;
static_assert(ACT_SCALE_GROUP % W == 0, "the columns of a pack have one scale of act");
constexpr bool EXACT = sizeof(Act) < 4 && sizeof(Weight) < 4;

constexpr int PRODUCT_WARPS = WARPS_A_ROW * TEAMS;  // then come the warps that add, and those that normalise
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

// The fields that the first copy needs come first, since parameters of a kernel are loaded by cache lines.
struct GemvParams {
    const Weight* weight;
    i64 weight_step;  // bytes between rows, below 2^32
    int columns;      // K
    int n_normed, n_unnormed;
    int rows_share, rows_more;      // a block has rows_share rows, the first rows_more blocks have 1 more
    int normed_share, normed_more;  // the same for normed rows
    int chunks;                     // stages of a row
    int groups;                     // groups of a row
    int early_trigger;
    int polled_from;  // the last block polls after it has published this number of rows, since polls delay its reads
    int unused;
    const Act* act;
    i64 act_stride;  // distance between act's rows, in elements
    const float* scales;
    Out* normed;
    Out* unnormed;
    u64* words;
    const Gamma* gamma;
    u32* finish_counter;  // the caller's counter or the workspace's
    Scratch scratch;
    int padded;   // n_normed rounded up to 4
    int stashed;  // shared memory holds the values that are normalised
    float eps;
    int act_scale_step;  // distance between the scales of act's rows, in elements
    const float* act_scales;
    const Bias* bias;
};

// The rows of a block: every gridDim.x-th row, so the normed rows come first.
struct Rows {
    int count, normed;

    __device__ __forceinline__ explicit Rows(const GemvParams& p) {
        const int b = blockIdx.x;
        count = p.rows_share + (b < p.rows_more);
        normed = p.normed_share + (b < p.normed_more);
    }

    __device__ __forceinline__ int operator[](int r) const { return blockIdx.x + r * gridDim.x; }
};
