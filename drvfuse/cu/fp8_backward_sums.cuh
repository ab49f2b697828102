// SPDX-License-Identifier: Apache-2.0
// Sums over the rows of the tensor: of each segment's, left as words of (launch's epoch, value), and of the segments.
//
// The block that adds some columns polls the words themselves, relaxed, since each carries its own readiness. No barrier
// and no fence, which would wait for the stores of dx.
#pragma once
#include "fp8_backward_rows.cuh"

constexpr int STRANDS = DRVFUSE_STRANDS;
constexpr int PAIRS = THREADS / STRANDS;  // pairs of columns that a block adds up at a time
constexpr int MOST = 8;                   // segments of a strand

// Two neighbouring columns of a segment's sums, as tagged words.
__device__ __forceinline__ void leave_words(u64* to, u32 epoch, float a, float b) {
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
                    leave_words(words + at + j, epoch, sums[i][j], sums[i][j + 1]);
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
            leave_words(words + at, epoch, sum.x, sum.y);
        }
    }
}
