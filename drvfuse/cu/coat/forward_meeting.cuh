// SPDX-License-Identifier: Apache-2.0
// The exchange of maxima between the blocks of the FP8 norms' forward pass, in which every block gets the maximum over
// the grid. A launch has up to two exchanges: one of estimates, and if these do not decide the scale, one of exact
// maxima.
//
// Memory ordering. Each block stores a word of grid_words.cuh with its maximum and the launch's epoch, and polls the
// words of all blocks. A word carries its own readiness and guards no other memory, so all accesses are relaxed. Thread
// 0 of a block reads the epoch and passes it to the other threads through shared memory, before a block barrier. So a
// block stores no word before it has read the epoch. Block 0 advances the epoch after it has read a word of every
// block, so after every block has read the epoch.
// Failure: see scratch.cuh. After a time-out qy, qy_t, the scale, mean and rstd are undefined.
#pragma once
#include "coat/forward.cuh"
#include "sync/grid_words.cuh"

// A maximum of |y|, as bits.
struct Maximum {
    u32 of_block;  // the maximum over this block's part of the tensor; threads raise it by atomicMax
    u32 of_grid;   // the maximum over the tensor, set by await_maximum()
};

// The shared memory of a block for the exchanges of a launch.
struct Meetings {
    Maximum estimate;  // the estimates of the largest |y|
    Maximum exact;     // the exact largest |y|, if the estimates do not decide the scale
    u32 epoch;         // the epoch in the words that this launch stores (ScratchUse::epoch)
    u32 users;         // the number of launches that used the workspace when this launch began
    u32 unused[2];     // makes the size a multiple of 16 bytes

    // Initialises all members. Called by thread 0; a block barrier must follow.
    __device__ __forceinline__ void begin(const ScratchUse& use) {
        estimate = exact = Maximum{0, 0};
        epoch = use.epoch(), users = use.users();
    }
};

// Publishes this block's maximum in exchange number `exchange`: 0 for estimates, 1 for exact maxima. All threads of the
// block call it after they have raised the maximum. It begins with a block barrier, after which the maximum is
// complete.
__device__ __forceinline__ void publish_maximum(GridWords* words, int exchange, const Maximum& maximum, u32 epoch) {
    __syncthreads();
    const bool absent = FAULT("block-1-absent") && blockIdx.x == 1;
    if (gridDim.x > 1 && threadIdx.x == 0 && !absent) {
        leave_word(words->maxima[exchange] + blockIdx.x, epoch, maximum.of_block);
    }
}

// Waits for the maxima of all blocks in exchange number `exchange`, and sets `maximum.of_grid`. In the same wait each
// thread also waits for its words awaited[1], awaited[2], ...; this function uses awaited[0] itself. `given_up` says
// whether this thread has given up an earlier wait. All threads of the block call it; it contains a block barrier.
// Returns false to all threads if one of them has given up.
template <int N>
__device__ __forceinline__ bool await_maximum(GridWords* words, int exchange, Maximum& maximum, u32 epoch,
                                              ScratchUse& use, const Scratch& scratch, bool given_up,
                                              Awaited (&awaited)[N]) {
    static_assert(THREADS >= MAX_WORD_BLOCKS, "a thread for each block");
    if (gridDim.x == 1) {
        if (threadIdx.x == 0) maximum.of_grid = maximum.of_block;
        __syncthreads();
        return true;
    }
    given_up |= use.aborted();
    awaited[0] = {threadIdx.x < gridDim.x ? words->maxima[exchange] + threadIdx.x : nullptr, threadIdx.x, 0};
    Patience patience(scratch);
    if (!given_up) await_words(awaited, epoch, patience, given_up);
    __syncwarp();
    const u32 of_warp = ptx::warp_max(given_up ? 0 : awaited[0].value);
    if (threadIdx.x % 32 == 0 && of_warp != 0) atomicMax(&maximum.of_grid, of_warp);
    return use.met(given_up);
}
