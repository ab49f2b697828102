// SPDX-License-Identifier: Apache-2.0
// Sums of rows of the weight: loads, products, and what is added by whom, as cu/gemv_partial_norm.cu says.
#pragma once
#include "gemv_params.cuh"

__device__ __forceinline__ void load_narrow(u32 (&word)[4], const char* at, int valid) {
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = 0;
    if constexpr (ACCESS == 8) {
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            if (4 * i < valid) {
                asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(word[i]), "=r"(word[i + 1]) : "l"(at + 4 * i));
            }
        }
    } else if constexpr (ACCESS == 4) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (4 * i < valid) asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(word[i]) : "l"(at + 4 * i));
        }
    } else {
#pragma unroll
        for (int i = 0; i < 16 / ACCESS; ++i) {
            if (ACCESS * i < valid) {
                u32 bits;
                if constexpr (ACCESS == 2) {
                    u16 half;
                    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(half) : "l"(at + 2 * i));
                    bits = half;
                } else {
                    asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(bits) : "l"(at + i));
                }
                word[ACCESS * i / 4] |= bits << (8 * (ACCESS * i % 4));
            }
        }
    }
}

// Loads 16 bytes of a row of the weight, of which `valid`, if that is less, are in the row; the others become zero.
// Without `wanted` the words stay as they are.
__device__ __forceinline__ void load_weight(u32 (&word)[4], const char* at, bool wanted, int valid) {
    if constexpr (ACCESS == 16) {
        asm volatile(
            "{ .reg .pred wanted; setp.ne.u32 wanted, %5, 0;\n"
            "@wanted ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4]; }"
            : "+r"(word[0]), "+r"(word[1]), "+r"(word[2]), "+r"(word[3])
            : "l"(at), "r"(u32(wanted)));
    } else {
        if (wanted) load_narrow(word, at, valid);
    }
}
template <typename T>
__device__ __forceinline__ void widen(float (&v)[16 / sizeof(T)], const u32 (&word)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (sizeof(T) == 1) {
            fp8_floats<T>(word[i], v + 4 * i);
        } else {
            Word<T>::unpack(word[i], v + i * Word<T>::per_word);
        }
    }
}

// Elements of act at column `at`, of which `valid` exist; the others are zero.
__device__ __forceinline__ void load_act(Pack<Act, W>& pack, const Act* at, int valid) {
    if constexpr (ACT_ALIGNED) {
#pragma unroll
        for (int i = 0; i < Pack<Act, W>::words; ++i) pack.word[i] = 0;
        if (valid > 0) load_pack(pack, at);
    } else {
        load_elements(pack, at, valid);
    }
}

// What a lane holds of a row while it arrives.
struct Slot {
    u32 word[PACKS][4];
    float scale[SCALES == Scales::group ? PACKS : 1];
};

// The sums over the warp of V values a lane, as by V butterflies. The lane gets that of value lane / (32 / V).
template <int V, int MASK = 16>
__device__ __forceinline__ float butterfly_sums(const float (&v)[V], int lane) {
    if constexpr (MASK == 0) {
        return v[0];
    } else {
        constexpr int KEPT = V > 1 ? V / 2 : 1;
        const bool upper = lane & MASK;
        float kept[KEPT];
#pragma unroll
        for (int k = 0; k < KEPT; ++k) {
            const float own = V > 1 && upper ? v[V - KEPT + k] : v[k], given = V > 1 && upper ? v[k] : v[V - KEPT + k];
            kept[k] = __fadd_rn(own, __shfl_xor_sync(0xffffffffu, given, MASK));
        }
        return butterfly_sums<KEPT, MASK / 2>(kept, lane);
    }
}

class Gemv {
public:
    __device__ __forceinline__ explicit Gemv(const GemvParams& params)
        : p(params), lane(threadIdx.x % 32), column(threadIdx.x / 32 % WARPS_A_ROW), team(threadIdx.x / 32 / WARPS_A_ROW) {
        place = reinterpret_cast<const char*>(p.weight) + u64(u32(team)) * u32(p.weight_step) + pack_index(0, 0) * 16;
    }

