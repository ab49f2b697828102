// SPDX-License-Identifier: Apache-2.0
// fence.proxy.alias in the race detector. The fence is needed between an access by a multicast address and an access by
// a unicast address to the same memory; race.cuh says where, and how clocks record the fence (TAG_ALIASED).
#pragma once

#include "race_access.cuh"

// Returns a new clock: copies of the untagged items of the clock `known`, with the tag TAG_ALIASED.
FAR Ref aliased(Race* r, Ref known) {
    Clock* all = (Clock*)arena_at(r, known);
    u32 size_class, n = 0;
    Ref ref = take_piece(r, bytes_of(0u, all->item_count), &size_class);
    Clock* c = (Clock*)arena_at(r, ref);
    Item *from = items_of(all), *to = (Item*)(c + 1);
    LOOP for (u32 i = 0; i < all->item_count; i++) {
        if ((u32)(from[i].key >> 6) & (AGENT_BULK | TAG_READS)) continue;
        to[n] = from[i];
        to[n++].key |= (u64)TAG_ALIASED << 6;
    }
    c->references = 1;
    c->size_class = size_class;
    c->chain_count = 0;
    c->item_count = n;
    return ref;
}

// Records a fence.proxy.alias by a thread. Adds a copy of each item, tagged TAG_ALIASED, to the thread's clock. The
// thread's own accesses since the last barrier are not in the clock, so that the threads of a block can still share one
// clock; RaceThread::alias_fence_time says which of these accesses precede the fence.
FAR void race_alias_fence(Thread* t) {
    Access access;
    begin_access(&access, t);
    Race* r = access.race;
    RaceBlock* b = access.block_state;
    if (r->exhausted) return;
    if (!b->alias_clock_after || b->alias_clock_before != access.clock || b->alias_barrier_time != b->barrier_time) {
        assign(r, &b->alias_clock_before, retain(r, access.clock));
        assign(r, &b->alias_clock_after, with_items(r, access.clock, access.op, access.block | TAG_ALIASED, b->barrier_time, 0, 0, 0));
        b->alias_barrier_time = b->barrier_time;
        if (access.clock) {
            Ref tags = aliased(r, access.clock);
            learn(r, &b->alias_clock_after, tags);
            release(r, tags);
        }
    }
    assign(r, &access.thread_state->clock, retain(r, b->alias_clock_after));
    access.thread_state->alias_fence_time = ++access.thread_state->time;
}
