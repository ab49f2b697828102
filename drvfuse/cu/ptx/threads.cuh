// SPDX-License-Identifier: Apache-2.0
// Instructions that the threads of a block or warp execute together, for which the compiler has no functions.
#pragma once
#include "common/types.cuh"

namespace ptx {

// bar.sync of `threads` threads, a multiple of 32, at barrier `number` of the block; __syncthreads() uses barrier 0
__device__ __forceinline__ void bar_sync(u32 number, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// bar.arrive: this thread arrives at the barrier and continues; threads in bar_sync() wait for it
__device__ __forceinline__ void bar_arrive(u32 number, u32 threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// bar_sync() at barrier 1.
__device__ __forceinline__ void bar_sync_1(u32 threads) { asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory"); }

// bar.red.or.pred: whether `own` is true for one of the threads
__device__ __forceinline__ bool bar_any(u32 number, u32 threads, bool own) {
    u32 result;
    asm volatile(
        "{ .reg .pred in, out; setp.ne.u32 in, %3, 0; bar.red.or.pred out, %1, %2, in; selp.u32 %0, 1, 0, out; }"
        : "=r"(result)
        : "r"(number), "r"(threads), "r"(u32(own))
        : "memory");
    return result;
}

// redux.sync.max.u32 over the whole warp
__device__ __forceinline__ u32 warp_max(u32 value) {
    u32 result;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(result) : "r"(value));
    return result;
}

// redux.sync.or.b32 over the whole warp
__device__ __forceinline__ u32 warp_or(u32 value) {
    u32 result;
    asm volatile("redux.sync.or.b32 %0, %1, 0xffffffff;" : "=r"(result) : "r"(value));
    return result;
}

// exit: ends this thread
__device__ __forceinline__ void exit_thread() { asm volatile("exit;"); }

}  // namespace ptx
