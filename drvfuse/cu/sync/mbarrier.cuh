// SPDX-License-Identifier: Apache-2.0
// Barrier objects in shared memory (mbarrier), for the threads of one block, and bulk copies that complete on them.
//
// A phase ends when as many arrivals have come as init() was told, and all the bytes that they announced. Waiters name the
// parity of the phase that they wait for: 0 for the first. What threads wrote before they arrived, and what was copied, is
// then visible to them.
#pragma once
#include "common/prelude.cuh"

class Mbarrier {
public:
    // By one thread, before a __syncthreads() that comes before all other uses. `bulk_copies_from_here` before the first
    // copy of this thread that completes on it.
    __device__ __forceinline__ void init(u32 arrivals) {
        asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address()), "r"(arrivals) : "memory");
    }

    __device__ __forceinline__ void arrive() {
        asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(address()) : "memory");
    }

    __device__ __forceinline__ void wait(u32 parity) {
        u32 done;
        do {
#if __CUDA_ARCH__ >= 900
            asm volatile(
                "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                : "=r"(done)
                : "r"(address()), "r"(parity)
                : "memory");
#else
            asm volatile(
                "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                : "=r"(done)
                : "r"(address()), "r"(parity)
                : "memory");
#endif
        } while (!done);
    }

#if __CUDA_ARCH__ >= 900
    // Arrives and announces `bytes` of copies.
    __device__ __forceinline__ void expect(u32 bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(address()), "r"(bytes) : "memory");
    }

    // Copies `bytes` of global memory to shared memory; all three are multiples of 16. They count as announced bytes. To
    // addresses in shared memory that are no multiple of 128 an H200 copies a quarter slower.
    __device__ __forceinline__ void copy(u32 to, const void* from, u32 bytes) {
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
            "l"(from), "r"(bytes), "r"(address())
            : "memory");
    }
#endif

private:
    __device__ __forceinline__ u32 address() const { return u32(__cvta_generic_to_shared(&word_)); }

    u64 word_;
};

// After init(), so that the copy engine sees it.
__device__ __forceinline__ void bulk_copies_from_here() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
