// SPDX-License-Identifier: Apache-2.0
// Accesses by a multicast address, which is one address for memory of several devices, and the fence between these
// accesses and accesses by a unicast address, which is an address for memory of one device. Each function is one
// instruction, which its comment names; sm_90 or later.
//
// Only these instructions may use a multicast address, and they may use no other address. A load returns the sum of the
// values on all devices, in an unspecified order and with fp32 arithmetic; the instruction rounds sums of 16-bit types
// once. An access has 4 or 16 bytes, so a single 16-bit value cannot be accessed. All accesses are relaxed at system
// scope, since the memory lies on several devices. They order nothing; the group's barriers order them.
#pragma once
#include "common/types.cuh"

namespace ptx {

#define DRVFUSE_REDUCE(NAME, INSTRUCTION)                                            \
    __device__ __forceinline__ void NAME(u32* word, const void* from) {              \
        asm volatile(INSTRUCTION " %0, [%1];" : "=r"(*word) : "l"(from) : "memory"); \
    }
DRVFUSE_REDUCE(reduce_f32, "multimem.ld_reduce.relaxed.sys.global.add.f32")
DRVFUSE_REDUCE(reduce_f16x2, "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.f16x2")
DRVFUSE_REDUCE(reduce_bf16x2, "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.bf16x2")
#undef DRVFUSE_REDUCE

#define DRVFUSE_REDUCE_V4(NAME, INSTRUCTION)                                      \
    __device__ __forceinline__ void NAME(u32* word, const void* from) {           \
        asm volatile(INSTRUCTION " {%0, %1, %2, %3}, [%4];"                       \
                     : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3]) \
                     : "l"(from)                                                  \
                     : "memory");                                                 \
    }
DRVFUSE_REDUCE_V4(reduce_f32_v4, "multimem.ld_reduce.relaxed.sys.global.add.v4.f32")
DRVFUSE_REDUCE_V4(reduce_f16x2_v4, "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f16x2")
DRVFUSE_REDUCE_V4(reduce_bf16x2_v4, "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2")
#undef DRVFUSE_REDUCE_V4

// Stores of bit patterns to all devices. They have the type f32, which moves any bits unchanged.

// multimem.st.relaxed.sys.global.f32
__device__ __forceinline__ void broadcast_u32(void* to, u32 word) {
    asm volatile("multimem.st.relaxed.sys.global.f32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}

// multimem.st.relaxed.sys.global.v2.f32
__device__ __forceinline__ void broadcast_v2(void* to, const u32* word) {
    asm volatile("multimem.st.relaxed.sys.global.v2.f32 [%0], {%1, %2};" ::"l"(to), "r"(word[0]), "r"(word[1])
                 : "memory");
}

// multimem.st.relaxed.sys.global.v4.f32
__device__ __forceinline__ void broadcast_v4(void* to, const u32* word) {
    asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(word[0]), "r"(word[1]),
                 "r"(word[2]), "r"(word[3])
                 : "memory");
}

// multimem.red.relaxed.sys.global.add.v4.f32, for a planted fault that adds instead of storing (common/faults.cuh)
__device__ __forceinline__ void add_to_all_v4(void* to, const u32* word) {
    asm volatile("multimem.red.relaxed.sys.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(word[0]),
                 "r"(word[1]), "r"(word[2]), "r"(word[3])
                 : "memory");
}

// fence.proxy.alias: orders earlier accesses to memory by one address before later accesses to it by another address
__device__ __forceinline__ void fence_aliases() { asm volatile("fence.proxy.alias;" ::: "memory"); }

}  // namespace ptx
