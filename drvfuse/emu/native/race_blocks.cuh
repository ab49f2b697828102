// SPDX-License-Identifier: Apache-2.0
// The race detector's part for the start and the end of blocks and for their barriers, and the functions that Python
// calls.
#pragma once

#include "race_touch.cuh"

// Makes the detector check all bytes of a line again.
FAR void unpoll(Race* r, Ref* cell) {
    Ref line = *cell & ~POLLED;
    *cell = 0;
    if (!line) return;
    *cell = ((PolledLine*)at(r, line))->list;
    give(r, line, 0);
}

// Stops the checks of these bytes of a line, and drops what its entries say about them.
FAR void poll_line(Race* r, u64 a, u32 bytes) {
    Ref* cell = cell_at(r, a);
    u32 others = 0xFFFF;
    list_at(r, a, &others);
    others &= ~bytes;
    if (!(*cell & POLLED)) {
        u32 klass;
        Ref ref = take(r, sizeof(PolledLine), &klass);
        ((PolledLine*)at(r, ref))->list = *cell;
        *cell = ref | POLLED;
    }
    if (*cell == POLLED) return;
    PolledLine* line = (PolledLine*)at(r, *cell & ~POLLED);
    line->bytes = 0xFFFF & ~others;
    LOOP for (Ref* link = &line->list; *link;) {
        Ref* pool = pool_at(r, a);
        Entry* e = (Entry*)at(r, *link);
        if (!(e->bytes & ~others)) {
            link = &e->next;
        } else if (e->kind & N_LOCATION || !(e->bytes & others)) {
            drop(r, pool, link);
        } else {
            if (e->kind & N_COMMON) e = unshare(r, pool, link);
            e->lanes = lanes_at(e, e->bytes & others);
            e->bytes &= others;
            link = &e->next;
        }
    }
    if (others) return;
    give(r, *cell & ~POLLED, 0);
    *cell = POLLED;
}

// Drops all entries of the lines that a range touches.
FAR void race_clear(Race* r, u64 addr, u64 nbytes) {
    r->stamp++;
    LOOP for (u64 a = addr & ~15ull; a < addr + nbytes; a += 16) {
        Ref* cell = cell_at(r, a);
        if (!*cell) continue;
        if (*cell & POLLED) unpoll(r, cell);
        LOOP while (*cell) drop(r, pool_at(r, a), cell);
    }
}

FAR void race_start_block(Launch* l, Block* b, u32 slot) {
    Race* r = l->engine->race;
    RaceBlock* rb = b->race = (RaceBlock*)(l->races + (u64)slot * size_of_races(l));
    rb->sync = 1;
    rb->end = rb->proxied = rb->alias_before = rb->alias_after = 0;
    rb->cluster_arrived = rb->cluster_known = 0;
    rb->misses = rb->bulks = rb->relaxed = 0;
    LOOP for (u32 i = 0; i < BARRIERS; i++) rb->arrived[i] = 0;
    LOOP for (u32 i = 0; i < MISSES; i++) rb->miss[i].op = rb->miss[i].clock = 0;
    LOOP for (u32 i = 0; i < l->threads; i++) {
        RaceThread* t = race_thread(b, i);
        t->clock = retain(r, l->start);
        t->time = 1;
        t->aliased = t->late = 0;
        LOOP for (u32 k = 0; k < 4; k++) t->fenced[k] = t->held[k] = 0;
        t->fenced[SCOPE_SYS] = retain(r, l->start);
    }
    race_clear(r, b->shared_base, l->shared_bytes);
}

// Called when a thread exits: its block's end knows what the thread knew.
FAR void race_exit(Thread* t) {
    Race* r = t->launch->engine->race;
    RaceThread* rt = race_thread(t->block, t->linear);
    Ref* end = &t->block->race->end;
    if (rt->clock != *end) learn(r, end, rt->clock);
    put(r, &rt->clock, 0);
    if (rt->late) {
        learn(r, end, rt->late);
        put(r, &rt->late, 0);
    }
    LOOP for (u32 k = 0; k < 4; k++) {
        if (rt->held[k]) learn(r, end, rt->held[k]);
        put(r, &rt->fenced[k], 0);
        put(r, &rt->held[k], 0);
    }
}

FAR void race_finish_block(Launch* l, Block* b) {
    Race* r = l->engine->race;
    learn(r, &l->end, b->race->end);
    put(r, &b->race->end, 0);
    put(r, &b->race->proxied, 0);
    put(r, &b->race->alias_before, 0);
    put(r, &b->race->alias_after, 0);
    LOOP for (u32 i = 0; i < BARRIERS; i++) put(r, &b->race->arrived[i], 0);
    LOOP for (u32 i = 0; i < MISSES; i++) put(r, &b->race->miss[i].clock, 0);
}

