// SPDX-License-Identifier: Apache-2.0
// Loads and stores by which threads do not synchronise. Each function is one instruction, which its comment names.
//
// All are volatile, so they are issued in program order; those that clobber memory also keep their order with ordinary
// accesses. "once" is L1::no_allocate: bytes that are read once do not displace others in L1. "readonly" is the load
// path for bytes that nobody writes while the kernel runs. Functions that end in `_if` are predicated, without a
// branch, so that no arithmetic is scheduled before them. Addresses in shared memory are 32-bit addresses of the shared
// window.
#pragma once
#include "common/types.cuh"

namespace ptx {

// ld.global.u8
__device__ __forceinline__ u32 load_u8(const void* from) {
    u32 value;
    asm volatile("ld.global.u8 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

// ld.global.u16
__device__ __forceinline__ u16 load_u16(const void* from) {
    u16 value;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(value) : "l"(from) : "memory");
    return value;
}

// ld.global.u32
__device__ __forceinline__ u32 load_u32(const void* from) {
    u32 value;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

// ld.global.v2.u32
__device__ __forceinline__ void load_v2(u32* word, const void* from) {
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(word[0]), "=r"(word[1]) : "l"(from) : "memory");
}

// ld.global.v4.u32
__device__ __forceinline__ void load_v4(u32* word, const void* from) {
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "l"(from)
                 : "memory");
}

// ld.global.L1::no_allocate.v4.u32
__device__ __forceinline__ void load_once_v4(u32* word, const void* from) {
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "l"(from));
}

// ld.global.L1::no_allocate.v2.u32, predicated; without `wanted` the words are undefined
__device__ __forceinline__ void load_once_v2_if(bool wanted, u32* word, const void* from) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %3, 0; @p ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2]; }"
                 : "=r"(word[0]), "=r"(word[1])
                 : "l"(from), "r"(u32(wanted))
                 : "memory");
}

// ld.global.L1::no_allocate.v4.u32, predicated; without `wanted` the words are undefined
__device__ __forceinline__ void load_once_v4_if(bool wanted, u32* word, const void* from) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4]; }"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "l"(from), "r"(u32(wanted))
                 : "memory");
}

// ld.global.u16, predicated; without `wanted` the value is undefined
__device__ __forceinline__ void load_u16_if(bool wanted, u16& value, const void* from) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.u16 %0, [%1]; }"
                 : "=h"(value)
                 : "l"(from), "r"(u32(wanted))
                 : "memory");
}

// ld.global.f32, predicated; without `wanted` the value is undefined
__device__ __forceinline__ void load_f32_if(bool wanted, float& value, const void* from) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.f32 %0, [%1]; }"
                 : "=f"(value)
                 : "l"(from), "r"(u32(wanted))
                 : "memory");
}

// prefetch.global.L2: a hint, which returns no data
__device__ __forceinline__ void prefetch_l2(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// ld.global.nc.u8
__device__ __forceinline__ u32 load_readonly_u8(const void* from) {
    u32 value;
    asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(value) : "l"(from));
    return value;
}

// ld.global.nc.u16
__device__ __forceinline__ u16 load_readonly_u16(const void* from) {
    u16 value;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(value) : "l"(from));
    return value;
}

// ld.global.nc.u32
__device__ __forceinline__ u32 load_readonly_u32(const void* from) {
    u32 value;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(value) : "l"(from));
    return value;
}

// ld.global.nc.v2.u32
__device__ __forceinline__ void load_readonly_v2(u32* word, const void* from) {
    asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(word[0]), "=r"(word[1]) : "l"(from));
}

// ld.global.nc.L1::no_allocate.v4.u32; without `wanted` the words stay as they are.
__device__ __forceinline__ void load_readonly_once_v4_if(bool wanted, u32* word, const void* from) {
    asm volatile(
        "{ .reg .pred wanted; setp.ne.u32 wanted, %5, 0;\n"
        "@wanted ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4]; }"
        : "+r"(word[0]), "+r"(word[1]), "+r"(word[2]), "+r"(word[3])
        : "l"(from), "r"(u32(wanted)));
}

