// SPDX-License-Identifier: Apache-2.0
// Element types and their conversions from and to fp32. No CUDA header is needed.
//
// Every conversion to a narrower type rounds to nearest even, once. A NaN becomes the type's canonical NaN
// (f32 0x7fffffff, f16 and bf16 0x7fff, FP8 0x7f), so the bits of a result never depend on the bits of an input's NaN.
// FP8 saturates to the largest finite value; f16 and bf16 overflow to infinity. FP4 is in quantise.cuh.
#pragma once
#include "common/types.cuh"
#include "ptx/convert.cuh"
#include "ptx/memory.cuh"

struct bf16 {
    u16 bits;
    __device__ __forceinline__ operator float() const { return __uint_as_float(u32(bits) << 16); }
};

struct f16 {
    u16 bits;
    __device__ __forceinline__ operator float() const { return ptx::float_of_f16(bits); }
};

__device__ __forceinline__ float low_half(u32 f16x2) { return f16{u16(f16x2)}; }

struct e4m3 {
    u8 bits;
    __device__ __forceinline__ operator float() const { return low_half(ptx::f16x2_of_e4m3x2(bits)); }
};

struct e5m2 {
    u8 bits;
    __device__ __forceinline__ operator float() const { return low_half(ptx::f16x2_of_e5m2x2(bits)); }
};

// The type of a scale that is a power of two, 2^(bits - 127), or NaN.
struct ue8m0 {
    u8 bits;
    __device__ __forceinline__ operator float() const {
        return __uint_as_float(bits == 0xff ? 0x7fffffffu : bits == 0 ? 0x00400000u : u32(bits) << 23);
    }
};

// Word<T> packs and unpacks the `per_word` elements of T in a 32-bit word, the first in the low bits. `plus_zero` adds
// +0 to each element, which turns -0 into +0.
template <typename T>
struct Word;

template <>
struct Word<float> {
    static constexpr int per_word = 1;
    static __device__ __forceinline__ void unpack(u32 word, float* v) { v[0] = __uint_as_float(word); }
    static __device__ __forceinline__ u32 pack(const float* v) {
        return v[0] != v[0] ? 0x7fffffffu : __float_as_uint(v[0]);
    }
    static __device__ __forceinline__ u32 plus_zero(u32 word) {
        return __float_as_uint(__fadd_rn(0.0f, __uint_as_float(word)));
    }
};

template <>
struct Word<bf16> {
    static constexpr int per_word = 2;
    static __device__ __forceinline__ void unpack(u32 word, float* v) {
        v[0] = __uint_as_float(word << 16);
        v[1] = __uint_as_float(word & 0xffff0000u);
    }
    static __device__ __forceinline__ u32 pack(const float* v) { return ptx::bf16x2(v[1], v[0]); }
    static __device__ __forceinline__ u32 plus_zero(u32 word) { return ptx::plus_zero_bf16x2(word); }
};

template <>
struct Word<f16> {
    static constexpr int per_word = 2;
    static __device__ __forceinline__ void unpack(u32 word, float* v) {
        v[0] = low_half(word);
        v[1] = low_half(word >> 16);
    }
    static __device__ __forceinline__ u32 pack(const float* v) { return ptx::f16x2(v[1], v[0]); }
    static __device__ __forceinline__ u32 plus_zero(u32 word) { return ptx::plus_zero_f16x2(word); }
};

template <>
struct Word<e4m3> {
    static constexpr int per_word = 4;
    static __device__ __forceinline__ void unpack(u32 word, float* v) {
        u32 low, high;
        ptx::f16x2s_of_e4m3x4(word, low, high);
        ptx::floats_of_f16x2(low, v);
        ptx::floats_of_f16x2(high, v + 2);
    }
    static __device__ __forceinline__ u32 pack(const float* v) { return ptx::e4m3x4(v); }
};

template <>
struct Word<e5m2> {
    static constexpr int per_word = 4;
    static __device__ __forceinline__ void unpack(u32 word, float* v) {
        u32 low, high;
        ptx::f16x2s_of_e5m2x4(word, low, high);
        ptx::floats_of_f16x2(low, v);
        ptx::floats_of_f16x2(high, v + 2);
    }
    static __device__ __forceinline__ u32 pack(const float* v) { return ptx::e5m2x4(v); }
};

// pack() is only for values that ue8m0 can represent.
template <>
struct Word<ue8m0> {
    static constexpr int per_word = 4;
    static __device__ __forceinline__ void unpack(u32 word, float* v) {
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = ue8m0{u8(word >> (8 * i))};
    }
    static __device__ __forceinline__ u32 pack(const float* v) {
        u32 word = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) word |= (__float_as_uint(v[i]) >> 23 & 0xff) << (8 * i);
        return word;
    }
};

// The largest finite value of an FP8 type, which is 1.75 * 2^exponent.
template <typename T>
struct Finite;
template <>
struct Finite<e4m3> {
    static constexpr float max = 448.0f;
    static constexpr int exponent = 8;
};
template <>
struct Finite<e5m2> {
    static constexpr float max = 57344.0f;
    static constexpr int exponent = 15;
};

// Returns the value rounded to T, as fp32.
template <typename T>
__device__ __forceinline__ float rounded(float value) {
    float values[4] = {value};
    Word<T>::unpack(Word<T>::pack(values), values);
    return values[0];
}

// The bits of the value in T; bits above those of T are undefined.
template <typename T>
__device__ __forceinline__ u32 bits_of(float value) {
    float values[4] = {value};
    return Word<T>::pack(values);
}

template <typename T>
__device__ __forceinline__ void store_scalar(T* address, float value) {
    const u32 word = bits_of<T>(value);
    if constexpr (sizeof(T) == 4) {
        ptx::store_u32(address, word);
    } else if constexpr (sizeof(T) == 2) {
        ptx::store_u16(address, u16(word));
    } else {
        ptx::store_u8(address, word & 0xff);
    }
}

// Copies one value of T, of 1, 2 or 4 bytes, which a peer may have written during this kernel.
template <typename T>
__device__ __forceinline__ void copy_scalar(T* to, const T* from) {
    if constexpr (sizeof(T) == 4) {
        ptx::store_u32(to, ptx::load_u32(from));
    } else if constexpr (sizeof(T) == 2) {
        ptx::store_u16(to, ptx::load_u16(from));
    } else {
        ptx::store_u8(to, ptx::load_u8(from));
    }
}
