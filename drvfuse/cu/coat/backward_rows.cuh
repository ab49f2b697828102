// SPDX-License-Identifier: Apache-2.0
// What the backward kernels of the FP8 norms share: their parameters, loads of a row (x, its scales, the arrays g,
// rstd and mean), and stores of dx.
//
// A thread of a team has PACKS packs of 8 columns, SPAN columns apart, in registers. Loads are predicated and volatile,
// so they are issued in program order. In registers, elements that do not exist are undefined with ALIGNED, else 0.
#pragma once
#include "coat/kernel.cuh"
#include "sync/scratch.cuh"

constexpr int TEAM_WARPS = DRVFUSE_TEAM_WARPS;  // warps of a team, which works on one row at a time
constexpr int TEAMS = DRVFUSE_TEAMS;            // teams of a block
constexpr int PACKS = DRVFUSE_PACKS;            // packs of a row that a thread has
constexpr int GRADIENTS = DRVFUSE_GRADIENTS;    // arrays g, whose sum is the gradient
constexpr bool CENTRED = DRVFUSE_CENTRED;       // LayerNorm: there are mean and db
constexpr bool WEIGHTED = DRVFUSE_WEIGHTED;     // there are w and dw
constexpr bool FULL = DRVFUSE_FULL;             // every thread has PACKS whole packs of a row

constexpr int WIDTH = 8;                       // elements of a pack
constexpr int TEAM_THREADS = 32 * TEAM_WARPS;  // threads of a team
constexpr int THREADS = TEAMS * TEAM_THREADS;  // threads of a block
constexpr int SPAN = TEAM_THREADS * WIDTH;     // columns between two packs of a thread

// The kernel's parameters. drvfuse/ops/coat/rmsnorm_backward.py reads this definition. Strides are in elements.
struct BackwardParams {
    const u8* x;           // [rows, columns], with `x_stride`
    const bf16* scales;    // s_x [rows, ceil(columns / QB)], with `scale_stride`
    const u16* g[3];       // GRADIENTS arrays [rows, columns], bf16, each with its `g_stride`
    const Weight* weight;  // w [columns], with WEIGHTED
    const float* rstd;     // [rows], of the forward pass
    const float* mean;     // [rows], of the forward pass, with CENTRED
    u16* dx;               // [rows, columns], bf16, contiguous
    Weight* dw;            // [columns], with WEIGHTED
    Weight* db;            // [columns], with WEIGHTED and CENTRED
    u32* words;            // [segments][SUMS][PACKS * SPAN]: the sums of each segment (backward_sums.cuh)
    Scratch scratch;       // the workspace's state
    i64 x_stride;          // distance between two rows of x
    i64 scale_stride;      // distance between two rows of s_x
    i64 g_stride[3];       // distance between two rows of each g
    int columns;           // columns of x
    int segments;          // segments of rows
    int segment_rows;      // rows of a segment; fp8_rmsnorm_backward_few.cu: all rows
    int longer;            // the first `longer` segments have one row more
    int early_trigger;     // 1: trigger dependent launches early, 0: after the last store
    int unused;            // padding to a multiple of 8 bytes
};

// A thread's pack: 8 columns of a row.
struct Octet {
    u32 x[WIDTH / 4];             // the FP8 elements of x
    u32 g[GRADIENTS][WIDTH / 2];  // the bf16 elements of each g
    u16 scale;                    // the bf16 bits of the scale of x
};

// A thread's packs of a row.
struct Row {
    Octet pack[PACKS];
};

// The statistics of a row that the forward pass has saved; `mean` is undefined without CENTRED.
struct Saved {
    float rstd, mean;

    // The statistics that lane `lane` of the warp holds.
    __device__ __forceinline__ Saved of_lane(int lane) const {
        Saved saved = {__shfl_sync(0xffffffffu, rstd, lane), 0.0f};
        if constexpr (CENTRED) saved.mean = __shfl_sync(0xffffffffu, mean, lane);
        return saved;
    }
};

// The addresses of a thread's first pack in the next row to load.
struct Cursor {
    const u8* x;
    const bf16* scales;
    const u16* g[GRADIENTS];

