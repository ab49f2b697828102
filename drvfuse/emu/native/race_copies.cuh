// SPDX-License-Identifier: Apache-2.0
// The race detector: asynchronous copies, whose accesses last. What their entries say is in race.cuh.
#pragma once

#include "race_cluster.cuh"

// The kind of entry that reductions of elements of so many bytes leave, and their size: among one another they are no race.
FN u32 reducing(Who* w, u32 scope, u32 bytes) {
    w->log = FFS(bytes) - 1;
    return N_STRONG | N_ATOMIC | scope << N_SCOPE;
}

const u32 ALONE = ~0u;

// A copy begins to access a range that lies in one line, with A_WRITE, or A_BULK. If not `pending`, it is over at once.
// `element`: bytes of each element of a reduction, or 0.
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

// Its thread has waited for it: from now on it is an access that the thread has made by now. Other copies by this thread and
// line of the kernel may be pending in the same 16 bytes: it is the oldest of those that touch no bytes but these. `time` is
// that of the thread when it waited. Where an mbarrier has waited, it becomes the access of the arrival with that `number`
// (but for ALONE), which is a thread of its own as a bulk copy is.
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

// The bytes of a bulk copy, or of an st.async, are to be subtracted at an mbarrier, which has to have been initialised.
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

// What is known (a reference, which it takes), and the accesses of a bulk copy, or of an arrival.
FN Ref with_agent(Who* w, Ref known) {
    u32 kind = w->number % BULK_KINDS, round = 1 + w->number / BULK_KINDS;
    Ref told = with_items(w->r, known, w->op, w->agent, 0, kind / 32, 1u << kind % 32, round + 1);
    release(w->r, known);
    return told;
}

// A bulk copy begins, or an st.async, which has no source: what its mbarrier can tell of it (a reference).
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

// An arrival that waits for the copies which its thread has issued: its number, and what its mbarrier will tell (a
// reference): them, and what the thread knows now.
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

// It has ended, and its mbarrier tells of it those who acquire that, in its block, or of another block at the scope of the
// cluster. The thread that issued it learns nothing.
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
