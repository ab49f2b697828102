// SPDX-License-Identifier: Apache-2.0
// How the blocks of a grid tell one another what their parts of the FP8 RMSNorm forward's maximum are.
//
// Memory order: words of grid_words.cuh carry all that blocks tell one another. The epoch in them is the one that thread 0
// of their block has read and handed on through shared memory, so a block leaves no word before it has read the epoch;
// block 0 advances the epoch when it has seen a word of every block. Failure: scratch.cuh; then what qy, qy_t, the scale
// and rstd hold is undefined.
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

    // By thread 0; a block barrier must follow.
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

// Hears what all blocks have told, and awaits the other words of `all`, of which the first is its own; false, for all
// threads, if this block has given up, now or, by `given_up`, before.
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
