// SPDX-License-Identifier: Apache-2.0
// Barrier objects in shared memory (mbarrier), for the threads of one block, and bulk copies that complete on them.
//
// A phase ends when arrive() and expect() have been called as often as the argument of init() says, and all bytes
// announced by expect() were copied. A waiter passes the parity of the phase that it waits for, 0 for the first. After
// the wait it sees everything that threads wrote before they arrived, and everything that was copied.
#pragma once
#include "ptx/mbarrier.cuh"

class Mbarrier {
public:
    // Initialises the object. Called by one thread, before a __syncthreads() that precedes all other uses. A thread
    // that copies must call bulk_copies_from_here() before its first copy.
    __device__ __forceinline__ void init(u32 arrivals) { ptx::mbarrier_init(address(), arrivals); }

    __device__ __forceinline__ void arrive() { ptx::mbarrier_arrive(address()); }

    __device__ __forceinline__ void wait(u32 parity) {
        while (!ptx::mbarrier_try_wait(address(), parity)) {
        }
    }

#if __CUDA_ARCH__ >= 900
    // Arrives at the mbarrier, and announces copies of `bytes` bytes: the phase ends only when these are complete.
    __device__ __forceinline__ void expect(u32 bytes) { ptx::mbarrier_arrive_expecting(address(), bytes); }

    // Copies `bytes` of global memory to shared memory; all three arguments are multiples of 16. The bytes must be
    // announced by expect(). To addresses in shared memory that are no multiple of 128 an H200 copies a quarter slower
    // than to multiples of 128.
    __device__ __forceinline__ void copy(u32 to, const void* from, u32 bytes) {
        ptx::copy_bulk(to, from, bytes, address());
    }

    // Copies as copy() does, with the hint that the bytes are not read again soon: L2 evicts them first.
    __device__ __forceinline__ void copy_once(u32 to, const void* from, u32 bytes) {
        ptx::copy_bulk_once(to, from, bytes, address());
    }
#endif

private:
    __device__ __forceinline__ u32 address() const { return u32(__cvta_generic_to_shared(&word_)); }

    u64 word_;
};

// Makes initialised mbarriers visible to bulk copies. Called after init().
__device__ __forceinline__ void bulk_copies_from_here() {
#if __CUDA_ARCH__ >= 900
    ptx::fence_async_shared();
#endif
}
