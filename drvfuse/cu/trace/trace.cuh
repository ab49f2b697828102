// SPDX-License-Identifier: Apache-2.0
// The trace of a kernel: the times of the phases of each block.
//
// Without the definition DRVFUSE_TRACE all functions are empty, and a kernel that calls them has the same
// instructions as one that does not. The source of a kernel that can be traced calls these functions:
//
//     extern "C" __global__ void kernel(const __grid_constant__ Params p DRVFUSE_TRACE_PARAMETER) {
//         Trace trace{DRVFUSE_TRACE_ARGUMENT};   // the entry; nothing is written yet
//         wait_for_producer();
//         trace.start();                         // once, right after the wait: the time since the entry is `producer`
//         ... trace.lap(TraceRole::load); ...    // the time since the previous lap was spent in this phase
//         trace.exit();                          // last, by all threads
//     }
//
// Writer. The thread with threadIdx.x == Writer writes; its warp must be whole. Laps of other threads do nothing, so a
// call needs no `if`. The phases are those of the writer. If a phase must last until values are loaded or computed,
// call `need(values)` before the lap, since otherwise the clock is read while loads are in flight.
//
// Memory. The words stay in shared memory until the block exits, since a global store in flight would delay the
// kernel's next fence. There is room for DRVFUSE_TRACE_WORDS words, and the host computes how many are needed. Further
// phases overwrite the last word.
//
// Cost. Each traced step adds instructions that take the writer's warp about five cycles.
//
// Layout of a launch's section, in 8-byte words, which drvfuse/trace/layout.py has too. Block number blockIdx.x +
// gridDim.x * blockIdx.y has `words` words, an even number:
//     0   %globaltimer at the entry, in ns
//     1   clock at the entry
//     2   %globaltimer at the exit + (SM id << 48)
//     3   clock at the exit, the end of the phase `finish`                       zero: the block has not run
//     4.. `waits` words, one per barrier and peer: clock when the peer was seen  zero: it was not
//     ..  one per phase, in order: clock at its end + (role + 1 << 48)           zero: there was none
// "clock" is %clock64 of the SM: differences are valid within a block, up to 2^48 cycles. The two readings of
// %globaltimer relate this clock to the time of the device. Every launch writes all words.
//
// Memory ordering. A section belongs to one kernel of one prepared call. The launches of this kernel follow one
// another, and each stores only after its wait for the producer. The host reads the section after the end of the
// kernel.
#pragma once
#include "common/prelude.cuh"
#include "ptx/special.cuh"

// What a block did in a phase, from one lap to the next. drvfuse/trace/layout.py has the names, in the same order.
enum class TraceRole : u32 {
    producer,      // from the entry until the previous kernel had completed
    stage,         // copied the rank's input to staging memory
    push,          // stored to peers
    sync,          // waited for the other threads of the block
    wait,          // waited for one peer, inside a barrier; only for times of waits, never for a lap
    barrier,       // waited for all peers, and for the threads of the block that poll
    load,          // loaded the data of the next phase
    multiply,      // multiplied rows by a vector
    reduce,        // added, normalised, quantised
    store,         // stored results
    gather,        // read peers' results
    receive,       // waited until the words of all peers had arrived
    apply_load,    // waited for the results of other blocks, and read them
    apply_reduce,  // reduced the results of other blocks
    apply_store,   // stored what `apply_reduce` has computed
    finish,        // everything after the last lap
};

#ifdef DRVFUSE_TRACE

struct TraceParams {
    u64* section;  // the section of the launch, of less than 2^32 words
    u32 words;     // words of a block's part of the section
    u32 waits;     // the number of a block's words that hold times of waits
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
        : params_(params), buffer_(buffer()), last_(buffer_ + 8 * (params.words - 1)),
          next_(buffer_ + 8 * (HEADER + params.waits)) {
        u64 entered_ns = 0, entered = 0;
        if (writes()) entered_ns = ptx::nanoseconds(), entered = ptx::cycles();
        if (in_warp()) {  // the writer stores the times of the entry, and the other lanes store zeros
            const u32 own = buffer_ + 16 * ((threadIdx.x - Writer) % 32);
            ptx::store_shared_v2(own, entered_ns, entered);
#pragma unroll 1
            for (u32 first = 64; first < WORDS; first += 64) ptx::store_shared_v2(own + 8 * first, 0, 0);
        }
        __syncwarp();
    }

