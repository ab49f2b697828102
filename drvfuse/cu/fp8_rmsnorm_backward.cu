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
// A segment's sums are words of (launch's epoch, value): the block that adds some columns polls the words themselves,
// relaxed, since each carries its own readiness. No barrier and no fence, which would wait for the stores of dx.
//
// PDL: nothing is read before the wait; the trigger is right after it (early_trigger) or after the last store of dw.
// Grid: cooperative, at most one block a segment. Failure: scratch.cuh; then dw is not written.
#include "fp8_rows.cuh"
#include "pdl.cuh"
#include "scratch.cuh"

using X = DRVFUSE_DTYPE;
using Weight = DRVFUSE_WEIGHT_DTYPE;
constexpr int QB = DRVFUSE_GROUP;
constexpr int TEAM_WARPS = DRVFUSE_TEAM_WARPS;
constexpr int TEAMS = DRVFUSE_TEAMS;
constexpr int PACKS = DRVFUSE_PACKS;
constexpr int DEPTH = DRVFUSE_DEPTH;  // rows of a team whose loads are in flight
constexpr int STRANDS = DRVFUSE_STRANDS;
constexpr int GRADIENTS = DRVFUSE_GRADIENTS;
constexpr bool CENTRED = DRVFUSE_CENTRED;
constexpr bool WEIGHTED = DRVFUSE_WEIGHTED;
constexpr bool ALIGNED = DRVFUSE_ALIGNED;
constexpr bool FULL = DRVFUSE_FULL;  // no thread has a pack beyond the last column

constexpr int WIDTH = 8;  // elements of a pack
constexpr int TEAM_THREADS = 32 * TEAM_WARPS;
constexpr int THREADS = TEAMS * TEAM_THREADS;
constexpr int SPAN = TEAM_THREADS * WIDTH;
constexpr int PAIRS = THREADS / STRANDS;  // pairs of columns that a block adds up at a time
constexpr int MOST = 8;                   // segments of a strand
constexpr int SUMS = CENTRED ? 2 : 1;     // over a row: c1, c2; over the rows: dw, db

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
    u64* words;  // [segments][pitch]: dw, and at the next even column db
    Scratch scratch;
    i64 x_stride, scale_stride, g_stride[3];
    int columns, pitch, segments;
    int segment_rows, longer;  // the first `longer` segments have a row more
    int early_trigger;
};

struct Row {
    u32 x[PACKS][WIDTH / 4];
    u32 g[GRADIENTS][PACKS][WIDTH / 2];
    u16 scale[PACKS];
    float rstd, mean;
};

// A thread's place in the next row to load.
struct Cursor {
    const u8* x;
    const bf16* scales;
    const u16* g[GRADIENTS];
    const float *rstd, *mean;
};

// Predicated, not branched round, so that no arithmetic is scheduled in front of them; `word` is undefined if not wanted.
__device__ __forceinline__ void load_if(bool wanted, u32 (&word)[2], const void* from) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %3, 0; @p ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2]; }"
                 : "=r"(word[0]), "=r"(word[1])
                 : "l"(from), "r"(u32(wanted))
                 : "memory");
}
__device__ __forceinline__ void load_if(bool wanted, u32 (&word)[4], const void* from) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4]; }"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "l"(from), "r"(u32(wanted))
                 : "memory");
}
__device__ __forceinline__ void load_if(bool wanted, u16& word, const void* from) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.u16 %0, [%1]; }"
                 : "=h"(word)
                 : "l"(from), "r"(u32(wanted))
                 : "memory");
}
__device__ __forceinline__ void load_if(bool wanted, float& word, const void* from) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.f32 %0, [%1]; }"
                 : "=f"(word)
                 : "l"(from), "r"(u32(wanted))
                 : "memory");
}

__device__ __forceinline__ void load_gradient(bool wanted, u32 (&word)[WIDTH / 2], const u16* from, int valid) {
    if constexpr (ALIGNED) {
        load_if(wanted, word, from);
    } else {
#pragma unroll
        for (int j = 0; j < WIDTH / 2; ++j) word[j] = 0;
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
            if (wanted && j < valid) word[j / 2] |= u32(from[j]) << (16 * (j % 2));
        }
    }
}