    // Begin to load row `s` of the team in a step.
    __device__ __forceinline__ void load(Slot& slot, const Step& step, int s, int chunk) const {
        const char* at = place + u64(u32(step.row)) * u32(p.weight_step) + u64(u32(s * TEAMS)) * u32(p.weight_step);
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            const int valid = p.columns * int(sizeof(Weight)) - pack_index(chunk, i) * 16;
            const int rows = valid > 0 ? step.count - team : 0;
            const int offset = ((CHUNKED ? chunk * PACKS : 0) + i) * WARPS_A_ROW * 512;
            load_weight(slot.word[i], at + offset, rows > s * TEAMS, valid);
            if constexpr (SCALES == Scales::group) {
                const i64 of_row = (p.columns + SCALE_GROUP - 1) / SCALE_GROUP;
                const float* scale = p.scales + (step.row + s * TEAMS + team) * of_row + pack_index(chunk, i) * W / SCALE_GROUP;
                slot.scale[i] = rows > s * TEAMS ? *scale : 0.0f;
            }
        }
    }

    __device__ __forceinline__ void load_resident_act() {
        if constexpr (RESIDENT) {
#pragma unroll
            for (int i = 0; i < PACKS; ++i) load_act_pack(raw_act[i], 0, pack_index(0, i));
        }
    }

    __device__ __forceinline__ void widen_resident_act() {
        if constexpr (RESIDENT) {
#pragma unroll
            for (int i = 0; i < PACKS; ++i) to_float(act[i], raw_act[i]);
        }
    }

    // The group sums of a step's rows at `chunk`, into `parts` [STEP][M][groups]. Each slot is loaded anew, for the next
    // chunk or step, once it is used.
    __device__ __forceinline__ void multiply(Slot (&slots)[SLOTS], const Step& next, int next_chunk, int chunk, float* parts) {
#pragma unroll
        for (int s0 = 0; s0 < SLOTS; s0 += TOGETHER) {
            float w[RESIDENT ? 1 : TOGETHER][PACKS][W];
            float scale[TOGETHER][PACKS];
            float sums[VALUES];
#pragma unroll
            for (int k = 0; k < VALUES; ++k) sums[k] = 0.0f;
#pragma unroll
            for (int s = 0; s < TOGETHER; ++s) {
                Slot& slot = slots[s0 + s];
                float(&wide)[PACKS][W] = w[RESIDENT ? 0 : s];
#pragma unroll
                for (int i = 0; i < PACKS; ++i) {
                    widen<Weight>(wide[i], slot.word[i]);
                    if constexpr (SCALES == Scales::group) scale[s][i] = slot.scale[i];
                    if constexpr (RESIDENT) sums[s * PACKS + i] = pack_sum(act[i], wide[i], scale[s][i]);
                }
                load(slot, next, s0 + s, next_chunk);
            }
            if constexpr (RESIDENT) {
                deposit(sums, s0, 0, chunk, parts);
            } else {
#pragma unroll 1
                for (int m = 0; m < M; ++m) {
#pragma unroll
                    for (int i = 0; i < PACKS; ++i) {
                        const bool inside = pack_index(chunk, i) * W < p.columns;
                        Pack<Act, W> pack;
                        float a[W];
                        load_act_pack(pack, m, pack_index(chunk, i));
                        to_float(a, pack);
#pragma unroll
                        for (int s = 0; s < TOGETHER; ++s) {
                            sums[s * PACKS + i] = inside ? pack_sum(a, w[s][i], scale[s][i]) : 0.0f;
                        }
                    }
                    deposit(sums, s0, m, chunk, parts);
                }
            }
        }
    }

    // The complete sums of a step, after the barrier. SUM_LANES add a row's groups: with fewer groups than 32 the other
    // lanes of the butterfly would add zeros.
    __device__ __forceinline__ void finish(const Step& step, u32 tag, const float* parts) const {
        constexpr int TOGETHER = 32 / SUM_LANES;
        const int values = min(step.count, STEP) * M, part = lane % SUM_LANES;
#pragma unroll 1
        for (int first = threadIdx.x / 32 * TOGETHER; first < values; first += WARPS * TOGETHER) {
            const int value = first + lane / SUM_LANES;
            float sum = 0.0f;
            if (value < values) {
                for (int group = part; group < p.groups; group += 32) {
                    sum = __fadd_rn(sum, parts[value * p.groups + group]);
                }
            }
#pragma unroll
            for (int mask = SUM_LANES / 2; mask > 0; mask /= 2) {
                sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, mask));
            }
            if (part != 0 || value >= values) continue;
            const int row = step.row + value / M, m = value % M;
            if constexpr (SCALES == Scales::tensor) sum = __fmul_rn(sum, *p.scales);
            if constexpr (SCALES == Scales::row) sum = __fmul_rn(sum, p.scales[row]);
            if (row < p.n_normed) {
                const u64 word = u64(tag) << 32 | Word<float>::pack(&sum);
                u64* to = p.words + i64(m) * p.padded + row;
                asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
            } else {
                store_scalar(p.unnormed + i64(m) * p.n_unnormed + (row - p.n_normed), sum);
            }
        }
    }

private:
    __device__ __forceinline__ int group_index(int chunk, int i) const {
        return (chunk * PACKS + i) * WARPS_A_ROW + column;
    }

    __device__ __forceinline__ int pack_index(int chunk, int i) const { return group_index(chunk, i) * 32 + lane; }

    __device__ __forceinline__ void load_act_pack(Pack<Act, W>& pack, int m, int index) const {
        load_act(pack, p.act + m * p.act_stride + i64(index) * W, p.columns - index * W);
    }

    static __device__ __forceinline__ float pack_sum(const float (&a)[W], const float (&w)[W], float scale) {
        float sum = 0.0f;
#pragma unroll
        for (int e = 0; e < W; ++e) {
            sum = EXACT ? __fmaf_rn(a[e], w[e], sum) : __fadd_rn(sum, __fmul_rn(a[e], w[e]));
        }
        return SCALES == Scales::group ? __fmul_rn(sum, scale) : sum;
    }

    __device__ __forceinline__ void deposit(float (&sums)[VALUES], int s0, int m, int chunk, float* parts) const {
        const float total = butterfly_sums(sums, lane);
        const int value = lane / (32 / VALUES);
        const int group = group_index(chunk, value % PACKS);
        if (lane % (32 / VALUES) == 0 && value < SUMS && group < p.groups) {
            parts[(((s0 + value / PACKS) * TEAMS + team) * M + m) * p.groups + group] = total;
        }
    }

    const GemvParams& p;
    const int lane, column, team;
    const char* place;  // this lane's, in the team's first row of the weight
    Pack<Act, W> raw_act[RESIDENT ? PACKS : 1];
    float act[RESIDENT ? PACKS : 1][W];
};
