// SPDX-License-Identifier: Apache-2.0
// The finish of cu/gemv/gemv_partial_norm.cu: the last NORM_WARPS * M warps of the last block wait for the normed sums
// and normalise them.
#pragma once
#include "gemv/params.cuh"
#include "gemv/butterfly.cuh"
#include "common/reduce.cuh"
#include "trace/trace.cuh"

constexpr int BATCH = DRVFUSE_NORM_BATCH;  // packs for which a lane waits at the same time: a power of two
constexpr bool HELD =
    DRVFUSE_NORM_HELD;  // a lane waits only once, and keeps the values that it normalises in registers
// The number of words in shared memory, per row of act, for the sums of groups of 32 packs: one for each lane of the
// last butterfly.
constexpr int BUCKETS = HELD ? BATCH * NORM_WARPS : 32;
static_assert(32 % (BATCH * NORM_WARPS) == 0, "each bucket is used by one lane only");

struct Words {
    u64 word[4];
};

__device__ __forceinline__ void load_words_relaxed(Words& w, const u64* at) {
    ptx::load_relaxed_gpu_v2(w.word[0], w.word[1], at);
    ptx::load_relaxed_gpu_v2(w.word[2], w.word[3], at + 2);
}

__device__ __forceinline__ void load_gamma(Pack<Gamma, 4>& g, const GemvParams& p, int pack) {
    if constexpr (NORM_ALIGNED) {
        load_pack(g, p.gamma + 4 * pack);
    } else {
        load_elements(g, p.gamma + 4 * pack, p.n_normed - 4 * pack);
    }
}

