// SPDX-License-Identifier: Apache-2.0
// A grid-wide barrier that carries a maximum, for cooperative launches of at most MAX_GRID blocks.
//
// Each block owns a 64-bit slot: (epoch, value). A block stores its slot with release and then polls all slots until
// each carries this launch's epoch, so the word is its own flag and nothing is reset between launches. The epoch is
// read by every block before its slot is stored; block 0 advances it after the barrier, when all have read it. So a
// workspace that was zeroed once serves any number of launches in stream order, of any grid.
//
// Every spin is bounded: two launches that share a workspace at once would wait for ever, and trap instead.
#pragma once
#include "prelude.cuh"

constexpr int MAX_GRID = 512;

struct GridWorkspace {
    u32 epoch;
    u32 unused[3];
    u64 slots[MAX_GRID];
};

__device__ __forceinline__ u64 global_ns() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// `epoch` is the workspace's at the kernel's start; `shared_maximum` is 0 on entry for all, or a shared word that every
// thread's value has been folded into before the last __syncthreads(). Returns the maximum over the grid (as u32).
// What any thread of any block wrote to global memory before is visible to all threads after.
__device__ __forceinline__ u32 grid_maximum(GridWorkspace* workspace, u32 epoch, u32* shared_maximum, u64 timeout_ns) {
    __syncthreads();
    if (gridDim.x == 1) return *shared_maximum;
    const u32 wanted = epoch + 1;
    if (threadIdx.x == 0) {
        u64 word = u64(wanted) << 32 | *shared_maximum;
        asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(workspace->slots + blockIdx.x), "l"(word) : "memory");
    }
    __syncthreads();
    u64 start = 0;
    for (u32 first = threadIdx.x / 32 * 32; first < gridDim.x; first += blockDim.x) {
        const u32 slot = first + threadIdx.x % 32;
        u64 word = u64(wanted) << 32;
        for (u32 polls = 1; slot < gridDim.x; ++polls) {
            asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(workspace->slots + slot) : "memory");
            if (u32(word >> 32) == wanted) break;
            if (polls % 1024 == 0) {
                u64 now = global_ns();
                if (start == 0) start = now;
                if (now - start > timeout_ns) __trap();
            }
        }
        __syncwarp();
        asm volatile("fence.acq_rel.gpu;" ::: "memory");
        u32 most;
        asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(most) : "r"(u32(word)));
        if (threadIdx.x % 32 == 0) atomicMax(shared_maximum, most);
    }
    __syncthreads();
    if (blockIdx.x == 0 && threadIdx.x == 0) workspace->epoch = wanted;
    return *shared_maximum;
}
