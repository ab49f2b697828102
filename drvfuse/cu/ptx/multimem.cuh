// SPDX-License-Identifier: Apache-2.0
// Accesses by a multicast address, which stands for memory of several devices, and the fence between them and accesses
// by a device's own address. One function an instruction, which stands beside it; sm_90 or later.
//
// Nothing but these instructions may use a multicast address, and they may use no other. A sum is of the values that all
// the devices have there, in no specified order, with fp32 arithmetic; those of 16-bit types are rounded once, by the
// instruction. They are as wide as 4 or 16 bytes, so a single 16-bit value cannot be accessed. All are relaxed at system
// scope, since the memory lies on several devices; that orders nothing, which is the barrier's work.
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

// Stores of bit patterns to all devices: the type f32 moves the bits of any other.

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

// multimem.red.relaxed.sys.global.add.v4.f32: it adds where a store is meant, for a fault (common/faults.cuh)
__device__ __forceinline__ void add_to_all_v4(void* to, const u32* word) {
    asm volatile("multimem.red.relaxed.sys.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(word[0]),
                 "r"(word[1]), "r"(word[2]), "r"(word[3])
                 : "memory");
}

// fence.proxy.alias: what precedes it by one address of a place in memory precedes what follows it by another
__device__ __forceinline__ void fence_aliases() { asm volatile("fence.proxy.alias;" ::: "memory"); }

}  // namespace ptx
