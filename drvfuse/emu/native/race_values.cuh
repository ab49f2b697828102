// SPDX-License-Identifier: Apache-2.0
// The race detector: a stream writes a word of memory, or waits for its value (cuStreamWriteValue, cuStreamWaitValue).
//
// Either is a strong access by an operation, with the scope of the system: it is judged as that of the only thread of a
// launch would be, which knows from its start what the operation knows. A write with a barrier is a release, a wait that has
// found its value an acquire. So flags and clocks need to know nothing of operations.
#pragma once

#include "race_touch.cuh"

// The operation that has written a word last, as far as its accesses are remembered; 0 for none.
API u32 rt_race_writer(Race* r, u64 addr) {
    if (r->off || *cell_at(r, addr) & POLLED) return 0;
    LOOP for (Ref ref = *cell_at(r, addr); ref;) {
        Entry* e = (Entry*)at(r, ref);
        ref = e->next;
        if (!(e->kind & N_LOCATION) && e->kind & N_WRITE && e->bytes & line_mask(addr, addr + 1)) return e->op;
    }
    return 0;
}

// What an operation knows that knew `clock` (a reference that it keeps) after its `number`th such access: a new reference.
API u32 rt_race_value(Race* r, u32 op, u32 clock, u64 addr, u32 size, u32 number, u32 write, u32 ordered, u64 now) {
    if (r->off) return retain(r, clock);
    Launch l = {};
    RaceBlock b = {};
    RaceThread t = {};
    Who w = {};
    l.start = clock;
    l.op = op;
    l.device = r->ops[op].device;
    l.cluster_size = 1;
    t.clock = retain(r, clock);
    t.time = number + 1;
    w.r = r;
    w.l = &l;
    w.rb = &b;
    w.rt = &t;
    w.op = op;
    w.bit = 1;
    w.time = t.time;
    w.site = NO_SITE;
    w.kind = (write ? N_WRITE : 0) | N_STRONG | SCOPE_SYS << N_SCOPE;
    w.device = l.device;
    w.scope = SCOPE_SYS;
    w.acquires = !write && ordered;
    w.releases = write && ordered;
    w.clock = t.clock;
    w.addr = addr;
    w.now = now;
    w.size = size;
    w.log = FFS(size) - 1;
    touch_range(&w, addr, addr + size);
    LOOP for (u32 i = 0; i < MISSES; i++) release(r, b.miss[i].clock);
    LOOP for (u32 i = 0; i < 4; i++) release(r, t.held[i]);
    return t.clock;
}