// Called when all blocks of a cluster have ended.
FN void race_finish_cluster(Race* r, RaceBlock* lead) {
    put(r, &lead->cluster_arrived, 0);
    put(r, &lead->cluster_known, 0);
}

FAR void race_gdc_wait(Thread* t) {
    Launch* l = t->launch;
    RaceThread* rt = race_thread(t->block, t->linear);
    learn(l->engine->race, &rt->clock, l->primary);
    learn(l->engine->race, &rt->fenced[SCOPE_SYS], l->primary);
}

// Called when these lanes of a warp synchronise with others: joins their clocks into *known and, with `share`, what
// they have fenced and read into *fenced and *held. Returns the latest of their times.
FAR u32 race_meet(Launch* l, Block* b, u32 w, u32 lanes, Ref* known, Ref* fenced, Ref* held, u32 share) {
    Race* r = l->engine->race;
    u32 last = 0, aliased = 0;
    LOOP for (u32 rest = lanes; rest; rest &= rest - 1) {
        RaceThread* t = race_thread(b, w * 32 + FFS(rest) - 1);
        if (t->time > last) last = t->time;
        if (t->aliased) aliased |= rest & -rest;
        if (t->clock != *known) learn(r, known, t->clock);
        if (!share) continue;
        LOOP for (u32 k = 0; k < 4; k++) {
            if (t->fenced[k] != fenced[k]) learn(r, &fenced[k], t->fenced[k]);
            if (t->held[k] != held[k]) learn(r, &held[k], t->held[k]);
        }
    }
    LOOP while (aliased) {
        u32 time = race_thread(b, w * 32 + FFS(aliased) - 1)->aliased, alike = 0;
        LOOP for (u32 rest = aliased; rest; rest &= rest - 1)
            if (race_thread(b, w * 32 + FFS(rest) - 1)->aliased == time) alike |= rest & -rest;
        put(r, known, with_items(r, *known, l->op, b->index | ALIASED, 0, w, alike, time));
        aliased &= ~alike;
    }
    return last;
}

// Called when these lanes continue after that: gives each of them the joined clocks and the time `time`.
FAR void race_part(Race* r, Block* b, u32 w, u32 lanes, u32 time, Ref known, Ref* fenced, Ref* held, u32 share) {
    LOOP for (u32 rest = lanes; rest; rest &= rest - 1) {
        RaceThread* t = race_thread(b, w * 32 + FFS(rest) - 1);
        t->time = time;
        t->aliased = 0;
        if (t->clock != known) put(r, &t->clock, retain(r, known));
        if (!share) continue;
        LOOP for (u32 k = 0; k < 4; k++) {
            if (t->fenced[k] != fenced[k]) put(r, &t->fenced[k], retain(r, fenced[k]));
            if (t->held[k] != held[k]) put(r, &t->held[k], retain(r, held[k]));
        }
    }
}

// Adds the accesses of these lanes before `time` to a clock.
FN void learn_lanes(Race* r, Launch* l, Block* b, Ref* known, u32 w, u32 lanes, u32 time) {
    put(r, known, with_items(r, *known, l->op, b->index, b->race->sync, w, lanes, time));
}

FAR void race_warp_sync(Launch* l, Block* b, u32 w, u32 lanes) {
    Race* r = l->engine->race;
    Ref known = 0, none[4] = {0, 0, 0, 0};
    u32 time = race_meet(l, b, w, lanes, &known, none, none, 0) + 1;
    learn_lanes(r, l, b, &known, w, lanes, time);
    race_part(r, b, w, lanes, time, known, none, none, 0);
    release(r, known);
}

// Called when lanes of a warp arrive at a barrier without waiting for it. *known is the clock that arrivals publish
// there.
FAR void race_arrive(Launch* l, Block* b, Ref* known, u32 w, u32 lanes) {
    Race* r = l->engine->race;
    Ref none[4] = {0, 0, 0, 0};
    u32 time = race_meet(l, b, w, lanes, known, none, none, 0) + 1;
    learn_lanes(r, l, b, known, w, lanes, time);
    LOOP for (u32 rest = lanes; rest; rest &= rest - 1) race_thread(b, w * 32 + FFS(rest) - 1)->time = time;
}