__device__ __forceinline__ void store_normed(const GemvParams& p, int m, int pack, const float (&product)[4],
                                             float factor) {
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

// A thread's part of the norm of y for one row of act. The normed columns form packs of four. If the last pack has
// fewer columns, its other words are published as 0 (result.cuh), so this code treats all packs as whole.
//
// This code is the last part of every launch. Its warps wait for the result of each instruction, so its time depends on
// the number of instructions.
class Norm {
public:
    // `stash` has room for M x padded floats if p.stashed. It first holds gamma, then the products of the sums with
    // gamma. With HELD it is not used.
    __device__ __forceinline__ Norm(const GemvParams& params, float4* stash, float (*shared_buckets)[32])
        : p(params), buckets(shared_buckets), lane(threadIdx.x % 32),
          m((threadIdx.x - FIRST_NORM_THREAD) / 32 / NORM_WARPS),
          part((threadIdx.x - FIRST_NORM_THREAD) / 32 % NORM_WARPS), packs(p.padded / 4),
          words(p.words + i64(m) * p.padded), products(stash + i64(m) * packs) {}

    // Loads gamma. Called before the wait for the producer, which must not write gamma.
    __device__ __forceinline__ void load() {
        if constexpr (HELD) {
            load_gammas(part);
        } else if (p.stashed) {
#pragma unroll 1
            for (int group = part; group * 32 < packs; group += BATCH * NORM_WARPS) {
                load_gammas(group);
#pragma unroll
                for (int k = 0; k < BATCH; ++k) {
                    float g[4];
                    to_float(g, gamma[k]);
                    if (pack_of(group, k) < packs) products[pack_of(group, k)] = make_float4(g[0], g[1], g[2], g[3]);
                }
            }
        }
        if (lane < 32 / NORM_WARPS) buckets[m][lane * NORM_WARPS + part] = 0.0f;
        __syncwarp();
    }

    // Waits for all normed sums, and returns the factor by which they are multiplied.
    __device__ __forceinline__ float factor(u32 tag, BlockTrace<FIRST_NORM_THREAD>& trace) {
        Patience patience(p.scratch);
#pragma unroll 1
        for (int group = part; group * 32 < packs; group += BATCH * NORM_WARPS) {
            const float sum = squares(group, tag, patience);
            // Each bucket is used by one lane only, the first of the LANES lanes with the same sum, so no atomic is
            // needed.
            float& bucket = buckets[m][(group + lane / LANES * NORM_WARPS) % 32];
            if (lane % LANES == 0) bucket = HELD ? sum : __fadd_rn(bucket, sum);
            if constexpr (HELD) break;
        }
        trace.lap(TraceRole::apply_load);
        if (!FAULT("gemv-no-block-barrier-before-norm")) ptx::bar_sync_1(THREADS - FIRST_NORM_THREAD);
        // A butterfly over BUCKETS lanes suffices: the buckets from BUCKETS on are 0.
        const float sum = butterfly_sum<BUCKETS / 2>(buckets[m][lane % BUCKETS]);
        const float mean = __fdiv_rn(sum, float(p.n_normed));
        return __frcp_rn(__fsqrt_rn(__fadd_rn(mean, p.epsilon)));
    }

    // Stores the normed columns of this lane.
    __device__ __forceinline__ void store(float factor) const {
        if constexpr (HELD) {
#pragma unroll
            for (int k = 0; k < BATCH; ++k) {
                if (pack_of(part, k) < packs) store_normed(p, m, pack_of(part, k), products_of_lane[k], factor);
            }
        } else if (p.stashed) {
#pragma unroll 4
            for (int pack = part * 32 + lane; pack < packs; pack += NORM_WARPS * 32) {
                const float4 stashed = products[pack];
                store_normed(p, m, pack, {stashed.x, stashed.y, stashed.z, stashed.w}, factor);
            }
        } else {
#pragma unroll 1
            for (int pack = part * 32 + lane; pack < packs; pack += NORM_WARPS * 32) {
                Words w;
                Pack<Gamma, 4> g;
                float product[4];
                load_words_relaxed(w, words + i64(pack) * 4);
                load_gamma(g, p, pack);
                multiply(product, w, g);
                store_normed(p, m, pack, product, factor);
            }
        }
    }

private:
    static constexpr int LANES = 32 / BATCH;  // adjacent lanes that get the same sum from squares()

    // The lane's pack in the k-th group of the iteration that begins with group `group`.
    __device__ __forceinline__ int pack_of(int group, int k) const { return (group + k * NORM_WARPS) * 32 + lane; }

    __device__ __forceinline__ void load_gammas(int group) {
#pragma unroll
        for (int k = 0; k < BATCH; ++k) {
            if (pack_of(group, k) < packs) load_gamma(gamma[k], p, pack_of(group, k));
        }
    }

    // Waits for the packs of the iteration that begins with group `group`. Returns the sum of squares of group lane /
    // LANES of the iteration.
    __device__ __forceinline__ float squares(int group, u32 tag, Patience& patience) {
        Words w[BATCH];
        float sums[BATCH];
        await(w, group, tag, patience);
#pragma unroll
        for (int k = 0; k < BATCH; ++k) {
            sums[k] = __fmul_rn(value(w[k], 0), value(w[k], 0));
#pragma unroll
            for (int i = 1; i < 4; ++i) sums[k] = __fadd_rn(sums[k], __fmul_rn(value(w[k], i), value(w[k], i)));
            if constexpr (HELD) {
                multiply(products_of_lane[k], w[k], gamma[k]);
            } else if (p.stashed && pack_of(group, k) < packs) {
                float4& product = products[pack_of(group, k)];
                product = make_float4(__fmul_rn(value(w[k], 0), product.x), __fmul_rn(value(w[k], 1), product.y),
                                      __fmul_rn(value(w[k], 2), product.z), __fmul_rn(value(w[k], 3), product.w));
            }
        }
        return butterfly_sums(sums, lane);
    }

    // Polls the words of the lane's packs of an iteration until the words of all lanes of the warp have the tag `tag`,
    // or a time-out. Sets `w` to the lane's words, and to 0 for packs that do not exist.
    //
    // There are no branches and no computations of addresses between two polls: a pack that does not exist is replaced
    // by the last pack.
    __device__ __forceinline__ void await(Words (&w)[BATCH], int group, u32 tag, Patience& patience) const {
        const u64* from[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; ++k) from[k] = words + i64(min(pack_of(group, k), packs - 1)) * 4;
        for (int polls = 1;; ++polls) {
#pragma unroll
            for (int k = 0; k < BATCH; ++k) load_words_relaxed(w[k], from[k]);
            u32 late = 0;
#pragma unroll
            for (int k = 0; k < BATCH; ++k) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    late |= FAULT("gemv-word-of-any-launch") ? tag_of(w[k], i) == 0 : tag_of(w[k], i) ^ tag;
                }
            }
            if (!__any_sync(0xffffffffu, late != 0)) break;
            if (polls % 16 == 0 && !__all_sync(0xffffffffu, late == 0 || goes_on(w, group, tag, patience))) break;
        }
#pragma unroll
        for (int k = 0; k < BATCH; ++k) {
            if (pack_of(group, k) >= packs) clear(w[k].word);
        }
    }

    __device__ __forceinline__ bool goes_on(const Words (&w)[BATCH], int group, u32 tag, Patience& patience) const {
        int column = 0;  // a column whose word has not arrived
        u32 seen = 0;
#pragma unroll
        for (int k = 0; k < BATCH; ++k) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (tag_of(w[k], i) != tag)
                    column = min(4 * pack_of(group, k) + i, p.n_normed - 1), seen = tag_of(w[k], i);
            }
        }
        return patience.goes_on(column % gridDim.x, tag, seen);
    }

    static __device__ __forceinline__ void multiply(float (&product)[4], const Words& w, const Pack<Gamma, 4>& packed) {
        float g[4];
        to_float(g, packed);
#pragma unroll
        for (int i = 0; i < 4; ++i) product[i] = __fmul_rn(value(w, i), g[i]);
    }

    static __device__ __forceinline__ u32 tag_of(const Words& w, int i) { return u32(w.word[i] >> 32); }
    static __device__ __forceinline__ float value(const Words& w, int i) { return __uint_as_float(u32(w.word[i])); }

    const GemvParams& p;
    float (*const buckets)[32];                   // [M]: the sums of squares of each row, in shared memory
    const int lane;                               // the lane in its warp
    const int m;                                  // the row of act
    const int part;                               // the index of the warp among the warps of row m
    const int packs;                              // packs of four normed columns
    const u64* const words;                       // the words of row m
    float4* const products;                       // the part of `stash` for row m
    Pack<Gamma, 4> gamma[BATCH];                  // gamma for the lane's packs of one iteration
    float products_of_lane[HELD ? BATCH : 1][4];  // with HELD: the sums of the lane's packs, times gamma
};
