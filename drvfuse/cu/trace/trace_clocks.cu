// SPDX-License-Identifier: Apache-2.0
// The rates of the clocks of a device, and the offset between the global timers of two devices. Each kernel has one
// thread.
//
// Failure. Every loop is bounded by a number of rounds. A kernel that reaches the bound leaves zeros in the results
// that it has not measured, which the host reports as unknown.
#include "ptx/ordered.cuh"
#include "ptx/special.cuh"

// Reads the global timer until it changes, at most `rounds` times. Returns its new value, or 0 if it has not changed.
// Sets `clock` to the SM's clock right before the last read.
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

// Measures the ticks of the global timer for at least `span` ns. Results: results[0], the smallest difference of two
// ticks in ns; results[1] and results[2], the cycles and the ns between the first tick and the last one.
extern "C" __global__ void trace_ticks(u64* results, u64 span, int rounds) {
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
    results[0] = smallest;
    results[1] = clock - first_clock;
    results[2] = last - first;
}

// Two devices run this kernel at the same time, one of them as `caller`. In round r the caller reads its timer and
// stores r to `theirs`. The other device polls `mine`, reads its own timer and stores r back. The caller polls its
// word and reads its timer again. So the reading of the other device lies between the two readings of the caller,
// however long the transfer takes. The words guard no other memory. `times` gets the two readings of the caller in
// each round, or the one reading of the other device.
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