    // Ends the phase `producer`. Called after the wait for the producer, before any lap.
    __device__ __forceinline__ void start() { lap(TraceRole::producer); }

    // Ends a phase: since the previous lap the writer was in phase `role`.
    __device__ __forceinline__ void lap(TraceRole role) {
        if (writes()) {
            ptx::store_shared_with_high(next_, ptx::cycles(), (u32(role) + 1) << 16);
            next_ = min(next_ + 8, last_);
        }
    }

    // Makes the writer wait until these values are loaded: words, floats, packs, or arrays of them.
    template <typename T>
    __device__ __forceinline__ void need(const T& values) {
        // The store needs the values, so the writer waits for them. What it stores does not matter: exit() overwrites
        // this word with the clock.
        if (writes()) ptx::store_shared_u32(buffer_ + 24, trace_detail::mix(values));
    }

    // For a loop that polls, in any thread: sets `when` to the current time if `ready`. Called in each round of the
    // loop right after the load, so that the time does not depend on when the threads of the warp reconverge.
    __device__ __forceinline__ void stamp(u64& when, bool ready) const { ptx::cycles_if(ready, when); }

    // Records the waits of barrier number `round` of this kernel, from 0: thread t < peers has waited for peer t from
    // the previous lap until the time `when`. `when` is 0 if the wait has failed. Called by all threads, before the lap
    // of role `barrier`. The writer must be in warp 0.
    __device__ __forceinline__ void waits(u32 round, u32 peers, u64 when) {
        static_assert(Writer < 32, "warp 0 copies the words");
        if (threadIdx.x < peers && (round + 1) * peers <= params_.waits)
            ptx::store_shared_u64(buffer_ + 8 * (HEADER + round * peers + threadIdx.x), when);
    }

    // Ends the phase `finish`. Called last, by all threads of the writer's warp, in every block.
    __device__ __forceinline__ void exit() {
        if (!in_warp()) return;
        // These registers are read before the clocks, since reading them takes longer than reading a clock.
        const u32 sm = ptx::sm_index(), x = ptx::block_x(), y = ptx::block_y();
        if (writes()) {
            const u64 exited_ns = ptx::nanoseconds();
            ptx::store_shared_v2(buffer_ + 16, exited_ns, ptx::cycles());
        }
        __syncwarp();
        const u32 block = (x + gridDim.x * y) * params_.words;
#pragma unroll 1
        for (u32 first = 0; first < WORDS; first += 64) {
            const u32 i = first + 2 * (threadIdx.x % 32);
            ptx::copy_shared_v4_if_less(i, params_.words, buffer_ + 8 * i, i == 2 ? sm << 16 : 0,
                                        params_.section + (block + i));
        }
    }

private:
    static constexpr u32 HEADER = DRVFUSE_TRACE_HEADER, WORDS = DRVFUSE_TRACE_WORDS;

    static __device__ __forceinline__ bool writes() { return threadIdx.x == Writer; }
    static __device__ __forceinline__ bool in_warp() { return threadIdx.x / 32 == Writer / 32; }

    // The address in shared memory of the block's words.
    static __device__ __forceinline__ u32 buffer() {
        __shared__ alignas(16) u64 words[WORDS];
        return u32(__cvta_generic_to_shared(words));
    }

    const TraceParams& params_;
    const u32 buffer_, last_;  // addresses of the first word and of the last word that may be written
    u32 next_;                 // address of the next phase's word
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
    __device__ __forceinline__ void waits(u32, u32, u64) {}
    __device__ __forceinline__ void exit() {}
};

#endif

using Trace = BlockTrace<0>;
