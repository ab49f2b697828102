// SPDX-License-Identifier: Apache-2.0
// Copies of whole rows from global to shared memory that no thread has registers for (sm_90), each of which completes on
// a barrier object of its block. A barrier serves one copy, or several, once.
//
// A copy ends by itself, as a load does, so a wait for it is not bounded by a time. What a waiting thread has seen
// complete it may read; for other threads it takes a block barrier as usual.
#pragma once
#include "prelude.cuh"

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ u32 shared_address(const void* address) { return u32(__cvta_generic_to_shared(address)); }

// By the thread that makes the copies; a block barrier must come before another thread awaits them.
__device__ __forceinline__ void make_copy_barrier(u64* barrier) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// By one thread, before its copies: how many bytes they are together.
__device__ __forceinline__ void expect_copies(u64* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

// Addresses and bytes are multiples of 16.
__device__ __forceinline__ void copy_bulk(void* to, const void* from, int bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

__device__ __forceinline__ void await_copies(u64* barrier) {
    u32 come = 0;
    while (come == 0) {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
                     : "=r"(come)
                     : "r"(shared_address(barrier))
                     : "memory");
    }
}
#endif
