// SPDX-License-Identifier: Apache-2.0
// Matrix instructions: what the lanes of a warp do together in mma, wmma, ldmatrix, stmatrix and movmatrix. A library of its
// own, which is loaded where a module has such an instruction.
//
// Each lane leaves its operands in its exchange area, a place in its frame (op_a is where), and suspends with a warp
// operation of kind MATRIX; op_value is the function here that the runtime calls when all 32 lanes have come, with the first
// lane's thread. It leaves the results in the exchange areas, and the lanes go on. It returns 0, or 1 if an access was
// refused, which has ended the launch.
//
// The products are bit-equal to those of an H200. Which element lies where is told by tables that the translator makes
// (ptx/fragments.py); they follow the structure Product.
#include "common.cuh"

typedef unsigned short u16;
typedef long long s64;

const u32 LANES = 32;
const u32 MOST = 512;  // elements of a matrix, or of the four matrices of m8n8k4

API u32 rt_access(Thread* t, u64 addr, u32 size, u32 flags, u32 site);

FN Thread* lane_of(Thread* first, u32 lane) { return (Thread*)((u8*)first + (u64)lane * first->launch->frame_stride); }

FN u32* exchange(Thread* t) { return (u32*)((u8*)t + t->op_a); }

// Numbers ----------------------------------------------------------------------------------------------------------------

FN u32 width_of(u32 kind) { return kind >= MX_F32 ? 32 : kind >= MX_F16 ? 16 : 8; }

FN float of_half(u32 x) {
    float r;
    asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h;}" : "=f"(r) : "r"(x));
    return r;
}

FN u32 to_half(float x) {
    u32 r;
    asm("{.reg .b16 h; cvt.rn.f16.f32 h, %1; cvt.u32.u16 %0, h;}" : "=r"(r) : "f"(x));
    return r;
}

FN u32 half_of_fp8(u32 x, u32 kind) {
    u32 pair;
    if (kind == MX_E4M3) asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.rn.f16x2.e4m3x2 %0, h;}" : "=r"(pair) : "r"(x));
    else asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.rn.f16x2.e5m2x2 %0, h;}" : "=r"(pair) : "r"(x));
    return pair & 0xFFFF;
}

FN u32 bits_of(float x) { return x != x ? 0x7FFFFFFFu : __float_as_uint(x); }

// A number apart: significand * 2^(exponent - 23), the significand not normalised where the number is subnormal. What is
// not finite has a class instead.
const u32 FINITE = 0, INFINITE = 1, NOT_A_NUMBER = 2;
const s32 ZERO = -(1 << 14);  // the exponent of a zero, and about that of a product with one: below all others
const u32 FRACTION = 23;

struct Number {
    s32 significand, exponent;
    u32 class_;
};

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

FN Number number_of(u32 bits, u32 kind) {
    if (kind == MX_F16) return number(bits, 16, 10);
    if (kind == MX_BF16) return number(bits, 16, 7);
    if (kind == MX_TF32) return number(bits >> 13, 19, 10);  // its low bits are not read
    return number(bits, 32, 23);
}

// Sums of products -------------------------------------------------------------------------------------------------------
//
// One step of the tensor cores adds C and all products at once, as integers: each term is cut off (toward zero) GUARD binary
// places below the greatest exponent of all terms. The exponent of a product is the sum of its factors' exponents, so its
// significand lies in [1, 4). The sum is exact then; it is rounded toward zero to fp32, or to nearest even to fp16.
const u32 GUARD = 25;

struct Side {  // A by rows or B by columns, apart
    s32 significand[MOST], exponent[MOST];
    u8 class_[MOST];
    u8 any[64];  // what classes a row, or column, has
};

FN void take_apart(const u32* bits, u32 count, u32 k, u32 kind, Side* side) {
    LOOP for (u32 i = 0; i < count; i++) {
        u32 any = 0;
        LOOP for (u32 j = i * k; j < (i + 1) * k; j++) {
            Number x = number_of(bits[j], kind);
            side->significand[j] = x.significand >> FRACTION - 10;
            side->exponent[j] = x.exponent;
            side->class_[j] = x.class_;
            any |= x.class_;
        }
        side->any[i] = any;
    }
}

