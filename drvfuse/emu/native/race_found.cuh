// SPDX-License-Identifier: Apache-2.0
// The race detector's record of races: what would have ordered the two accesses, and doubts. A doubt is a pair of
// stores that is a race only if the second store changes the value; it is decided after the second store.
#pragma once

#include "race.cuh"

// Remembers, for later reports, that the current access has seen a flag of another block without learning the clock
// `what`, and the edge that is missing.
FAR void record_missed_flag(Access* access, u32 op, u32 block, u32 edge, u32 store_site, Ref what) {
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
    if (m->clock != what) assign(r, &m->clock, retain(r, what));
}

// Whether threads of an entry's block, which is in the same cluster, have arrived at the cluster's barrier with
// .relaxed_arrival_time since that access.
FN u32 relaxed_arrival(Access* access, Entry* e) {
    Launch* l = access->launch;
    LOOP for (u32 slot = 0; slot < l->high; slot++) {
        Block* b = (Block*)(l->slots + slot * l->slot_stride);
        if (b->active && b->index == e->block) return e->time <= b->race->relaxed_arrival_time;
    }
    return 0;
}

// The kind of order that is missing from the access of an entry to the current access, for the report. If a flag of
// that block was seen, *f gets the sites of its store and its load.
FAR u32 missing_edge(Access* access, Entry* e, Found* f) {
    if (e->kind & access->kind & N_STRONG) return e->variant == access->variant ? X_STRONG_SCOPES : X_STRONG_SIZES;
    if ((e->block & AGENT_BULK) == AGENT_BULK) return X_BULK;
    if (e->block & AGENT_PENDING) {
        u32 own = same_block(access, e->op, e->block & ~AGENT_PENDING) && e->warp == access->warp && e->lanes == access->lane_bit;
        return own ? X_COPY_OWN : X_COPY;
    }
    if (same_block(access, e->op, e->block) && access->kind & N_ASYNC && access->kind & ~e->kind & N_WRITE && !(e->kind & N_ASYNC))
        return X_COPY_EARLY;
    if (same_block(access, e->op, e->block)) return e->kind & N_ASYNC ? X_COPIED : e->warp == access->warp ? X_WARP : X_BARRIER;
    if (!access->thread_state) return X_ORDER;
    // First look for a flag whose clock includes the access, then for any flag of its block.
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
    u32 near = same_cluster(access, e->op, e->block);
    if (near && relaxed_arrival(access, e)) return X_CLUSTER_RELAXED;
    Op* ops = access->race->ops;
    if (ops[access->op].primary == e->op || ops[e->op].primary == access->op) return X_GDC_WAIT;
    if (knowledge(access->race, access->clock, e->op, e->block, e->warp, e->lanes, e->time) == KNOWS_OTHERS) return X_RELEASED_EARLIER;
    return near ? X_CLUSTER : e->op == access->op ? X_NONE : X_ORDER;
}

// A new record of a race, or null if a race of these operations at these sites is recorded already or if there is no
// room.
FN Found* new_found(Race* r, u32 op, u32 site, u32 other_op, u32 other_site) {
    LOOP for (u32 i = 0; i < r->found_count; i++) {
        Found* f = &r->found_races[i];
        if (f->op == op && f->site == site && f->other_op == other_op && f->other_site == other_site) return 0;
    }
    return r->found_count == FOUND_RACES ? 0 : &r->found_races[r->found_count++];
}

// Fills in the record of a race between the current access and the access of an entry by these lanes.
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

// Records a race between the current access and the access of an entry by these lanes.
FAR void report_race(Access* access, Entry* e, u32 lanes, u64 addr, u32 edge) {
    Found* f = new_found(access->race, access->op, plain_site(access->site), e->op, plain_site(e->site));
    if (f) describe_race(access, e, lanes, addr, edge, f);
}

// Records a doubt: the pair is a race if the current store changes any of these bytes of a line.
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

// Called after a store: makes each doubt a race, or drops it.
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
