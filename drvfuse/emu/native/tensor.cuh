// SPDX-License-Identifier: Apache-2.0
// The sums that tensor cores compute, bit-equal to those of an H200. docs/matrix.md describes them.
#pragma once

#include "common.cuh"
#include "narrow.cuh"

typedef unsigned short u16;
typedef long long s64;

const u32 MOST = 512;  // the most elements of an operand: a matrix, or the four matrices of m8n8k4

// Numbers -------------------------------------------------------------------------------------------------------------

// The bits of a float, with the canonical NaN for any NaN.
FN u32 bits_of(float x) { return x != x ? 0x7FFFFFFFu : __float_as_uint(x); }

const u32 FINITE = 0, INFINITE = 1, NOT_A_NUMBER = 2;  // Number::class_
const s32 ZERO = -(1 << 14);  // the exponent of a zero: so low that no product with a zero has the greatest exponent
const u32 FRACTION = 23;      // the number of fraction bits of Number::significand
const u32 FACTOR = 10;  // the maximum number of fraction bits of a factor's significand, over all types of factors

// A floating-point number: significand * 2^(exponent - FRACTION). If class_ is not FINITE, only the sign of the
// significand means something. The significand of a subnormal number is not normalised.
struct Number {
    s32 significand, exponent;
    u32 class_;
};

// The number with these bits, in a format of `width` bits of which `fraction` are the fraction.
FN Number number(u32 bits, u32 width, u32 fraction) {
    u32 exponents = width - 1 - fraction, top = (1u << exponents) - 1;
    u32 e = bits >> fraction & top, f = bits & (1u << fraction) - 1;
    Number x;
    s32 significand = (s32)((f | (u32)(e != 0) << fraction) << FRACTION - fraction);
    x.significand = bits >> width - 1 & 1 ? -significand : significand;
    x.exponent = !significand ? ZERO : (s32)(e ? e : 1) - (s32)(top >> 1);
    x.class_ = e < top ? FINITE : f ? NOT_A_NUMBER : INFINITE;
    return x;
}

// The number with these bits, in the format of a MatrixKind.
FN Number number_of(u32 bits, u32 kind) {
    if (kind == MX_F16) return number(bits, 16, 10);
    if (kind == MX_BF16) return number(bits, 16, 7);
    if (kind == MX_TF32) return number(bits >> 13, 19, 10);  // the low bits of tf32 are not read
    return number(bits, 32, 23);
}

// Sums of products ----------------------------------------------------------------------------------------------------
//
// One step of the tensor cores adds C and all products as integers. Each term is truncated (toward zero) GUARD binary
// places below the greatest exponent of all terms. The exponent of a product is the sum of its factors' exponents, so
// its significand lies in [1, 4). The sum of the truncated terms is exact, and is rounded toward zero to fp32 or to
// nearest even to fp16.
const u32 GUARD = 25;
const s32 LEAST_TOP = -133;  // the greatest exponent counts as at least this, so bits below 2^-158 are truncated

// The elements of A by rows, or of B by columns, as significands and exponents.
struct Side {
    s32 significand[MOST], exponent[MOST];  // as in Number, with FACTOR fraction bits
    u8 class_[MOST];
    u8 any[64];  // for each row or column: the classes of its elements, or-ed
};

// Splits the elements of `count` rows or columns, of k elements each, into significands and exponents.
FN void take_apart(const u32* bits, u32 count, u32 k, u32 kind, Side* side) {
    LOOP for (u32 i = 0; i < count; i++) {
        u32 any = 0;
        LOOP for (u32 j = i * k; j < (i + 1) * k; j++) {
            Number x = number_of(bits[j], kind);
            side->significand[j] = x.significand >> FRACTION - FACTOR;
            side->exponent[j] = x.exponent;
            side->class_[j] = x.class_;
            any |= x.class_;
        }
        side->any[i] = any;
    }
}

// significand * 2^(places - below), truncated to an integer below 2^31.
FN s32 cut(s32 significand, u32 places, u32 below) {
    s32 sign = significand >> 31;  // -1 or 0
    u32 magnitude = (u32)((significand ^ sign) - sign) << places >> (below < 31 ? below : 31);
    return (s32)((magnitude ^ sign) - sign);
}

