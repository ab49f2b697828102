// SPDX-License-Identifier: Apache-2.0
// Clusters of blocks: the barrier of all threads of a cluster (barrier.cluster).
//
// The blocks of a cluster have adjacent block slots, in the order of their ranks, and become resident together. Their
// shared memories are 1 << CLUSTER_SHIFT bytes apart, so a 32-bit shared-memory address is rank << CLUSTER_SHIFT |
// offset: it means the same memory in all blocks of the cluster, and mapa replaces the rank. An instruction on
// .shared::cta may access the shared memory of its thread's block only. An instruction on .shared::cluster, or with a
// generic address, may access the memory of each block of the cluster that is present (access.cuh).
//
// A phase of the barrier is complete when each thread of the cluster has arrived in it or has exited. A thread arrives
// once in a phase, and waits for the phase before it arrives in the next one. The counts are in the block of rank 0,
// whose block slot stays in use until the last block of the cluster has ended. A lane at an .aligned arrive or wait
// continues when all lanes of its warp that have not exited have reached the same instruction; without .aligned, each
// lane continues alone.
//
// An arrival releases, unless it is .relaxed, and a wait acquires, at the scope of the cluster: race_cluster.cuh.
#pragma once

#include "access.cuh"

// Completes a phase of the cluster's barrier: the threads that wait at the barrier continue. `lead` is the block of
// rank 0, `last` the thread that arrived or exited last.
FAR void complete_cluster(Launch* l, Block* lead, Thread* last) {
    lead->cluster_arrived = lead->cluster_missing = 0;
    if (l->engine->race) race_cluster_complete(l->engine->race, lead->race);
    LOOP for (u32 rank = 0; rank < l->cluster_size; rank++) {
        Block* b = block_of_rank(l, lead, rank);
        if (!b->active) continue;
        lead->cluster_missing += b->live;
        note(l, b, last->linear, V_CLUSTER, last->site, 0, lead->cluster_phase, 0);
        b->woken = 1;
        LOOP for (u32 w = 0; w < l->warps; w++) {
            Warp* warp = &b->warps[w];
            u32 waiting = warp->cluster & ~warp->gathered;
            warp->cluster_passed = warp->cluster_arrived & ~waiting;
            warp->cluster_arrived = 0;
            warp->cluster &= ~waiting;
            warp->ready |= waiting;
            if (waiting && l->engine->race) race_cluster_wait(l->engine->race, lead->race, b, w, waiting);
        }
    }
    lead->cluster_phase++;
}

// Counts `count` threads, which have arrived at the barrier of the cluster or have exited. Completes the phase if no
// thread is missing any more and at least one has arrived.
FN void cluster_counts(Launch* l, Block* b, u32 count, Thread* last) {
    Block* lead = block_of_rank(l, b, 0);
    lead->cluster_missing -= count;
    if (!lead->cluster_missing && lead->cluster_arrived) complete_cluster(l, lead, last);
}

// Executes barrier.cluster.arrive or barrier.cluster.wait for lanes of a warp.
FAR void cluster_barrier(Launch* l, Block* b, u32 w, u32 lanes) {
    Warp* warp = &b->warps[w];
    Thread* first = thread_at(l, b, w * 32 + FFS(lanes) - 1);
    u32 known = warp->cluster_arrived | warp->cluster_passed, waits = first->op_kind & CB_WAIT;
    u32 wrong = waits ? lanes & ~known : lanes & known;
    if (wrong) {
        Thread* t = thread_at(l, b, w * 32 + FFS(wrong) - 1);
        fault(l, t, F_CLUSTER_BARRIER, t->site, 0, 0, waits ? E_NOT_ARRIVED : E_TWICE, 0);
        return;
    }
    u32 free = waits ? lanes & warp->cluster_passed : lanes;
    warp->cluster = (warp->cluster | lanes) & ~free;
    warp->ready |= free;
    if (waits) {
        warp->cluster_passed &= ~free;
        if (free && l->engine->race) race_cluster_wait(l->engine->race, block_of_rank(l, b, 0)->race, b, w, free);
        return;
    }
    u32 releases = !(first->op_kind & CB_RELAXED);
    LOOP for (u32 rest = lanes; rest && releases && l->engine->delay && !l->engine->probing; rest &= rest - 1)
        delay_release(thread_at(l, b, w * 32 + FFS(rest) - 1), SCOPE_CLUSTER);
    Block* lead = block_of_rank(l, b, 0);
    if (l->engine->race) race_cluster_arrive(l, lead->race, b, w, lanes, releases);
    warp->cluster_arrived |= lanes;
    lead->cluster_arrived += POPC(lanes);
    cluster_counts(l, b, POPC(lanes), first);
}

// Counts a thread that has exited as arrived in all phases of the cluster's barrier.
FN void cluster_exit(Launch* l, Block* b, Warp* warp, u32 bit, Thread* t) {
    cluster_counts(l, b, !(warp->cluster_arrived & bit), t);
    warp->cluster_arrived &= ~bit;
}
