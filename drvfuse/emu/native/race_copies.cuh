// SPDX-License-Identifier: Apache-2.0
// The race detector's part for asynchronous copies, whose accesses last from their issue to a wait. race.cuh describes
// their entries.
#pragma once

#include "race_cluster.cuh"

// The kind of the entry of a reduction, and its size in w->log: reductions by elements of the same size do not race
// with one another.
FN u32 reduction_kind(Access* access, u32 scope, u32 bytes) {
    access->variant = FFS(bytes) - 1;
    return N_STRONG | N_ATOMIC | scope << ENTRY_SCOPE_SHIFT;
}

const u32 NO_ARRIVAL = ~0u;  // no mbarrier

// Called when a copy is issued: checks its access to a range inside one line. `flags` has A_WRITE, or A_BULK for the
// read of a bulk copy. If not `pending`, the access is complete at once. `element`: bytes of each element of a
// reduction, else 0.
FAR void race_copy(Thread* t, u64 addr, u32 size, u32 flags, u32 site, u32 pending, u32 element) {
    Access access;
    begin_access(&access, t);
    if (access.race->exhausted || !size) return;
    access.site = site;
    access.flags = flags;
    access.addr = addr;
    access.size = size;
    access.scope = access.variant = access.acquires = access.releases = 0;
    access.kind = (flags & A_WRITE ? N_WRITE : 0) | N_ASYNC | (pending ? 0 : N_COPIED);
    if (element) access.kind |= reduction_kind(&access, SCOPE_GPU, element);
    if (pending) access.agent |= AGENT_PENDING;
    check_line(&access, addr, line_mask(addr, addr + size));
}

// Called when a thread has waited for its copy: from now on, the entry of the copy is an access that the thread made at
// `time`. Other copies of the same thread and instruction may be pending in the same line; the copy is the oldest of
// those that touch only these bytes. If an mbarrier waited for the copy, the entry becomes an access of the arrival
// with this `number`, which counts as a thread of its own as a bulk copy does; NO_ARRIVAL otherwise.
FAR void race_copied(Thread* t, u64 addr, u32 size, u32 write, u32 site, u32 time, u32 number) {
    Launch* l = t->launch;
    Race* r = l->engine->race;
    u32 bit = 1u << t->lane, mask = line_mask(addr, addr + size);
    Ref* cell = list_at(r, addr, &mask);
    if (r->exhausted || !mask) return;
    Entry* oldest = 0;
    Entry* e;
    LOOP for (Ref ref = *cell; ref; ref = e->next) {
        e = (Entry*)arena_at(r, ref);
        if (e->block != (t->block->index | AGENT_PENDING) || e->op != l->op || e->warp != t->warp || e->lanes != bit) continue;
        if ((e->kind & N_WRITE) == write && e->site == site && !(e->bytes & ~mask)) oldest = e;
    }
    if (!oldest) return;
    oldest->block = t->block->index;
    oldest->kind |= N_COPIED;
    oldest->time = time;
    if (number == NO_ARRIVAL) return;
    Access access;
    begin_access(&access, t);
    access.agent |= AGENT_BULK;
    access.copy_number = number;
    oldest->block |= AGENT_BULK;
    set_bulk_agent(&access, oldest);
}

// Checks that the initialisation of an mbarrier happens before the issue of a bulk copy or an st.async that completes
// on it.
FAR void race_completes(Access* access, u64 mbarrier) {
    u32 mask = line_mask(mbarrier, mbarrier + 8), both;
    Ref* cell = list_at(access->race, mbarrier, &mask);
    if (!mask) return;
    Entry* e;
    access->variant = VARIANT_MBARRIER;
    LOOP for (Ref ref = *cell; ref; ref = e->next) {
        e = (Entry*)arena_at(access->race, ref);
        both = e->kind & N_LOCATION ? 0 : e->bytes & mask;
        if (!both || e->variant != VARIANT_MBARRIER_INIT) continue;
        if (same_block(access, e->op, e->block) && e->warp == access->warp && e->lanes == access->lane_bit) continue;
        if (!ordered(access, e, e->lanes)) report_race(access, e, e->lanes, (mbarrier & ~15ull) + FFS(both) - 1, 0);
    }
    access->variant = 0;
}

