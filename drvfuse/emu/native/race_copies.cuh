// SPDX-License-Identifier: Apache-2.0
// The race detector's part for asynchronous copies, whose accesses last from their issue to a wait. race.cuh describes
// their entries.
#pragma once

#include "race_cluster.cuh"

// The kind of the entry of a reduction, and its size in w->log: reductions by elements of the same size do not race
// with one another.
FN u32 reducing(Who* w, u32 scope, u32 bytes) {
    w->log = FFS(bytes) - 1;
    return N_STRONG | N_ATOMIC | scope << N_SCOPE;
}

const u32 ALONE = ~0u;  // no mbarrier

// Called when a copy is issued: checks its access to a range inside one line. `flags` has A_WRITE, or A_BULK for the
// read of a bulk copy. If not `pending`, the access is complete at once. `element`: bytes of each element of a
// reduction, else 0.
FAR void race_copy(Thread* t, u64 addr, u32 size, u32 flags, u32 site, u32 pending, u32 element) {
    Who w;
    who(&w, t);
    if (w.r->off || !size) return;
    w.site = site;
    w.flags = flags;
    w.addr = addr;
    w.size = size;
    w.scope = w.log = w.acquires = w.releases = 0;
    w.kind = (flags & A_WRITE ? N_WRITE : 0) | N_ASYNC | (pending ? 0 : N_COPIED);
    if (element) w.kind |= reducing(&w, SCOPE_GPU, element);
    if (pending) w.agent |= COPYING;
    touch(&w, addr, line_mask(addr, addr + size));
}

// Called when a thread has waited for its copy: from now on, the entry of the copy is an access that the thread made at
// `time`. Other copies of the same thread and instruction may be pending in the same line; the copy is the oldest of
// those that touch only these bytes. If an mbarrier waited for the copy, the entry becomes an access of the arrival
// with this `number`, which counts as a thread of its own as a bulk copy does; ALONE otherwise.
FAR void race_copied(Thread* t, u64 addr, u32 size, u32 write, u32 site, u32 time, u32 number) {
    Launch* l = t->launch;
    Race* r = l->engine->race;
    u32 bit = 1u << t->lane, mask = line_mask(addr, addr + size);
    Ref* cell = list_at(r, addr, &mask);
    if (r->off || !mask) return;
    Entry* oldest = 0;
    Entry* e;
    LOOP for (Ref ref = *cell; ref; ref = e->next) {
        e = (Entry*)at(r, ref);
        if (e->block != (t->block->index | COPYING) || e->op != l->op || e->warp != t->warp || e->lanes != bit) continue;
        if ((e->kind & N_WRITE) == write && e->site == site && !(e->bytes & ~mask)) oldest = e;
    }
    if (!oldest) return;
    oldest->block = t->block->index;
    oldest->kind |= N_COPIED;
    oldest->time = time;
    if (number == ALONE) return;
    Who w;
    who(&w, t);
    w.agent |= BULK;
    w.number = number;
    oldest->block |= BULK;
    be_bulk(&w, oldest);
}

// Checks that the initialisation of an mbarrier happens before the issue of a bulk copy or an st.async that completes
// on it.
FAR void race_completes(Who* w, u64 mbarrier) {
    u32 mask = line_mask(mbarrier, mbarrier + 8), both;
    Ref* cell = list_at(w->r, mbarrier, &mask);
    if (!mask) return;
    Entry* e;
    w->log = OF_MBARRIER;
    LOOP for (Ref ref = *cell; ref; ref = e->next) {
        e = (Entry*)at(w->r, ref);
        both = e->kind & N_LOCATION ? 0 : e->bytes & mask;
        if (!both || e->size != MADE) continue;
        if (same_block(w, e->op, e->block) && e->warp == w->warp && e->lanes == w->bit) continue;
        if (!ordered(w, e, e->lanes)) found(w, e, e->lanes, (mbarrier & ~15ull) + FFS(both) - 1, 0);
    }
    w->log = 0;
}

// `known`, a reference that passes to the function, and besides it the accesses of a bulk copy or of an arrival.
FN Ref with_agent(Who* w, Ref known) {
    u32 kind = w->number % BULK_KINDS, round = 1 + w->number / BULK_KINDS;
    Ref told = with_items(w->r, known, w->op, w->agent, 0, kind / 32, 1u << kind % 32, round + 1);
    release(w->r, known);
    return told;
}

// Called when a bulk copy or an st.async, which has no source, is issued. Returns the clock that its mbarrier will
// publish, as a reference.
FAR Ref race_bulk(Thread* t, u64 target, u64 source, u32 size, u64 mbarrier, u32 site, u32 element) {
    Who w;
    who(&w, t);
    Race* r = w.r;
    if (r->off) return 0;
    w.site = site;
    w.size = size;
    w.scope = w.log = w.acquires = w.releases = 0;
    u32 to_other = target - t->block->shared_base >= w.l->shared_bytes;
    u32 from_shared = source - t->block->shared_base < w.l->shared_bytes;
    w.addr = target;
    w.kind = N_WRITE | N_ASYNC;
    if (to_other) race_other_block(&w, t, target);
    w.addr = mbarrier;
    if (to_other) race_completes(&w, mbarrier);
    w.agent |= BULK;
    w.number = w.rb->bulks++;
    LOOP for (u32 write = !source; write < 2; write++) {
        w.addr = write ? target : source;
        w.flags = write ? A_WRITE : from_shared ? A_BULK : 0;
        w.kind = (write ? N_WRITE : 0) | N_ASYNC;
        if (write && element) w.kind |= reducing(&w, SCOPE_CLUSTER, element);
        touch_range(&w, w.addr, w.addr + size);
    }
    Ref known = 0;
    if (!source) {
        Ref all = all_known(&w);
        known = reads_of(r, all, w.op);
        release(r, all);
        w.rt->time++;
    }
    return with_agent(&w, known);
}

// Called for an arrival that waits for the copies which its thread has issued. Stores its number, and returns the clock
// that its mbarrier will publish, as a reference: those copies, and what the thread knows now.
FAR Ref race_copy_arrival(Thread* t, u32* number) {
    Who w;
    who(&w, t);
    if (w.r->off) return 0;
    w.agent |= BULK;
    w.number = *number = w.rb->bulks++;
    Ref all = all_known(&w);
    w.rt->time++;
    return with_agent(&w, all);
}

// Called when a bulk copy, an st.async or an arrival has ended: publishes its clock at the mbarrier, at block scope, or
// at cluster scope for an mbarrier of another block. The thread that issued it learns nothing by that.
FAR void race_bulk_end(Thread* t, u64 mbarrier, Ref known) {
    Who w;
    who(&w, t);
    Race* r = w.r;
    if (r->off) return;
    u32 mask = line_mask(mbarrier, mbarrier + 8);
    Ref* cell = list_at(r, mbarrier, &mask);
    if (!mask) return;
    u32 scope = mbarrier - t->block->shared_base < w.l->shared_bytes ? SCOPE_CTA : SCOPE_CLUSTER;
    r->stamp++;
    LOOP for (Ref ref = *cell; ref; ref = ((Entry*)at(r, ref))->next) {
        Location* v = (Location*)at(r, ref);
        if (v->kind & N_LOCATION && v->bytes == mask) publish(&w, v, scope, known);
    }
}
