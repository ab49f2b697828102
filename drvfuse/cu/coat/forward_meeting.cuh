// SPDX-License-Identifier: Apache-2.0
// The exchange between the blocks of a grid of their parts of the FP8 norms' maximum.
//
// Memory ordering. Blocks exchange values by words of grid_words.cuh. Thread 0 of a block reads the epoch and passes it
// on through shared memory, so a block stores no word before it has read the epoch. Block 0 advances the epoch when it
// has read a word of every block.
// Failure: scratch.cuh. After a time-out qy, qy_t, the scale and rstd are undefined.
#pragma once
#include "coat/forward.cuh"
#include "sync/grid_words.cuh"

// The largest |y| of a block and of the grid, as bits.
struct Largest {
    u32 own, all;
};

// The shared memory of a block for the meetings.
struct Meetings {
    Largest estimate, exact;
    u32 epoch, users;
    u32 unused[2];

    // Called by thread 0; a block barrier must follow.
    __device__ __forceinline__ void begin(const ScratchUse& use) {
        estimate = exact = Largest{0, 0};
        epoch = use.epoch(), users = use.users();
    }
};

// Publishes this block's maximum to the other blocks; contains a block barrier.
__device__ __forceinline__ void tell(GridWords* words, int round, const Largest& largest, u32 epoch) {
    __syncthreads();
    const bool absent = FAULT("block-1-absent") && blockIdx.x == 1;
    if (gridDim.x > 1 && threadIdx.x == 0 && !absent) leave_word(words->maxima[round] + blockIdx.x, epoch, largest.own);
}

// Waits for the maxima of all blocks, and for the other words of `all`, whose first entry it uses itself. Returns false
// to all threads if this block has given up, now or, as `given_up` says, before.
template <int N>
__device__ __forceinline__ bool hear(GridWords* words, int round, Largest& largest, u32 epoch, ScratchUse& use,
                                     const Scratch& scratch, bool given_up, Awaited (&all)[N]) {
    static_assert(THREADS >= MAX_WORD_BLOCKS, "a thread for each block");
    if (gridDim.x == 1) {
        if (threadIdx.x == 0) largest.all = largest.own;
        __syncthreads();
        return true;
    }
    given_up |= use.aborted();
    all[0] = {threadIdx.x < gridDim.x ? words->maxima[round] + threadIdx.x : nullptr, threadIdx.x, 0};
    Patience patience(scratch);
    if (!given_up) await_words(all, epoch, patience, given_up);
    __syncwarp();
    const u32 most = ptx::warp_max(given_up ? 0 : all[0].value);
    if (threadIdx.x % 32 == 0 && most != 0) atomicMax(&largest.all, most);
    return use.met(given_up);
}
