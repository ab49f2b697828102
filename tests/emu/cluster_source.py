# SPDX-License-Identifier: Apache-2.0
"""Inline PTX of thread block clusters, for the kernels of tests."""

from __future__ import annotations

TOP = """
__device__ __forceinline__ u32 at_(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ u32 rank_() { u32 r; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
// The address of a variable of the block of a rank, as .shared::cluster.
__device__ __forceinline__ u32 of_(const void* p, u32 rank) {
    u32 a;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(a) : "r"(at_(p)), "r"(rank));
    return a;
}
#define C_ARRIVE(how) asm volatile("barrier.cluster.arrive" how ";" ::: "memory");
#define C_WAIT asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#define C_SYNC C_ARRIVE(".release.aligned") C_WAIT
#define C_INIT_FENCE asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#define C_ST(p, r, v) asm volatile("st.shared::cluster.u32 [%0], %1;" :: "r"(of_(p, r)), "r"((u32)(v)) : "memory");
#define C_LD(v, p, r) asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(of_(p, r)) : "memory");
#define C_INIT(b, n) asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(at_(b)), "r"((u32)(n)) : "memory");
#define C_EXPECT(b, n) asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" \\
    :: "r"(at_(b)), "r"((u32)(n)) : "memory");
#define C_ARRIVE_AT(how, b, r) asm volatile("mbarrier.arrive" how ".shared::cluster.b64 _, [%0];" \\
    :: "r"(of_(b, r)) : "memory");
#define C_SEND(p, r, v, b) asm volatile( \\
    "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" \\
    :: "r"(of_(p, r)), "r"((u32)(v)), "r"(of_(b, r)) : "memory");
#define C_TRY(how, d, b, p) asm volatile( \\
    "{ .reg .pred q; mbarrier.try_wait.parity" how ".shared::cta.b64 q, [%1], %2; " \\
    "selp.u32 %0, 1, 0, q; }" : "=r"(d) : "r"(at_(b)), "r"((u32)(p)) : "memory");
#define C_AWAIT(how, b, p) { u32 d_; do C_TRY(how, d_, b, p) while (!d_); }
#define C_COPY(dst, r, src, n, b) asm volatile( \\
    "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" \\
    :: "r"(of_(dst, r)), "r"(at_(src)), "r"((u32)(n)), "r"(of_(b, r)) : "memory");
#define C_LOAD(dst, r, src, n, b) asm volatile( \\
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" \\
    :: "r"(of_(dst, r)), "l"(src), "r"((u32)(n)), "r"(of_(b, r)) : "memory");
#define C_SPREAD(dst, src, n, b, mask) asm volatile( \\
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" \\
    :: "r"(at_(dst)), "l"(src), "r"((u32)(n)), "r"(at_(b)), "h"((unsigned short)(mask)) : "memory");
"""