FN s64 cut(s32 significand, u32 places, u32 below) {
    u32 magnitude = (u32)(significand < 0 ? -significand : significand) << places;
    magnitude >>= below < 31 ? below : 31;
    return significand < 0 ? -(s64)magnitude : (s64)magnitude;
}

FN u32 fp32_toward_zero(u64 magnitude, s32 exponent) {  // of magnitude * 2^exponent, not 0
    s32 last = exponent + 63 - __clzll(magnitude) - 23;
    if (last < -149) last = -149;
    s32 shift = last - exponent;
    u32 r = (u32)(shift > 0 ? magnitude >> (shift < 63 ? shift : 63) : magnitude << -shift);
    s32 biased = last + 149;  // of the last place: 0 where the number is subnormal
    if (biased > 253) return 0x7F800000;
    return ((u32)biased << 23) + r;
}

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

// The result where a factor or C is not finite, as its class and, for an infinity, its sign.
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

// C plus `count` products; `half`: the accumulator is fp16.
FN u32 fused(const Side* a, u32 row, const Side* b, u32 column, u32 count, u32 any, u32 c_bits, u32 half) {
    Number c = number_of(c_bits, half ? MX_F16 : MX_F32);
    if (any | c.class_) return not_finite(a, row, b, column, count, c_bits, half);
    s32 top = c.exponent;
    LOOP for (u32 i = 0; i < count; i++) {
        s32 e = a->exponent[row + i] + b->exponent[column + i];
        if (e > top) top = e;
    }
    s64 sum = cut(c.significand, GUARD - FRACTION, (u32)(top - c.exponent));
    LOOP for (u32 i = 0; i < count; i++) {
        s32 e = a->exponent[row + i] + b->exponent[column + i];
        sum += cut(a->significand[row + i] * b->significand[column + i], GUARD - 20, (u32)(top - e));
    }
    if (!sum) return 0;
    u64 magnitude = (u64)(sum < 0 ? -sum : sum);
    u32 r = half ? fp16_to_nearest(magnitude, top - (s32)GUARD) : fp32_toward_zero(magnitude, top - (s32)GUARD);
    return r && sum < 0 ? r | (half ? 0x8000u : 0x80000000u) : r;  // no zero is negative
}

// Products -------------------------------------------------------------------------------------------------------------------

FN u32 add(u32 x, u32 y, u32 half) {
    if (half) return to_half(of_half(x) + of_half(y));
    return bits_of(__fadd_rn(__uint_as_float(x), __uint_as_float(y)));
}

// In `steps` steps of the tensor cores, each of which takes the next of the products: to C or, for FP8, to zero; C is added
// to that by an ordinary addition.
FAR void tensor(const Product* p, const u32* a_bits, const u32* b_bits, const u32* c, u32* d) {
    Side a, b;
    u32 k = p->k, step = k / p->steps, late = p->method == MX_FP8, kind = late ? MX_F16 : p->kind[0];
    u32 widens = p->kind[2] == MX_F16 && p->kind[3] == MX_F32, narrows = p->kind[2] == MX_F32 && p->kind[3] == MX_F16;
    u32 half = p->kind[2] == MX_F16 && p->kind[3] == MX_F16;
    take_apart(a_bits, p->m, k, kind, &a);
    take_apart(b_bits, p->n, k, kind, &b);
    LOOP for (u32 i = 0; i < p->m; i++)
        LOOP for (u32 j = 0; j < p->n; j++) {
            u32 start = c[i * p->n + j];
            if (widens) start = bits_of(of_half(start));
            u32 sum = late ? 0 : start;
            LOOP for (u32 at = 0; at < k; at += step) {
                u32 any = 0;
                if (a.any[i] | b.any[j]) {
                    LOOP for (u32 e = at; e < at + step; e++) any |= a.class_[i * k + e] | b.class_[j * k + e];
                }
                sum = fused(&a, i * k + at, &b, j * k + at, step, any, sum, half);
            }
            if (late) sum = add(start, sum, half);
            d[i * p->n + j] = narrows ? to_half(__uint_as_float(sum)) : sum;
        }
}

