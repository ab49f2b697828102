// SPDX-License-Identifier: Apache-2.0
// FP8 RMSNorm backward in one launch: x, its group scales and g are read once, dx is written once, dw summed in fp32.
//
// Layout: x [rows, columns] FP8 and g [rows, columns] bf16, each with a row stride; s_x bf16; w, rstd; dx bf16.
// The rows are cut into `segments` runs of equal length (to within one). A block takes whole segments; in one, team t
// of TEAMS takes rows t, t + TEAMS, ..., and each thread keeps fp32 sums of g * xhat for its PACKS packs of columns.
// The teams' sums are added in order and stored as the segment's partial row. After a grid barrier the partial rows are
// added: warp i adds segments i, i + WARPS, ..., and the warps' sums are added in order; one rounding. So dw has the
// same bits in every run and on every grid, and there are no locks and nothing to clear.
//
// Grid: cooperative, at most one block a segment. All operations are IEEE; no fma. c1 is a tree on the columns: 8
// elements in order, then packs, then a butterfly over the lanes, then the warps in order. A pack is 8 elements here, so
// that a warp's accesses of g and dx are 512 contiguous bytes: 32-byte strides would write each sector in two halves.
#include "fp8_rows.cuh"
#include "grid_barrier.cuh"
#include "pdl.cuh"

using X = DRVFUSE_DTYPE;
using Weight = DRVFUSE_WEIGHT_DTYPE;
constexpr int QB = DRVFUSE_GROUP;
constexpr int TEAM_WARPS = DRVFUSE_TEAM_WARPS;
constexpr int TEAMS = DRVFUSE_TEAMS;
constexpr int PACKS = DRVFUSE_PACKS;
constexpr bool ALIGNED = DRVFUSE_ALIGNED;

constexpr int WIDTH = 8;  // elements of a pack
constexpr int TEAM_THREADS = 32 * TEAM_WARPS;
constexpr int THREADS = TEAMS * TEAM_THREADS;
constexpr int WARPS = TEAMS * TEAM_WARPS;

struct BackwardParams {
    const u8* x;
    const bf16* scales;
    const u16* g;
    const Weight* weight;
    const float* rstd;
    u16* dx;
    Weight* dw;
    float* partials;
    GridWorkspace* workspace;
    u64 timeout_ns;
    i64 rows, x_stride, scale_stride, g_stride;
    int columns, segments;
    int early_trigger;
    int unused;
};

struct RowLoad {
    u32 x[PACKS][WIDTH / 4];
    u32 g[PACKS][WIDTH / 2];
    u16 scale[PACKS];
    float rstd;
};

__device__ __forceinline__ void load_row(RowLoad& load, const BackwardParams& p, i64 row, i64 end, int column) {
    load.rstd = row < end ? p.rstd[row] : 0.0f;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        const int at = column + i * TEAM_THREADS * WIDTH;
        load.scale[i] = 0;
#pragma unroll
        for (int j = 0; j < WIDTH / 4; ++j) load.x[i][j] = 0;
#pragma unroll
        for (int j = 0; j < WIDTH / 2; ++j) load.g[i][j] = 0;
        if (row < end && at < p.columns) {
            load_bytes<WIDTH>(load.x[i], p.x + row * p.x_stride + at, p.columns - at, ALIGNED);
            load.scale[i] = p.scales[row * p.scale_stride + at / QB].bits;
            const u16* g = p.g + row * p.g_stride + at;
            if constexpr (ALIGNED) {
                load_words<WIDTH / 2>(load.g[i], g);
            } else {
#pragma unroll
                for (int j = 0; j < WIDTH; ++j) {
                    if (at + j < p.columns) load.g[i][j / 2] |= u32(g[j]) << (16 * (j % 2));
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) fp8_rmsnorm_backward(const BackwardParams p) {
    extern __shared__ __align__(16) u8 dynamic[];
    float* shared_dw = reinterpret_cast<float*>(dynamic);  // [TEAMS - 1][columns], then [WARPS][32]
    __shared__ float warp_sums[2][WARPS];
    __shared__ u32 nothing;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int team = warp / TEAM_WARPS, member = threadIdx.x % TEAM_THREADS;
    const int column = member * WIDTH;

    wait_for_producer();
    if (p.early_trigger) launch_dependents();
    const u32 epoch = p.workspace->epoch;
    if (threadIdx.x == 0) nothing = 0;
    float w[PACKS][WIDTH];
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        const int at = column + i * TEAM_THREADS * WIDTH;
        const int valid = p.columns - at;
        load_weights<Weight, WIDTH>(w[i], p.weight + at, valid, ALIGNED && valid > 0);
    }

    u32 turn = 0;
    for (int segment = blockIdx.x; segment < p.segments; segment += gridDim.x) {
        const i64 begin = p.rows * segment / p.segments, end = p.rows * (segment + 1) / p.segments;
        float dw[PACKS][WIDTH];
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) dw[i][j] = 0.0f;
        }
        RowLoad load;
        load_row(load, p, begin + team, end, column);
        for (i64 row = begin + team; row < end; row += TEAMS) {
            RowLoad next;
            load_row(next, p, row + TEAMS, end, column);
            const float rstd = load.rstd;
            float xhat[PACKS][WIDTH];
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < PACKS; ++i) {
                const float scale = bf16{load.scale[i]};
                float own = 0.0f;
#pragma unroll
                for (int j = 0; j < WIDTH / 4; ++j) {
                    float v[4], g[4];
                    fp8_floats<X>(load.x[i][j], v);
                    Word<bf16>::unpack(load.g[i][2 * j], g);
                    Word<bf16>::unpack(load.g[i][2 * j + 1], g + 2);
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        const int at = 4 * j + k;
                        xhat[i][at] = __fmul_rn(__fmul_rn(v[k], scale), rstd);
                        const float wdy = __fmul_rn(w[i][at], g[k]);
                        if (ALIGNED || column + i * TEAM_THREADS * WIDTH + at < p.columns) {
                            own = __fadd_rn(own, __fmul_rn(xhat[i][at], wdy));
                            dw[i][at] = __fadd_rn(dw[i][at], __fmul_rn(g[k], xhat[i][at]));
                        }
                    }
                }
                if (column + i * TEAM_THREADS * WIDTH < p.columns) sum = __fadd_rn(sum, own);
            }
#pragma unroll
            for (int mask = 16; mask > 0; mask /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, mask));
            if constexpr (TEAM_WARPS > 1) {
                if (lane == 0) warp_sums[turn][warp] = sum;
                // Each team has a barrier of its own. Two sets of words: a warp is overtaken by one row at most.
                asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "r"(TEAM_THREADS) : "memory");
                sum = 0.0f;
