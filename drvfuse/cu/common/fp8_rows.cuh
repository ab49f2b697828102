// SPDX-License-Identifier: Apache-2.0
// Packs of 16 FP8 elements with group scales: loads, stores, exact conversions to fp32, and the arithmetic of COAT.
#pragma once
#include "common/pack16.cuh"
#include "ptx/math.cuh"

constexpr int PACK = 16;  // FP8 elements of one 16-byte access; group sizes are multiples of it

// Loads W bytes. With `aligned` all of them exist, and one access loads them. Otherwise only the first `valid` exist,
// and the others become 0.
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
    clear(word);
#pragma unroll
    for (int i = 0; i < W; ++i) {
        if (i < valid) word[i / 4] |= u32(address[i]) << (8 * (i % 4));
    }
}

// Stores the first `valid` of W bytes, or with `aligned` all of them in one access. STREAMING adds the hint that the
// bytes are not read again soon.
template <int W, bool STREAMING = false>
__device__ __forceinline__ void store_bytes(u8* address, const u32 (&word)[W / 4], int valid, bool aligned) {
    if (aligned) {
        if constexpr (STREAMING && W >= 8) {
            store_words_streaming<W / 4>(address, word);
        } else {
            store_words<W / 4>(address, word);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < W; ++i) {
        if (i < valid) address[i] = u8(word[i / 4] >> (8 * (i % 4)));
    }
}

// Loads W weights and converts them to fp32. With `aligned` all of them exist, and the address is a multiple of 8
// bytes. Otherwise only the first `valid` exist, and the others become 0.
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

// Calls f(i, v) for each of the 16 elements of a pack, where v is element i as fp32.
template <typename T, class F>
__device__ __forceinline__ void for_each_value(const u32 (&word)[PACK / 4], F f) {
#pragma unroll
    for (int j = 0; j < PACK / 4; ++j) {
        float v[4];
        Word<T>::unpack(word[j], v);
#pragma unroll
        for (int k = 0; k < 4; ++k) f(4 * j + k, v[k]);
    }
}

// Returns 1 / root of the value, by the approximate instructions that COAT uses.
__device__ __forceinline__ float reciprocal_root(float value) {
    return ptx::divide_full(1.0f, ptx::root_approx(value));
}

// Returns the bits of COAT's scale for values whose largest magnitude is `maximum`: bf16((maximum + 1e-10) / fp8_max),
// where fp8_max is the largest finite value of the FP8 type T.
template <typename T>
__device__ __forceinline__ u16 fp8_scale_bits(float maximum) {
    float pair[2] = {ptx::divide_full(__fadd_rn(maximum, 1e-10f), Finite<T>::max), 0.0f};
    return u16(Word<bf16>::pack(pair));
}

// Transposes 4 x 4 bytes: byte i of column[r] is byte r of row[i].
__device__ __forceinline__ void transpose_bytes(const u32 (&row)[4], u32 (&column)[4]) {
    u32 a = __byte_perm(row[0], row[1], 0x5140), b = __byte_perm(row[2], row[3], 0x5140);
    u32 c = __byte_perm(row[0], row[1], 0x7362), d = __byte_perm(row[2], row[3], 0x7362);
    column[0] = __byte_perm(a, b, 0x5410);
    column[1] = __byte_perm(a, b, 0x7632);
    column[2] = __byte_perm(c, d, 0x5410);
    column[3] = __byte_perm(c, d, 0x7632);
}