// The row at `from`, which then moves on by `jump` rows.
__device__ __forceinline__ void load_row(Row& row, Cursor& from, bool wanted, const BackwardParams& p, int column,
                                         i64 jump) {
    load_if(wanted, row.rstd, from.rstd);
    if constexpr (CENTRED) load_if(wanted, row.mean, from.mean);
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        const int valid = p.columns - column - i * SPAN;
        const bool here = wanted && (FULL || valid > 0);
        if constexpr (ALIGNED) {
            load_if(here, row.x[i], from.x + i * SPAN);
        } else {
            load_bytes<WIDTH>(row.x[i], from.x + i * SPAN, here ? valid : 0, false);
        }
        load_if(here, row.scale[i], from.scales + i * SPAN / QB);
#pragma unroll
        for (int k = 0; k < GRADIENTS; ++k) load_gradient(here, row.g[k][i], from.g[k] + i * SPAN, valid);
    }
    from.x += jump * p.x_stride;
    from.scales += jump * p.scale_stride;
    from.rstd += jump;
    if constexpr (CENTRED) from.mean += jump;
#pragma unroll
    for (int k = 0; k < GRADIENTS; ++k) from.g[k] += jump * p.g_stride[k];
}

// Four elements of the gradient: the sum of the arrays', rounded to bf16 after each addition.
__device__ __forceinline__ void gradient(float (&g)[4], const Row& row, int pack, int word) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float* pair = g + 2 * half;
        Word<bf16>::unpack(row.g[0][pack][word + half], pair);
#pragma unroll
        for (int k = 1; k < GRADIENTS; ++k) {
            float more[2];
            Word<bf16>::unpack(row.g[k][pack][word + half], more);
            float sum[2] = {__fadd_rn(pair[0], more[0]), __fadd_rn(pair[1], more[1])};
            Word<bf16>::unpack(Word<bf16>::pack(sum), pair);
        }
    }
}

__device__ __forceinline__ void store_dx(u16* to, const float (&v)[WIDTH], int valid) {
    u32 word[WIDTH / 2];
#pragma unroll
    for (int j = 0; j < WIDTH / 2; ++j) word[j] = Word<bf16>::pack(v + 2 * j);
    if constexpr (ALIGNED) {
        if (FULL || valid > 0) {
            asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(word[0]), "r"(word[1]),
                         "r"(word[2]), "r"(word[3])
                         : "memory");
        }
    } else {
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
            if (j < valid) to[j] = u16(word[j / 2] >> (16 * (j % 2)));
        }
    }
}

// Two neighbouring columns of a segment's sums, as tagged words.
__device__ __forceinline__ void store_words(u64* to, u32 epoch, float a, float b) {
    const u64 tag = u64(epoch) << 32;
    asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(tag | __float_as_uint(a)),
                 "l"(tag | __float_as_uint(b))
                 : "memory");
}

// Where db begins in a segment's words.
__device__ __forceinline__ int second_sum(const BackwardParams& p) { return (p.columns + 1) / 2 * 2; }

__device__ __forceinline__ void store_sum(const BackwardParams& p, int at, float sum) {
    if (at < p.columns) {
        store_scalar(p.dw + at, sum);
    } else if (CENTRED && at >= second_sum(p) && at < second_sum(p) + p.columns) {
        store_scalar(p.db + at - second_sum(p), sum);
    }
}

