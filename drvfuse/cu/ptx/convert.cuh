// SPDX-License-Identifier: Apache-2.0
// Conversions between fp32 and the narrower floating-point types. Conversions to fp32, and from FP8 to f16, are exact.
// Conversions from fp32 to a narrower type round to nearest even, and those to FP8 saturate. The first of several
// elements is in the low bits.
#pragma once
#include "common/types.cuh"

namespace ptx {

// cvt.f32.f16
__device__ __forceinline__ float float_of_f16(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// cvt.f32.f16 of both halves of a word
__device__ __forceinline__ void floats_of_f16x2(u32 word, float* v) {
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
        : "=f"(v[0]), "=f"(v[1])
        : "r"(word));
}

// cvt.rn.f16x2.f32
__device__ __forceinline__ u32 f16x2(float high, float low) {
    u32 word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

// cvt.rn.bf16x2.f32
__device__ __forceinline__ u32 bf16x2(float high, float low) {
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

// fma.rn.bf16x2 and fma.rn.f16x2 of both halves with 1 and +0: -0 becomes +0, and a NaN the canonical one.
__device__ __forceinline__ u32 plus_zero_bf16x2(u32 word) {
    asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(word) : "r"(0x3f803f80u), "r"(0u));
    return word;
}

__device__ __forceinline__ u32 plus_zero_f16x2(u32 word) {
    asm("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(word) : "r"(0x3c003c00u), "r"(0u));
    return word;
}

// Three functions for e4m3 and three for e5m2: cvt.rn.f16x2.e4m3x2 of two elements; the same instruction for the four
// elements of a word; and cvt.rn.satfinite.e4m3x2.f32 twice for four elements, in one asm statement, so that the two
// conversions are merged.
#define DRVFUSE_FP8(TYPE)                                                                                             \
    __device__ __forceinline__ u32 f16x2_of_##TYPE##x2(u16 bits) {                                                    \
        u32 halves;                                                                                                   \
        asm("cvt.rn.f16x2." #TYPE "x2 %0, %1;" : "=r"(halves) : "h"(bits));                                           \
        return halves;                                                                                                \
    }                                                                                                                 \
    __device__ __forceinline__ void f16x2s_of_##TYPE##x4(u32 word, u32& low, u32& high) {                             \
        asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2." #TYPE "x2 %0, a; cvt.rn.f16x2." #TYPE "x2 %1, b; }" \
            : "=r"(low), "=r"(high)                                                                                   \
            : "r"(word));                                                                                             \
    }                                                                                                                 \
    __device__ __forceinline__ u32 TYPE##x4(const float* v) {                                                         \
        u32 word;                                                                                                     \
        asm("{ .reg .b16 low, high; cvt.rn.satfinite." #TYPE "x2.f32 low, %2, %1; cvt.rn.satfinite." #TYPE            \
            "x2.f32 high, %4, %3; mov.b32 %0, {low, high}; }"                                                         \
            : "=r"(word)                                                                                              \
            : "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]));                                                            \
        return word;                                                                                                  \
    }
DRVFUSE_FP8(e4m3)
DRVFUSE_FP8(e5m2)
#undef DRVFUSE_FP8

}  // namespace ptx
