// SPDX-License-Identifier: Apache-2.0
// A barrier of all blocks of a grid that also computes a maximum, for cooperative launches of at most MAX_GRID blocks.
//
// Each block owns a 64-bit slot: (epoch, value). A block stores its slot with release and then polls all slots until
// each has this launch's epoch, so a slot is its own flag and nothing is reset between launches. The polls are relaxed,
// and a fence after them acquires. Every block reads the epoch before it stores its slot; block 0 advances the epoch
// after the barrier, when all blocks have read it. So a workspace that was zeroed once serves any number of launches in
// stream order, with any grids.
//
// Failure. As scratch.cuh says.
#pragma once
#include "ptx/threads.cuh"
#include "sync/scratch.cuh"

constexpr int MAX_GRID = 512;

struct GridWorkspace {
    ScratchState state;
    u64 slots[MAX_GRID];
};

// Passes the barrier. The caller constructs `use` at the kernel's start, with `wanted` false in a grid of one block.
// This function calls use.finish() when all blocks have arrived. The shared word `*shared_maximum` is the maximum of
// the values that threads of the block have stored in it before the call, or 0. Afterwards the word has the maximum
// over the grid (as u32), and all earlier writes of all blocks to global memory are visible to all threads. Returns
// false to all threads of the block if a block did not arrive in time, or if an earlier launch gave up.
__device__ __forceinline__ bool grid_maximum(const Scratch& scratch, ScratchUse& use, u32* shared_maximum) {
    __syncthreads();
    if (gridDim.x == 1) return true;
    u64* slots = reinterpret_cast<GridWorkspace*>(scratch.state)->slots;
    const u32 epoch = use.epoch();
    if (threadIdx.x == 0 && !(FAULT("block-1-absent") && blockIdx.x == 1)) {
        const u64 word = u64(epoch) << 32 | *shared_maximum;
        if constexpr (FAULT("grid-barrier-relaxed")) {
            ptx::store_relaxed_gpu(slots + blockIdx.x, word);
        } else {
            ptx::store_release_gpu(slots + blockIdx.x, word);
        }
    }
    __syncthreads();
    Patience patience(scratch);
    bool failed = use.aborted();
    for (u32 first = threadIdx.x / 32 * 32; first < gridDim.x; first += blockDim.x) {
        const u32 slot = first + threadIdx.x % 32;
        u64 word = u64(epoch) << 32;
        while (slot < gridDim.x && !failed) {
            word = ptx::load_relaxed_gpu(slots + slot);
            if (u32(word >> 32) == epoch) break;
            failed = !patience.goes_on(slot, epoch, u32(word >> 32));
        }
        __syncwarp();
        if (!FAULT("grid-barrier-no-fence")) ptx::fence_gpu();
        const u32 most = ptx::warp_max(u32(word));
        if (threadIdx.x % 32 == 0) atomicMax(shared_maximum, most);
    }
    if (!use.met(failed)) return false;
    use.finish();
    return true;
}
