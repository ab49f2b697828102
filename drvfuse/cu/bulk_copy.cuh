// SPDX-License-Identifier: Apache-2.0
// Bulk copies from global to shared memory and the mbarriers that they complete on, for the threads of one block
// (sm_90).
//
// A thread makes an mbarrier with `make_arrivals` and, behind `arrivals_are_made`, tells it with `expect_bytes` what is
// to come and starts the copies, all of which it may do before other threads know. They wait with `await_bytes` for the
// phase of a parity: 0 first, then in turn. Before a buffer is filled again, a barrier must stand between its readers
// and the thread that copies.
#pragma once
#include "prelude.cuh"

__device__ __forceinline__ u32 shared_address(const void* place) { return u32(__cvta_generic_to_shared(place)); }

__device__ __forceinline__ void make_arrivals(u64* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}

// So that copies find what this thread has made.
__device__ __forceinline__ void arrivals_are_made() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The one arrival of a phase, which ends when as many bytes have been copied.
__device__ __forceinline__ void expect_bytes(u64* barrier, u32 bytes) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1; }" ::"r"(
                     shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}

// `bytes`, a multiple of 16, between places on 16 bytes. What is copied is read once: L2 need not keep it.
__device__ __forceinline__ void copy_bytes(void* to, const void* from, u32 bytes, u64* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
}

// No bound: what it waits for is the memory system, not another block.
__device__ __forceinline__ void await_bytes(u64* barrier, u32 parity) {
    u32 done = 0;
    while (done == 0) {
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(done)
            : "r"(shared_address(barrier)), "r"(parity)
            : "memory");
    }
}
