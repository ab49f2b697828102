// SPDX-License-Identifier: Apache-2.0
// Words that blocks of one launch leave for one another: 64 bits, the launch's epoch and a value, so a word is its own
// flag and orders no other memory. They follow the state of scratch.cuh in the workspace.
#pragma once
#include "scratch.cuh"

constexpr int MAX_WORD_BLOCKS = 256, MAX_WORD_ROWS = 2048, MAX_WORD_SUMS = 1 << 17;

// ops/fp8_forward_plan.py has its size.
struct GridWords {
    ScratchState state;
    u64 maxima[2][MAX_WORD_BLOCKS];  // of each block, in two rounds
    u64 rows[MAX_WORD_ROWS];
    u64 sums[MAX_WORD_SUMS];
};

__device__ __forceinline__ void leave_word(u64* word, u32 epoch, u32 value) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(u64(epoch) << 32 | value) : "memory");
}

// The value that `block` leaves in the word; 0, and `given_up` set, if the wait is over.
__device__ __forceinline__ u32 await_word(const u64* word, u32 epoch, u32 block, Patience& patience, bool& given_up) {
    for (;;) {
        u64 seen;
        asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(word) : "memory");
        if (u32(seen >> 32) == epoch) return u32(seen);
        if (!patience.goes_on(block, epoch, u32(seen >> 32))) {
            given_up = true;
            return 0;
        }
    }
}