// st.global.u8
__device__ __forceinline__ void store_u8(void* to, u32 value) {
    asm volatile("st.global.u8 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// st.global.u16
__device__ __forceinline__ void store_u16(void* to, u16 value) {
    asm volatile("st.global.u16 [%0], %1;" ::"l"(to), "h"(value) : "memory");
}

// st.global.u32
__device__ __forceinline__ void store_u32(void* to, u32 value) {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// st.global.v2.u32
__device__ __forceinline__ void store_v2(void* to, const u32* word) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(word[0]), "r"(word[1]) : "memory");
}

// st.global.v4.u32
__device__ __forceinline__ void store_v4(void* to, const u32* word) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(word[0]), "r"(word[1]), "r"(word[2]),
                 "r"(word[3])
                 : "memory");
}

// st.global.cs.v2.u32, for bytes that are not read again soon
__device__ __forceinline__ void store_streaming_v2(void* to, const u32* word) {
    asm volatile("st.global.cs.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(word[0]), "r"(word[1]) : "memory");
}

// st.global.cs.v4.u32
__device__ __forceinline__ void store_streaming_v4(void* to, const u32* word) {
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(word[0]), "r"(word[1]), "r"(word[2]),
                 "r"(word[3])
                 : "memory");
}

// ld.shared.v4.u32
__device__ __forceinline__ void load_shared_v4(u32* word, u32 from) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "r"(from)
                 : "memory");
}

// ld.shared.v4.u32 if `wanted`; otherwise the words stay unchanged.
__device__ __forceinline__ void load_shared_v4_if(bool wanted, u32* word, u32 from) {
    asm volatile(
        "{ .reg .pred wanted; setp.ne.u32 wanted, %5, 0;\n"
        "@wanted ld.shared.v4.u32 {%0, %1, %2, %3}, [%4]; }"
        : "+r"(word[0]), "+r"(word[1]), "+r"(word[2]), "+r"(word[3])
        : "r"(from), "r"(u32(wanted))
        : "memory");
}

// st.shared.u32
__device__ __forceinline__ void store_shared_u32(u32 to, u32 value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}

// st.shared.u64
__device__ __forceinline__ void store_shared_u64(u32 to, u64 value) {
    asm volatile("st.shared.u64 [%0], %1;" ::"r"(to), "l"(value) : "memory");
}

// st.shared.v2.u64
__device__ __forceinline__ void store_shared_v2(u32 to, u64 first, u64 second) {
    asm volatile("st.shared.v2.u64 [%0], {%1, %2};" ::"r"(to), "l"(first), "l"(second) : "memory");
}

// st.shared.v2.u32 of the halves of a word, after `more` was added to the upper half: faster than a 64-bit addition
__device__ __forceinline__ void store_shared_with_high(u32 to, u64 word, u32 more) {
    asm volatile(
        "{ .reg .u32 low, high; mov.b64 {low, high}, %1; add.u32 high, high, %2;"
        " st.shared.v2.u32 [%0], {low, high}; }" ::"r"(to),
        "l"(word), "r"(more)
        : "memory");
}

// If `index` < `count`: ld.shared.v4.u32, then st.global.v4.u32 of these words, with `more` added to the second word
__device__ __forceinline__ void copy_shared_v4_if_less(u32 index, u32 count, u32 from, u32 more, void* to) {
    asm volatile(
        "{ .reg .pred p; .reg .b32 a, b, c, d; setp.lt.u32 p, %0, %1;"
        " @p ld.shared.v4.u32 {a, b, c, d}, [%2]; add.u32 b, b, %3;"
        " @p st.global.v4.u32 [%4], {a, b, c, d}; }" ::"r"(index),
        "r"(count), "r"(from), "r"(more), "l"(to)
        : "memory");
}

}  // namespace ptx
