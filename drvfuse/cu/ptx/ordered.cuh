// SPDX-License-Identifier: Apache-2.0
// Accesses to global memory by which threads synchronise: relaxed, acquire and release loads and stores, atomics and
// fences, at GPU scope or system scope. Each function is one instruction.
#pragma once
#include "common/types.cuh"

namespace ptx {

#define DRVFUSE_LOAD(NAME, T, REGISTER, INSTRUCTION)                                         \
    __device__ __forceinline__ T NAME(const T* from) {                                       \
        T value;                                                                             \
        asm volatile(INSTRUCTION " %0, [%1];" : "=" REGISTER(value) : "l"(from) : "memory"); \
        return value;                                                                        \
    }
DRVFUSE_LOAD(load_relaxed_gpu, u32, "r", "ld.relaxed.gpu.global.u32")
DRVFUSE_LOAD(load_relaxed_gpu, u64, "l", "ld.relaxed.gpu.global.u64")
DRVFUSE_LOAD(load_relaxed_sys, u32, "r", "ld.relaxed.sys.global.u32")
DRVFUSE_LOAD(load_relaxed_sys, u64, "l", "ld.relaxed.sys.global.u64")
DRVFUSE_LOAD(load_acquire_gpu, u64, "l", "ld.acquire.gpu.global.u64")
DRVFUSE_LOAD(load_acquire_sys, u32, "r", "ld.acquire.sys.global.u32")
DRVFUSE_LOAD(load_acquire_sys, u64, "l", "ld.acquire.sys.global.u64")
DRVFUSE_LOAD(load_volatile, u64, "l", "ld.volatile.global.u64")
#undef DRVFUSE_LOAD

#define DRVFUSE_STORE(NAME, T, REGISTER, INSTRUCTION)                                 \
    __device__ __forceinline__ void NAME(T* to, T value) {                            \
        asm volatile(INSTRUCTION " [%0], %1;" ::"l"(to), REGISTER(value) : "memory"); \
    }
DRVFUSE_STORE(store_relaxed_gpu, u32, "r", "st.relaxed.gpu.global.u32")
DRVFUSE_STORE(store_relaxed_gpu, u64, "l", "st.relaxed.gpu.global.u64")
DRVFUSE_STORE(store_relaxed_sys, u32, "r", "st.relaxed.sys.global.u32")
DRVFUSE_STORE(store_relaxed_sys, u64, "l", "st.relaxed.sys.global.u64")
DRVFUSE_STORE(store_release_gpu, u64, "l", "st.release.gpu.global.u64")
DRVFUSE_STORE(store_release_sys, u32, "r", "st.release.sys.global.u32")
DRVFUSE_STORE(store_release_sys, u64, "l", "st.release.sys.global.u64")
DRVFUSE_STORE(store_volatile, u64, "l", "st.volatile.global.u64")
#undef DRVFUSE_STORE

// Accesses to vectors. For other threads, each part of 8 bytes of a vector is a separate access.

// ld.relaxed.gpu.global.v2.u32
__device__ __forceinline__ void load_relaxed_gpu_v2(u32& first, u32& second, const void* from) {
    asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(first), "=r"(second) : "l"(from) : "memory");
}

// ld.relaxed.gpu.global.v4.u32
__device__ __forceinline__ void load_relaxed_gpu_v4(u32 (&word)[4], const u32* from) {
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "l"(from)
                 : "memory");
}

// ld.relaxed.gpu.global.v2.u64
__device__ __forceinline__ void load_relaxed_gpu_v2(u64& first, u64& second, const u64* from) {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(from) : "memory");
}

// st.relaxed.gpu.global.v2.u64
__device__ __forceinline__ void store_relaxed_gpu_v2(u64* to, u64 first, u64 second) {
    asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(first), "l"(second) : "memory");
}

// st.relaxed.gpu.global.v4.u32
__device__ __forceinline__ void store_relaxed_gpu_v4(u32* to, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

// st.relaxed.gpu.global.v4.u32 of one word, four times
__device__ __forceinline__ void store_relaxed_gpu_v4(u32* to, u32 same) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %1, %1, %1};" ::"l"(to), "r"(same) : "memory");
}

// ld.relaxed.sys.global.v2.u64
__device__ __forceinline__ void load_relaxed_sys_v2(u64& first, u64& second, const u64* from) {
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(from) : "memory");
}

// ld.relaxed.sys.global.u64, predicated; `value` is unchanged unless `wanted`
__device__ __forceinline__ void load_relaxed_sys_if(bool wanted, u64& value, const u64* from) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; @p ld.relaxed.sys.global.u64 %0, [%2]; }"
                 : "+l"(value)
                 : "r"(u32(wanted)), "l"(from)
                 : "memory");
}

// ld.relaxed.sys.global of one, two, four or eight words; eight words take two instructions
__device__ __forceinline__ void load_relaxed_sys_words(u32 (&word)[1], const void* from) {
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(word[0]) : "l"(from) : "memory");
}

__device__ __forceinline__ void load_relaxed_sys_words(u32 (&word)[2], const void* from) {
    asm volatile("ld.relaxed.sys.global.v2.u32 {%0, %1}, [%2];" : "=r"(word[0]), "=r"(word[1]) : "l"(from) : "memory");
}

__device__ __forceinline__ void load_relaxed_sys_words(u32 (&word)[4], const void* from) {
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "l"(from)
                 : "memory");
}

__device__ __forceinline__ void load_relaxed_sys_words(u32 (&word)[8], const void* from) {
    load_relaxed_sys_words(reinterpret_cast<u32(&)[4]>(word[0]), from);
    load_relaxed_sys_words(reinterpret_cast<u32(&)[4]>(word[4]), static_cast<const char*>(from) + 16);
}

// st.relaxed.sys.global of one, two, four or eight words; eight words take two instructions
__device__ __forceinline__ void store_relaxed_sys_words(void* to, const u32 (&word)[1]) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(word[0]) : "memory");
}

__device__ __forceinline__ void store_relaxed_sys_words(void* to, const u32 (&word)[2]) {
    asm volatile("st.relaxed.sys.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(word[0]), "r"(word[1]) : "memory");
}

__device__ __forceinline__ void store_relaxed_sys_words(void* to, const u32 (&word)[4]) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(word[0]), "r"(word[1]),
                 "r"(word[2]), "r"(word[3])
                 : "memory");
}

__device__ __forceinline__ void store_relaxed_sys_words(void* to, const u32 (&word)[8]) {
    store_relaxed_sys_words(to, reinterpret_cast<const u32(&)[4]>(word[0]));
    store_relaxed_sys_words(static_cast<char*>(to) + 16, reinterpret_cast<const u32(&)[4]>(word[4]));
}

// red.relaxed.gpu.global.add.u64
__device__ __forceinline__ void add_relaxed_gpu(u64* counter, u64 amount) {
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(counter), "l"(amount) : "memory");
}

// atom.relaxed.gpu.global.add.u32: returns the old value
__device__ __forceinline__ u32 increment_relaxed_gpu(u32* counter) {
    u32 before;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

// atom.acq_rel.gpu.global.add.u32: returns the old value
__device__ __forceinline__ u32 increment_acq_rel_gpu(u32* counter) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

// fence.acq_rel.gpu
__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// fence.acq_rel.sys
__device__ __forceinline__ void fence_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

}  // namespace ptx
