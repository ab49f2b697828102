// SPDX-License-Identifier: Apache-2.0
// The race detector's records of races, from which Python makes reports (findings/race_report.py), and doubts.
//
// A record (Found) names both accesses and the edge that is missing: what would have ordered them. To name a flag that
// was read without effect, each block remembers the last MISSED_FLAGS strong reads that learnt nothing.
//
// A doubt is a pair of stores of one block that is a race only if the later store changes the word. The bytes before
// that store are kept with the doubt. They are compared when the thread next enters the runtime or suspends, which is
// before any other thread runs.
#pragma once

#include "race.cuh"

// Missing edges -------------------------------------------------------------------------------------------------------

// Records, for reports, that the current access has read a flag, stored by block `block` of operation `op`, without
// learning `clock`, because `edge` is missing between the store and the read.
FAR void record_missed_flag(Access* access, u32 op, u32 block, u32 edge, u32 store_site, Ref clock) {
    Race* r = access->race;
    RaceBlock* b = access->block_state;
    MissedFlag* m = 0;
    if (!b) return;
    LOOP for (u32 i = 0; i < MISSED_FLAGS && !m; i++)
        if (b->missed_flags[i].op == op && b->missed_flags[i].block == block && b->missed_flags[i].edge == edge) m = &b->missed_flags[i];
    if (!m) {
        m = &b->missed_flags[b->missed_flag_count++ % MISSED_FLAGS];
        m->op = op;
        m->block = block;
        m->edge = edge;
        m->store_site = plain_site(store_site);
        m->load_site = plain_site(access->site);
    }
    if (m->clock != clock) assign(r, &m->clock, retain(r, clock));
}

// Whether threads of an entry's block, which is in the same cluster, have arrived at the barrier of the cluster with
// .relaxed since the entry's access.
FN u32 relaxed_arrival(Access* access, Entry* e) {
    Launch* l = access->launch;
    LOOP for (u32 slot = 0; slot < l->slots_used; slot++) {
        Block* b = (Block*)(l->slots + slot * l->slot_stride);
        if (b->active && b->index == e->block) return e->time <= b->race->relaxed_arrival_time;
    }
    return 0;
}

// Looks for a flag that the present block has read and that should have ordered an entry before the current access.
// Prefers a flag whose clock includes the entry's access. If there is none, takes any flag that the entry's block has
// stored. Returns the edge that is missing between the flag's store and its read, or X_NONE if no flag is found. Stores
// the sites of both in *f.
FN u32 edge_of_flag(Access* access, Entry* e, Found* f) {
    LOOP for (u32 i = 0; i < 2 * MISSED_FLAGS; i++) {
        MissedFlag* m = &access->block_state->missed_flags[i % MISSED_FLAGS];
        if (!m->op) continue;
        if (i < MISSED_FLAGS ? knows(access->race, m->clock, e->op, e->block, e->warp, f->other_lanes, e->time)
                             : m->op == e->op && m->block == e->block) {
            f->store_op = m->op;
            f->store_site = m->store_site;
            f->load_site = m->load_site;
            return m->edge;
        }
    }
    return X_NONE;
}

// The missing edge between two accesses of one block.
FN u32 edge_in_block(Access* access, Entry* e) {
    if (access->kind & N_ASYNC && access->kind & ~e->kind & N_WRITE && !(e->kind & N_ASYNC)) return X_COPY_EARLY;
    if (e->kind & N_ASYNC) return X_COPIED;
    return e->warp == access->warp ? X_WARP : X_BARRIER;
}

// The missing edge between an entry and the current access. If the edge is missing at a flag, stores the sites of the
// flag's store and read in *f.
FAR u32 missing_edge(Access* access, Entry* e, Found* f) {
    if (e->kind & access->kind & N_STRONG) return e->variant == access->variant ? X_STRONG_SCOPES : X_STRONG_SIZES;
    if ((e->block & AGENT_BULK) == AGENT_BULK) return X_BULK;
    if (e->block & AGENT_PENDING) {
        u32 own_block = same_block(access, e->op, e->block & ~AGENT_PENDING);
        return own_block && e->warp == access->warp && e->lanes == access->lane_bit ? X_COPY_OWN : X_COPY;
    }
    if (same_block(access, e->op, e->block)) return edge_in_block(access, e);
    if (!access->thread_state) return X_ORDER;
    u32 flag_edge = edge_of_flag(access, e, f);
    if (flag_edge) return flag_edge;
    u32 in_cluster = same_cluster(access, e->op, e->block);
    if (in_cluster && relaxed_arrival(access, e)) return X_CLUSTER_RELAXED;
    Op* ops = access->race->ops;
    if (ops[access->op].primary == e->op || ops[e->op].primary == access->op) return X_GDC_WAIT;
    if (knowledge(access->race, access->clock, e->op, e->block, e->warp, e->lanes, e->time) == KNOWS_OTHERS)
        return X_RELEASED_EARLIER;
    return in_cluster ? X_CLUSTER : e->op == access->op ? X_NONE : X_ORDER;
}

