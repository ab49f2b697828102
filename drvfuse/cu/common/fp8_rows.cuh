// SPDX-License-Identifier: Apache-2.0
// Rows of FP8 with group scales: 16 elements a thread, exact conversion, and the conventions of COAT's arithmetic.
#pragma once
#include "common/pack16.cuh"

constexpr int PACK = 16;  // elements of one 16-byte access; every group size is a multiple

// Four FP8 values as two f16x2, exactly.
template <typename T>
__device__ __forceinline__ void fp8_halves(u32 word, u32& low, u32& high);
template <>
__device__ __forceinline__ void fp8_halves<e4m3>(u32 word, u32& low, u32& high) {
    asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b; }"
        : "=r"(low), "=r"(high)
        : "r"(word));
}
template <>
__device__ __forceinline__ void fp8_halves<e5m2>(u32 word, u32& low, u32& high) {
    asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e5m2x2 %0, a; cvt.rn.f16x2.e5m2x2 %1, b; }"
        : "=r"(low), "=r"(high)
        : "r"(word));
}

__device__ __forceinline__ void half_pair(u32 f16x2, float* v) {
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
        : "=f"(v[0]), "=f"(v[1])
        : "r"(f16x2));
}

template <typename T>
__device__ __forceinline__ void fp8_floats(u32 word, float* v) {
    u32 low, high;
    fp8_halves<T>(word, low, high);
    half_pair(low, v);
    half_pair(high, v + 2);
}

// `W` bytes at `address`, of which the first `valid` exist; others are 0. With `aligned` all exist, in one access.
template <int W>
__device__ __forceinline__ void load_bytes(u32 (&word)[W / 4], const u8* address, int valid, bool aligned) {
    if (aligned) {
        if constexpr (W == 16) {
            uint4 v = *reinterpret_cast<const uint4*>(address);
            word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
        } else if constexpr (W == 8) {
            uint2 v = *reinterpret_cast<const uint2*>(address);
            word[0] = v.x, word[1] = v.y;
        } else {
            word[0] = *reinterpret_cast<const u32*>(address);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < W / 4; ++i) word[i] = 0;
#pragma unroll
    for (int i = 0; i < W; ++i) {
        if (i < valid) word[i / 4] |= u32(address[i]) << (8 * (i % 4));
    }
}

// 16 bytes that are read once: they do not displace what L1 holds. Volatile, so that it stays behind the wait for PDL.
__device__ __forceinline__ void stream_pack(u32 (&word)[4], const u8* address) {
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "l"(address));
}

template <int W>
__device__ __forceinline__ void store_bytes(u8* address, const u32 (&word)[W / 4], int valid, bool aligned) {
    if (aligned) {
        store_words<W / 4>(address, word);
        return;
    }
#pragma unroll
    for (int i = 0; i < W; ++i) {
        if (i < valid) address[i] = u8(word[i / 4] >> (8 * (i % 4)));
    }
}

// The first `valid` of W weights, widened; others are 0. With `aligned` W exist and the address is on 2 W or 16 bytes.
template <typename T, int W>
__device__ __forceinline__ void load_weights(float (&v)[W], const T* address, int valid, bool aligned) {
    constexpr int per_word = Word<T>::per_word;
    if (aligned) {
        u32 word[W / per_word];
#pragma unroll
        for (int i = 0; i < W / per_word; i += 2) {
            uint2 pair = *reinterpret_cast<const uint2*>(reinterpret_cast<const u32*>(address) + i);
            word[i] = pair.x, word[i + 1] = pair.y;
        }
#pragma unroll
        for (int i = 0; i < W / per_word; ++i) Word<T>::unpack(word[i], v + i * per_word);
        return;
    }
#pragma unroll
    for (int i = 0; i < W; ++i) v[i] = i < valid ? float(address[i]) : 0.0f;
}

__device__ __forceinline__ float divide_full(float a, float b) {
    float quotient;
    asm("div.full.f32 %0, %1, %2;" : "=f"(quotient) : "f"(a), "f"(b));
    return quotient;
}

__device__ __forceinline__ float reciprocal(float value) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}

__device__ __forceinline__ float reciprocal_root(float value) {
    float root;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(value));
    return divide_full(1.0f, root);
}

// bf16((maximum + 1e-10) / fp8_max): COAT's scale of whatever has that maximum.
template <typename T>
__device__ __forceinline__ u16 fp8_scale_bits(float maximum) {
    float pair[2] = {divide_full(__fadd_rn(maximum, 1e-10f), Finite<T>::max), 0.0f};
    return u16(Word<bf16>::pack(pair));
}

// 4 x 4 bytes: row r of the result holds byte r of each input word.
__device__ __forceinline__ void transpose_bytes(const u32 (&row)[4], u32 (&column)[4]) {
    u32 a = __byte_perm(row[0], row[1], 0x5140), b = __byte_perm(row[2], row[3], 0x5140);
    u32 c = __byte_perm(row[0], row[1], 0x7362), d = __byte_perm(row[2], row[3], 0x7362);
    column[0] = __byte_perm(a, b, 0x5410);
    column[1] = __byte_perm(a, b, 0x7632);
    column[2] = __byte_perm(c, d, 0x5410);
    column[3] = __byte_perm(c, d, 0x7632);
}
