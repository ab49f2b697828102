// SPDX-License-Identifier: Apache-2.0
// Special registers, programmatic dependent launch, and values that the compiler must treat as unknown.
#pragma once
#include "common/types.cuh"

namespace ptx {

// %globaltimer, in ns
__device__ __forceinline__ u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
    return now;
}

// %clock64, of this SM
__device__ __forceinline__ u64 cycles() {
    u64 now;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(now)::"memory");
    return now;
}

// %clock64, predicated; `now` is unchanged unless `wanted`
__device__ __forceinline__ void cycles_if(bool wanted, u64& now) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; @p mov.u64 %0, %%clock64; }"
                 : "+l"(now)
                 : "r"(u32(wanted))
                 : "memory");
}

// %smid
__device__ __forceinline__ u32 sm_index() {
    u32 index;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(index));
    return index;
}

// %ctaid.x, read again at this point, so that no register holds it earlier
__device__ __forceinline__ u32 block_x() {
    u32 x;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
    return x;
}

// %ctaid.y, read again at this point, as in block_x()
__device__ __forceinline__ u32 block_y() {
    u32 y;
    asm volatile("mov.u32 %0, %%ctaid.y;" : "=r"(y));
    return y;
}

// griddepcontrol.wait; nothing before sm_90
__device__ __forceinline__ void wait_for_grids() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// griddepcontrol.launch_dependents; nothing before sm_90
__device__ __forceinline__ void launch_grids() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Emits no instruction. From here on the compiler treats `value` as unknown, so it neither keeps results of
// the old value nor computes results of the new value earlier.
template <typename T>
__device__ __forceinline__ void forget(T& value) {
    static_assert(sizeof(T) == 4, "a register");
    asm volatile("" : "+r"(value));
}

}  // namespace ptx
