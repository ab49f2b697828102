// SPDX-License-Identifier: Apache-2.0
// Quantisation of rows by the rules of `drvfuse.Quantisation`: scales from maxima, codes, and the layout of scales.
//
// A kernel is compiled with DRVFUSE_QUANT (a Quant), DRVFUSE_GROUP (columns of a scale, or 0), DRVFUSE_OUT_DTYPE,
// DRVFUSE_SCALES_DTYPE and DRVFUSE_SCALES_LAYOUT (a ScaleLayout), and gets one number, `given`: for static quantisation
// the scale, for NVFP4 the tensor scale, otherwise the upper bound of the maximum.
//
// Adjacent lanes hold adjacent packs of W elements of a row. So GROUP / W lanes, a power of two and at most a warp,
// hold a group of columns. Maxima are of the bits of |y| as integers, as in reduce.cuh: a NaN exceeds all numbers.
#pragma once
#include "common/pack16.cuh"
#include "ptx/threads.cuh"

enum class Quant { none, row, fixed, group };  // `fixed` is "static" of drvfuse.Quantisation: C++ reserves that word
enum class ScaleLayout { row, column, tiles };

// How values y are quantised: code = y * inverse, rounded, so that y ~ code * scale.
struct Quantisation {
    float scale;    // the scale to store, already rounded to its type
    float inverse;  // the factor by which y is multiplied
};

// Returns 1 / scale, or 0 if that is not finite: for a scale that is 0, tiny or NaN.
__device__ __forceinline__ float finite_inverse(float scale) {
    const float inverse = __frcp_rn(scale);
    const float largest_float = __uint_as_float(0x7f7fffffu);
    return fabsf(inverse) <= largest_float ? inverse : 0.0f;
}

// Two FP4 numbers, the first in the low bits.
struct e2m1x2 {
    u8 bits;
};

template <typename Q, typename S>
struct ScaleRule {
    static __device__ __forceinline__ Quantisation of(float maximum, float upper_bound) {
        const float largest = rounded<S>(maximum);
        const float bound = rounded<S>(upper_bound);
        // NaN if `largest` is NaN
        const float limit = bound < largest ? bound : largest;
        const float scale = rounded<S>(__fdiv_rn(limit, Finite<Q>::max));
        return {scale, finite_inverse(scale)};
    }
};

// The scale is limit / Finite<Q>::max, rounded up to a power of two. Finite<Q>::max is 1.75 * 2^Finite<Q>::exponent. So
// the exponent of the scale is that of the limit, plus one if the limit's mantissa exceeds 1.75, minus
// Finite<Q>::exponent.
template <typename Q>
struct ScaleRule<Q, ue8m0> {
    static __device__ __forceinline__ Quantisation of(float maximum, float upper_bound) {
        const float limit = upper_bound < maximum ? upper_bound : maximum;
        if (limit != limit) return {__uint_as_float(0x7fffffffu), __uint_as_float(0x7fffffffu)};
        const int exponent = int((__float_as_uint(limit) + 0x1fffffu) >> 23) - Finite<Q>::exponent;
        const u32 bits = max(exponent, 0);
        return {ue8m0{u8(bits)}, __uint_as_float((254 - bits) << 23)};
    }
};

template <>
struct ScaleRule<e2m1x2, e4m3> {
    static __device__ __forceinline__ Quantisation of(float maximum, float tensor_scale) {
        const float scale = rounded<e4m3>(__fdiv_rn(__fdiv_rn(maximum, 6.0f), tensor_scale));
        return {scale, finite_inverse(__fmul_rn(scale, tensor_scale))};
    }
};

// Returns the scale of a row or group whose largest |y| is `maximum`, and the factor by which y is multiplied to give
// the codes, for codes of type Q and scales of type S.
template <typename Q, typename S>
__device__ __forceinline__ Quantisation quantisation(float maximum, float given) {
    return ScaleRule<Q, S>::of(maximum, given);
}

// Returns the maximum over the GROUP / W adjacent lanes that hold a group of columns. Called by whole warps.
template <int GROUP, int W>
__device__ __forceinline__ u32 group_max(u32 maximum) {
    static_assert(GROUP / W >= 1 && GROUP / W <= 32, "a group is adjacent lanes of a warp");
#pragma unroll
    for (int mask = 1; mask < GROUP / W; mask *= 2) maximum = max(maximum, __shfl_xor_sync(0xffffffffu, maximum, mask));
    return maximum;
}

// The e2m1 code of a number: nearest, ties to even, saturated; +6 for the NaN that arithmetic returns. These are the
// results of cvt.rn.satfinite.e2m1x2.f32, which sm_90 lacks.
//
// Let 2^e be the power of two of the magnitude, but at least 1. Then codes are 2^(e - 1) apart, which is one unit in
// the last place of 2^(e + 22). So the sum of 2^(e + 22) and the magnitude is rounded to a code. The sum exceeds
// 2^(e + 22) by 0 to 4 units, and the code is the number of these units + 2 e. Bits 22 and above of 2^(e + 22) are
// 2 e + 298; adding 6 more units makes the constant 0 modulo 8.
__device__ __forceinline__ u32 e2m1_of(float value) {
    const float magnitude = fminf(fabsf(value), 6.0f);
    const float power = fmaxf(__uint_as_float(__float_as_uint(magnitude) & 0x7f800000u), 1.0f);
    // `power` is a power of two, so that its product is exact, and only the addition rounds.
    const u32 sum = __float_as_uint(__fmaf_rn(power, 4194304.0f + 3.0f, magnitude));
    return (((sum >> 22) + sum) & 7) | (__float_as_uint(value) >> 28 & 8);
}

