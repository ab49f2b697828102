// SPDX-License-Identifier: Apache-2.0
// How fast the clocks of a device run, and how far the global timers of two devices are apart. One thread each.
//
// Failure. Every loop is bounded by a number of rounds; a kernel that runs out of them leaves zeros in what it did not
// measure, and the host says that it is unknown.
#include "ptx/ordered.cuh"
#include "ptx/special.cuh"

// Waits until the global timer ticks. Returns it, and the clock right before the reading.
__device__ __forceinline__ u64 next_tick(u64& clock, int rounds) {
    const u64 before = ptx::nanoseconds();
#pragma unroll 1
    for (int i = 0; i < rounds; ++i) {
        clock = ptx::cycles();
        const u64 now = ptx::nanoseconds();
        if (now != before) return now;
    }
    return 0;
}

// found[0]: the smallest tick in ns. found[1], found[2]: cycles, and ns, from one tick to another at least `span` later.
extern "C" __global__ void trace_ticks(u64* found, u64 span, int rounds) {
    u64 first_clock, clock;
    const u64 first = next_tick(first_clock, rounds);
    u64 smallest = ~u64(0), last = first;
#pragma unroll 1
    while (last != 0) {
        const u64 now = next_tick(clock, rounds);
        if (now == 0) return;
        if (now - last < smallest) smallest = now - last;
        last = now;
        if (now - first >= span) break;
    }
    if (last == 0) return;
    found[0] = smallest;
    found[1] = clock - first_clock;
    found[2] = last - first;
}

// Two devices run it at the same time, one of them as `caller`. Round r: the caller reads its timer and sends r to
// `theirs`; the other sees it in `mine`, reads its own timer and sends r back; the caller sees that and reads its timer
// again. So the other's reading lies between the caller's two, whatever the way takes. The words guard nothing else.
// times: the caller's two readings of each round, or the other's one.
extern "C" __global__ void trace_meet(u64* mine, u64* theirs, u64* times, int meetings, int caller, int rounds) {
#pragma unroll 1
    for (u64 r = 1; r <= u64(meetings); ++r) {
        const u64 called = ptx::nanoseconds();
        if (caller) ptx::store_relaxed_sys(theirs, r);
        u64 seen = 0;
#pragma unroll 1
        for (int i = 0; i < rounds && seen < r; ++i) seen = ptx::load_relaxed_sys(mine);
        if (seen < r) return;
        const u64 now = ptx::nanoseconds();
        if (caller) {
            times[2 * r - 2] = called;
            times[2 * r - 1] = now;
        } else {
            ptx::store_relaxed_sys(theirs, r);
            times[r - 1] = now;
        }
    }
}