// magnitude * 2^exponent, which is not 0, rounded toward zero to fp32.
FN u32 fp32_toward_zero(u64 magnitude, s32 exponent) {
    s32 last = exponent + 63 - __clzll(magnitude) - 23;
    if (last < -149) last = -149;
    s32 shift = last - exponent;
    u32 r = (u32)(shift > 0 ? magnitude >> (shift < 63 ? shift : 63) : magnitude << -shift);
    s32 biased = last + 149;  // 0 for a subnormal number
    if (biased > 253) return 0x7F800000;
    return ((u32)biased << 23) + r;
}

// magnitude * 2^exponent, which is not 0, rounded to the nearest fp16, ties to even.
FN u32 fp16_to_nearest(u64 magnitude, s32 exponent) {
    s32 last = exponent + 63 - __clzll(magnitude) - 10;
    if (last < -24) last = -24;
    s32 shift = last - exponent;
    u64 r;
    if (shift > 0) {
        if (shift > 62) return 0;
        r = magnitude >> shift;
        u64 rest = magnitude - (r << shift), half = 1ull << shift - 1;
        r += rest > half || (rest == half && r & 1);
    } else {
        r = magnitude << -shift;
    }
    s32 biased = last + 24;
    if (biased > 29) return 0x7C00;
    u32 bits = ((u32)biased << 10) + (u32)r;
    return bits < 0x7C00 ? bits : 0x7C00;
}

// Computes one step in which a factor or C is not finite. Returns the sum, an infinity or the canonical NaN.
FAR u32 not_finite(const Side* a, u32 row, const Side* b, u32 column, u32 count, u32 c_bits, u32 half) {
    Number c = number_of(c_bits, half ? MX_F16 : MX_F32);
    u32 positive = 0, negative = 0, nan = c.class_ == NOT_A_NUMBER;
    if (c.class_ == INFINITE) c.significand < 0 ? negative = 1 : positive = 1;
    LOOP for (u32 i = 0; i < count; i++) {
        u32 x = a->class_[row + i], y = b->class_[column + i];
        if (!(x | y)) continue;
        s32 p = a->significand[row + i], q = b->significand[column + i];
        if ((x | y) & NOT_A_NUMBER || !p || !q) nan = 1;
        else if ((p < 0) != (q < 0)) negative = 1;
        else positive = 1;
    }
    if (nan || (positive && negative)) return half ? 0x7FFF : 0x7FFFFFFF;
    u32 infinity = half ? 0x7C00 : 0x7F800000;
    return negative ? infinity | (half ? 0x8000u : 0x80000000u) : infinity;
}

// Computes one step: C plus `count` products, of the elements of A from `row` on and those of B from `column` on. `any`
// is not 0 if one of these elements is not finite. With `half`, C and the sum are fp16, otherwise fp32.
FN u32 fused(const Side* a, u32 row, const Side* b, u32 column, u32 count, u32 any, u32 c_bits, u32 half) {
    Number c = number_of(c_bits, half ? MX_F16 : MX_F32);
    if (any | c.class_) return not_finite(a, row, b, column, count, c_bits, half);
    const s32 *x = a->significand + row, *y = b->significand + column;
    const s32 *p = a->exponent + row, *q = b->exponent + column;
    s32 top = c.exponent > LEAST_TOP ? c.exponent : LEAST_TOP;
#pragma unroll 4  // matrix products spend most of their time in this loop
    for (u32 i = 0; i < count; i++) top = p[i] + q[i] > top ? p[i] + q[i] : top;
    s64 sum = cut(c.significand, GUARD - FRACTION, (u32)(top - c.exponent));
#pragma unroll 4
    for (u32 i = 0; i < count; i++) sum += cut(x[i] * y[i], GUARD - 2 * FACTOR, (u32)(top - p[i] - q[i]));
    if (!sum) return 0;
    u64 magnitude = (u64)(sum < 0 ? -sum : sum);
    u32 r = half ? fp16_to_nearest(magnitude, top - (s32)GUARD) : fp32_toward_zero(magnitude, top - (s32)GUARD);
    return r && sum < 0 ? r | (half ? 0x8000u : 0x80000000u) : r;  // a sum that is rounded to zero is +0
}
