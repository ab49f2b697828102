// SPDX-License-Identifier: Apache-2.0
// Clusters of blocks in the race detector: their barrier, and the shared memory of other blocks.
//
// Barrier of a cluster. An arrival publishes, at cluster scope, what its thread knows; with .relaxed, only what the
// thread knew at its last fence of at least cluster scope. A wait learns what the arrivals of its phase have published.
// A thread that exits publishes nothing. The block of rank 0 keeps the clocks of the barrier.
//
// Shared memory of another block. A thread may access it only after that block has started and before it has ended. A
// thread knows that a block has started if it knows any access of the block, or has passed a barrier of the cluster at
// which threads of the block arrived, even with .relaxed. When a block ends, its threads must know every access by
// other blocks to its shared memory; otherwise a race is reported.
//
// mbarriers. Two operations on one mbarrier are never a race, whatever their scopes; the scopes decide only who learns
// what. fence.mbarrier_init releases the initialisations of mbarriers and nothing else.
//
// st.async. When its bytes have arrived, its mbarrier publishes a clock of three parts: the write of the st.async, and
// the reads and the copies of the launch that the issuing thread knew at the issue. So a thread that waits for the
// mbarrier may overwrite what these reads have read. The clock includes no writes of the thread, since an st.async may
// overtake them.
#pragma once

#include "race_blocks.cuh"

// Records that lanes of a warp arrive at the barrier of the cluster. `lead` is the block of rank 0. `releases` is 0 for
// an arrival with .relaxed. Such an arrival publishes what the thread knew at its last fence of at least cluster scope,
// and an item for its block at time 1, by which other threads know that the block has started.
FAR void race_cluster_arrive(Launch* l, RaceBlock* lead, Block* b, u32 w, u32 lanes, u32 releases) {
    Race* r = l->engine->race;
    if (releases) {
        race_arrive(l, b, &lead->cluster_arrivals, w, lanes);
        return;
    }
    assign(r, &lead->cluster_arrivals, with_items(r, lead->cluster_arrivals, l->op, b->index, 1, 0, 0, 0));
    LOOP for (u32 rest = lanes; rest; rest &= rest - 1) {
        RaceThread* t = race_thread(b, w * 32 + FFS(rest) - 1);
        learn(r, &lead->cluster_arrivals, t->fence_release[SCOPE_CLUSTER]);
        if (t->time > b->race->relaxed_arrival_time) b->race->relaxed_arrival_time = t->time;
        t->time++;
    }
}

// Completes a phase of the cluster's barrier: waits of this phase will learn what its arrivals have published. Called
// when all threads of the cluster have arrived or exited.
FAR void race_cluster_complete(Race* r, RaceBlock* lead) {
    assign(r, &lead->cluster_phase_clock, lead->cluster_arrivals);
    lead->cluster_arrivals = 0;
}

// Records that lanes of a warp pass barrier.cluster.wait: they learn what the arrivals of its phase have published.
FAR void race_cluster_wait(Race* r, RaceBlock* lead, Block* b, u32 w, u32 lanes) {
    LOOP for (u32 rest = lanes; rest; rest &= rest - 1) {
        RaceThread* t = race_thread(b, w * 32 + FFS(rest) - 1);
        learn(r, &t->clock, lead->cluster_phase_clock);
        t->time++;
    }
}

// Records a fence.mbarrier_init by a thread: releases its initialisations of mbarriers at cluster scope.
FAR void race_init_fence(Thread* t) {
    Access access;
    begin_access(&access, t);
    if (access.race->exhausted) return;
    Ref all = with_items(access.race, 0, access.op, access.block | TAG_INIT, 0, access.warp, access.lane_bit, access.thread_state->time + 1);
    LOOP for (u32 k = 0; k <= SCOPE_CLUSTER; k++) learn(access.race, &access.thread_state->fence_release[k], all);
    release(access.race, all);
    access.thread_state->time++;
}

// Reports accesses of other blocks to the shared memory of a block that are not ordered before the block's end.
FAR void race_end_shared(Launch* l, Block* b) {
    Access access;
    Race* r = access.race = l->engine->race;
    if (r->exhausted || l->cluster_size < 2) return;
    begin_block_access(&access, l, b);
    LOOP for (u64 a = b->shared_base; a < b->shared_base + l->shared_bytes; a += 16) {
        u32 mask = 0xFFFF;
        Ref* cell = list_at(r, a, &mask);
        if (!mask) continue;
        Entry* e;
        LOOP for (Ref ref = *cell; ref; ref = e->next) {
            e = (Entry*)arena_at(r, ref);
            u32 own_block = same_block(&access, e->op, e->block & ~AGENT_BULK);
            // A write by a pending copy of the block itself is harmless, since no thread of the block is left to read
            // it.
            if (e->kind & N_LOCATION || (own_block && (e->block == b->index || e->kind & N_WRITE))) continue;
            if (knows(r, access.clock, e->op, e->block, e->warp, e->lanes, e->time) || observed(&access, cell, e)) continue;
            access.size = POPC(e->bytes);
            report_race(&access, e, e->lanes, a + FFS(e->bytes) - 1, X_CLUSTER_END);
        }
    }
}
