// SPDX-License-Identifier: Apache-2.0
// FP8 RMSNorm backward in one launch: x, its group scales and g are read once, dx is written once, dw summed in fp32.
// With CENTRED it is LayerNorm's, which has a mean, a second sum c2 of the row, and db; without WEIGHTED there are no w,
// dw and db, and so no words, no wait and no scratch.
//
// Layout: x [rows, columns] FP8 and GRADIENTS arrays g [rows, columns] bf16, each with a row stride; s_x bf16; w, rstd;
// dx bf16. The gradient is g[0] + g[1] + g[2], rounded to bf16 after each addition. Segment s of `segments` has the rows
// s, s + segments, ...; a block takes whole segments, so that all blocks are at neighbouring rows at any time. In a
// segment team t of TEAMS takes every TEAMS-th row from its t-th on, and each thread keeps fp32 sums of g * xhat for its
// PACKS packs of columns. A row's loads are issued as soon as the registers of the row before it are free, and cross the
// reduction of c1. Global bytes an element: 1 + 2 / QB of x, 2 GRADIENTS of g, 2 of dx; a row: 4 of rstd; a column: w a
// block that has a segment, 8 written and 8 read a segment, dw.
//
// Order of dw: the rows of a team in turn (fma), the teams in turn, then strand i of STRANDS adds segments i,
// i + STRANDS, ... and the strands are added in turn; one rounding. c1: 8 elements of a pack in turn, packs, a
// butterfly over the lanes, the warps in turn, times 1 / columns. So all results have the same bits in every run and on
// every grid, and there are no locks and nothing to clear. All operations are IEEE. A pack is 8 elements here, so that
// a warp's accesses of g and dx are 512 contiguous bytes: 32-byte strides would write each sector in two halves.
//
// Memory order: fp8_backward_sums.cuh.
// PDL: nothing is read before the wait; the trigger is right after it (early_trigger) or after the last store of dw.
// Grid: cooperative, at most one block a segment. Failure: scratch.cuh; then dw is not written.
#include "fp8_backward_sums.cuh"
#include "pdl.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) fp8_rmsnorm_backward(const BackwardParams p) {
    extern __shared__ __align__(16) u8 dynamic[];
    float4* weights = reinterpret_cast<float4*>(dynamic);                            // [PACKS][2][TEAM_THREADS]
    float* shared = reinterpret_cast<float*>(dynamic + PACKS * SPAN * sizeof(float));  // teams' sums, then strands'
    __shared__ __align__(16) float warp_sums[2][TEAMS][SUMS][TEAM_WARPS];
    const int lane = threadIdx.x % 32;
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // so that the compiler knows it to be uniform
    const int team = warp / TEAM_WARPS, member = threadIdx.x % TEAM_THREADS;
    const int column = member * WIDTH;

    wait_for_producer();
    if (p.early_trigger) launch_dependents();
    ScratchUse use(p.scratch, WEIGHTED && p.segments != 1);
    const float inverse = __frcp_rn(float(p.columns));

    u32 turn = 0;
    for (int segment = blockIdx.x; segment < p.segments; segment += gridDim.x) {
        const i64 jump = i64(TEAMS) * p.segments, first = segment + i64(team) * p.segments;
        int left = p.segment_rows + (segment < p.longer) - team;  // this row and those after it, of all teams
        Cursor from = {p.x + first * p.x_stride + column, p.scales + first * p.scale_stride + column / QB, {},
                       p.rstd + first, CENTRED ? p.mean + first : nullptr};
#pragma unroll
        for (int k = 0; k < GRADIENTS; ++k) from.g[k] = p.g[k] + first * p.g_stride[k] + column;
        u16* to = p.dx + first * p.columns + column;
        Row rows[DEPTH];
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) load_row(rows[d], from, d * TEAMS < left, p, column, jump);
        float dw[PACKS][WIDTH], db[PACKS][WIDTH];
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) dw[i][j] = 0.0f, db[i][j] = 0.0f;
        }
        if (WEIGHTED && segment == blockIdx.x) {
            if (team == 0) {
#pragma unroll
                for (int i = 0; i < PACKS; ++i) {
                    float v[WIDTH];
                    const int valid = p.columns - column - i * SPAN;
                    load_weights<Weight, WIDTH>(v, p.weight + column + i * SPAN, valid, ALIGNED && valid > 0);
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        weights[(2 * i + j) * TEAM_THREADS + member] =
                            make_float4(v[4 * j], v[4 * j + 1], v[4 * j + 2], v[4 * j + 3]);
                    }
                }
            }
            __syncthreads();
        }
        auto step = [&](Row& row) {
            const float rstd = row.rstd;
            float xhat[PACKS][WIDTH], wdy[PACKS][WIDTH];
            float sums[SUMS] = {};
#pragma unroll
            for (int i = 0; i < PACKS; ++i) {
                const float scale = bf16{row.scale[i]};
                float own[SUMS] = {};
#pragma unroll
                for (int j = 0; j < WIDTH / 4; ++j) {
                    float weight[4] = {1.0f, 1.0f, 1.0f, 1.0f};
                    if constexpr (WEIGHTED) {
                        const float4 w = weights[(2 * i + j) * TEAM_THREADS + member];
                        weight[0] = w.x, weight[1] = w.y, weight[2] = w.z, weight[3] = w.w;
                    }
                    float v[4], g[4];
                    fp8_floats<X>(row.x[i][j], v);
                    gradient(g, row, i, 2 * j);
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        const int at = 4 * j + k;
                        const float x = __fmul_rn(v[k], scale);
                        xhat[i][at] = __fmul_rn(CENTRED ? __fsub_rn(x, row.mean) : x, rstd);
                        wdy[i][at] = __fmul_rn(weight[k], g[k]);
                        if constexpr (WEIGHTED) dw[i][at] = __fmaf_rn(g[k], xhat[i][at], dw[i][at]);
                        if constexpr (WEIGHTED && CENTRED) db[i][at] = __fadd_rn(db[i][at], g[k]);
                        if (ALIGNED || column + i * SPAN + at < p.columns) {
                            own[0] = __fadd_rn(own[0], __fmul_rn(xhat[i][at], wdy[i][at]));
                            if constexpr (CENTRED) own[1] = __fadd_rn(own[1], wdy[i][at]);
                        }
                    }
                }
#pragma unroll
                for (int k = 0; k < SUMS; ++k) {
                    if (FULL || column + i * SPAN < p.columns) sums[k] = __fadd_rn(sums[k], own[k]);
                }
            }
            load_row(row, from, DEPTH * TEAMS < left, p, column, jump);
