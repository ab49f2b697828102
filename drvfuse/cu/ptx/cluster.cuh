// SPDX-License-Identifier: Apache-2.0
// Instructions of thread-block clusters (sm_90): the cluster's barrier, addresses in the shared memory of other blocks,
// and stores to such addresses that complete on an mbarrier. Addresses in shared memory have 32 bits; those in other
// blocks are in the window shared::cluster.
#pragma once
#include "common/types.cuh"

#if __CUDA_ARCH__ >= 900
namespace ptx {

// %cluster_ctarank
__device__ __forceinline__ u32 block_in_cluster() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// barrier.cluster.arrive.relaxed.aligned: does not release; a fence before it must do so
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// barrier.cluster.wait.acquire.aligned
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// mapa.shared::cluster.u32: the same place in the shared memory of block `rank` of the cluster
__device__ __forceinline__ u32 address_in_block(u32 address, u32 rank) {
    u32 mapped;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
}

// st.async.shared::cluster.v2.b32: when it is complete, it counts 8 bytes on the mbarrier
__device__ __forceinline__ void store_async_v2(u32 to, u32 first, u32 second, u32 barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(to),
                 "r"(first), "r"(second), "r"(barrier)
                 : "memory");
}

// fence.mbarrier_init.release.cluster: orders earlier inits of mbarriers before a later cluster_arrive()
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64: whether the phase of that parity has ended
__device__ __forceinline__ bool mbarrier_try_wait_cluster(u32 barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done;
}

}  // namespace ptx
#endif
