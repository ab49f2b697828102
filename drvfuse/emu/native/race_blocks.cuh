// SPDX-License-Identifier: Apache-2.0
// The race detector's part for the start and the end of blocks and for their barriers, and the functions that Python
// calls.
#pragma once

#include "race_access.cuh"

// Makes the detector check all bytes of a line again.
FAR void check_again(Race* r, Ref* cell) {
    Ref line = *cell & ~UNCHECKED;
    *cell = 0;
    if (!line) return;
    *cell = ((UncheckedLine*)arena_at(r, line))->list;
    give_piece(r, line, 0);
}

// Stops the checks of these bytes of a line, and drops what its entries say about them.
FAR void uncheck_line(Race* r, u64 a, u32 bytes) {
    Ref* cell = cell_at(r, a);
    u32 others = 0xFFFF;
    list_at(r, a, &others);
    others &= ~bytes;
    if (!(*cell & UNCHECKED)) {
        u32 size_class;
        Ref ref = take_piece(r, sizeof(UncheckedLine), &size_class);
        ((UncheckedLine*)arena_at(r, ref))->list = *cell;
        *cell = ref | UNCHECKED;
    }
    if (*cell == UNCHECKED) return;
    UncheckedLine* line = (UncheckedLine*)arena_at(r, *cell & ~UNCHECKED);
    line->bytes = 0xFFFF & ~others;
    LOOP for (Ref* link = &line->list; *link;) {
        Ref* pool = pool_at(r, a);
        Entry* e = (Entry*)arena_at(r, *link);
        if (!(e->bytes & ~others)) {
            link = &e->next;
        } else if (e->kind & N_LOCATION || !(e->bytes & others)) {
            drop_entry(r, pool, link);
        } else {
            if (e->kind & N_COMMON) e = unshare(r, pool, link);
            e->lanes = lanes_at(e, e->bytes & others);
            e->bytes &= others;
            link = &e->next;
        }
    }
    if (others) return;
    give_piece(r, *cell & ~UNCHECKED, 0);
    *cell = UNCHECKED;
}

// Drops all entries of the lines that a range touches.
FAR void race_clear(Race* r, u64 addr, u64 nbytes) {
    r->change_count++;
    LOOP for (u64 a = addr & ~15ull; a < addr + nbytes; a += 16) {
        Ref* cell = cell_at(r, a);
        if (!*cell) continue;
        if (*cell & UNCHECKED) check_again(r, cell);
        LOOP while (*cell) drop_entry(r, pool_at(r, a), cell);
    }
}

FAR void race_start_block(Launch* l, Block* b, u32 slot) {
    Race* r = l->engine->race;
    RaceBlock* rb = b->race = (RaceBlock*)(l->races + (u64)slot * size_of_races(l));
    rb->barrier_time = 1;
    rb->end_clock = rb->proxy_fence_clock = rb->alias_clock_before = rb->alias_clock_after = 0;
    rb->cluster_arrivals = rb->cluster_phase_clock = 0;
    rb->missed_flag_count = rb->bulk_count = rb->relaxed_arrival_time = 0;
    LOOP for (u32 i = 0; i < BARRIERS; i++) rb->arrivals[i] = 0;
    LOOP for (u32 i = 0; i < MISSED_FLAGS; i++) rb->missed_flags[i].op = rb->missed_flags[i].clock = 0;
    LOOP for (u32 i = 0; i < l->threads; i++) {
        RaceThread* t = race_thread(b, i);
        t->clock = retain(r, l->start);
        t->time = 1;
        t->alias_fence_time = t->flag_reads = 0;
        LOOP for (u32 k = 0; k < 4; k++) t->fence_release[k] = t->fence_acquire[k] = 0;
        t->fence_release[SCOPE_SYS] = retain(r, l->start);
    }
    race_clear(r, b->shared_base, l->shared_bytes);
}