// Races ---------------------------------------------------------------------------------------------------------------

// Returns a free record for a race. Returns null if a race of these operations at these sites is recorded already, or
// if there is no room.
FN Found* new_found(Race* r, u32 op, u32 site, u32 other_op, u32 other_site) {
    LOOP for (u32 i = 0; i < r->found_count; i++) {
        Found* f = &r->found_races[i];
        if (f->op == op && f->site == site && f->other_op == other_op && f->other_site == other_site) return 0;
    }
    return r->found_count == FOUND_RACES ? 0 : &r->found_races[r->found_count++];
}

// Fills in the record of a race between the current access and the access that an entry records for `lanes`. `edge` is
// the missing edge; if it is 0, missing_edge finds it.
FAR void describe_race(Access* access, Entry* e, u32 lanes, u64 addr, u32 edge, Found* f) {
    u32 unordered = 0;
    LOOP for (u32 rest = lanes; rest; rest &= rest - 1)
        if (!ordered(access, e, rest & -rest)) unordered |= rest & -rest;
    f->other_lanes = unordered ? unordered : lanes;
    f->store_op = 0;
    f->store_site = f->load_site = NO_SITE;
    f->edge = edge ? edge : missing_edge(access, e, f);
    f->addr = addr;
    f->events = access->event_count;
    f->size = access->size;
    f->op = access->op;
    f->block = access->block;
    f->thread = access->thread;
    f->site = plain_site(access->site);
    f->flags = access->kind;
    f->other_op = e->op;
    f->other_block = e->block & ~AGENT_BULK;
    f->other_warp = e->warp;
    if ((e->block & AGENT_BULK) == AGENT_BULK) {
        f->other_warp = e->serial >> 5;
        f->other_lanes = 1u << (e->serial & 31);
    }
    f->other_site = plain_site(e->site);
    f->other_flags = e->kind;
}

// Records a race between the current access and the access that an entry records for `lanes`.
FAR void report_race(Access* access, Entry* e, u32 lanes, u64 addr, u32 edge) {
    Found* f = new_found(access->race, access->op, plain_site(access->site), e->op, plain_site(e->site));
    if (f) describe_race(access, e, lanes, addr, edge, f);
}

// Doubts --------------------------------------------------------------------------------------------------------------

// Records a doubt: the current store races with an entry if it changes any of `bytes` of a line.
FAR void report_doubt(Access* access, Entry* e, u32 lanes, u64 addr, u32 bytes) {
    Race* r = access->race;
    u64 line = addr & ~15ull;
    LOOP for (u32 i = 0; i < r->doubt_count; i++) {
        Doubt* d = &r->doubts[i];
        if (d->line == line && d->found.other_op == e->op && d->found.other_site == plain_site(e->site)) {
            d->bytes |= bytes;
            return;
        }
    }
    if (r->doubt_count == DOUBTS) {
        report_race(access, e, lanes, addr, 0);
        return;
    }
    Doubt* d = &r->doubts[r->doubt_count++];
    d->line = line;
    d->low = *(u64*)line;
    d->high = *(u64*)(line + 8);
    d->bytes = bytes;
    describe_race(access, e, lanes, addr, 0, &d->found);
}

// Settles the doubts about the last store: records a race for each doubt whose bytes have changed, and drops all
// doubts.
FAR void settle_doubts(Race* r) {
    LOOP for (u32 i = 0; i < r->doubt_count; i++) {
        Doubt* d = &r->doubts[i];
        u64 changed[2] = {d->low ^ *(u64*)d->line, d->high ^ *(u64*)(d->line + 8)};
        u32 bytes = d->bytes;
        LOOP while (bytes && !(changed[FFS(bytes) - 1 >> 3] >> (FFS(bytes) - 1 & 7) * 8 & 0xFF)) bytes &= bytes - 1;
        if (!bytes) continue;
        Found* f = new_found(r, d->found.op, d->found.site, d->found.other_op, d->found.other_site);
        if (f) *f = d->found;
    }
    r->doubt_count = 0;
}
