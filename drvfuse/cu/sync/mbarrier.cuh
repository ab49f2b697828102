// SPDX-License-Identifier: Apache-2.0
// Barrier objects in shared memory (mbarrier), for the threads of one block, and bulk copies that complete on them.
//
// A phase ends when as many arrivals have come as init() was told, and all the bytes that they announced. Waiters name the
// parity of the phase that they wait for: 0 for the first. What threads wrote before they arrived, and what was copied, is
// then visible to them.
#pragma once
#include "ptx/mbarrier.cuh"

class Mbarrier {
public:
    // By one thread, before a __syncthreads() that comes before all other uses. `bulk_copies_from_here` before the first
    // copy of this thread that completes on it.
    __device__ __forceinline__ void init(u32 arrivals) { ptx::mbarrier_init(address(), arrivals); }

    __device__ __forceinline__ void arrive() { ptx::mbarrier_arrive(address()); }

    __device__ __forceinline__ void wait(u32 parity) {
        while (!ptx::mbarrier_try_wait(address(), parity)) {
        }
    }

#if __CUDA_ARCH__ >= 900
    // Arrives and announces `bytes` of copies.
    __device__ __forceinline__ void expect(u32 bytes) { ptx::mbarrier_arrive_expecting(address(), bytes); }

    // Copies `bytes` of global memory to shared memory; all three are multiples of 16. They count as announced bytes. To
    // addresses in shared memory that are no multiple of 128 an H200 copies a quarter slower.
    __device__ __forceinline__ void copy(u32 to, const void* from, u32 bytes) {
        ptx::copy_bulk(to, from, bytes, address());
    }

    // The same of what is not read again soon: L2 gives it up first.
    __device__ __forceinline__ void copy_once(u32 to, const void* from, u32 bytes) {
        ptx::copy_bulk_once(to, from, bytes, address());
    }
#endif

private:
    __device__ __forceinline__ u32 address() const { return u32(__cvta_generic_to_shared(&word_)); }

    u64 word_;
};

// After init(), so that the copy engine sees it.
__device__ __forceinline__ void bulk_copies_from_here() {
#if __CUDA_ARCH__ >= 900
    ptx::fence_async_shared();
#endif
}
