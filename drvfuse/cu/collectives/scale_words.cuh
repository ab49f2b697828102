// SPDX-License-Identifier: Apache-2.0
// How an owner of rows sends the scales of groups by the push protocol (sync/push.cuh), as words of 4 bytes.
//
// Scales of 2 or 4 bytes are sent one per word, as floats, whose NaNs are canonical. Scales of one byte are sent PER_WORD
// per word, those of adjacent groups of a row, the first in the low byte: four, if a warp has so many groups. A word of
// the last groups of a row may have fewer scales. The packs of a word's groups are in WORD_LANES adjacent lanes.
//   E8M0   The scales of rows are 0 to 247 or NaN, which is 255. Each is sent as scale + 1 modulo 256, so no byte is 255.
//   E4M3   The scales of FP4 are not negative, so the sign bits of their bytes are free. They carry a key, of the first byte
//          its low bit. The words of the codes are sent as `word ^ key`, since eight FP4 codes of -6 have the bits of ABSENT.
//          A key is valid if it is not equal to ~word for any of the words. The lanes have 8 words of codes, so one of the
//          keys 0 to 8 is valid, and the smallest is taken. Key 15 does not occur, so the word of scales is not ABSENT.
//          (FP4 codes of float32 inputs take half a word per pack, and need no key.)
//
// Memory ordering. A scale word is a word of the push protocol as any other. The lane of the word's first group sends it,
// and the lane of the same index receives and clears it, in one wait with its codes. All lanes of a warp leave a wait
// together, after every lane has received its words. Then a shuffle brings the word to the lanes of its groups.
#pragma once
#include "collectives/norm_form.cuh"
#include "sync/push.cuh"

constexpr bool BYTE_SCALES = GROUPED && sizeof(Scale) == 1;
constexpr int PER_WORD = !BYTE_SCALES ? 1 : LANES > 8 ? 32 / LANES : 4;
constexpr int WORD_LANES = LANES * PER_WORD;
constexpr bool KEYED = FP4 && W == 8;
constexpr u32 E8M0_OFFSET = FAULT("scales-without-offset") ? 0 : 1;
static_assert(!KEYED || (BYTE_SCALES && WORD_LANES <= 8), "one of nine keys is valid, and there are four sign bits");

// The number of words that the scales of a row are sent as.
__device__ __forceinline__ int scale_words(const FusedParams& p) {
    return PER_WORD > 1 ? (groups_of_row(p) + PER_WORD - 1) / PER_WORD : groups_of_row(p);
}

struct ScaleWord {
    u32 word;
    u32 key;  // of the codes of these groups; 0 unless KEYED
};

// The position of this lane's scale in its word, in bits.
__device__ __forceinline__ u32 place_in_word() { return threadIdx.x % WORD_LANES / LANES * 8; }

// The word of this lane's group and the groups next to it, whose scales have one byte each. `exists`: the lane has a pack.
// Called by whole warps.
__device__ __forceinline__ ScaleWord scale_word(bool exists, const OutPack& pack, float scale) {
    const u32 byte = (bits_of<Scale>(scale) + (FP4 ? 0 : E8M0_OFFSET)) & 0xff;
    ScaleWord sent = {byte << place_in_word(), 0};
#pragma unroll
    for (int mask = LANES; mask < WORD_LANES; mask *= 2) sent.word |= __shfl_xor_sync(0xffffffffu, sent.word, mask);
    if constexpr (KEYED) {
        const u32 code = ~pack.word[0];
        if (!__any_sync(0xffffffffu, exists && code == 0) || FAULT("codes-without-keys")) return sent;
        u32 taken = exists && code <= 8 ? 1u << code : 0;
#pragma unroll
        for (int mask = 1; mask < WORD_LANES; mask *= 2) taken |= __shfl_xor_sync(0xffffffffu, taken, mask);
        sent.key = __ffs(~taken) - 1;
        sent.word |= (sent.key * 0x00204081u & 0x01010101u) << 7;
    }
    return sent;
}

// The scale of this lane's group, from the group's word.
__device__ __forceinline__ u32 scale_of_word(u32 word) {
    const u32 byte = word >> place_in_word();
    return FP4 ? byte & 0x7f : (byte - E8M0_OFFSET) & 0xff;
}

// The key of the codes of the word's groups.
__device__ __forceinline__ u32 key_of_word(u32 word) {
    return KEYED ? ((word >> 7 & 0x01010101u) * 0x01020408u) >> 24 : 0;
}
