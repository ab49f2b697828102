// SPDX-License-Identifier: Apache-2.0
// Barriers of a block (bar, barrier). A warp arrives as a whole, once all of its lanes that have not exited have
// reached the barrier.
#pragma once

#include "poll.cuh"

// Completes barrier `id`: its waiting threads continue.
FAR void complete_barrier(Launch* l, Block* b, u32 id) {
    Barrier* r = &b->barrier[id];
    l->barriers++;
    b->epoch++;
    u32 all = r->all_wait && r->kind == B_SYNC && r->threads == b->live;
    note(l, b, r->last->linear, V_BARRIER, r->site, 0, id, all);
    if (l->engine->race) race_barrier(l, b, id, all);
    u32 result = r->kind == B_POPC ? r->count : r->kind == B_AND ? r->every : r->count != 0;
    LOOP for (u32 w = 0; w < l->warps; w++) {
        Warp* warp = &b->warps[w];
        u32 lanes = warp->barrier & ~warp->gathered;
        if (all) {
            warp->ready |= lanes;
            warp->barrier = 0;
            continue;
        }
        LOOP while (lanes) {
            u32 lane = FFS(lanes) - 1;
            lanes &= lanes - 1;
            Thread* t = thread_at(l, b, w * 32 + lane);
            if (t->op_a != id) continue;
            t->op_result = result;
            warp->barrier &= ~(1u << lane);
            warp->ready |= 1u << lane;
        }
    }
    r->arrived = 0;
    b->woken = 1;
}

// Completes a barrier if enough threads have arrived.
FAR void try_barrier(Launch* l, Block* b, u32 id) {
    Barrier* r = &b->barrier[id];
    if (r->arrived && (r->expected ? r->arrived >= r->expected : r->threads >= b->live)) complete_barrier(l, b, id);
}

// Records the arrival of a warp at the barrier of the cluster. All lanes must be at the same instruction.
FN void arrive_at_cluster(Launch* l, Block* b, Warp* warp, u32 w, u32 lanes, Thread* first) {
    LOOP for (u32 rest = lanes; rest; rest &= rest - 1) {
        Thread* t = thread_at(l, b, w * 32 + FFS(rest) - 1);
        if (t->site == first->site) continue;
        fault(l, t, F_BARRIER_DIVERGENCE, t->site, 0, 0, first->site, t->op_a);
        return;
    }
    warp->gathered = 0;
    cluster_barrier(l, b, w, lanes);
}

// Checks the operands of a thread that arrives at barrier `id`, and records them in the barrier. `first` is the first
// arriving thread of the same warp. Both threads must be at the same barrier and, unless both are unaligned, at the
// same instruction. Returns 0, or 1 after recording a fault.
FN u32 join_barrier(Launch* l, Barrier* r, u32 id, Thread* t, Thread* first) {
    u32 kind = t->op_kind & ~B_UNALIGNED, every = t->op_kind & first->op_kind & B_UNALIGNED;
    u32 reduces = kind >= B_POPC ? kind : B_SYNC;
    if (t->op_a != id || (t->site != first->site && !every)) {
        fault(l, t, F_BARRIER_DIVERGENCE, t->site, 0, 0, first->site, t->op_a);
        return 1;
    }
    if (t->op_b & 31 || (kind == B_ARRIVE && !t->op_b)) {
        fault(l, t, F_BARRIER_COUNT, t->site, COUNT_THREADS, 0, 0, t->op_b);
        return 1;
    }
    if (!r->arrived && t == first) {
        r->expected = t->op_b;
        r->threads = r->count = 0;
        r->every = r->all_wait = 1;
        r->kind = reduces;
    }
    if (r->expected != t->op_b) {
        fault(l, t, F_BARRIER_COUNT, t->site, COUNT_OTHERS_DIFFER, 0, r->expected, t->op_b);
        return 1;
    }
    if (r->kind != reduces) {
        fault(l, t, F_BARRIER_KINDS, t->site, 0, 0, 0, id);
        return 1;
    }
    if (kind == B_ARRIVE) {
        r->all_wait = 0;
    } else if (reduces) {
        r->count += t->op_c != 0;
        r->every &= t->op_c != 0;
    }
    return 0;
}

// Records the arrival of a warp at a barrier, of the block or of the cluster. Lanes at bar.arrive continue at once.
FAR void arrive(Launch* l, Block* b, Warp* warp) {
    u32 lanes = warp->gathered;
    u32 w = (u32)(warp - b->warps);
    Thread* first = thread_at(l, b, w * 32 + FFS(lanes) - 1);
    u32 id = first->op_a;
    if (first->status == CLUSTER) {
        arrive_at_cluster(l, b, warp, w, lanes, first);
        return;
    }
    if (id >= BARRIERS) {
        fault(l, first, F_BARRIER_COUNT, first->site, COUNT_NUMBER, 0, 0, id);
        return;
    }
    Barrier* r = &b->barrier[id];
    u32 leaving = 0;  // the lanes that execute bar.arrive, and so do not wait for the barrier
    LOOP for (u32 rest = lanes; rest; rest &= rest - 1) {
        u32 lane_bit = rest & -rest;
        Thread* t = thread_at(l, b, w * 32 + FFS(rest) - 1);
        if (join_barrier(l, r, id, t, first)) return;
        if ((t->op_kind & ~B_UNALIGNED) != B_ARRIVE) continue;
        leaving |= lane_bit;
        warp->barrier &= ~lane_bit;
        warp->ready |= lane_bit;
    }
    if (lanes != warp->lanes && l->engine->race && l->engine->race->strict) notice(l, first, NOTICE_BARRIER, 0);
    if (leaving && l->engine->race) race_arrive(l, b, &b->race->arrivals[id], w, leaving);
    warp->gathered = 0;
    r->arrived += 32;
    r->threads += POPC(lanes);
    r->site = first->site;
    r->last = first;
    try_barrier(l, b, id);
}
