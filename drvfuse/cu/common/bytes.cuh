// SPDX-License-Identifier: Apache-2.0
// Packs of 16 bytes at addresses of any alignment, of which the last of an array may have fewer bytes.
//
// `left` is how many bytes there are from the address on. Aligned packs take one access, those at multiples of 4 bytes
// four, and all others, and parts of a pack, one for each byte.
#pragma once
#include "common/pack16.cuh"

// Whether a pack is read or written by one access.
__device__ __forceinline__ bool is_whole(const char* at, i64 left) {
    return left >= 16 && u32(reinterpret_cast<u64>(at)) % 16 == 0;
}

// Bytes beyond the last become zero.
__device__ __forceinline__ void load_bytes(u32 (&word)[4], const char* at, i64 left) {
    const u32 low = u32(reinterpret_cast<u64>(at));
    if (is_whole(at, left)) {
        ptx::load_v4(word, at);
    } else if (left >= 16 && low % 4 == 0) {
#pragma unroll
        for (int i = 0; i < 4; ++i) word[i] = ptx::load_u32(at + 4 * i);
    } else {
        clear(word);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            if (i < left) word[i / 4] |= ptx::load_u8(at + i) << (8 * (i % 4));
        }
    }
}

__device__ __forceinline__ void store_bytes(char* at, const u32 (&word)[4], i64 left) {
    const u32 low = u32(reinterpret_cast<u64>(at));
    if (is_whole(at, left)) {
        ptx::store_v4(at, word);
    } else if (left >= 16 && low % 4 == 0) {
#pragma unroll
        for (int i = 0; i < 4; ++i) ptx::store_u32(at + 4 * i, word[i]);
    } else {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            if (i < left) ptx::store_u8(at + i, word[i / 4] >> (8 * (i % 4)));
        }
    }
}
