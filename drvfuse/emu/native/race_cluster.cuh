// SPDX-License-Identifier: Apache-2.0
// The race detector: clusters of blocks.
//
// The barrier of a cluster. An arrival tells, at the scope of the cluster, what its thread knows, or with .relaxed what
// it knew at its last fence of at least that scope; a wait learns what was told in its phase. Threads that exit tell nothing.
//
// Another block's shared memory. It may be accessed from the beginning of that block on, of which a thread knows when it
// knows of anything that the block's threads have done, and by a barrier of the cluster even where they arrived with .relaxed.
// And no later than the block ends: when its last thread exits, its threads have to know of every access by others.
//
// st.async. That it has arrived tells, by the mbarrier, of itself and of what its thread knew to have been read before it was
// issued, and of the copies that had arrived, so a buffer may be filled again. It is no release of writes: those it may overtake.
//
// mbarriers. Two operations on one are never a race, whatever their scopes, which decide only who learns what by them. Unless
// `strict`, the scope is at least the cluster: hardware has no narrower one, and kernels rely on that.
// fence.mbarrier_init releases nothing but the initialisation of mbarriers.
#pragma once

#include "race_blocks.cuh"

FAR void race_cluster_arrive(Launch* l, RaceBlock* lead, Block* b, u32 w, u32 lanes, u32 releases) {
    Race* r = l->engine->race;
    if (releases) {
        race_arrive(l, b, &lead->cluster_arrived, w, lanes);
        return;
    }
    put(r, &lead->cluster_arrived, with_items(r, lead->cluster_arrived, l->op, b->index, 1, 0, 0, 0));
    LOOP for (u32 rest = lanes; rest; rest &= rest - 1) {
        RaceThread* t = race_thread(b, w * 32 + FFS(rest) - 1);
        learn(r, &lead->cluster_arrived, t->fenced[SCOPE_CLUSTER]);
        if (t->time > b->race->relaxed) b->race->relaxed = t->time;
        t->time++;
    }
}

FAR void race_cluster_complete(Race* r, RaceBlock* lead) {
    put(r, &lead->cluster_known, lead->cluster_arrived);
    lead->cluster_arrived = 0;
}

FAR void race_cluster_wait(Race* r, RaceBlock* lead, Block* b, u32 w, u32 lanes) {
    LOOP for (u32 rest = lanes; rest; rest &= rest - 1) {
        RaceThread* t = race_thread(b, w * 32 + FFS(rest) - 1);
        learn(r, &t->clock, lead->cluster_known);
        t->time++;
    }
}

FAR void race_init_fence(Thread* t) {
    Who w;
    who(&w, t);
    if (w.r->off) return;
    Ref all = with_items(w.r, 0, w.op, w.block | INIT, 0, w.warp, w.bit, w.rt->time + 1);
    LOOP for (u32 k = 0; k <= SCOPE_CLUSTER; k++) learn(w.r, &w.rt->fenced[k], all);
    release(w.r, all);
    w.rt->time++;
}

// Called when a block has ended.
FAR void race_end_shared(Launch* l, Block* b) {
    Who w;
    Race* r = w.r = l->engine->race;
    if (r->off || l->cluster_size < 2) return;
    of_block(&w, l, b);
    LOOP for (u64 a = b->shared_base; a < b->shared_base + l->shared_bytes; a += 16) {
        u32 mask = 0xFFFF;
        Ref* cell = list_at(r, a, &mask);
        if (!mask) continue;
        Entry* e;
        LOOP for (Ref ref = *cell; ref; ref = e->next) {
            e = (Entry*)at(r, ref);
            u32 own = same_block(&w, e->op, e->block & ~BULK);
            // What its own copies write is read by nobody any more.
            if (e->kind & N_LOCATION || (own && (e->block == b->index || e->kind & N_WRITE))) continue;
            if (knows(r, w.clock, e->op, e->block, e->warp, e->lanes, e->time) == 1 || observed(&w, cell, e)) continue;
            w.size = POPC(e->bytes);
            found(&w, e, e->lanes, a + FFS(e->bytes) - 1, X_CLUSTER_END);
        }
    }
}
