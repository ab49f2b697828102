// SPDX-License-Identifier: Apache-2.0
// Packs: the elements of one 16-byte access of the input, in registers, and how they are loaded and stored.
//
// Pack<T, W> holds W elements of T, where W is 16 / sizeof(input element); if an element of T has another size than one
// of the input, the pack has 4, 8 or 32 bytes. All accesses are ordinary global accesses. The read-only path
// (ld.global.nc) must not be used, as peers write these bytes while the kernel runs. The accesses of cu/ptx/memory.cuh
// are volatile and clobber memory, which keeps every load after the barrier that precedes the load in the source text.
#pragma once
#include "common/prelude.cuh"
#include "ptx/special.cuh"

// Sets every element of an array to zero.
template <typename T, int N>
__device__ __forceinline__ void clear(T (&values)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = 0;
}

template <typename T, int M, int N>
__device__ __forceinline__ void clear(T (&values)[M][N]) {
#pragma unroll
    for (int i = 0; i < M; ++i) clear(values[i]);
}

template <typename T, int W>
struct Pack {
    static_assert(W * sizeof(T) % 4 == 0, "a pack is whole words");
    static constexpr int words = W * sizeof(T) / 4;
    u32 word[words];
};

template <int N>
__device__ __forceinline__ void load_words(u32* w, const void* address) {
    if constexpr (N == 1) {
        *w = ptx::load_u32(address);
    } else if constexpr (N == 2) {
        ptx::load_v2(w, address);
    } else {
        static_assert(N % 4 == 0, "whole 16-byte accesses");
#pragma unroll
        for (int i = 0; i < N; i += 4) ptx::load_v4(w + i, static_cast<const char*>(address) + 4 * i);
    }
}

template <int N>
__device__ __forceinline__ void store_words(void* address, const u32* w) {
    if constexpr (N == 1) {
        ptx::store_u32(address, *w);
    } else if constexpr (N == 2) {
        ptx::store_v2(address, w);
    } else {
#pragma unroll
        for (int i = 0; i < N; i += 4) ptx::store_v4(static_cast<char*>(address) + 4 * i, w + i);
    }
}

// Stores 2, 4, 8, ... words that are not read again soon.
template <int N>
__device__ __forceinline__ void store_words_streaming(void* address, const u32* w) {
    if constexpr (N == 2) {
        ptx::store_streaming_v2(address, w);
    } else {
#pragma unroll
        for (int i = 0; i < N; i += 4) ptx::store_streaming_v4(static_cast<char*>(address) + 4 * i, w + i);
    }
}

template <typename T, int W>
__device__ __forceinline__ void load_pack(Pack<T, W>& pack, const void* address) {
    load_words<Pack<T, W>::words>(pack.word, address);
}

template <typename T, int W>
__device__ __forceinline__ void store_pack(void* address, const Pack<T, W>& pack) {
    store_words<Pack<T, W>::words>(address, pack.word);
}

// Loads the elements `first` to valid - 1 of the pack at `address`, which is aligned to one element. The others become
// +0.
template <typename T, int W>
__device__ __forceinline__ void load_elements(Pack<T, W>& pack, const void* address, i64 valid, i64 first = 0) {
    constexpr int per_word = 4 / sizeof(T);
    const char* at = static_cast<const char*>(address);
    clear(pack.word);
#pragma unroll
    for (int i = 0; i < W; ++i) {
        if (i >= first && i < valid) {
            u32 bits;
            if constexpr (sizeof(T) == 4) {
                bits = ptx::load_u32(at + 4 * i);
            } else if constexpr (sizeof(T) == 2) {
                bits = ptx::load_u16(at + 2 * i);
            } else {
                bits = ptx::load_u8(at + i);
            }
            pack.word[i / per_word] |= bits << (8 * sizeof(T) * (i % per_word));
        }
    }
}

// Stores the elements `first` to valid - 1 of the pack at `address`, which is aligned to one element.
template <typename T, int W>
__device__ __forceinline__ void store_elements(void* address, const Pack<T, W>& pack, i64 valid, i64 first = 0) {
    constexpr int per_word = 4 / sizeof(T);
    char* at = static_cast<char*>(address);
#pragma unroll
    for (int i = 0; i < W; ++i) {
        if (i >= first && i < valid) {
            u32 bits = pack.word[i / per_word] >> (8 * sizeof(T) * (i % per_word));
            if constexpr (sizeof(T) == 4) {
                ptx::store_u32(at + 4 * i, bits);
            } else if constexpr (sizeof(T) == 2) {
                ptx::store_u16(at + 2 * i, u16(bits));
            } else {
                ptx::store_u8(at + i, bits);
            }
        }
    }
}

// Converts the elements of a pack to fp32.
template <typename T, int W>
__device__ __forceinline__ void to_float(float (&v)[W], const Pack<T, W>& pack) {
#pragma unroll
    for (int i = 0; i < Pack<T, W>::words; ++i) Word<T>::unpack(pack.word[i], v + i * Word<T>::per_word);
}

// Hides from the compiler that the words of a pack keep their values, so that it does not keep the converted values in
// registers.
template <typename T, int W>
__device__ __forceinline__ void forget(Pack<T, W>& pack) {
#pragma unroll
    for (int i = 0; i < Pack<T, W>::words; ++i) ptx::forget(pack.word[i]);
}

// Rounds W values to the type of a pack.
template <typename T, int W>
__device__ __forceinline__ void from_float(Pack<T, W>& pack, const float (&v)[W]) {
#pragma unroll
    for (int i = 0; i < Pack<T, W>::words; ++i) pack.word[i] = Word<T>::pack(v + i * Word<T>::per_word);
}

// Adds N packs in fp32, in order: +0, source 0, ..., source N - 1.
template <typename T, int W, int N>
__device__ __forceinline__ void sum_packs(float (&sum)[W], const Pack<T, W> (&packs)[N]) {
    clear(sum);
#pragma unroll
    for (int source = 0; source < N; ++source) {
        float v[W];
        to_float(v, packs[source]);
#pragma unroll
        for (int i = 0; i < W; ++i) sum[i] = __fadd_rn(sum[i], v[i]);
    }
}