// The W elements of FP4 that belong to a pack of W inputs: 4 bytes for 16-bit inputs, 2 bytes for fp32 inputs.
template <int W>
struct Pack<e2m1x2, W> {
    static constexpr int words = 1;
    static_assert(W == 4 || W == 8, "a word or half of it");
    u32 word[1];
};

template <int W>
__device__ __forceinline__ void from_float(Pack<e2m1x2, W>& pack, const float (&v)[W]) {
    pack.word[0] = 0;
#pragma unroll
    for (int i = 0; i < W; ++i) pack.word[0] |= e2m1_of(v[i]) << (4 * i);
}

template <int W>
__device__ __forceinline__ void store_pack(void* address, const Pack<e2m1x2, W>& pack) {
    if constexpr (W == 8) {
        ptx::store_u32(address, pack.word[0]);
    } else {
        ptx::store_u16(address, u16(pack.word[0]));
    }
}

// Stores the first `valid` elements, an even number, at any address.
template <int W>
__device__ __forceinline__ void store_elements(void* address, const Pack<e2m1x2, W>& pack, i64 valid) {
#pragma unroll
    for (int i = 0; i < W; i += 2) {
        if (i < valid) ptx::store_u8(static_cast<char*>(address) + i / 2, pack.word[0] >> (4 * i) & 0xff);
    }
}

// The number of bytes of `elements` elements of T.
template <typename T>
struct Bytes {
    static __device__ __forceinline__ constexpr i64 of(i64 elements) { return elements * i64(sizeof(T)); }
};
template <>
struct Bytes<e2m1x2> {
    static __device__ __forceinline__ constexpr i64 of(i64 elements) { return elements / 2; }
};

// The index of the scale of a row's group in an array with the scales of `rows` rows and `groups` groups. `row` and
// `group` may also be in the padding of the array.
template <ScaleLayout LAYOUT>
__device__ __forceinline__ i64 scale_index(int row, int group, int rows, int groups) {
    if constexpr (LAYOUT == ScaleLayout::row) {
        return i64(row) * groups + group;
    } else if constexpr (LAYOUT == ScaleLayout::column) {
        return i64(group) * ((i64(rows) + 3) / 4 * 4) + row;
    } else {
        const i64 tile = i64(row / 128) * ((groups + 3) / 4) + group / 4;
        return tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + group % 4;
    }
}

// Clears the padding of scales after the last row. `count` threads divide the work, and `first` is the index of this
// thread. Arrays of tiles are aligned to 16 bytes.
template <typename S, ScaleLayout LAYOUT>
__device__ __forceinline__ void clear_row_padding(void* scales, int rows, int groups, u32 first, u32 count) {
    static_assert(LAYOUT != ScaleLayout::tiles || sizeof(S) == 1, "tiles hold bytes");
    char* const bytes = static_cast<char*>(scales);
    if constexpr (LAYOUT == ScaleLayout::column) {
        if (rows % 4 == 0) return;
        for (u32 group = first; group < u32(groups); group += count) {
            for (int row = rows; row % 4 != 0; ++row) {
                char* const to = bytes + scale_index<LAYOUT>(row, group, rows, groups) * i64(sizeof(S));
                if constexpr (sizeof(S) == 4) {
                    ptx::store_u32(to, 0);
                } else {
                    ptx::store_u8(to, 0);
                }
            }
        }
    } else if constexpr (LAYOUT == ScaleLayout::tiles) {
        // 16 bytes of a tile are four words, of 4 groups each, for rows r, r + 32, r + 64 and r + 96 of the tile.
        constexpr u32 zeros[4] = {0, 0, 0, 0};
        const u32 across = (groups + 3) / 4, in_last = rows % 128;
        char* const last = bytes + i64(rows / 128) * across * 512;
        for (u32 i = first; in_last != 0 && i < across * 32; i += count) {
            if (i % 32 >= in_last) {
                ptx::store_v4(last + i * 16, zeros);
                continue;
            }
#pragma unroll
            for (u32 k = 1; k < 4; ++k) {
                if (i % 32 + 32 * k >= in_last) ptx::store_u32(last + i * 16 + 4 * k, 0);
            }
        }
    }
}

// Clears all padding of the scales: the padding after the last row and, in tiles, the padding after the last group of
// each row.
template <typename S, ScaleLayout LAYOUT>
__device__ __forceinline__ void clear_scale_padding(void* scales, int rows, int groups, u32 first, u32 count) {
    clear_row_padding<S, LAYOUT>(scales, rows, groups, first, count);
    if constexpr (LAYOUT == ScaleLayout::tiles) {
        if (groups % 4 == 0) return;
        char* const bytes = static_cast<char*>(scales);
        for (u32 row = first; row < u32(rows); row += count) {
            for (int group = groups; group % 4 != 0; ++group)
                ptx::store_u8(bytes + scale_index<LAYOUT>(row, group, rows, groups), 0);
        }
    }
}
