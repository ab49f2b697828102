// SPDX-License-Identifier: Apache-2.0
// Loads and stores of the rows of the gradient's kernels: x with its scales, up to three arrays g, rstd and mean; dx.
//
// A thread has PACKS packs of 8 columns, SPAN columns apart. Loads are predicated and volatile, so they are issued in
// program order. Elements that do not exist are undefined (with ALIGNED) or 0.
#pragma once
#include "coat/kernel.cuh"
#include "sync/scratch.cuh"

constexpr int TEAM_WARPS = DRVFUSE_TEAM_WARPS;
constexpr int TEAMS = DRVFUSE_TEAMS;
constexpr int PACKS = DRVFUSE_PACKS;
constexpr int GRADIENTS = DRVFUSE_GRADIENTS;
constexpr bool CENTRED = DRVFUSE_CENTRED;
constexpr bool WEIGHTED = DRVFUSE_WEIGHTED;
constexpr bool FULL = DRVFUSE_FULL;  // no thread has a pack beyond the last column

constexpr int WIDTH = 8;  // elements of a pack
constexpr int TEAM_THREADS = 32 * TEAM_WARPS;
constexpr int THREADS = TEAMS * TEAM_THREADS;
constexpr int SPAN = TEAM_THREADS * WIDTH;

struct BackwardParams {
    const u8* x;
    const bf16* scales;
    const u16* g[3];
    const Weight* weight;
    const float* rstd;
    const float* mean;
    u16* dx;
    Weight* dw;
    Weight* db;
    u32* words;  // [segments][SUMS][PACKS * SPAN], backward_sums.cuh
    Scratch scratch;
    i64 x_stride, scale_stride, g_stride[3];
    int columns, segments;
    int segment_rows, longer;  // the first `longer` segments have one more row
    int early_trigger, unused;
};

// 8 columns of a row.
struct Octet {
    u32 x[WIDTH / 4];
    u32 g[GRADIENTS][WIDTH / 2];
    u16 scale;
};

struct Row {
    Octet pack[PACKS];
};

// The values of a row that the forward pass has saved.
struct Saved {
    float rstd, mean;

    // The values that lane `lane` of the warp holds.
    __device__ __forceinline__ Saved of_lane(int lane) const {
        Saved saved = {__shfl_sync(0xffffffffu, rstd, lane), 0.0f};
        if constexpr (CENTRED) saved.mean = __shfl_sync(0xffffffffu, mean, lane);
        return saved;
    }
};

// A thread's position in the next row to load.
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

// Loads the saved values of row `row`, if they are wanted.
__device__ __forceinline__ Saved load_saved(const BackwardParams& p, i64 row, bool wanted) {
    Saved saved;
    ptx::load_f32_if(wanted, saved.rstd, p.rstd + row);
    if constexpr (CENTRED) ptx::load_f32_if(wanted, saved.mean, p.mean + row);
    return saved;
}

// Loads the columns `ahead` columns after `from`, of which `valid` exist.
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

// Loads the row at `from`, and advances `from` by `jump` rows.
__device__ __forceinline__ void load_row(Row& row, Cursor& from, bool wanted, const BackwardParams& p, int column,
                                         i64 jump) {
#pragma unroll
    for (int i = 0; i < PACKS; ++i) load_octet(row.pack[i], from, i * SPAN, wanted, p.columns - column - i * SPAN);
    from.x += jump * p.x_stride;
    from.scales += jump * p.scale_stride;
#pragma unroll
    for (int k = 0; k < GRADIENTS; ++k) from.g[k] += jump * p.g_stride[k];
}

// Four elements of the gradient: the sum of the elements of the arrays, rounded to bf16 after each addition.
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

// Four elements of xhat.
__device__ __forceinline__ void normalised(float (&xhat)[4], const Octet& pack, int word, const Saved& saved) {
    Word<X>::unpack(pack.x[word], xhat);
    const float scale = bf16{pack.scale};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const float x = __fmul_rn(xhat[k], scale);
        xhat[k] = __fmul_rn(CENTRED ? __fsub_rn(x, saved.mean) : x, saved.rstd);
    }
}

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