// `known`, a reference that passes to the function, and besides it the accesses of a bulk copy or of an arrival.
FN Ref with_agent(Access* access, Ref known) {
    u32 kind = access->copy_number % BULK_LANES, round = 1 + access->copy_number / BULK_LANES;
    Ref told = with_items(access->race, known, access->op, access->agent, 0, kind / 32, 1u << kind % 32, round + 1);
    release(access->race, known);
    return told;
}

// Called when a bulk copy or an st.async, which has no source, is issued. Returns the clock that its mbarrier will
// publish, as a reference.
FAR Ref race_bulk(Thread* t, u64 target, u64 source, u32 size, u64 mbarrier, u32 site, u32 element) {
    Access access;
    begin_access(&access, t);
    Race* r = access.race;
    if (r->exhausted) return 0;
    access.site = site;
    access.size = size;
    access.scope = access.variant = access.acquires = access.releases = 0;
    u32 to_other = target - t->block->shared_base >= access.launch->shared_bytes;
    u32 from_shared = source - t->block->shared_base < access.launch->shared_bytes;
    access.addr = target;
    access.kind = N_WRITE | N_ASYNC;
    if (to_other) race_other_block(&access, t, target);
    access.addr = mbarrier;
    if (to_other) race_completes(&access, mbarrier);
    access.agent |= AGENT_BULK;
    access.copy_number = access.block_state->bulk_count++;
    LOOP for (u32 write = !source; write < 2; write++) {
        access.addr = write ? target : source;
        access.flags = write ? A_WRITE : from_shared ? A_BULK : 0;
        access.kind = (write ? N_WRITE : 0) | N_ASYNC;
        if (write && element) access.kind |= reduction_kind(&access, SCOPE_CLUSTER, element);
        check_range(&access, access.addr, access.addr + size);
    }
    Ref known = 0;
    if (!source) {
        Ref all = all_known(&access);
        known = reads_of(r, all, access.op);
        release(r, all);
        access.thread_state->time++;
    }
    return with_agent(&access, known);
}

// Called for an arrival that waits for the copies which its thread has issued. Stores its number, and returns the clock
// that its mbarrier will publish, as a reference: those copies, and what the thread knows now.
FAR Ref race_copy_arrival(Thread* t, u32* number) {
    Access access;
    begin_access(&access, t);
    if (access.race->exhausted) return 0;
    access.agent |= AGENT_BULK;
    access.copy_number = *number = access.block_state->bulk_count++;
    Ref all = all_known(&access);
    access.thread_state->time++;
    return with_agent(&access, all);
}

// Called when a bulk copy, an st.async or an arrival has ended: publishes its clock at the mbarrier, at block scope, or
// at cluster scope for an mbarrier of another block. The thread that issued it learns nothing by that.
FAR void race_bulk_end(Thread* t, u64 mbarrier, Ref known) {
    Access access;
    begin_access(&access, t);
    Race* r = access.race;
    if (r->exhausted) return;
    u32 mask = line_mask(mbarrier, mbarrier + 8);
    Ref* cell = list_at(r, mbarrier, &mask);
    if (!mask) return;
    u32 scope = mbarrier - t->block->shared_base < access.launch->shared_bytes ? SCOPE_CTA : SCOPE_CLUSTER;
    r->change_count++;
    LOOP for (Ref ref = *cell; ref; ref = ((Entry*)arena_at(r, ref))->next) {
        Location* v = (Location*)arena_at(r, ref);
        if (v->kind & N_LOCATION && v->bytes == mask) publish(&access, v, scope, known);
    }
}