#pragma unroll
            for (int mask = 16; mask > 0; mask /= 2) {
#pragma unroll
                for (int k = 0; k < SUMS; ++k) sums[k] = __fadd_rn(sums[k], __shfl_xor_sync(0xffffffffu, sums[k], mask));
            }
            if constexpr (TEAM_WARPS > 1) {
#pragma unroll
                for (int k = 0; k < SUMS; ++k) {
                    if (lane == 0) warp_sums[turn][team][k][warp % TEAM_WARPS] = sums[k];
                }
                // Each team has a barrier of its own. Two sets of words: a warp is overtaken by one row at most.
                asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "r"(TEAM_THREADS) : "memory");
#pragma unroll
                for (int k = 0; k < SUMS; ++k) {
                    sums[k] = 0.0f;
#pragma unroll
                    for (int i = 0; i < TEAM_WARPS; ++i) sums[k] = __fadd_rn(sums[k], warp_sums[turn][team][k][i]);
                }
                turn ^= 1;
            }
            const float c1 = __fmul_rn(sums[0], inverse);
#pragma unroll
            for (int i = 0; i < PACKS; ++i) {
                float v[WIDTH];
#pragma unroll
                for (int j = 0; j < WIDTH; ++j) {
                    if constexpr (CENTRED) {
                        const float c2 = __fmul_rn(sums[SUMS - 1], inverse);
                        v[j] = __fmul_rn(__fsub_rn(wdy[i][j], __fmaf_rn(xhat[i][j], c1, c2)), rstd);
                    } else {
                        v[j] = __fmul_rn(__fmaf_rn(-xhat[i][j], c1, wdy[i][j]), rstd);
                    }
                }
                store_dx(to + i * SPAN, v, p.columns - column - i * SPAN);
            }
            to += jump * p.columns;
            left -= TEAMS;
        };
#pragma unroll 1
        while (left > 0) {
#pragma unroll
            for (int d = 0; d < DEPTH; ++d) {
                if (d > 0 && left <= 0) break;
                step(rows[d]);
            }
        }
        if constexpr (WEIGHTED) {
            u64* words = p.words + i64(segment) * p.pitch;
            store_segment(p, words, p.dw, use.epoch(), shared, team, column, dw);
            if constexpr (CENTRED) {
                store_segment(p, words + second_sum(p), p.db, use.epoch(), shared, team, column, db);
            }
        }
    }
    if (!WEIGHTED || p.segments == 1) {  // all is in place
        if (!p.early_trigger) launch_dependents();
        return;
    }
    __syncthreads();
    if (!add_segments(p, use, shared)) return;
    // Block 0 has columns, so it has seen a word of every segment, so every block has read the epoch.
    use.finish();
    if (!p.early_trigger) launch_dependents();
}
