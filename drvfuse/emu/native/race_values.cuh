// SPDX-License-Identifier: Apache-2.0
// Streams that write a word of memory, or wait for its value (cuStreamWriteValue, cuStreamWaitValue), in the race
// detector.
//
// Each such operation is a strong access of system scope. The detector treats it as a launch of one thread, which knows
// from its start what the operation knows. So race_publish.cuh and clock.cuh need no special case for the operation. A
// write with a memory barrier is a release, and a wait that has found its value is an acquire.
#pragma once

#include "race_access.cuh"

// Returns the operation that wrote the byte at an address last, or 0 if no entry of such a write is left.
API u32 rt_race_writer(Race* r, u64 addr) {
    if (r->exhausted || *cell_at(r, addr) & UNCHECKED) return 0;
    LOOP for (Ref ref = *cell_at(r, addr); ref;) {
        Entry* e = (Entry*)arena_at(r, ref);
        ref = e->next;
        if (!(e->kind & N_LOCATION) && e->kind & N_WRITE && e->bytes & line_mask(addr, addr + 1)) return e->op;
    }
    return 0;
}

// Checks an access of an operation; `number` is its index among the accesses of the operation. `clock` is what the
// operation knows before it; the caller keeps the reference. `is_ordered`: the write is a release, or the wait an
// acquire. `now` is the number of events so far. Returns what the operation knows after the access, as a new reference.
API u32 rt_race_value(Race* r, u32 op, u32 clock, u64 addr, u32 size, u32 number, u32 write, u32 is_ordered, u64 now) {
    if (r->exhausted) return retain(r, clock);
    Launch l = {};
    RaceBlock b = {};
    RaceThread t = {};
    Access access = {};
    l.start = clock;
    l.op = op;
    l.device = r->ops[op].device;
    l.cluster_size = 1;
    t.clock = retain(r, clock);
    t.time = number + 1;
    access.race = r;
    access.launch = &l;
    access.block_state = &b;
    access.thread_state = &t;
    access.op = op;
    access.lane_bit = 1;
    access.time = t.time;
    access.site = NO_SITE;
    access.kind = (write ? N_WRITE : 0) | N_STRONG | SCOPE_SYS << ENTRY_SCOPE_SHIFT;
    access.device = l.device;
    access.scope = SCOPE_SYS;
    access.acquires = !write && is_ordered;
    access.releases = write && is_ordered;
    access.clock = t.clock;
    access.addr = addr;
    access.event_count = now;
    access.size = size;
    access.variant = FFS(size) - 1;
    check_range(&access, addr, addr + size);
    LOOP for (u32 i = 0; i < MISSED_FLAGS; i++) release(r, b.missed_flags[i].clock);
    LOOP for (u32 i = 0; i < 4; i++) release(r, t.fence_acquire[i]);
    return t.clock;
}