#pragma unroll
                for (int i = 0; i < TEAM_WARPS; ++i) sum = __fadd_rn(sum, warp_sums[turn][team * TEAM_WARPS + i]);
                turn ^= 1;
            }
            const float c1 = __fdiv_rn(sum, float(p.columns));
#pragma unroll
            for (int i = 0; i < PACKS; ++i) {
                const int at = column + i * TEAM_THREADS * WIDTH;
                float v[WIDTH];
#pragma unroll
                for (int j = 0; j < WIDTH; ++j) {
                    float g[2];
                    Word<bf16>::unpack(load.g[i][j / 2], g);
                    const float wdy = __fmul_rn(w[i][j], g[j % 2]);
                    v[j] = __fmul_rn(__fsub_rn(wdy, __fmul_rn(xhat[i][j], c1)), rstd);
                }
                u32 word[WIDTH / 2];
#pragma unroll
                for (int j = 0; j < WIDTH / 2; ++j) word[j] = Word<bf16>::pack(v + 2 * j);
                u16* to = p.dx + row * p.columns + at;
                if constexpr (ALIGNED) {
                    if (at < p.columns) store_words<WIDTH / 2>(to, word);
                } else {
#pragma unroll
                    for (int j = 0; j < WIDTH; ++j) {
                        if (at + j < p.columns) to[j] = u16(word[j / 2] >> (16 * (j % 2)));
                    }
                }
            }
            load = next;
        }
        // The teams' sums, in order.
        __syncthreads();
        if (team > 0) {
#pragma unroll
            for (int i = 0; i < PACKS; ++i) {
#pragma unroll
                for (int j = 0; j < WIDTH; ++j) {
                    // Transposed by element, so that lanes meet different banks.
                    shared_dw[((team - 1) * PACKS * WIDTH + i * WIDTH + j) * TEAM_THREADS + member] = dw[i][j];
                }
            }
        }
        __syncthreads();
        if (team == 0) {
#pragma unroll
            for (int i = 0; i < PACKS; ++i) {
                const int at = column + i * TEAM_THREADS * WIDTH;
#pragma unroll
                for (int j = 0; j < WIDTH; ++j) {
                    for (int other = 0; other < TEAMS - 1; ++other) {
                        const float more = shared_dw[(other * PACKS * WIDTH + i * WIDTH + j) * TEAM_THREADS + member];
                        dw[i][j] = __fadd_rn(dw[i][j], more);
                    }
                }
                float* to = p.partials + i64(segment) * ((p.columns + 15) / 16 * 16) + at;
                if (at < p.columns) {
#pragma unroll
                    for (int j = 0; j < WIDTH; j += 4) {
                        *reinterpret_cast<float4*>(to + j) =
                            make_float4(dw[i][j], dw[i][j + 1], dw[i][j + 2], dw[i][j + 3]);
                    }
                }
            }
        }
    }

    grid_maximum(p.workspace, epoch, &nothing, p.timeout_ns);
    const int pitch = (p.columns + 15) / 16 * 16;
    if (p.segments <= WARPS) {  // the order of the loop below, where each warp has one segment at most
        for (int at = blockIdx.x * THREADS + threadIdx.x; at < p.columns; at += gridDim.x * THREADS) {
            float sum = 0.0f;
            for (int segment = 0; segment < p.segments; ++segment) {
                sum = __fadd_rn(sum, p.partials[i64(segment) * pitch + at]);
            }
            store_scalar(p.dw + at, sum);
        }
        if (!p.early_trigger) launch_dependents();
        return;
    }
    for (int first = blockIdx.x * 32; first < p.columns; first += gridDim.x * 32) {
        const int at = first + lane;
        float sum = 0.0f;
        if (at < p.columns) {
#pragma unroll 4
            for (int segment = warp; segment < p.segments; segment += WARPS) {
                sum = __fadd_rn(sum, p.partials[i64(segment) * pitch + at]);
            }
        }
        shared_dw[warp * 32 + lane] = sum;
        __syncthreads();
        if (warp == 0 && at < p.columns) {
            sum = 0.0f;
            for (int i = 0; i < WARPS; ++i) sum = __fadd_rn(sum, shared_dw[i * 32 + lane]);
            store_scalar(p.dw + at, sum);
        }
        __syncthreads();
    }
    if (!p.early_trigger) launch_dependents();
}
