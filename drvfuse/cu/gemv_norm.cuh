// SPDX-License-Identifier: Apache-2.0
// The finish of cu/gemv_partial_norm.cu: the last NORM_WARPS * M warps of the last block wait for the normed sums and
// normalise them.
#pragma once
#include "gemv_params.cuh"
#include "gemv_butterfly.cuh"
#include "reduce.cuh"
#include "trace.cuh"

constexpr int BATCH = 4;  // packs a lane waits for at a time
static_assert(32 % (BATCH * NORM_WARPS) == 0, "a bucket has the same lane in all rounds");

struct Words {
    u64 word[4];
};

__device__ __forceinline__ void load_words_relaxed(Words& w, const u64* at) {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(w.word[0]), "=l"(w.word[1]) : "l"(at) : "memory");
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(w.word[2]), "=l"(w.word[3]) : "l"(at + 2) : "memory");
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

__device__ __forceinline__ void store_normed(const GemvParams& p, int m, int pack, const float (&product)[4], float factor) {
    float y[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = __fmul_rn(product[i], factor);
    Pack<Out, 4> out;
    from_float(out, y);
    Out* to = p.normed + i64(m) * p.n_normed + 4 * pack;
    if constexpr (NORM_ALIGNED) {
        store_pack(to, out);
    } else {
        store_elements(to, out, p.n_normed - 4 * pack);
    }
}

class Norm {
public:
    // `stash` has room for M x padded floats, if p.stashed: first gamma, then the products with it.
    __device__ __forceinline__ Norm(const GemvParams& params, float4* stash, float (*shared_buckets)[32])
        : p(params), buckets(shared_buckets), lane(threadIdx.x % 32), m((threadIdx.x - FIRST_NORM_THREAD) / 32 / NORM_WARPS),
          part((threadIdx.x - FIRST_NORM_THREAD) / 32 % NORM_WARPS), packs(p.padded / 4),
          words(p.words + i64(m) * p.padded), products(stash + i64(m) * packs) {}

    // Before the producer's end: gamma is no producer's.
    __device__ __forceinline__ void load() const {
        if (!p.stashed) return;
#pragma unroll 1
        for (int pack = part * 32 + lane; pack < packs; pack += NORM_WARPS * 32) {
            float g[4];
            load_gamma(g, p, pack);
            products[pack] = make_float4(g[0], g[1], g[2], g[3]);
        }
    }

    // Waits for all normed sums: what each is multiplied by.
    __device__ __forceinline__ float factor(u32 tag, BlockTrace<FIRST_NORM_THREAD>& trace) {
        Patience patience(p.scratch);
        if (lane < 32 / NORM_WARPS) buckets[m][lane * NORM_WARPS + part] = 0.0f;
        __syncwarp();
        for (int group = part; group * 32 < packs; group += BATCH * NORM_WARPS) {
            const float sum = squares(group * 32, tag, patience);
            float& bucket = buckets[m][(group + lane / LANES * NORM_WARPS) % 32];  // this lane's in all rounds
            if (lane % LANES == 0) bucket = __fadd_rn(bucket, sum);
        }
        trace.lap(TraceRole::apply_load);
        asm volatile("bar.sync 1, %0;" ::"r"(THREADS - FIRST_NORM_THREAD) : "memory");
        const float mean = __fdiv_rn(butterfly_sum(buckets[m][lane]), float(p.n_normed));
        return __frcp_rn(__fsqrt_rn(__fadd_rn(mean, p.eps)));
    }

    __device__ __forceinline__ void store(float factor) const {
#pragma unroll 1
        for (int pack = part * 32 + lane; pack < packs; pack += NORM_WARPS * 32) {
            float product[4];
            if (p.stashed) {
                const float4 stashed = products[pack];
                product[0] = stashed.x, product[1] = stashed.y, product[2] = stashed.z, product[3] = stashed.w;
            } else {
                Words w;
                float g[4];
                load_words_relaxed(w, words + i64(pack) * 4);
                load_gamma(g, p, pack);
#pragma unroll
                for (int i = 0; i < 4; ++i) product[i] = __fmul_rn(value(w, i), g[i]);
            }
            store_normed(p, m, pack, product, factor);
        }
    }

private:
    static constexpr int LANES = 32 / BATCH;  // that have the same sum of squares

    // Waits for BATCH packs a lane, NORM_WARPS * 32 apart: lane / LANES says of which the sum over the warp is returned.
    __device__ __forceinline__ float squares(int first, u32 tag, Patience& patience) {
        Words w[BATCH];
        float sums[BATCH];
        await(w, first, tag, patience);
#pragma unroll
        for (int k = 0; k < BATCH; ++k) {
            const int pack = first + k * NORM_WARPS * 32 + lane;
            sums[k] = 0.0f;
            if (pack < packs) {
#pragma unroll
                for (int i = 1; i < 4; ++i) {
                    if (4 * pack + i >= p.n_normed) w[k].word[i] = 0;
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[k] = __fadd_rn(sums[k], __fmul_rn(value(w[k], i), value(w[k], i)));
                if (p.stashed) {
                    const float4 g = products[pack];
                    products[pack] = make_float4(__fmul_rn(value(w[k], 0), g.x), __fmul_rn(value(w[k], 1), g.y),
                                                 __fmul_rn(value(w[k], 2), g.z), __fmul_rn(value(w[k], 3), g.w));
                }
            }
        }
        __syncwarp();
        return butterfly_sums(sums, lane);
    }

    // The words of BATCH packs once they carry the tag. All that are missing are loaded anew together.
    __device__ __forceinline__ void await(Words (&w)[BATCH], int first, u32 tag, Patience& patience) const {
        bool missing[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; ++k) missing[k] = first + k * NORM_WARPS * 32 + lane < packs;
        for (;;) {
#pragma unroll
            for (int k = 0; k < BATCH; ++k) {
                if (missing[k]) load_words_relaxed(w[k], words + i64(first + k * NORM_WARPS * 32 + lane) * 4);
            }
            int column = -1;  // that is missing
            u32 seen = 0;
#pragma unroll
            for (int k = 0; k < BATCH; ++k) {
                const int pack = first + k * NORM_WARPS * 32 + lane;
                bool all = true;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (missing[k] && 4 * pack + i < p.n_normed && u32(w[k].word[i] >> 32) != tag) {
                        all = false, column = 4 * pack + i, seen = u32(w[k].word[i] >> 32);
                    }
                }
                missing[k] = missing[k] && !all;
            }
            if (column < 0 || !patience.goes_on(column % gridDim.x, tag, seen)) return;
        }
    }

    static __device__ __forceinline__ float value(const Words& w, int i) { return __uint_as_float(u32(w.word[i])); }

    const GemvParams& p;
    float (*const buckets)[32];  // [M]
    const int lane, m, part, packs;
    const u64* const words;
    float4* const products;
};
