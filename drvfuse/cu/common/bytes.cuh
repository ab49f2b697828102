// SPDX-License-Identifier: Apache-2.0
// Loads and stores of packs of 16 bytes at any address. The last pack of an array may have fewer bytes.
//
// A warp loads or stores one pack per lane. There are three ways:
//   - A pack that is whole and at a multiple of 16 bytes takes one access of 16 bytes.
//   - If the packs of the 32 lanes are whole, contiguous and not at multiples of 16 bytes, they form a row of 512
//   bytes.
//     Each lane but the first accesses 16 aligned bytes, and the lanes exchange by shuffles the parts that belong to
//     their neighbours. The first lane accesses the two ends of the row, 16 bytes together, one byte at a time.
//   - Every other pack is accessed by its lane alone, by words of 4 bytes if it is aligned to 4 bytes, else byte by
//     byte. Such packs occur in the last warp of an array, and in a warp whose packs belong to two arrays.
// No warp touches a byte that does not belong to its packs.
#pragma once
#include "common/pack16.cuh"

// The address of a pack, and the number of bytes from there to the end of its array: 0 or less if there is no pack.
struct Spot {
    char* at;
    i64 left;
};

__device__ __forceinline__ u32 misalignment(const char* at) { return u32(reinterpret_cast<u64>(at)) % 16; }

// Whether one access reads or writes the pack.
__device__ __forceinline__ bool is_whole(const Spot& spot) { return spot.left >= 16 && misalignment(spot.at) == 0; }

// Whether the packs of the 32 lanes are a row.
__device__ __forceinline__ bool in_a_row(const Spot& spot) {
    const u64 at = reinterpret_cast<u64>(spot.at), first = __shfl_sync(0xffffffffu, at, 0);
    return __all_sync(0xffffffffu, spot.left >= 16 && at == first + threadIdx.x % 32 * 16);
}

// What a lane accesses: its pack, or 16 bytes of a row.
struct Access {
    char* at;    // the first byte; for the first lane of a row, that of the first end of the row
    i64 bytes;   // the number of bytes to the end of the array
    u32 behind;  // for the first lane of a row: how many of its 16 bytes follow the row's last aligned access; else 0
    bool whole;  // one access of 16 bytes
    bool words;  // accesses of 4 bytes; otherwise, unless `whole`, of 1 byte

    __device__ __forceinline__ Access(const Spot& spot, bool row) {
        const u32 off = misalignment(spot.at);
        at = row ? spot.at - off : spot.at;
        whole = is_whole(spot) || (row && threadIdx.x % 32 != 0);
        behind = row ? off : 0;
        bytes = spot.left;
        words = bytes >= 16 && off % 4 == 0;
    }

    // The address of byte `i` of the 16 bytes.
    __device__ __forceinline__ char* byte(u32 i) const { return at + i + (i < behind ? 512 : 0); }
};

// Sets `word` to the 16 bytes that begin at byte `skip`, 0 to 15, of the 32 bytes (low, high).
__device__ __forceinline__ void shift_bytes(u32 (&word)[4], const u32 (&low)[4], const u32 (&high)[4], u32 skip) {
    u32 all[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) all[i] = i < 4 ? low[i] : high[i - 4];
#pragma unroll
    for (int i = 0; i < 6; ++i) all[i] = skip & 8 ? all[i + 2] : all[i];
#pragma unroll
    for (int i = 0; i < 5; ++i) all[i] = skip & 4 ? all[i + 1] : all[i];
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = __funnelshift_r(all[i], all[i + 1], skip % 4 * 8);
}

// Sets `word` to the words `own` of lane (lane + ahead) modulo 32.
__device__ __forceinline__ void of_lane(u32 (&word)[4], const u32 (&own)[4], u32 ahead) {
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = __shfl_sync(0xffffffffu, own[i], (threadIdx.x + ahead) % 32);
}

