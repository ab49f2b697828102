// SPDX-License-Identifier: Apache-2.0
// Asynchronous copies in the race detector. Their accesses last from the issue of the copy to a wait for it.
//
//     cp.async. From the issue on, its entries have the bit AGENT_PENDING, so they are ordered with no other access.
//     The thread's wait makes them accesses of the thread.
//
//     Bulk copy to shared memory. From the issue on, its entries name an agent of their own (AGENT_BULK). The mbarrier
//     publishes the accesses of this agent when the copy has ended.
//
//     Bulk copy to global memory. It consists of pieces of 16 bytes (store.cuh). Each piece is treated as a cp.async
//     with two waits, one for the read and one for the write.
#pragma once

#include "race_cluster.cuh"

// Returns the bits of Entry::kind for a reduction with elements of `bytes` bytes, and sets the variant of the access.
// Reductions with elements of the same size do not race with one another.
FN u32 reduction_kind(Access* access, u32 scope, u32 bytes) {
    access->variant = FFS(bytes) - 1;
    return N_STRONG | N_ATOMIC | scope << ENTRY_SCOPE_SHIFT;
}

// cp.async ------------------------------------------------------------------------------------------------------------

const u32 NO_ARRIVAL = ~0u;

// Checks the access of a copy to a range inside one line, when the copy is issued. `flags` is A_WRITE for a write,
// A_BULK for the read of a bulk copy, 0 for the read of a cp.async. If not `pending`, the access is complete at once.
// `element` is the number of bytes of each element of a reduction, else 0.
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

// Returns the entry of a pending copy that thread `t` has issued at `site`, and that touches only bytes in `mask` of a
// line; null if there is none. If several such copies are pending, returns the oldest, which is the last one in the
// list.
FN Entry* pending_entry(Thread* t, Ref* cell, u32 mask, u32 write, u32 site) {
    Launch* l = t->launch;
    Race* r = l->engine->race;
    Entry* oldest = 0;
    Entry* e;
    LOOP for (Ref ref = *cell; ref; ref = e->next) {
        e = (Entry*)arena_at(r, ref);
        if (e->block != (t->block->index | AGENT_PENDING) || e->op != l->op || e->warp != t->warp) continue;
        if (e->lanes != 1u << t->lane) continue;
        if ((e->kind & N_WRITE) == write && e->site == site && !(e->bytes & ~mask)) oldest = e;
    }
    return oldest;
}

// Ends the pending access of a copy. If its thread has waited for the copy, `arrival` is NO_ARRIVAL, and the access
// becomes an access of the thread at `time`. If an arrival has waited for the copy (cp.async.mbarrier.arrive), the
// access becomes an access of that arrival, which is an agent (race.cuh) with the number `arrival`.
FAR void race_copied(Thread* t, u64 addr, u32 size, u32 write, u32 site, u32 time, u32 arrival) {
    Race* r = t->launch->engine->race;
    u32 mask = line_mask(addr, addr + size);
    Ref* cell = list_at(r, addr, &mask);
    if (r->exhausted || !mask) return;
    Entry* e = pending_entry(t, cell, mask, write, site);
    if (!e) return;
    e->block = t->block->index;
    e->kind |= N_COPIED;
    e->time = time;
    if (arrival == NO_ARRIVAL) return;
    Access access;
    begin_access(&access, t);
    access.agent |= AGENT_BULK;
    access.copy_number = arrival;
    e->block |= AGENT_BULK;
    set_bulk_agent(&access, e);
}

// Bulk copies to shared memory ----------------------------------------------------------------------------------------

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

// Returns the join of `known` and the accesses of an agent (race.cuh), which is a bulk copy or an arrival. Takes over
// the caller's reference to `known`.
FN Ref with_agent(Access* access, Ref known) {
    u32 lane = access->copy_number % BULK_LANES, round = 1 + access->copy_number / BULK_LANES;
    Ref joined = with_items(access->race, known, access->op, access->agent, 0, lane / 32, 1u << lane % 32, round + 1);
    release(access->race, known);
    return joined;
}

// Checks the accesses of a bulk copy, or of an st.async (`source` is 0), when it is issued. Returns the clock that its
// mbarrier will publish, as a new reference.
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

// Records an arrival that waits for the copies which its thread has issued (cp.async.mbarrier.arrive). The arrival is
// an agent (AGENT_BULK in race_entry.cuh); its number is stored in *number. Returns the clock that the mbarrier will
// publish, as a new reference. It includes those copies and all that the thread knows now.
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

// Called when a bulk copy, an st.async or an arrival has ended: publishes its clock at its mbarrier. The scope is CTA,
// or CLUSTER if the mbarrier is of another block. The thread that issued the copy or arrival learns nothing by that.
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
