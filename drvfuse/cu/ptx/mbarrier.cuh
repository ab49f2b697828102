// SPDX-License-Identifier: Apache-2.0
// Instructions on mbarriers in shared memory, by their 32-bit addresses. sync/mbarrier.cuh uses them.
#pragma once
#include "common/types.cuh"

namespace ptx {

// mbarrier.init.shared.b64
__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// mbarrier.arrive.shared.b64
__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// mbarrier.try_wait.parity.shared.b64, which may suspend the thread for a while; before sm_90
// mbarrier.test_wait.parity.shared.b64: whether the phase of that parity has ended
__device__ __forceinline__ bool mbarrier_try_wait(u32 barrier, u32 parity) {
    u32 done;
#if __CUDA_ARCH__ >= 900
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
#else
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
#endif
    return done;
}

#if __CUDA_ARCH__ >= 900
// mbarrier.arrive.expect_tx.shared.b64
__device__ __forceinline__ void mbarrier_arrive_expecting(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// cp.async.bulk from global to shared memory, which completes on an mbarrier
__device__ __forceinline__ void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// copy_bulk() with the cache hint L2::evict_first, for bytes that are not read again
__device__ __forceinline__ void copy_bulk_once(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile(
        "{ .reg .b64 policy; createpolicy.fractional.L2::evict_first.b64 policy, 1.0;"
        " cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3],"
        " policy; }" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

// fence.proxy.async.shared::cta
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#endif

}  // namespace ptx
