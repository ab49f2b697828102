// SPDX-License-Identifier: Apache-2.0
// An exchange between ranks with a barrier of three-valued flags. Other libraries have this protocol; it is here for a
// fault that cannot be planted in drvfuse's own barrier.
//
// Rank r fills its row of `data` with `value`, passes a barrier, and adds the rows of all ranks to `sums`. Block b has
// the elements b, b + blocks, ... of a row. A flag counts 0, 1, 2, 0, ..., one step for each barrier, and a wait ends
// when the flag has changed since the barrier before. So every flag must take every step, also the flags of blocks that
// this launch does not have: the blocks of the launch set these flags too (the backfill). A block does so before it
// sets its own flag. A peer that has seen a block's own flag may continue to a call with more blocks. If the flag of a
// further block had not yet taken this step, the peer would find it different from the value of this step, and would
// not wait.
//
// A block has two warps; the second one does the backfill. `flags[rank]` has, in that rank's memory, SLOTS x MAX_RANKS
// words; `step` is the number of barriers before this launch, modulo 3.
#include "common/faults.cuh"
#include "ptx/ordered.cuh"

constexpr int MAX_RANKS = 8;
constexpr int SLOTS = 8;

struct Peers {
    u32* data[MAX_RANKS];
    u32* flags[MAX_RANKS];
};

__device__ __forceinline__ void set(const Peers& peers, int peer, int slot, int rank, u32 step) {
    u32* flag = peers.flags[peer] + slot * MAX_RANKS + rank;
    ptx::store_release_sys(flag, step);
}

__device__ __forceinline__ void backfill(const Peers& peers, int peer, int rank, u32 step) {
#pragma unroll 1
    for (int slot = blockIdx.x + gridDim.x; slot < SLOTS; slot += gridDim.x) set(peers, peer, slot, rank, step);
}

__device__ __forceinline__ void barrier(const Peers& peers, int rank, int ranks, u32 step) {
    const int peer = threadIdx.x % 32;
    __syncthreads();
    if (FAULT("flag-before-backfill") && threadIdx.x < ranks) set(peers, peer, blockIdx.x, rank, step);
    if (FAULT("flag-before-backfill")) __syncthreads();
    if (threadIdx.x >= 32 && peer < ranks) backfill(peers, peer, rank, step);
    if (!FAULT("flag-before-backfill")) __syncthreads();
    if (threadIdx.x < ranks) {
        if (!FAULT("flag-before-backfill")) set(peers, peer, blockIdx.x, rank, step);
        const u32* flag = peers.flags[rank] + blockIdx.x * MAX_RANKS + peer;
        u32 seen;
        do seen = ptx::load_acquire_sys(flag);
        while (seen == (step + 2) % 3);
    }
    __syncthreads();
}

extern "C" __global__ void slots(const __grid_constant__ Peers peers, u32* sums, int count, int rank, int ranks,
                                 u32 value, u32 step) {
    const int stride = gridDim.x * blockDim.x;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) peers.data[rank][i] = value + i;
    barrier(peers, rank, ranks, (step + 1) % 3);
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) {
        u32 sum = 0;
        for (int peer = 0; peer < ranks; ++peer) sum += peers.data[peer][i];
        sums[i] = sum;
    }
    barrier(peers, rank, ranks, (step + 2) % 3);
}
