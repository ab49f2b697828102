// SPDX-License-Identifier: Apache-2.0
// The last block of cu/gemv_partial_norm.cu: it waits for the normed sums and normalises them.
#pragma once
#include "gemv_params.cuh"
#include "reduce.cuh"
#include "trace.cuh"

constexpr int NORM_WARPS = DRVFUSE_NORM_WARPS;  // that finish a row of act: a power of two
constexpr int TURNS = 32 / NORM_WARPS;          // groups of a warp, of 32
constexpr int BATCH = TURNS < 4 ? TURNS : 4;    // packs a lane reads at a time
static_assert(NORM_WARPS * M <= WARPS, "a warp for each row of act");

struct Words {
    u64 word[4];
};

__device__ __forceinline__ void load_words_relaxed(Words& w, const u64* at) {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(w.word[0]), "=l"(w.word[1]) : "l"(at) : "memory");
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(w.word[2]), "=l"(w.word[3]) : "l"(at + 2) : "memory");
}

// Whether the first `columns` of the words carry the tag.
__device__ __forceinline__ bool ready(const Words& w, u32 tag, int columns) {
    bool all = true;
#pragma unroll
    for (int i = 0; i < 4; ++i) all = all && (i >= columns || u32(w.word[i] >> 32) == tag);
    return all;
}

__device__ __forceinline__ void load_gamma(float (&g)[4], const GemvParams& p, int pack) {
    Pack<Gamma, 4> packed;
    if constexpr (NORM_ALIGNED) {
        load_pack(packed, p.gamma + 4 * pack);
    } else {
        load_elements(packed, p.gamma + 4 * pack, p.n_normed - 4 * pack);
    }
    to_float(g, packed);
}

__device__ __forceinline__ void prefetch_gamma(const GemvParams& p) {
#pragma unroll 1
    for (int i = threadIdx.x * 32; i < p.n_normed; i += 32 * WARPS * 32) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(p.gamma + i));
    }
}

// Waits for all normed sums and normalises them. `stash` has room for M x padded floats, if p.stashed.
__device__ __forceinline__ void normalise(const GemvParams& p, u32 tag, float4* stash, float (*buckets)[32], Trace& trace) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int m = warp / NORM_WARPS, part = warp % NORM_WARPS;
    const int packs = p.padded / 4, rounds = (packs + 1023) / 1024;
    const u64* words = p.words + i64(m) * p.padded;
    float4* products = stash + i64(m) * packs;
    Patience patience(p.scratch);
    if (m < M) {
        float bucket[TURNS];
#pragma unroll
        for (int t = 0; t < TURNS; ++t) bucket[t] = 0.0f;
        for (int round = 0; round < rounds; ++round) {
#pragma unroll
            for (int t0 = 0; t0 < TURNS; t0 += BATCH) {
                const int first = ((round * 32) + t0 * NORM_WARPS + part) * 32 + lane;
                if (first - lane >= packs) break;
                Words w[BATCH];
                float g[BATCH][4];
#pragma unroll
                for (int t = 0; t < BATCH; ++t) {
                    const int pack = first + t * NORM_WARPS * 32;
                    if (pack < packs) load_words_relaxed(w[t], words + i64(pack) * 4);
                    if (pack < packs && p.stashed) load_gamma(g[t], p, pack);
                }
#pragma unroll
                for (int t = 0; t < BATCH; ++t) {
                    const int pack = first + t * NORM_WARPS * 32;
                    float squares = 0.0f;
                    if (pack < packs) {
                        const int columns = p.n_normed - 4 * pack;
                        while (!ready(w[t], tag, columns)) {
                            if (!patience.goes_on(0, tag, u32(w[t].word[0] >> 32))) break;
                            load_words_relaxed(w[t], words + i64(pack) * 4);
                        }
                        float y[4];
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            y[i] = i < columns ? __uint_as_float(u32(w[t].word[i])) : 0.0f;
                            squares = __fadd_rn(squares, __fmul_rn(y[i], y[i]));
                        }
                        if (p.stashed) {
                            products[pack] = make_float4(__fmul_rn(y[0], g[t][0]), __fmul_rn(y[1], g[t][1]),
                                                         __fmul_rn(y[2], g[t][2]), __fmul_rn(y[3], g[t][3]));
                        }
                    }
                    __syncwarp();
                    bucket[t0 + t] = __fadd_rn(bucket[t0 + t], butterfly_sum(squares));
                }
            }
        }
#pragma unroll
        for (int t = 0; t < TURNS; ++t) {
            if (lane == 0) buckets[m][t * NORM_WARPS + part] = bucket[t];
        }
    }
    trace.lap(TraceRole::apply_load);
    __syncthreads();
    if (m >= M) return;
    const float mean = __fdiv_rn(butterfly_sum(buckets[m][lane]), float(p.n_normed));
    const float factor = __frcp_rn(__fsqrt_rn(__fadd_rn(mean, p.eps)));
    trace.need(factor);
    trace.lap(TraceRole::apply_reduce);
    for (int group = part; group * 32 < packs; group += NORM_WARPS) {
        const int pack = group * 32 + lane;
        if (pack >= packs) break;
        float y[4];
        if (p.stashed) {
            const float4 product = products[pack];
            y[0] = product.x, y[1] = product.y, y[2] = product.z, y[3] = product.w;
        } else {
            Words w;
            float g[4];
            load_words_relaxed(w, words + i64(pack) * 4);
            load_gamma(g, p, pack);
#pragma unroll
            for (int i = 0; i < 4; ++i) y[i] = __fmul_rn(__uint_as_float(u32(w.word[i])), g[i]);
        }
        Pack<Out, 4> out;
#pragma unroll
        for (int i = 0; i < 4; ++i) y[i] = __fmul_rn(y[i], factor);
        from_float(out, y);
        Out* to = p.normed + i64(m) * p.n_normed + 4 * pack;
        if constexpr (NORM_ALIGNED) {
            store_pack(to, out);
        } else {
            store_elements(to, out, p.n_normed - 4 * pack);
        }
    }
    trace.lap(TraceRole::apply_store);
}