// m8n8k4, which an H200 makes of fp32 operations.
FAR void chain(const Product* p, const u32* a_bits, const u32* b_bits, const u32* c, u32* d) {
    LOOP for (u32 i = 0; i < 8; i++)
        LOOP for (u32 j = 0; j < 8; j++) {
            float a[4], b[4];
            LOOP for (u32 e = 0; e < 4; e++) {
                a[e] = of_half(a_bits[i * 4 + e]);
                b[e] = of_half(b_bits[j * 4 + e]);
            }
            u32 x = c[i * 8 + j];
            float start = p->kind[2] == MX_F16 ? of_half(x) : __uint_as_float(x);
            if (p->kind[3] == MX_F16) {
                float low = __fmaf_rn(a[1], b[1], __fmul_rn(a[0], b[0])), high = __fmaf_rn(a[3], b[3], __fmul_rn(a[2], b[2]));
                d[i * 8 + j] = to_half(__fadd_rn(__fadd_rn(start, low), high));
            } else {
                float sum = __fmaf_rn(a[1], b[1], __fmaf_rn(a[0], b[0], 0.0f));
                sum = __fmaf_rn(a[3], b[3], __fmaf_rn(a[2], b[2], sum));
                d[i * 8 + j] = bits_of(__fadd_rn(start, sum));
            }
        }
}

FN s32 integer_of(u32 bits, u32 kind) { return kind == MX_S8 ? (s32)(signed char)bits : (s32)bits; }

FAR void integers(const Product* p, const u32* a, const u32* b, const u32* c, u32* d) {
    u32 k = p->k;
    LOOP for (u32 i = 0; i < p->m; i++)
        LOOP for (u32 j = 0; j < p->n; j++) {
            s64 sum = (s32)c[i * p->n + j];
            LOOP for (u32 e = 0; e < k; e++)
                sum += integer_of(a[i * k + e], p->kind[0]) * integer_of(b[j * k + e], p->kind[1]);
            if (p->method == MX_SATURATED) {
                if (sum > 0x7FFFFFFF) sum = 0x7FFFFFFF;
                if (sum < -0x7FFFFFFFll - 1) sum = -0x7FFFFFFFll - 1;
            }
            d[i * p->n + j] = (u32)sum;
        }
}

// Fragments -----------------------------------------------------------------------------------------------------------------

// The elements of one operand (0 to 3: A, B, C, D) between the lanes' registers, from register `at` of the exchange areas on,
// and `elements`. `places` has one for each element of each lane's registers; returns what follows there.
FN const u16* gather(Thread* first, const Product* p, u32 operand, u32 at, const u16* places, u32* elements) {
    u32 width = width_of(p->kind[operand]), mask = width < 32 ? (1u << width) - 1 : ~0u;
    LOOP for (u32 lane = 0; lane < LANES; lane++) {
        const u32* words = exchange(lane_of(first, lane)) + at;
        LOOP for (u32 r = 0; r < p->registers[operand]; r++)
            LOOP for (u32 shift = 0; shift < 32; shift += width) elements[*places++] = words[r] >> shift & mask;
    }
    return places;
}

FN void scatter(Thread* first, const Product* p, const u16* places, const u32* elements) {
    u32 width = width_of(p->kind[3]);
    LOOP for (u32 lane = 0; lane < LANES; lane++) {
        u32* words = exchange(lane_of(first, lane));
        LOOP for (u32 r = 0; r < p->registers[3]; r++) {
            u32 word = 0;
            LOOP for (u32 shift = 0; shift < 32; shift += width) word |= elements[*places++] << shift;
            words[r] = word;
        }
    }
}