// The lanes of a warp that wait at a barrier.
FN u32 waiting_at(Launch* l, Block* b, u32 id, u32 w) {
    u32 lanes = b->warps[w].barrier & ~b->warps[w].gathered;
    LOOP for (u32 rest = lanes; rest; rest &= rest - 1)
        if (thread_at(l, b, w * 32 + FFS(rest) - 1)->op_a != id) lanes &= ~(1u << (FFS(rest) - 1));
    return lanes;
}

// Called before the threads at a barrier continue. `all`: all threads of the block that have not exited are there.
FAR void race_barrier(Launch* l, Block* b, u32 id, u32 all) {
    Race* r = l->engine->race;
    RaceBlock* rb = b->race;
    u32 share = !r->strict, last = 0;
    Ref known = rb->arrived[id], fenced[4] = {0, 0, 0, 0}, held[4] = {0, 0, 0, 0};
    rb->arrived[id] = 0;
    LOOP for (u32 w = 0; w < l->warps; w++) {
        u32 lanes = waiting_at(l, b, id, w);
        u32 time = lanes ? race_meet(l, b, w, lanes, &known, fenced, held, share) : 0;
        if (time > last) last = time;
    }
    if (all && b->live == l->threads) {
        rb->sync = last + 1;
    } else {
        LOOP for (u32 w = 0; w < l->warps; w++) {
            u32 lanes = waiting_at(l, b, id, w);
            if (lanes) learn_lanes(r, l, b, &known, w, lanes, last + 1);
        }
    }
    LOOP for (u32 w = 0; w < l->warps; w++) {
        u32 lanes = waiting_at(l, b, id, w);
        if (lanes) race_part(r, b, w, lanes, last + 1, known, fenced, held, share);
    }
    release(r, known);
    LOOP for (u32 k = 0; k < 4; k++) {
        release(r, fenced[k]);
        release(r, held[k]);
    }
}

// For Python ----------------------------------------------------------------------------------------------------------

// Checks and records the access of a copy or fill, which knows `clock`, to a range of the window. `write` is a Range.
API void rt_race_range(Race* r, u32 op, u32 clock, u64 addr, u64 nbytes, u32 write, u64 now) {
    if (r->off) return;
    Who w;
    w.r = r;
    w.l = 0;
    w.rb = 0;
    w.rt = 0;
    w.op = op;
    w.block = w.agent = w.warp = w.thread = w.flags = w.scope = w.acquires = w.releases = w.log = w.again = w.plain = 0;
    w.bit = w.time = 1;
    w.site = NO_SITE;
    w.kind = write ? N_WRITE : 0;
    w.device = r->ops[op].device;
    w.clock = clock;
    w.addr = addr;
    w.size = nbytes > 0xFFFFFFFFull ? 0xFFFFFFFFu : (u32)nbytes;
    w.now = now;
    w.common = 0;
    if (write == RANGE_FREE) {
        LOOP for (u64 a = addr & ~15ull; a < addr + nbytes; a += 16)
            if (*cell_at(r, a)) touch(&w, a, 0xFFFF);
        return;
    }
    u32 klass;
    w.common = take(r, sizeof(Entry), &klass);
    Entry* e = (Entry*)at(r, w.common);
    e->op = op;
    e->block = 0;
    e->time = e->lanes = 1;
    e->bytes = 0xFFFF;
    e->warp = 0;
    e->kind = (u8)(w.kind | N_COMMON);
    e->site = NO_SITE;
    e->next = e->serial = e->size = 0;
    touch_range(&w, addr, addr + nbytes);
}

// Drops all entries of a range, which is new memory from now on.
API void rt_race_clear(Race* r, u64 addr, u64 nbytes) { race_clear(r, addr, nbytes); }

// Stops the checks of a range: it is part of a protocol in which unordered accesses are no race.
API void rt_race_polled(Race* r, u64 addr, u64 nbytes) {
    r->stamp++;
    LOOP for (u64 a = addr; a < addr + nbytes; a = (a & ~15ull) + 16) poll_line(r, a, line_mask(a, addr + nbytes));
}

// Called when a launch has ended or was stopped. Returns the clock of what its threads knew at their end, as a
// reference.
API u32 rt_race_settle(Launch* l) {
    LOOP for (u32 slot = 0; slot < l->high; slot++) {
        Block* b = (Block*)(l->slots + slot * l->slot_stride);
        if (!b->active) continue;
        LOOP for (u32 i = 0; i < l->threads; i++) race_exit(thread_at(l, b, i));
        race_finish_block(l, b);
        race_finish_cluster(l->engine->race, block_of_rank(l, b, 0)->race);
    }
    Ref end = l->end;
    l->end = 0;
    return end ? end : retain(l->engine->race, l->start);
}
