// SPDX-License-Identifier: Apache-2.0
// Words by which blocks of one launch exchange values. A word has 64 bits, the launch's epoch and a value, so it is its
// own flag, and orders no other memory. The words follow the state of scratch.cuh in the workspace.
#pragma once
#include "sync/scratch.cuh"

constexpr int MAX_WORD_BLOCKS = 256, MAX_WORD_ROWS = 2048, MAX_WORD_SUMS = 1 << 16;

// The workspace of a kernel whose blocks exchange values through these words. drvfuse/plans/scratch.py has the struct's
// size.
struct GridWords {
    ScratchState state;
    u64 maxima[2][MAX_WORD_BLOCKS];  // each block's maximum, for two exchanges of maxima: [exchange][block]
    u64 rows[MAX_WORD_ROWS];  // one value for each row, or a maximum for each strip or block (forward_strips.cuh)
    u64 sums[MAX_WORD_SUMS];  // the sums of parts of rows
};

// Publishes `value`, with the epoch, in a word of this block.
__device__ __forceinline__ void leave_word(u64* word, u32 epoch, u32 value) {
    ptx::store_relaxed_gpu(word, u64(epoch) << 32 | value);
}

// A word for which a thread waits.
struct Awaited {
    const u64* word;  // the address of the word; null: there is no wait
    u32 block;        // the block that stores the word
    u32 value;        // set by await_words(): the value that the word has
};

// Waits for the values of all words; in every poll the loads of all words are in flight at once. Sets `given_up` on a
// time-out.
template <int N>
__device__ __forceinline__ void await_words(Awaited (&all)[N], u32 epoch, Patience& patience, bool& given_up) {
    for (;;) {
        u64 seen[N];
#pragma unroll
        for (int i = 0; i < N; ++i) {
            seen[i] = u64(epoch) << 32;
            if (all[i].word != nullptr) seen[i] = ptx::load_relaxed_gpu(all[i].word);
        }
        bool late = false;
        u32 block = 0, late_epoch = 0;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            all[i].value = u32(seen[i]);
            const u32 word_epoch = u32(seen[i] >> 32);
            if (FAULT("fp8-word-of-any-launch") ? word_epoch == 0 : word_epoch != epoch)
                late = true, block = all[i].block, late_epoch = word_epoch;
        }
        if (!late) return;
        if (!patience.goes_on(block, epoch, late_epoch)) {
            given_up = true;
            return;
        }
    }
}
