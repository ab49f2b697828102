// SPDX-License-Identifier: Apache-2.0
// Barrier objects in shared memory (mbarrier).
//
// An mbarrier is a 64-bit word whose layout PTX leaves open. Here it has these fields, at the shifts of
// abi/__init__.py: the arrivals still to come in this phase, the arrivals that each phase expects, the bytes still to
// come (negative if bytes arrived before they were expected), the parity of the phase, whether the mbarrier was used,
// and whether it is valid. A phase completes when no arrival and no byte is still to come.
//
// An arrival is a strong atomic with release semantics at its scope. A wait is a strong load, which acquires if it
// finds the phase complete. The scheduler and the race detector treat arrivals and waits as such accesses, and a thread
// that polls an mbarrier is not resumed until the word changes. A thread that finds a phase complete also learns what
// arrivals of the next phase have released by then.
#pragma once

#include "copy.cuh"

// Returns the word of an mbarrier after `count` arrivals and after `bytes` is added to the number of bytes still to
// come: positive for bytes that are expected, negative for bytes that have arrived. Sets *error if the operation is not
// allowed.
FN u64 changed_barrier(u64 word, u32 count, s32 bytes, u32* error) {
    u32 pending = (u32)(word & MBARRIER_COUNT_MASK);
    s32 left = (s32)((u32)(word >> MBARRIER_BYTES_SHIFT & MBARRIER_BYTES_MASK) << 11) >> 11;
    left += bytes;
    if (!(word & MBARRIER_VALID)) *error = E_NO_BARRIER;
    else if (count > pending) *error = E_ARRIVALS;
    else if (left > (s32)MBARRIER_COUNT_MASK || left < -(s32)MBARRIER_COUNT_MASK) *error = E_BYTES;
    pending -= count;
    u64 expected = word >> MBARRIER_EXPECTED_SHIFT & MBARRIER_COUNT_MASK,
        rest =
            word & (MBARRIER_VALID | MBARRIER_USED | MBARRIER_PARITY | MBARRIER_COUNT_MASK << MBARRIER_EXPECTED_SHIFT);
    if (!pending && !left) return (rest ^ MBARRIER_PARITY) | expected;
    return rest | pending | ((u64)(u32)left & MBARRIER_BYTES_MASK) << MBARRIER_BYTES_SHIFT;
}

// Returns the word of an mbarrier that expects `count` fewer arrivals in all later phases; sets *error if it expects
// fewer than that. The arrivals of the present phase are subtracted by changed_barrier.
FN u64 dropped(u64 word, u32 count, u32* error) {
    u64 expected = word >> MBARRIER_EXPECTED_SHIFT & MBARRIER_COUNT_MASK;
    if (count > expected) *error = E_ARRIVALS;
    return count > expected ? word : word - ((u64)count << MBARRIER_EXPECTED_SHIFT);
}

// Executes an operation (Mbarrier) on the mbarrier at `addr`. Returns 0, or 1 after recording a fault. Stores the word
// before the operation in Thread::op_value, except for MB_INIT and MB_INVAL. For MB_TEST, op_pred says whether the
// phase with the parity of `state` has completed. `order` has the order, scope and state space of the access; MB_TEST
// acquires only if the phase has completed.
API u32 rt_mbarrier(Thread* t, u64 addr, u32 op, u32 count, u32 bytes, u64 state, u32 order, u32 site) {
    Launch* l = t->launch;
    u32 found, error = E_NONE;
    if (!(order >> SPACE_SHIFT & 15) && !shared_of(t, addr, 8)) {  // a generic address outside of shared memory
        fault(l, t, F_FOREIGN_SHARED, site, addr, 8, A_WRITE, 8);
        return 1;
    }
    if (op == MB_INIT || op == MB_INVAL) {
        if (access(t, addr, 8, A_WRITE | A_MBARRIER | order, site)) return 1;
        if (op == MB_INIT && (!count || count > MBARRIER_COUNT_MASK)) error = E_COUNT;
        *(u64*)addr = op == MB_INIT ? MBARRIER_VALID | (u64)count << MBARRIER_EXPECTED_SHIFT | count : 0;
    } else {
        if (refused(t, addr, 8, order & 15 << SPACE_SHIFT, site, &found)) return 1;
        u64 word = *(u64*)addr;
        u64 after = changed_barrier(op == MB_DROP ? dropped(word, count, &error) : word, count, (s32)bytes, &error);
        if (op != MB_EXPECT && op != MB_TEST && !count) error = E_COUNT;
        if (op == MB_NO_COMPLETE && !error && (word ^ after) & MBARRIER_PARITY) error = E_COMPLETES;
        u32 flags = A_STRONG | (order & ~(3u << ORDER_SHIFT)), done = !!((word ^ state) & MBARRIER_PARITY);
        if (op != MB_TEST) flags = A_WRITE | A_ATOMIC | A_STRONG | order;
        else if (done) flags = A_STRONG | order;
        if (!error && access(t, addr, 8, flags | A_MBARRIER, site)) return 1;
        t->op_value = word;
        t->op_pred = done;
        if (!error && op != MB_TEST) *(u64*)addr = after | MBARRIER_USED;
    }
    if (error) fault(l, t, F_MBARRIER, site, addr, 8, error, error == E_BYTES ? bytes : count);
    return error != E_NONE;
}
