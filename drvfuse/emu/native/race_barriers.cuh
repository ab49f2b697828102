// SPDX-License-Identifier: Apache-2.0
// Barriers of a block and of a warp in the race detector.
//
// A barrier joins the clocks of its lanes (join_lanes), and gives the joined clock and a new time to each lane
// (give_lanes). The new time is later than the time of every lane before the barrier. So one Item (clock.cuh) with the
// new time, in the joined clock, makes all accesses known that the lanes made before the barrier. After a barrier of
// all threads of a block no Item is needed, as RaceBlock::barrier_time holds the new time.
// Invariant: each thread of a block knows all accesses of the block before barrier_time.
//
// Unless `strict`, a barrier of the block also joins what its threads have fenced (fence_release) and what they have
// read by relaxed loads (fence_acquire).
#pragma once

#include "race_access.cuh"

// The clocks that lanes bring to a barrier, joined. A Meeting owns its references.
struct Meeting {
    Ref known;                               // the join of the lanes' clocks
    Ref fence_release[4], fence_acquire[4];  // the joins of the lanes' clocks of these names; 0 unless joins_fences
    u32 joins_fences;
};

// Joins the clocks of these lanes of a warp into *m. Returns the latest of the lanes' times.
FAR u32 join_lanes(Launch* l, Block* b, u32 w, u32 lanes, Meeting* m) {
    Race* r = l->engine->race;
    u32 last = 0, aliased = 0;
    LOOP for (u32 rest = lanes; rest; rest &= rest - 1) {
        RaceThread* t = race_thread(b, w * 32 + FFS(rest) - 1);
        if (t->time > last) last = t->time;
        if (t->alias_fence_time) aliased |= rest & -rest;
        if (t->clock != m->known) learn(r, &m->known, t->clock);
        if (!m->joins_fences) continue;
        LOOP for (u32 k = 0; k < 4; k++) {
            if (t->fence_release[k] != m->fence_release[k]) learn(r, &m->fence_release[k], t->fence_release[k]);
            if (t->fence_acquire[k] != m->fence_acquire[k]) learn(r, &m->fence_acquire[k], t->fence_acquire[k]);
        }
    }
    // A thread's own accesses before its fence.proxy.alias are in no clock yet, so they are added to `known` here.
    // Lanes with the same alias_fence_time share an item.
    LOOP while (aliased) {
        u32 time = race_thread(b, w * 32 + FFS(aliased) - 1)->alias_fence_time, alike = 0;
        LOOP for (u32 rest = aliased; rest; rest &= rest - 1)
            if (race_thread(b, w * 32 + FFS(rest) - 1)->alias_fence_time == time) alike |= rest & -rest;
        assign(r, &m->known, with_items(r, m->known, l->op, b->index | TAG_ALIASED, 0, w, alike, time));
        aliased &= ~alike;
    }
    return last;
}

// Gives each of these lanes the clocks of *m, and the time `time`.
FAR void give_lanes(Race* r, Block* b, u32 w, u32 lanes, u32 time, Meeting* m) {
    LOOP for (u32 rest = lanes; rest; rest &= rest - 1) {
        RaceThread* t = race_thread(b, w * 32 + FFS(rest) - 1);
        t->time = time;
        t->alias_fence_time = 0;
        if (t->clock != m->known) assign(r, &t->clock, retain(r, m->known));
        if (!m->joins_fences) continue;
        LOOP for (u32 k = 0; k < 4; k++) {
            if (t->fence_release[k] != m->fence_release[k])
                assign(r, &t->fence_release[k], retain(r, m->fence_release[k]));
            if (t->fence_acquire[k] != m->fence_acquire[k])
                assign(r, &t->fence_acquire[k], retain(r, m->fence_acquire[k]));
        }
    }
}

// Adds the accesses of these lanes before `time` to the clock *known.
FN void learn_lanes(Race* r, Launch* l, Block* b, Ref* known, u32 w, u32 lanes, u32 time) {
    assign(r, known, with_items(r, *known, l->op, b->index, b->race->barrier_time, w, lanes, time));
}

// Records a bar.warp.sync: orders the earlier accesses of these lanes before their later ones.
FAR void race_warp_sync(Launch* l, Block* b, u32 w, u32 lanes) {
    Race* r = l->engine->race;
    Meeting m = {};
    u32 time = join_lanes(l, b, w, lanes, &m) + 1;
    learn_lanes(r, l, b, &m.known, w, lanes, time);
    give_lanes(r, b, w, lanes, time, &m);
    release(r, m.known);
}

// Records that lanes of a warp arrive at a barrier without waiting for it: adds what they know to *known, the clock
// that the arrivals of this phase publish.
FAR void race_arrive(Launch* l, Block* b, Ref* known, u32 w, u32 lanes) {
    Race* r = l->engine->race;
    Meeting m = {};
    m.known = *known;
    u32 time = join_lanes(l, b, w, lanes, &m) + 1;
    learn_lanes(r, l, b, &m.known, w, lanes, time);
    *known = m.known;
    LOOP for (u32 rest = lanes; rest; rest &= rest - 1) race_thread(b, w * 32 + FFS(rest) - 1)->time = time;
}

// The lanes of a warp that wait at barrier `id`.
FN u32 waiting_at(Launch* l, Block* b, u32 id, u32 w) {
    u32 lanes = b->warps[w].barrier & ~b->warps[w].gathered;
    LOOP for (u32 rest = lanes; rest; rest &= rest - 1)
        if (thread_at(l, b, w * 32 + FFS(rest) - 1)->op_a != id) lanes &= ~(1u << (FFS(rest) - 1));
    return lanes;
}

// Records that barrier `id` is complete: joins the clocks of the threads that wait there, and gives them the result.
// Called before they continue. `all`: all threads of the block that have not exited wait there.
FAR void race_barrier(Launch* l, Block* b, u32 id, u32 all) {
    Race* r = l->engine->race;
    RaceBlock* state = b->race;
    u32 last = 0;
    Meeting m = {};
    m.joins_fences = !r->strict;
    m.known = state->arrivals[id];
    state->arrivals[id] = 0;
    LOOP for (u32 w = 0; w < l->warps; w++) {
        u32 lanes = waiting_at(l, b, id, w);
        u32 time = lanes ? join_lanes(l, b, w, lanes, &m) : 0;
        if (time > last) last = time;
    }
    if (all && b->live == l->threads) {
        state->barrier_time = last + 1;
    } else {
        LOOP for (u32 w = 0; w < l->warps; w++) {
            u32 lanes = waiting_at(l, b, id, w);
            if (lanes) learn_lanes(r, l, b, &m.known, w, lanes, last + 1);
        }
    }
    LOOP for (u32 w = 0; w < l->warps; w++) {
        u32 lanes = waiting_at(l, b, id, w);
        if (lanes) give_lanes(r, b, w, lanes, last + 1, &m);
    }
    release(r, m.known);
    LOOP for (u32 k = 0; k < 4; k++) {
        release(r, m.fence_release[k]);
        release(r, m.fence_acquire[k]);
    }
}