    __device__ __forceinline__ Cursor(const BackwardParams& p, i64 row, int column)
        : x(p.x + row * p.x_stride + column), scales(p.scales + row * p.scale_stride + column / QB) {
#pragma unroll
        for (int k = 0; k < GRADIENTS; ++k) g[k] = p.g[k] + row * p.g_stride[k] + column;
    }
};

// Loads a pack of one array g, of which the first `valid` elements exist.
__device__ __forceinline__ void load_gradient(bool wanted, u32 (&word)[WIDTH / 2], const u16* from, int valid) {
    if constexpr (ALIGNED) {
        ptx::load_once_v4_if(wanted, word, from);
    } else {
        clear(word);
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
            if (wanted && j < valid) word[j / 2] |= u32(from[j]) << (16 * (j % 2));
        }
    }
}

// Loads the statistics of row `row`, if they are wanted; otherwise the result is undefined.
__device__ __forceinline__ Saved load_saved(const BackwardParams& p, i64 row, bool wanted) {
    Saved saved;
    ptx::load_f32_if(wanted, saved.rstd, p.rstd + row);
    if constexpr (CENTRED) ptx::load_f32_if(wanted, saved.mean, p.mean + row);
    return saved;
}

// Loads the pack that begins `ahead` columns after `from`. Its first `valid` elements exist.
__device__ __forceinline__ void load_octet(Octet& pack, const Cursor& from, int ahead, bool wanted, int valid) {
    wanted = wanted && (FULL || valid > 0);
    if constexpr (ALIGNED) {
        ptx::load_once_v2_if(wanted, pack.x, from.x + ahead);
    } else {
        load_bytes<WIDTH>(pack.x, from.x + ahead, wanted ? valid : 0, false);
    }
    ptx::load_u16_if(wanted, pack.scale, from.scales + ahead / QB);
#pragma unroll
    for (int k = 0; k < GRADIENTS; ++k) load_gradient(wanted, pack.g[k], from.g[k] + ahead, valid);
}

// Loads the thread's packs of the row at `from`, if the row is wanted, and advances `from` by `jump` rows. `column` is
// the thread's first column.
__device__ __forceinline__ void load_row(Row& row, Cursor& from, bool wanted, const BackwardParams& p, int column,
                                         i64 jump) {
#pragma unroll
    for (int i = 0; i < PACKS; ++i) load_octet(row.pack[i], from, i * SPAN, wanted, p.columns - column - i * SPAN);
    from.x += jump * p.x_stride;
    from.scales += jump * p.scale_stride;
#pragma unroll
    for (int k = 0; k < GRADIENTS; ++k) from.g[k] += jump * p.g_stride[k];
}

// Computes the four elements of the gradient that belong to words `word` and word + 1 of the pack: the sum of the
// arrays g, rounded to bf16 after each addition.
__device__ __forceinline__ void gradient(float (&g)[4], const Octet& pack, int word) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float* pair = g + 2 * half;
        Word<bf16>::unpack(pack.g[0][word + half], pair);
#pragma unroll
        for (int k = 1; k < GRADIENTS; ++k) {
            float more[2];
            Word<bf16>::unpack(pack.g[k][word + half], more);
            float sum[2] = {__fadd_rn(pair[0], more[0]), __fadd_rn(pair[1], more[1])};
            Word<bf16>::unpack(Word<bf16>::pack(sum), pair);
        }
    }
}

// Computes four elements of xhat, those in word `word` of x.
__device__ __forceinline__ void normalised(float (&xhat)[4], const Octet& pack, int word, const Saved& saved) {
    Word<X>::unpack(pack.x[word], xhat);
    const float scale = bf16{pack.scale};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const float x = __fmul_rn(xhat[k], scale);
        xhat[k] = __fmul_rn(CENTRED ? __fsub_rn(x, saved.mean) : x, saved.rstd);
    }
}

// Stores a pack of dx, of which the first `valid` elements exist.
__device__ __forceinline__ void store_dx(u16* to, const float (&v)[WIDTH], int valid) {
    u32 word[WIDTH / 2];
#pragma unroll
    for (int j = 0; j < WIDTH / 2; ++j) word[j] = Word<bf16>::pack(v + 2 * j);
    if constexpr (ALIGNED) {
        if (FULL || valid > 0) ptx::store_streaming_v4(to, word);
    } else {
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
            if (j < valid) to[j] = u16(word[j / 2] >> (16 * (j % 2)));
        }
    }
}
