// SPDX-License-Identifier: Apache-2.0
// How the push protocol (push.cuh) carries foreign bytes, of which any word may be ABSENT: under a key.
//
// A warp sends one pack of four words per lane to a peer, and a word more, the key. Each word travels as `word ^ key`, so a
// key is right if it is none of ~word: then no word that is sent is ABSENT, and the key, a small number, is not either.
// The warp has at most 128 words, so one of the numbers 0 to 128 is right, and it takes the least. Mostly no word is ABSENT,
// and the key is 0 after one vote. The receiver takes word ^ key again: bytes arrive as they are, and 516 bytes are sent for
// 512.
//
// The key is sent by the first lane, and it is sent where a warp has no bytes for a peer, too. So every warp hears from
// the warp of the same numbers of every peer, in every unit of every round, whatever the moves are: that is what push.cuh
// demands of each call (a word from every peer) and of calls of several rounds (who sends a thread words has heard that
// its slots are clear). There the argument is about a thread; here it is about a warp:
//   `receive` brings the warp together when all lanes have cleared what they have taken. So that comes before the
//   first lane's fence between rounds, and before its next key. Every lane of the peer's warp polls that key itself, and its
//   own fence stands between that poll and what it sends in the round after. With the relaxed words these are release and
//   acquire patterns, as in push.cuh.
//   After several rounds a warp has heard in the last round of all that its peers' warps of the same numbers cleared in the
//   round before it, and together a rank's warps have heard of all of that.
// A key's slot is cleared by the first lane when all lanes have taken the key, which the same meeting of the warp says.
#pragma once
#include "sync/push.cuh"

// The key for the packs of the warp's lanes, of which those that do not `exist` are not sent. All 32 lanes come to it.
__device__ __forceinline__ u32 key_of(const u32 (&word)[4], bool exists) {
    bool absent = false;
#pragma unroll
    for (int i = 0; i < 4; ++i) absent |= word[i] == ABSENT && !FAULT("foreign-words-as-they-are");
    if (!__any_sync(0xffffffffu, absent && exists)) return 0;
#pragma unroll 1
    for (u32 first = 0;; first += 32) {  // one of 160 numbers is free
        u32 taken = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 key = ~word[i] - first;
            if (exists && key < 32) taken |= 1u << key;
        }
        taken = ptx::warp_or(taken);
        if (taken != 0xffffffffu) return first + __ffs(~taken) - 1;
    }
}

// Push calls of foreign bytes, of a pack per thread.
template <int Ranks>
class KeyedPush : public Push<Ranks, false, false, false> {
    using Base = Push<Ranks, false, false, false>;

public:
    using Base::Base;

    // K packs that peers have sent, `stride` bytes apart, each where it is `wanted`, and in the same wait the key of each,
    // `key_stride` bytes apart, which comes from every peer and is for the whole warp. Pack k is of distance k + 1. They are
    // cleared. All 32 lanes come to it.
    template <int K>
    __device__ __forceinline__ void receive(u32 (&words)[K][4], const bool (&wanted)[K], u32 offset, u32 stride,
                                            u32 (&keys)[K][1], u32 key_offset, u32 key_stride, Leg leg = PUSH) {
        char* const at = this->own(offset);
        char* const keys_at = this->own(key_offset);
        this->wait(
            leg,
            [&] {
                bool late = false;
#pragma unroll
                for (int k = 0; k < K; ++k) {
                    if (wanted[k]) ptx::load_relaxed_sys_words(words[k], at + k * stride);
                    ptx::load_relaxed_sys_words(keys[k], keys_at + k * key_stride);
                }
#pragma unroll
                for (int k = 0; k < K; ++k) {
                    late |= wanted[k] && Base::absent(words[k]);
                    if (wanted[k] || !FAULT("keys-only-with-bytes")) late |= Base::absent(keys[k]);
                }
                return late;
            },
            [&](Report* to) {
                int first = 0;
                u32 where = 0;  // found without an index that varies, so that the keys stay in registers
#pragma unroll
                for (int k = K - 1; k >= 0; --k) {
                    const bool no_key = Base::absent(keys[k]), late = no_key || (wanted[k] && Base::absent(words[k]));
                    first = late ? k : first;
                    where = no_key ? key_offset + k * key_stride : late ? offset + k * stride : where;
                }
                this->report(to, leg, (this->call_.rank + Ranks - 1 - first) % Ranks, where);
            });
        this->fall_behind();
#pragma unroll
        for (int k = 0; k < K; ++k) {
            if (wanted[k] && !FAULT("slot-not-cleared")) Base::template clear<4>(at + k * stride);
        }
        if (!FAULT("key-cleared-before-all-have-it")) __syncwarp();  // all have the keys, and have cleared their slots
        if (threadIdx.x % 32 == 0) Base::template clear_all<K, 1>(keys_at, key_stride);
    }
};
