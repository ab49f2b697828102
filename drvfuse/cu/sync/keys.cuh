// SPDX-License-Identifier: Apache-2.0
// Bytes in the push protocol (push.cuh). Any word of them may be equal to ABSENT, so they are sent under a key.
//
// A warp sends one pack of four words per lane to a peer, and one more word, the key. Each word is sent as `word ^
// key`. A key is valid if it is not equal to ~word for any of the words: then no word that is sent is ABSENT. The key
// itself is a small number, so it is not ABSENT either. The warp has at most 128 words, so one of the numbers 0 to 128
// is valid; the smallest valid number is the key. Usually no word is ABSENT, and one vote shows that the key is 0. The
// receiver computes word ^ key again, and so gets the original bytes. 516 bytes are sent for 512.
//
// The first lane sends the key, also if the warp has no bytes for a peer. So in every unit of every round each warp
// receives a word from the warp of the same index of every peer, whatever bytes move. push.cuh requires this for two
// reasons. In each call a rank must receive a word from every peer. In a call of several rounds, a sender must have
// received a word that the receiver sent after it had cleared its slots. The argument in push.cuh is about threads; the
// same argument for warps is:
//   In `receive` the warp executes __syncwarp() after all lanes have cleared the slots of their packs; then the first
//   lane clears the slots of the keys, which all lanes have read. So all these clears come before the first lane's
//   fence between rounds, and before its next key. Every lane of the peer's warp polls that key itself, and executes a
//   fence between that poll and its stores of the next round. With the relaxed words these are release and acquire
//   patterns, as in push.cuh.
//   In the last of several rounds a warp receives a key from the warp of the same index of every peer, which has sent
//   it after all its clears of the round before. So all clears of all peers happen before the end of the rank's call.
#pragma once
#include "sync/push.cuh"

// Returns a key that is valid for all packs of the warp. `word` is this lane's pack, if it `exists`. Called by all 32
// lanes.
__device__ __forceinline__ u32 key_of(const u32 (&word)[4], bool exists) {
    bool absent = false;
#pragma unroll
    for (int i = 0; i < 4; ++i) absent |= word[i] == ABSENT && !FAULT("foreign-words-as-they-are");
    if (!__any_sync(0xffffffffu, absent && exists)) return 0;
    // Ends with first = 128 at the latest: one of the numbers 0 to 128 is a valid key.
#pragma unroll 1
    for (u32 first = 0;; first += 32) {
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

// Push calls of bytes, with one pack per thread.
template <int Ranks>
class KeyedPush : public Push<Ranks, false, false, false> {
    using Base = Push<Ranks, false, false, false>;

public:
    using Base::Base;

    // Waits for K packs, which peers have sent to addresses `stride` bytes apart, and clears their slots. Pack k comes
    // from the rank k + 1 ranks before this one. Only packs that are `wanted` are read. The same wait reads the key of
    // each peer, at addresses `key_stride` bytes apart; every peer sends a key for the whole warp. Called by all 32
    // lanes.
    template <int K>
    __device__ __forceinline__ void receive(u32 (&words)[K][4], const bool (&wanted)[K], u32 offset, u32 stride,
                                            u32 (&keys)[K][1], u32 key_offset, u32 key_stride, WaitKind kind = PUSH) {
        char* const at = this->own(offset);
        char* const keys_at = this->own(key_offset);
        this->wait(
            kind,
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
                // `where` is computed without indexing `keys` by `first`, which would place `keys` in local memory.
                u32 where = 0;
#pragma unroll
                for (int k = K - 1; k >= 0; --k) {
                    const bool no_key = Base::absent(keys[k]), late = no_key || (wanted[k] && Base::absent(words[k]));
                    first = late ? k : first;
                    where = no_key ? key_offset + k * key_stride : late ? offset + k * stride : where;
                }
                this->report(to, kind, (this->call_.rank + Ranks - 1 - first) % Ranks, where);
            });
        this->fall_behind();
#pragma unroll
        for (int k = 0; k < K; ++k) {
            if (wanted[k] && !FAULT("slot-not-cleared")) Base::template clear<4>(at + k * stride);
        }
        if (!FAULT("key-cleared-before-all-have-it"))
            __syncwarp();  // from here on, all lanes have read the keys and cleared the slots of their packs
        if (threadIdx.x % 32 == 0) Base::template clear_all<K, 1>(keys_at, key_stride);
    }
};
