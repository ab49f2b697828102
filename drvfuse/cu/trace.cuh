// SPDX-License-Identifier: Apache-2.0
// The trace of a kernel: which phase each block was in, and when.
//
// Without the definition DRVFUSE_TRACE everything here is empty, and a kernel that calls it has the PTX of one that
// does not. A kernel is traced like this:
//
//     extern "C" __global__ void kernel(const __grid_constant__ Params p DRVFUSE_TRACE_PARAMETER) {
//         Trace trace{DRVFUSE_TRACE_ARGUMENT};   // the entry; nothing is written yet
//         wait_for_producer();
//         trace.start();                         // once, right after the wait: the time since the entry is `producer`
//         ... trace.lap(TraceRole::load); ...    // the time since the lap before it was spent in this phase
//         trace.exit();                          // last
//     }
//
// Who writes. The thread with threadIdx.x == Writer; laps of other threads do nothing, so a call needs no `if`. A phase
// is the writer's: where it must last until values have arrived or are computed, call `need(values)` before the lap, or
// the clock is read while loads are in flight.
//
// Layout of a launch's section, in 8-byte words; the host has the same in drvfuse/trace/layout.py. Blocks lie by
// blockIdx.x + gridDim.x * blockIdx.y, each DRVFUSE_TRACE_HEADER + `events` words:
//     0   %globaltimer at the entry, in ns
//     1   (SM id + 1) << 48 | clock at the entry       zero: the block has not begun
//     2   %globaltimer at the exit
//     3   events in all (up to 65535) << 48 | clock    zero: the block has not ended
//     4   what `need` wrote
//     5.. one event: (role + 1) << 56 | (peer + 1, or 0) << 48 | clock at the end of the phase    zero: none
// "clock" is the low 48 bits of %clock64, which is the SM's own: differences are good within a block, and the two
// %globaltimer readings place them. Events beyond `events` are counted but not written.
//
// Memory ordering. The section belongs to one prepared launch; launches of it follow each other, and the first store
// comes after the wait for the producer. Its reader waits for the kernel's end.
#pragma once
#include "prelude.cuh"

// What a block did since the lap before. drvfuse/trace/layout.py has the names, in the same order.
enum class TraceRole : u32 {
    producer,      // from the entry until the kernel in front had completed
    stage,         // copied the own input to where peers read it
    push,          // stored to peers
    sync,          // waited for the other threads of the block
    wait,          // waited for a peer, from the lap before to the time its flag or data was seen
    barrier,       // waited for all peers and for the threads that watch them
    load,          // read what the phase after it works on
    multiply,      // products of a row and a vector
    reduce,        // added, normalised, quantised
    store,         // stored results
    gather,        // read peers' results
    elect,         // counted the block as one that is done
    apply_load,    // the block that finishes the others' work: read it,
    apply_reduce,  // reduced it,
    apply_store,   // stored the result
    finish,        // left the call's state ready for the next one
};

#ifdef DRVFUSE_TRACE

struct TraceParams {
    u64* section;
    u64 events;  // of a block
};

#define DRVFUSE_TRACE_PARAMETER , const __grid_constant__ TraceParams trace_params
#define DRVFUSE_TRACE_ARGUMENT trace_params

namespace trace_detail {
__device__ __forceinline__ u32 mix(u32 value) { return value; }
__device__ __forceinline__ u32 mix(float value) { return __float_as_uint(value); }
template <typename Pack>
__device__ __forceinline__ u32 mix(const Pack& pack) {
    u32 all = 0;
#pragma unroll
    for (int i = 0; i < Pack::words; ++i) all ^= pack.word[i];
    return all;
}
template <typename T, int N>
__device__ __forceinline__ u32 mix(const T (&values)[N]) {
    u32 all = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) all ^= mix(values[i]);
    return all;
}
}  // namespace trace_detail