// Called when a thread exits: its block's end knows what the thread knew.
FAR void race_exit(Thread* t) {
    Race* r = t->launch->engine->race;
    RaceThread* rt = race_thread(t->block, t->linear);
    Ref* end = &t->block->race->end_clock;
    if (rt->clock != *end) learn(r, end, rt->clock);
    assign(r, &rt->clock, 0);
    if (rt->flag_reads) {
        learn(r, end, rt->flag_reads);
        assign(r, &rt->flag_reads, 0);
    }
    LOOP for (u32 k = 0; k < 4; k++) {
        if (rt->fence_acquire[k]) learn(r, end, rt->fence_acquire[k]);
        assign(r, &rt->fence_release[k], 0);
        assign(r, &rt->fence_acquire[k], 0);
    }
}

FAR void race_finish_block(Launch* l, Block* b) {
    Race* r = l->engine->race;
    learn(r, &l->end, b->race->end_clock);
    assign(r, &b->race->end_clock, 0);
    assign(r, &b->race->proxy_fence_clock, 0);
    assign(r, &b->race->alias_clock_before, 0);
    assign(r, &b->race->alias_clock_after, 0);
    LOOP for (u32 i = 0; i < BARRIERS; i++) assign(r, &b->race->arrivals[i], 0);
    LOOP for (u32 i = 0; i < MISSED_FLAGS; i++) assign(r, &b->race->missed_flags[i].clock, 0);
}

// Called when all blocks of a cluster have ended.
FN void race_finish_cluster(Race* r, RaceBlock* lead) {
    assign(r, &lead->cluster_arrivals, 0);
    assign(r, &lead->cluster_phase_clock, 0);
}

FAR void race_gdc_wait(Thread* t) {
    Launch* l = t->launch;
    RaceThread* rt = race_thread(t->block, t->linear);
    learn(l->engine->race, &rt->clock, l->primary);
    learn(l->engine->race, &rt->fence_release[SCOPE_SYS], l->primary);
}

// Called when these lanes of a warp synchronise with others: joins their clocks into *known and, with `share`, what
// they have fenced and read into *fenced and *held. Returns the latest of their times.
FAR u32 join_lanes(Launch* l, Block* b, u32 w, u32 lanes, Ref* known, Ref* fenced, Ref* held, u32 share) {
    Race* r = l->engine->race;
    u32 last = 0, aliased = 0;
    LOOP for (u32 rest = lanes; rest; rest &= rest - 1) {
        RaceThread* t = race_thread(b, w * 32 + FFS(rest) - 1);
        if (t->time > last) last = t->time;
        if (t->alias_fence_time) aliased |= rest & -rest;
        if (t->clock != *known) learn(r, known, t->clock);
        if (!share) continue;
        LOOP for (u32 k = 0; k < 4; k++) {
            if (t->fence_release[k] != fenced[k]) learn(r, &fenced[k], t->fence_release[k]);
            if (t->fence_acquire[k] != held[k]) learn(r, &held[k], t->fence_acquire[k]);
        }
    }
    LOOP while (aliased) {
        u32 time = race_thread(b, w * 32 + FFS(aliased) - 1)->alias_fence_time, alike = 0;
        LOOP for (u32 rest = aliased; rest; rest &= rest - 1)
            if (race_thread(b, w * 32 + FFS(rest) - 1)->alias_fence_time == time) alike |= rest & -rest;
        assign(r, known, with_items(r, *known, l->op, b->index | TAG_ALIASED, 0, w, alike, time));
        aliased &= ~alike;
    }
    return last;
}

// Called when these lanes continue after that: gives each of them the joined clocks and the time `time`.
FAR void distribute(Race* r, Block* b, u32 w, u32 lanes, u32 time, Ref known, Ref* fenced, Ref* held, u32 share) {
    LOOP for (u32 rest = lanes; rest; rest &= rest - 1) {
        RaceThread* t = race_thread(b, w * 32 + FFS(rest) - 1);
        t->time = time;
        t->alias_fence_time = 0;
        if (t->clock != known) assign(r, &t->clock, retain(r, known));
        if (!share) continue;
        LOOP for (u32 k = 0; k < 4; k++) {
            if (t->fence_release[k] != fenced[k]) assign(r, &t->fence_release[k], retain(r, fenced[k]));
            if (t->fence_acquire[k] != held[k]) assign(r, &t->fence_acquire[k], retain(r, held[k]));
        }
    }
}