// mma and wmma.mma: op_addr is the Product. The exchange areas have A, B and C, and then D in their place.
API u32 mx_multiply(Thread* first) {
    const Product* p = (const Product*)first->op_addr;
    u32 a[MOST], b[MOST], c[MOST], d[MOST];
    const u16* places = (const u16*)(p + 1);
    places = gather(first, p, 0, 0, places, a);
    places = gather(first, p, 1, p->registers[0], places, b);
    places = gather(first, p, 2, p->registers[0] + p->registers[1], places, c);
    if (p->method == MX_FP8) {
        LOOP for (u32 i = 0; i < p->m * p->k; i++) a[i] = half_of_fp8(a[i], p->kind[0]);
        LOOP for (u32 i = 0; i < p->n * p->k; i++) b[i] = half_of_fp8(b[i], p->kind[1]);
    }
    LOOP for (u32 i = 0; i < p->count; i++) {
        const u32 *x = a + i * p->m * p->k, *y = b + i * p->n * p->k, *z = c + i * p->m * p->n;
        u32* out = d + i * p->m * p->n;
        if (p->method == MX_CHAIN) chain(p, x, y, z, out);
        else if (p->method == MX_TENSOR || p->method == MX_FP8) tensor(p, x, y, z, out);
        else integers(p, x, y, z, out);
    }
    scatter(first, p, places, d);
    return 0;
}

// Rows of shared memory ----------------------------------------------------------------------------------------------------
//
// Matrices of 8 x 8 elements of 16 bits: lane 4 r + c has the elements 2 c and 2 c + 1 of row r, or transposed those of
// column r. Lane 8 i + r has the address of row r of matrix i in op_addr; op_b is the number of matrices, op_c is 1 for
// transposed. Each row is an access of the lane that has its address, and all are checked before any is made.

FN u16* row_of(Thread* first, u32 lane) { return (u16*)lane_of(first, lane)->op_addr; }

FN u32 rows_refused(Thread* first, u32 flags) {
    LOOP for (u32 lane = 0; lane < 8 * first->op_b; lane++) {
        Thread* t = lane_of(first, lane);
        if (rt_access(t, t->op_addr, 16, flags | SPACE_SHARED << SPACE_SHIFT, t->site)) return 1;
    }
    return 0;
}

FN u32 row_in(u32 lane, u32 element, u32 transposed) { return transposed ? lane % 4 * 2 + element : lane / 4; }

FN u32 column_in(u32 lane, u32 element, u32 transposed) { return transposed ? lane / 4 : lane % 4 * 2 + element; }

API u32 mx_load_rows(Thread* first) {
    if (rows_refused(first, 0)) return 1;
    u32 transposed = first->op_c;
    LOOP for (u32 lane = 0; lane < LANES; lane++)
        LOOP for (u32 i = 0; i < first->op_b; i++) {
            u32 word = 0;
            LOOP for (u32 e = 0; e < 2; e++)
                word |= (u32)row_of(first, 8 * i + row_in(lane, e, transposed))[column_in(lane, e, transposed)] << 16 * e;
            exchange(lane_of(first, lane))[i] = word;
        }
    return 0;
}

API u32 mx_store_rows(Thread* first) {
    if (rows_refused(first, A_WRITE)) return 1;
    u32 transposed = first->op_c;
    LOOP for (u32 lane = 0; lane < LANES; lane++)
        LOOP for (u32 i = 0; i < first->op_b; i++)
            LOOP for (u32 e = 0; e < 2; e++)
                row_of(first, 8 * i + row_in(lane, e, transposed))[column_in(lane, e, transposed)] =
                    (u16)(exchange(lane_of(first, lane))[i] >> 16 * e);
    return 0;
}

// movmatrix: one matrix between registers.
API u32 mx_transpose(Thread* first) {
    u32 words[LANES];
    LOOP for (u32 lane = 0; lane < LANES; lane++) words[lane] = exchange(lane_of(first, lane))[0];
    LOOP for (u32 lane = 0; lane < LANES; lane++) {
        u32 word = 0;
        LOOP for (u32 e = 0; e < 2; e++) {
            u32 row = lane % 4 * 2 + e, column = lane / 4;
            word |= (words[row * 4 + column / 2] >> 16 * (column % 2) & 0xFFFF) << 16 * e;
        }
        exchange(lane_of(first, lane))[0] = word;
    }
    return 0;
}