template <u32 Writer>
class BlockTrace {
public:
    __device__ __forceinline__ explicit BlockTrace(const TraceParams& params)
        : block_(params.section +
                 (blockIdx.x + u64(gridDim.x) * blockIdx.y) * (DRVFUSE_TRACE_HEADER + params.events)),
          events_(u32(params.events)),
          position_(0) {
        if (writes()) {
            entered_ns_ = nanoseconds();
            entered_ = clock();
        }
    }

    // After the wait for the producer, before any lap.
    __device__ __forceinline__ void start() {
        if (writes()) {
            u32 sm;
            asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
            const u64 now = clock();
            store(block_, entered_ns_);
            store(block_ + 1, u64(sm + 1) << 48 | entered_);
            store(block_ + 2, 0);
            store(block_ + 3, 0);
            put(position_++, TraceRole::producer, 0, now);
        }
    }

    // The writer was in phase `role` since the lap before.
    __device__ __forceinline__ void lap(TraceRole role) {
        if (writes()) put(position_++, role, 0, clock());
    }

    // The writer goes on once it has these values: words, floats, packs, or arrays of them.
    template <typename T>
    __device__ __forceinline__ void need(const T& values) {
        if (writes()) {
            asm volatile("st.global.u32 [%0], %1;" ::"l"(block_ + 4), "r"(trace_detail::mix(values)) : "memory");
        }
    }

    // For a loop that polls, in any thread: `when` becomes the time at which `ready` was true. Called in each round right
    // after the load, it does not depend on when the threads of a warp that polls for several peers meet again.
    __device__ __forceinline__ void stamp(u64& when, bool ready) const {
        asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; @p mov.u64 %0, %%clock64; }"
                     : "+l"(when)
                     : "r"(u32(ready))
                     : "memory");
    }

    // All threads of warp 0 and more, where thread t < peers has waited for peer t since the lap before, until `when`;
    // 0 if it has not seen what it waited for. The writer must be thread 0.
    __device__ __forceinline__ void waits(u32 peers, u64 when) {
        static_assert(Writer == 0, "thread 0 counts the events");
        if (threadIdx.x < 32) {
            const u32 first = __shfl_sync(0xffffffffu, position_, 0);
            if (threadIdx.x < peers) put(first + threadIdx.x, TraceRole::wait, threadIdx.x + 1, when);
            position_ = first + peers;
        }
    }

    // Nothing may follow. Every block must get here.
    __device__ __forceinline__ void exit() {
        if (writes()) {
            store(block_ + 2, nanoseconds());
            store(block_ + 3, u64(position_ < 0xffffu ? position_ : 0xffffu) << 48 | clock());
        }
    }

private:
    static __device__ __forceinline__ bool writes() { return threadIdx.x == Writer; }

    static __device__ __forceinline__ u64 clock() {
        u64 now;
        asm volatile("mov.u64 %0, %%clock64;" : "=l"(now)::"memory");
        return now & CLOCK;
    }

    static __device__ __forceinline__ u64 nanoseconds() {
        u64 now;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
        return now;
    }

    static __device__ __forceinline__ void store(u64* address, u64 value) {
        asm volatile("st.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
    }

    __device__ __forceinline__ void put(u32 position, TraceRole role, u32 peer, u64 when) {
        if (position < events_) {
            const u64 event = u64((u32(role) + 1) << 8 | peer) << 48 | (when & CLOCK);
            store(block_ + DRVFUSE_TRACE_HEADER + position, when ? event : 0);
        }
    }

    static constexpr u64 CLOCK = (u64(1) << 48) - 1;
    u64* block_;
    u64 entered_ns_, entered_;
    u32 events_, position_;
};

#else

#define DRVFUSE_TRACE_PARAMETER
#define DRVFUSE_TRACE_ARGUMENT

template <u32 Writer>
class BlockTrace {
public:
    __device__ __forceinline__ void start() {}
    __device__ __forceinline__ void lap(TraceRole) {}
    template <typename T>
    __device__ __forceinline__ void need(const T&) {}
    __device__ __forceinline__ void stamp(u64&, bool) const {}
    __device__ __forceinline__ void waits(u32, u64) {}
    __device__ __forceinline__ void exit() {}
};

#endif

using Trace = BlockTrace<0>;
