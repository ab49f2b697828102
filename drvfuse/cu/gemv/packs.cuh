// SPDX-License-Identifier: Apache-2.0
// Packs of cu/gemv/gemv_partial_norm.cu: 16 bytes of a row of the weight, as many elements of act, and their scales.
#pragma once
#include "gemv/params.cuh"

// Loads 16 bytes of a row of the weight by accesses of ACCESS bytes, 8 or fewer. Only the first `valid` bytes are
// inside the row, and the others become zero.
__device__ __forceinline__ void load_narrow(u32 (&word)[4], const char* at, int valid) {
    clear(word);
    if constexpr (ACCESS == 8) {
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            if (4 * i < valid) ptx::load_readonly_v2(word + i, at + 4 * i);
        }
    } else if constexpr (ACCESS == 4) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (4 * i < valid) word[i] = ptx::load_readonly_u32(at + 4 * i);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 16 / ACCESS; ++i) {
            if (ACCESS * i < valid) {
                u32 bits;
                if constexpr (ACCESS == 2) {
                    bits = ptx::load_readonly_u16(at + 2 * i);
                } else {
                    bits = ptx::load_readonly_u8(at + i);
                }
                word[ACCESS * i / 4] |= bits << (8 * (ACCESS * i % 4));
            }
        }
    }
}

// Loads 16 bytes of a row of the weight. If `valid` is less than 16, only the first `valid` bytes are inside the row,
// and the others become zero. Without `wanted` the words are unchanged.
__device__ __forceinline__ void load_weight(u32 (&word)[4], const char* at, bool wanted, int valid) {
    if constexpr (ACCESS == 16) {
        ptx::load_readonly_once_v4_if(wanted, word, at);
    } else {
        if (wanted) load_narrow(word, at, valid);
    }
}

// Converts the elements of a pack to fp32.
template <typename T>
__device__ __forceinline__ void widen(float (&v)[16 / sizeof(T)], const u32 (&word)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) Word<T>::unpack(word[i], v + i * Word<T>::per_word);
}

// Loads the elements of act's row `m` that belong to pack `index` of a row of the weight. Elements beyond the end of
// the row become zero.
__device__ __forceinline__ void load_act(Pack<Act, W>& pack, const GemvParams& p, int m, int index) {
    const Act* at = p.act + m * p.act_stride + i64(index) * W;
    const int valid = p.columns - index * W;
    if constexpr (ACT_ALIGNED) {
        clear(pack.word);
        if (valid > 0) load_pack(pack, at);
    } else {
        load_elements(pack, at, valid);
    }
}

// Returns act's scale for pack `index` of row `m`: 1 if act has no scales of groups, 0 beyond the last column.
__device__ __forceinline__ float scale_of_act(const GemvParams& p, int m, int index) {
    if constexpr (ACT_SCALES != Scales::group) return 1.0f;
    return index * W < p.columns ? p.act_scales[m * p.act_scale_step + index * W / ACT_SCALE_GROUP] : 0.0f;
}

// Returns the weight's scale for pack `index` of row `row`: 1 if it has no scales of groups, 0 beyond the last column.
__device__ __forceinline__ float scale_of_weight(const GemvParams& p, i64 row, int index) {
    if constexpr (SCALES != Scales::group) return 1.0f;
    const i64 row_scales = (p.columns + SCALE_GROUP - 1) / SCALE_GROUP;
    return index * W < p.columns ? p.scales[row * row_scales + index * W / SCALE_GROUP] : 0.0f;
}

// Returns the sum of the products of a pack, added in order and multiplied by the pack's scales: `scale` is that of the
// weight, `act_scale` that of act.
__device__ __forceinline__ float pack_sum(const float (&a)[W], const float (&w)[W], float scale, float act_scale) {
    float sum = 0.0f;
#pragma unroll
    for (int e = 0; e < W; ++e) {
        sum = EXACT ? __fmaf_rn(a[e], w[e], sum) : __fadd_rn(sum, __fmul_rn(a[e], w[e]));
    }
    if constexpr (SCALES == Scales::group) sum = __fmul_rn(sum, scale);
    return ACT_SCALES == Scales::group ? __fmul_rn(sum, act_scale) : sum;
}