// Adds the accesses of these lanes before `time` to a clock.
FN void learn_lanes(Race* r, Launch* l, Block* b, Ref* known, u32 w, u32 lanes, u32 time) {
    assign(r, known, with_items(r, *known, l->op, b->index, b->race->barrier_time, w, lanes, time));
}

FAR void race_warp_sync(Launch* l, Block* b, u32 w, u32 lanes) {
    Race* r = l->engine->race;
    Ref known = 0, none[4] = {0, 0, 0, 0};
    u32 time = join_lanes(l, b, w, lanes, &known, none, none, 0) + 1;
    learn_lanes(r, l, b, &known, w, lanes, time);
    distribute(r, b, w, lanes, time, known, none, none, 0);
    release(r, known);
}

// Called when lanes of a warp arrive at a barrier without waiting for it. *known is the clock that arrivals publish
// there.
FAR void race_arrive(Launch* l, Block* b, Ref* known, u32 w, u32 lanes) {
    Race* r = l->engine->race;
    Ref none[4] = {0, 0, 0, 0};
    u32 time = join_lanes(l, b, w, lanes, known, none, none, 0) + 1;
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
    Ref known = rb->arrivals[id], fenced[4] = {0, 0, 0, 0}, held[4] = {0, 0, 0, 0};
    rb->arrivals[id] = 0;
    LOOP for (u32 w = 0; w < l->warps; w++) {
        u32 lanes = waiting_at(l, b, id, w);
        u32 time = lanes ? join_lanes(l, b, w, lanes, &known, fenced, held, share) : 0;
        if (time > last) last = time;
    }
    if (all && b->live == l->threads) {
        rb->barrier_time = last + 1;
    } else {
        LOOP for (u32 w = 0; w < l->warps; w++) {
            u32 lanes = waiting_at(l, b, id, w);
            if (lanes) learn_lanes(r, l, b, &known, w, lanes, last + 1);
        }
    }
    LOOP for (u32 w = 0; w < l->warps; w++) {
        u32 lanes = waiting_at(l, b, id, w);
        if (lanes) distribute(r, b, w, lanes, last + 1, known, fenced, held, share);
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
    if (r->exhausted) return;
    Access access;
    access.race = r;
    access.launch = 0;
    access.block_state = 0;
    access.thread_state = 0;
    access.op = op;
    access.block = access.agent = access.warp = access.thread = access.flags = access.scope = access.acquires = access.releases = access.variant = access.repeats_poll = access.is_plain = 0;
    access.lane_bit = access.time = 1;
    access.site = NO_SITE;
    access.kind = write ? N_WRITE : 0;
    access.device = r->ops[op].device;
    access.clock = clock;
    access.addr = addr;
    access.size = nbytes > 0xFFFFFFFFull ? 0xFFFFFFFFu : (u32)nbytes;
    access.event_count = now;
    access.shared_entry = 0;
    if (write == RANGE_FREE) {
        LOOP for (u64 a = addr & ~15ull; a < addr + nbytes; a += 16)
            if (*cell_at(r, a)) check_line(&access, a, 0xFFFF);
        return;
    }
    u32 size_class;
    access.shared_entry = take_piece(r, sizeof(Entry), &size_class);
    Entry* e = (Entry*)arena_at(r, access.shared_entry);
    e->op = op;
    e->block = 0;
    e->time = e->lanes = 1;
    e->bytes = 0xFFFF;
    e->warp = 0;
    e->kind = (u8)(access.kind | N_COMMON);
    e->site = NO_SITE;
    e->next = e->serial = e->variant = 0;
    check_range(&access, addr, addr + nbytes);
}

// Drops all entries of a range, which is new memory from now on.
API void rt_race_clear(Race* r, u64 addr, u64 nbytes) { race_clear(r, addr, nbytes); }

// Stops the checks of a range: it is part of a protocol in which unordered accesses are no race.
API void rt_race_polled(Race* r, u64 addr, u64 nbytes) {
    r->change_count++;
    LOOP for (u64 a = addr; a < addr + nbytes; a = (a & ~15ull) + 16) uncheck_line(r, a, line_mask(a, addr + nbytes));
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