// Loads the pack of each lane. Called by whole warps. Bytes beyond the end of the array become zero.
__device__ __forceinline__ void load_bytes(u32 (&word)[4], const Spot& from) {
    const bool row = in_a_row(from);
    const Access access(from, row);
    clear(word);
    if (access.whole) {
        ptx::load_v4(word, access.at);
    } else if (access.words) {
#pragma unroll
        for (int i = 0; i < 4; ++i) word[i] = ptx::load_u32(access.byte(4 * i));
    } else {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            if (i < access.bytes) word[i / 4] |= ptx::load_u8(access.byte(i)) << (8 * (i % 4));
        }
    }
    if (!row) return;
    u32 next[4];
    of_lane(next, word, 1);
    shift_bytes(word, word, next, access.behind);
}

// Stores the pack of each lane, without the bytes beyond the end of the array. Called by whole warps.
__device__ __forceinline__ void store_bytes(const Spot& to, const u32 (&word)[4]) {
    const bool row = in_a_row(to);
    const Access access(to, row);
    u32 own[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) own[i] = word[i];
    if (row && access.behind != 0) {
        u32 before[4];
        of_lane(before, word, 31);
        shift_bytes(own, before, word, 16 - access.behind);
    }
    if (access.whole) {
        ptx::store_v4(access.at, own);
    } else if (access.words) {
#pragma unroll
        for (int i = 0; i < 4; ++i) ptx::store_u32(access.byte(4 * i), own[i]);
    } else {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            if (i < access.bytes) ptx::store_u8(access.byte(i), own[i / 4] >> (8 * (i % 4)));
        }
    }
}

// Whether a lane of the warp has a pack, at one of at(0) to at(K - 1), that is not whole and aligned.
template <int K, typename At>
__device__ __forceinline__ bool some_are_not_whole(const At& at) {
    bool some = false;
#pragma unroll
    for (int k = 0; k < K; ++k) {
        const auto spot = at(k);
        some |= spot.left > 0 && !is_whole(spot);
    }
    return __any_sync(0xffffffffu, some);
}

// Loads K packs of each lane; pack k lies at at(k). Called by whole warps. Words of a pack that does not exist are
// undefined. First the loads of all packs that are whole and aligned are issued, so that all are in flight at once.
// Then the lanes vote on whether there are other packs, and the warp loads these one after another. With `all_whole`
// the kernel has no other packs, and its lanes do not vote.
template <int K, typename At>
__device__ __forceinline__ void load_packs(u32 (&words)[K][4], bool all_whole, const At& at) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
        const auto spot = at(k);
        if (is_whole(spot)) ptx::load_v4(words[k], spot.at);
    }
    if (all_whole || !some_are_not_whole<K>(at)) return;
#pragma unroll 1
    for (int k = 0; k < K; ++k) {
        auto spot = at(k);
        const bool loaded = is_whole(spot);
        if (loaded) spot.left = 0;
        u32 word[4];
        load_bytes(word, spot);
#pragma unroll
        for (int i = 0; i < 4 * K; ++i) {
            if (i / 4 == k && !loaded) words[i / 4][i % 4] = word[i % 4];
        }
    }
}

template <int K, typename At>
__device__ __forceinline__ void store_packs(bool all_whole, const At& at, const u32 (&words)[K][4]) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
        const auto spot = at(k);
        if (is_whole(spot)) ptx::store_v4(spot.at, words[k]);
    }
    if (all_whole || !some_are_not_whole<K>(at)) return;
#pragma unroll 1
    for (int k = 0; k < K; ++k) {
        auto spot = at(k);
        if (is_whole(spot)) spot.left = 0;
        u32 word[4] = {};
#pragma unroll
        for (int i = 0; i < 4 * K; ++i) word[i % 4] = i / 4 == k ? words[i / 4][i % 4] : word[i % 4];
        store_bytes(spot, word);
    }
}
