// SPDX-License-Identifier: Apache-2.0
// Element-wise reductions of words, as multimem, red.async and cp.reduce.async.bulk compute them.
//
// In all functions, `how` has a Reduce, an Element and, for intermediate sums, an Accumulate, each at its shift.
// Intermediate sums are rounded as the Accumulate says, and each result is rounded to the type of the elements. A NaN
// result is the type's canonical NaN, min and max return the number if one operand is a NaN, and -0 is less than +0.
#pragma once

#include "common.cuh"
#include "narrow.cuh"

FN u32 to_bfloat(float x) {
    u32 r;
    asm("{.reg .b16 h; cvt.rn.bf16.f32 h, %1; cvt.u32.u16 %0, h;}" : "=r"(r) : "f"(x));
    return r;
}

FN float of_fp8(u32 x, u32 is_e4m3) { return of_half(half_of_fp8(x, is_e4m3)); }

FN u32 to_fp8(float x, u32 is_e4m3) {
    u32 r;
    if (is_e4m3) asm("{.reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, %1, %1; cvt.u32.u16 %0, h;}" : "=r"(r) : "f"(x));
    else asm("{.reg .b16 h; cvt.rn.satfinite.e5m2x2.f32 h, %1, %1; cvt.u32.u16 %0, h;}" : "=r"(r) : "f"(x));
    return r & 0xFF;
}

// The width of an element in bits.
FN u32 width_of(u32 element) {
    if (element == ELEMENT_F16 || element == ELEMENT_BF16) return 16;
    if (element >= ELEMENT_E4M3) return 8;
    return element == ELEMENT_B64 || element == ELEMENT_U64 || element == ELEMENT_S64 || element == ELEMENT_F64 ? 64
                                                                                                                : 32;
}

FN u32 bytes_of_element(u32 how) { return width_of(how >> ELEMENT_SHIFT & 15) / 8; }

// The value of a floating-point element of at most 32 bits, from its bits.
FN float real_of(u64 bits, u32 element) {
    if (element == ELEMENT_F32) return __uint_as_float((u32)bits);
    if (element == ELEMENT_F16) return of_half((u32)bits);
    if (element == ELEMENT_BF16) return __uint_as_float((u32)bits << 16);
    return of_fp8((u32)bits, element == ELEMENT_E4M3);
}

// Rounds a value to the nearest floating-point element, and returns the bits of the element.
FN u64 bits_of_real(float x, u32 element) {
    if (element == ELEMENT_F32) return x != x ? 0x7FFFFFFFu : __float_as_uint(x);
    if (element == ELEMENT_F16) return to_half(x);
    if (element == ELEMENT_BF16) return to_bfloat(x);
    return to_fp8(x, element == ELEMENT_E4M3);
}

FN float min_of(float x, float y) {
    float r;
    asm("min.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y));
    return r;
}

FN float max_of(float x, float y) {
    float r;
    asm("max.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y));
    return r;
}

// One step of a reduction of integers of 32 or 64 bits, or of words without a type (and, or, xor).
FN u64 combine_integers(u64 x, u64 y, u32 reduce, u32 element) {
    if (reduce == REDUCE_AND) return x & y;
    if (reduce == REDUCE_OR) return x | y;
    if (reduce == REDUCE_XOR) return x ^ y;
    if (reduce == REDUCE_ADD) return element == ELEMENT_U64 || element == ELEMENT_S64 ? x + y : (u32)(x + y);
    if (reduce == REDUCE_INC) return x >= y ? 0 : x + 1;
    if (reduce == REDUCE_DEC) return !x || x > y ? y : x - 1;
    u32 less = element == ELEMENT_S32 ? (s32)x < (s32)y : element == ELEMENT_S64 ? (long long)x < (long long)y : x < y;
    return less == (reduce == REDUCE_MIN) ? x : y;
}

// One step of a reduction of floating-point elements of less than 64 bits: x and y combined in fp32, and rounded to the
// precision of the accumulation.
FN float combine_reals(float x, float y, u32 reduce, u32 element, u32 accumulate) {
    float r = reduce == REDUCE_ADD ? x + y : reduce == REDUCE_MIN ? min_of(x, y) : max_of(x, y);
    if (accumulate == ACCUMULATE_F32) return r;
    if (accumulate == ACCUMULATE_F16) return of_half(to_half(r));
    return real_of(bits_of_real(r, element), element);
}

// One step of a reduction of fp64 elements, which is always a sum.
FAR u64 combine_doubles(u64 x, u64 y) {
    double r = __longlong_as_double((long long)x) + __longlong_as_double((long long)y);
    return r != r ? 0x7FFFFFFFFFFFFFFFull : (u64)__double_as_longlong(r);
}

// Combines two words of `bits` bits, element by element. Rounds each result to the type of the elements, as a reduction
// in memory does.
FN u64 combine_word(u64 x, u64 y, u32 how, u32 bits) {
    u32 reduce = how & 15, element = how >> ELEMENT_SHIFT & 15, width = width_of(element);
    if (element == ELEMENT_F64) return combine_doubles(x, y);
    if (width == 64) return combine_integers(x, y, reduce, element);
    u64 out = 0, mask = (1ull << width) - 1;
    LOOP for (u32 at = 0; at < bits; at += width) {
        u64 a = x >> at & mask, b = y >> at & mask, r;
        if (element < ELEMENT_F32) r = combine_integers(a, b, reduce, element) & mask;
        else r = bits_of_real(combine_reals(real_of(a, element), real_of(b, element), reduce, element, 0), element);
        out |= r << at;
    }
    return out;
}
