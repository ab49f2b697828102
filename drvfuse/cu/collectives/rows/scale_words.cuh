// SPDX-License-Identifier: Apache-2.0
// Words of 4 bytes in which the owner of a row sends the scales of its groups by the push protocol (sync/push.cuh).
//
// Scales of one byte of groups of up to 32 columns are sent four per word: those of adjacent groups of a row, the
// first in the low byte. The last word of a row may have fewer scales. The packs of the groups of a word are in
// WORD_LANES adjacent lanes. All other scales are sent one per word, as floats, whose NaNs are canonical. (With larger
// groups, words of four scales would save less than the shuffles take.)
//   E8M0   The bytes of scales are 0 to 247 or, for NaN, 255. A byte is sent as byte + 1 modulo 256, so no sent byte is
//          255.
//   E4M3   The scales of FP4 are not negative, so the sign bits of the word's four bytes are free. They hold a key of
//          four bits, whose lowest bit is in the first byte. A word of codes is sent as `word ^ key`, since eight FP4
//          codes of -6 have the bits of ABSENT. A key is valid if it is not equal to ~word for any of the words. The
//          groups of a word of scales have at most 8 words of codes, so one of the keys 0 to 8 is valid, and the
//          smallest valid key is taken. Key 15 does not occur, so the word of scales is not ABSENT.
//          (The FP4 codes of a pack of float32 inputs take half a word, and need no key.)
//
// Memory ordering. A word of scales is an ordinary word of the push protocol. The lane that holds the first pack of the
// word's first group sends it. In the receiver the lane of the same index receives the word and clears its slot, in the
// same wait as for the lane's codes. All lanes of a warp leave a wait together, after every lane has received its
// words. Then a shuffle brings the word to the lanes of its groups.
#pragma once
#include "collectives/rows/form.cuh"
#include "sync/push.cuh"

constexpr bool BYTE_SCALES = GROUPED && sizeof(Scale) == 1 && LANES * W <= 32;  // whether scales are sent as bytes
constexpr int PER_WORD = BYTE_SCALES ? 4 : 1;
constexpr int WORD_LANES = LANES * PER_WORD;
constexpr bool KEYED = FP4 && W == 8;
static_assert(!KEYED || (BYTE_SCALES && WORD_LANES <= 8), "the groups of a word must have at most 8 words of codes");

// The number of words in which the scales of a row are sent.
__device__ __forceinline__ int scale_words(const RowsParams& p) {
    return PER_WORD > 1 ? (groups_of_row(p) + PER_WORD - 1) / PER_WORD : groups_of_row(p);
}

struct ScaleWord {
    u32 word;
    u32 key;  // the key under which the codes with these scales are sent; 0 unless KEYED
};

// The number that is added, modulo 256, to an E8M0 scale before it is sent, so that no sent byte is 255.
__device__ __forceinline__ constexpr u32 e8m0_offset() { return FAULT("scales-without-offset") ? 0 : 1; }

// The position of this lane's scale in its word, in bits.
__device__ __forceinline__ u32 place_in_word() { return threadIdx.x % WORD_LANES / LANES * 8; }

// Returns the word that holds the scale of this lane's group, for scales of one byte, and the key for the codes of that
// word's groups. `exists`: the lane has a pack, `pack`. Called by whole warps.
__device__ __forceinline__ ScaleWord scale_word(bool exists, const OutPack& pack, float scale) {
    const u32 byte = (bits_of<Scale>(scale) + (FP4 ? 0 : e8m0_offset())) & 0xff;
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

// Returns the scale of this lane's group from the word that holds it.
__device__ __forceinline__ u32 scale_of_word(u32 word) {
    const u32 byte = word >> place_in_word();
    return FP4 ? byte & 0x7f : (byte - e8m0_offset()) & 0xff;
}

// Returns the key under which the codes that belong to a word of scales were sent.
__device__ __forceinline__ u32 key_of_word(u32 word) {
    return KEYED ? ((word >> 7 & 0x01010101u) * 0x01020408u) >> 24 : 0;
}
