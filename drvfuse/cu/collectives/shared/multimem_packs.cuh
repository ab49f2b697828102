// SPDX-License-Identifier: Apache-2.0
// Packs of 16 bytes in multicast memory: one load returns the sum of a pack over the ranks, and one store writes a
// result to all ranks.
//
// The load rounds the sum to the type of the elements. A partial last pack is accessed word by word, so an array in
// multicast memory must consist of whole words. The host stages other arrays in the staging memory, where packs are
// whole.
#pragma once
#include "collectives/shared/kernel.cuh"
#include "ptx/multimem.cuh"

struct MultimemCall {
    const char* inputs;  // multicast address of the inputs; unused with STAGED
    char* outputs;       // multicast address of the outputs; unused without TO_OUTPUTS
    char* staging;       // address of this rank's staging memory
    char* all_staging;   // multicast address of all ranks' staging memory
};

template <int W>
__device__ __forceinline__ void reduce_word(Pack<float, W>& pack, int i, const char* from) {
    ptx::reduce_f32(pack.word + i, from);
}
template <int W>
__device__ __forceinline__ void reduce_word(Pack<f16, W>& pack, int i, const char* from) {
    ptx::reduce_f16x2(pack.word + i, from);
}
template <int W>
__device__ __forceinline__ void reduce_word(Pack<bf16, W>& pack, int i, const char* from) {
    ptx::reduce_bf16x2(pack.word + i, from);
}

template <int W>
__device__ __forceinline__ void reduce_whole(Pack<float, W>& pack, const char* from) {
    ptx::reduce_f32_v4(pack.word, from);
}
template <int W>
__device__ __forceinline__ void reduce_whole(Pack<f16, W>& pack, const char* from) {
    ptx::reduce_f16x2_v4(pack.word, from);
}
template <int W>
__device__ __forceinline__ void reduce_whole(Pack<bf16, W>& pack, const char* from) {
    ptx::reduce_bf16x2_v4(pack.word, from);
}

// Sets `pack` to the sum, over the ranks, of the packs at multicast address `from`.
template <typename T, int W>
__device__ __forceinline__ void reduce_pack(Pack<T, W>& pack, const char* from) {
    if constexpr (FAULT("multimem-plain-load")) {
        load_pack(pack, from);
    } else {
        reduce_whole(pack, from);
    }
}

// As reduce_pack(), but sums only the first `valid` elements, which are whole words. The other elements become +0.
template <typename T, int W>
__device__ __forceinline__ void reduce_elements(Pack<T, W>& pack, const char* from, i64 valid) {
#pragma unroll
    for (int i = 0; i < Pack<T, W>::words; ++i) {
        pack.word[i] = 0;
        if (i * Word<T>::per_word < valid) reduce_word(pack, i, from + 4 * i);
    }
}

// Stores a pack of 4, 8, 16 or 32 bytes to all ranks, at a multicast address.
template <typename T, int W>
__device__ __forceinline__ void broadcast_pack(char* to, const Pack<T, W>& pack) {
    constexpr int words = Pack<T, W>::words;
    if constexpr (words == 1) {
        ptx::broadcast_u32(to, pack.word[0]);
    } else if constexpr (words == 2) {
        ptx::broadcast_v2(to, pack.word);
    } else if constexpr (words == 8) {
        ptx::broadcast_v4(to, pack.word);
        ptx::broadcast_v4(to + 16, pack.word + 4);
    } else {
        static_assert(words == 4, "a pack must have 1, 2, 4 or 8 words");
        if constexpr (FAULT("multimem-red-for-store")) {
            ptx::add_to_all_v4(to, pack.word);
        } else {
            ptx::broadcast_v4(to, pack.word);
        }
    }
}

template <typename T, int W>
__device__ __forceinline__ void broadcast_elements(char* to, const Pack<T, W>& pack, i64 valid) {
#pragma unroll
    for (int i = 0; i < Pack<T, W>::words; ++i) {
        if (i * Word<T>::per_word < valid) ptx::broadcast_u32(to + 4 * i, pack.word[i]);
    }
}
