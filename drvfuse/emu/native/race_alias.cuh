// SPDX-License-Identifier: Apache-2.0
// The race detector's part for fence.proxy.alias, which is needed between accesses by multicast addresses and by the
// memory's own addresses. race.cuh says where it is needed and how clocks record it.
#pragma once

#include "race_touch.cuh"

// A copy of the items of a clock with the tag ALIASED, as a new reference.
FAR Ref aliased(Race* r, Ref known) {
    Clock* all = (Clock*)at(r, known);
    u32 klass, n = 0;
    Ref ref = take(r, bytes_of(0u, all->items), &klass);
    Clock* c = (Clock*)at(r, ref);
    Item *from = items_of(all), *to = (Item*)(c + 1);
    LOOP for (u32 i = 0; i < all->items; i++) {
        if ((u32)(from[i].key >> 6) & (BULK | READS)) continue;
        to[n] = from[i];
        to[n++].key |= (u64)ALIASED << 6;
    }
    c->refs = 1;
    c->klass = klass;
    c->chains = 0;
    c->items = n;
    return ref;
}

// fence.proxy.alias by a thread: adds tagged items for what the thread knows of others to its clock. Its own accesses
// are recorded in `aliased` instead, so that the threads of a block can still share one clock.
FAR void race_alias_fence(Thread* t) {
    Who w;
    who(&w, t);
    Race* r = w.r;
    RaceBlock* b = w.rb;
    if (r->off) return;
    if (!b->alias_after || b->alias_before != w.clock || b->alias_sync != b->sync) {
        put(r, &b->alias_before, retain(r, w.clock));
        put(r, &b->alias_after, with_items(r, w.clock, w.op, w.block | ALIASED, b->sync, 0, 0, 0));
        b->alias_sync = b->sync;
        if (w.clock) {
            Ref tags = aliased(r, w.clock);
            learn(r, &b->alias_after, tags);
            release(r, tags);
        }
    }
    put(r, &w.rt->clock, retain(r, b->alias_after));
    w.rt->aliased = ++w.rt->time;
}