// The sums over all segments of the columns that are this block's. False, for all threads, if a wait was given up.
__device__ __forceinline__ bool add_segments(const BackwardParams& p, ScratchUse& use, float* shared) {
    const u32 epoch = use.epoch();
    const int pair = threadIdx.x % PAIRS, strand = threadIdx.x / PAIRS;
    const int columns = CENTRED ? second_sum(p) + p.columns : p.columns;
    for (int first = blockIdx.x * 2 * PAIRS; first < columns; first += gridDim.x * 2 * PAIRS) {
        const int at = first + 2 * pair;
        const u64* from = p.words + i64(strand) * p.pitch + at;
        u64 word[MOST][2] = {};
        Patience patience(p.scratch);
        bool waiting = strand < STRANDS && at < columns, failed = use.aborted();
        while (waiting && !failed) {
            waiting = false;
#pragma unroll
            for (int k = 0; k < MOST; ++k) {
                if (strand + k * STRANDS < p.segments) {
                    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
                                 : "=l"(word[k][0]), "=l"(word[k][1])
                                 : "l"(from + i64(k) * STRANDS * p.pitch)
                                 : "memory");
                }
            }
            int missing = 0;
            u32 seen = 0;
#pragma unroll
            for (int k = 0; k < MOST; ++k) {
                if (strand + k * STRANDS < p.segments) {
                    if (u32(word[k][0] >> 32) != epoch || u32(word[k][1] >> 32) != epoch) {
                        waiting = true, missing = strand + k * STRANDS, seen = u32(word[k][0] >> 32);
                    }
                }
            }
            if (waiting) failed = !patience.goes_on(missing % gridDim.x, epoch, seen);
        }
        float a = 0.0f, b = 0.0f;
#pragma unroll
        for (int k = 0; k < MOST; ++k) {
            if (strand + k * STRANDS < p.segments) {
                a = __fadd_rn(a, __uint_as_float(u32(word[k][0])));
                b = __fadd_rn(b, __uint_as_float(u32(word[k][1])));
            }
        }
        *reinterpret_cast<float2*>(shared + 2 * threadIdx.x) = make_float2(a, b);
        if (!use.met(failed)) return false;
        const int out = threadIdx.x;
        if (out < 2 * PAIRS) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < STRANDS; ++i) sum = __fadd_rn(sum, shared[i * 2 * PAIRS + out]);
            store_sum(p, first + out, sum);
        }
        if constexpr (2 * PAIRS > THREADS) {  // a strand alone: a thread has two columns
            const int second = out + THREADS;
            store_sum(p, first + second, __fadd_rn(0.0f, shared[second]));
        }
        __syncthreads();
    }
    return true;
}

// A segment's sums, from those of each thread, to its words, or if there is no other segment `to` their place.
__device__ __forceinline__ void store_segment(const BackwardParams& p, u64* words, Weight* to, u32 epoch, float* shared,
                                              int team, int column, const float (&sums)[PACKS][WIDTH]) {
    if constexpr (TEAMS == 1) {
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            const int at = column + i * SPAN;
#pragma unroll
            for (int j = 0; j < WIDTH; j += 2) {
                if (at + j >= p.columns) continue;
                if (p.segments > 1) {
                    store_words(words + at + j, epoch, sums[i][j], sums[i][j + 1]);
                } else {
                    store_scalar(to + at + j, sums[i][j]);
                    if (at + j + 1 < p.columns) store_scalar(to + at + j + 1, sums[i][j + 1]);
                }
            }
        }
    } else {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
#pragma unroll
            for (int j = 0; j < WIDTH; j += 4) {
                *reinterpret_cast<float4*>(shared + team * PACKS * SPAN + column + i * SPAN + j) =
                    make_float4(sums[i][j], sums[i][j + 1], sums[i][j + 2], sums[i][j + 3]);
            }
        }
        __syncthreads();
        for (int at = 2 * threadIdx.x; at < p.columns; at += 2 * THREADS) {
            float2 sum = *reinterpret_cast<const float2*>(shared + at);
#pragma unroll
            for (int other = 1; other < TEAMS; ++other) {
                const float2 more = *reinterpret_cast<const float2*>(shared + other * PACKS * SPAN + at);
                sum = make_float2(__fadd_rn(sum.x, more.x), __fadd_rn(sum.y, more.y));
            }
            store_words(words + at, epoch, sum.x, sum.y);
        }
    }
}

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
