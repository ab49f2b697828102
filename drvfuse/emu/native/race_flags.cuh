// SPDX-License-Identifier: Apache-2.0
// The race detector's part for flags: what strong writes publish at a location, and what strong reads of it learn.
#pragma once

#include "race_found.cuh"

FAR void drop_published(Race* r, Location* v) {
    LOOP while (v->published) {
        Published* p = (Published*)arena_at(r, v->published);
        Ref next = p->next;
        release(r, p->clock);
        release(r, p->block_clock);
        give_piece(r, v->published, 0);
        v->published = next;
    }
}

// Whether the current thread publishes in `p`. For each scope, a location has one Published per block, cluster or
// device.
FN u32 publishes_there(Access* access, Published* p) {
    if (p->scope == SCOPE_CTA) return same_block(access, p->op, p->block);
    if (p->scope == SCOPE_CLUSTER) return same_cluster(access, p->op, p->block);
    return p->device == access->device;
}

// Publishes the clock `what` at a location, for a scope.
FAR void publish(Access* access, Location* v, u32 scope, Ref what) {
    Race* r = access->race;
    Published* p = 0;
    LOOP for (Ref ref = v->published; ref; ref = p->next) {
        p = (Published*)arena_at(r, ref);
        if (p->scope == scope && publishes_there(access, p)) {
            learn(r, &p->clock, what);
            if (same_block(access, p->op, p->block)) learn(r, &p->block_clock, what);
            else assign(r, &p->block_clock, retain(r, what));
            p->op = access->op;
            p->block = access->block;
            p->start_only = what == access->launch->start;
            return;
        }
    }
    u32 size_class;
    Ref ref = take_piece(r, sizeof(Published), &size_class);
    p = (Published*)arena_at(r, ref);
    p->device = access->device;
    p->scope = scope;
    p->clock = retain(r, what);
    p->block_clock = retain(r, what);
    p->op = access->op;
    p->block = access->block;
    p->start_only = what == access->launch->start;
    p->next = v->published;
    v->published = ref;
}

// Publishes a release. A release for a wider scope than the cluster is also published for the cluster, since what is
// published for the wider scope may come from blocks of other clusters.
FN void publish_release(Access* access, Location* v, u32 scope, Ref what) {
    publish(access, v, scope, what);
    if (scope > SCOPE_CLUSTER && access->launch->cluster_size > 1) publish(access, v, SCOPE_CLUSTER, what);
}

// What the thread knows, its own accesses so far included, as a new reference.
FN Ref all_known(Access* access) {
    Ref all = with_items(access->race, access->thread_state->clock, access->op, access->block, access->block_state->barrier_time, access->warp, access->lane_bit, access->thread_state->time + 1);
    if (access->thread_state->alias_fence_time)
        assign(access->race, &all, with_items(access->race, all, access->op, access->block | TAG_ALIASED, 0, access->warp, access->lane_bit, access->thread_state->alias_fence_time));
    return all;
}

// A part of what a clock knows of the blocks of launch `op`, as a reference: its items for all accesses, restricted to
// the reads (tag TAG_READS); or, with `kept`, its items that have the tag TAG_READS already and those of copies.
FAR Ref select_items(Race* r, Ref known, u32 op, u32 kept) {
    Clock* all = (Clock*)arena_at(r, known);
    u32 size_class, n = 0;
    Ref ref = take_piece(r, bytes_of(0u, all->item_count), &size_class);
    Clock* c = (Clock*)arena_at(r, ref);
    Item *from = items_of(all), *to = (Item*)(c + 1);
    LOOP for (u32 i = 0; i < all->item_count; i++) {
        u32 tag = (u32)(from[i].key >> 6) & (AGENT_BULK | TAG_READS);
        if (from[i].key >> 32 != op || !tag == kept || tag == TAG_INIT) continue;
        to[n] = from[i];
        if (!tag) to[n].key |= (u64)TAG_READS << 6;
        n++;
    }
    c->references = 1;
    c->size_class = size_class;
    c->chain_count = 0;
    c->item_count = n;
    return ref;
}

// The part of a clock that an st.async or a relaxed flag publishes, as a reference: the reads of launch `op`.
FAR Ref reads_of(Race* r, Ref known, u32 op) {
    Ref own = select_items(r, known, op, 0), kept = select_items(r, known, op, 1);
    Ref both = merge(r, (Clock*)arena_at(r, own), (Clock*)arena_at(r, kept));
    release(r, own);
    release(r, kept);
    return both;
}

// Called for a strong read of a location: learns what is published there, or remembers for reports why not.
FAR void learn_published(Access* access, Location* v) {
    Race* r = access->race;
    u32 published = same_block(access, v->op, v->block);
    LOOP for (Ref ref = v->published; ref;) {
        Published* p = (Published*)arena_at(r, ref);
        ref = p->next;
        if (p->op == v->op && p->block == v->block && !p->start_only) published = 1;
        u32 need = scope_needed(access, p->op, p->block), own = need == SCOPE_CTA, theirs = p->scope, ours = access->scope;
        u32 twin = need == SCOPE_CLUSTER && theirs > SCOPE_CLUSTER;  // the release is published for the cluster too
        if (twin && ours == SCOPE_CLUSTER) continue;
        if (need < SCOPE_GPU) need = theirs == SCOPE_CLUSTER ? SCOPE_CLUSTER : p->device == access->device ? SCOPE_GPU : SCOPE_SYS;
        Ref what = theirs >= need && ours >= need ? p->clock : own ? p->block_clock : 0;
        if (!what) {
            record_missed_flag(access, p->op, p->block, theirs < need ? X_STORE_SCOPE : X_LOAD_SCOPE, v->site, p->clock);
        } else if (access->acquires) {
            learn(r, &access->thread_state->clock, what);
        } else {
            if (!own) record_missed_flag(access, p->op, p->block, X_RELAXED_LOAD, v->site, p->clock);
            if (own) learn(r, &access->thread_state->fence_acquire[0], p->block_clock);
            if (what == p->clock) learn(r, &access->thread_state->fence_acquire[need], what);
        }
    }
    if (v->published_reads && morally_strong(access, v)) learn(r, &access->thread_state->flag_reads, v->published_reads);
    if (!published) record_missed_flag(access, v->op, v->block, X_RELAXED_STORE, v->site, 0);
    access->clock = access->thread_state->clock;
}

// Called for a strong read of a location: records that it has seen the last write, unless that write is ordered before
// it anyway.
FAR void record_observation(Access* access, Location* v) {
    Race* r = access->race;
    if (!morally_strong(access, v) || ordered(access, v, v->lanes)) return;
    if (same_block(access, v->op, v->block) && v->warp == access->warp && v->lanes == access->lane_bit) return;
    Observation* alike = 0;
    u32 poll = ~access->kind & N_WRITE;  // a read may have been recorded here by an earlier poll
    LOOP for (Ref* link = &v->observations; poll && *link;) {
        Observation* s = (Observation*)arena_at(r, *link);
        if (same_block(access, s->op, s->block) && s->warp == access->warp && s->first_serial == v->chain_begin) {
            if (s->last_serial == v->serial && s->lanes & access->lane_bit) return;
            if (s->time == access->time) {
                if (s->last_serial == v->serial) alike = s;
                else s->lanes &= ~access->lane_bit;
            }
            if (!s->lanes) {
                Ref ref = *link;
                *link = s->next;
                give_piece(r, ref, 0);
                v->observation_count--;
                continue;
            }
        }
        link = &s->next;
    }
    if (alike) {
        alike->lanes |= access->lane_bit;
        return;
    }
    u32 size_class;
    Ref ref = take_piece(r, sizeof(Observation), &size_class);
    Observation* s = (Observation*)arena_at(r, ref);
    s->op = access->op;
    s->block = access->block;
    s->warp = access->warp;
    s->lanes = access->lane_bit;
    s->time = access->time;
    s->first_serial = v->chain_begin;
    s->last_serial = v->serial;
    s->next = v->observations;
    v->observations = ref;
    v->observation_count++;
}

// Whether the write of an entry was seen by a read that the current thread has made or knows.
FAR u32 observed(Access* access, Ref* cell, Entry* e) {
    Race* r = access->race;
    if (~e->kind & (N_WRITE | N_STRONG)) return 0;
    LOOP for (Ref ref = *cell; ref; ref = ((Entry*)arena_at(r, ref))->next) {
        Location* v = (Location*)arena_at(r, ref);
        if (!(v->kind & N_LOCATION) || !(v->bytes & e->bytes)) continue;
        LOOP for (Ref next = v->observations; next;) {
            Observation* s = (Observation*)arena_at(r, next);
            next = s->next;
            if (e->serial - s->first_serial > s->last_serial - s->first_serial) continue;
            u32 own = same_block(access, s->op, s->block);
            if (own && (!access->thread_state || s->time < access->block_state->barrier_time || (s->warp == access->warp && s->lanes & access->lane_bit))) return 1;
            LOOP for (u32 rest = s->lanes; rest; rest &= rest - 1)
                if (knows(r, access->clock, s->op, s->block, s->warp, rest & -rest, s->time)) return 1;
        }
    }
    return 0;
}

const u32 OBSERVATION_SLACK = 16, COMPACTED_WRITES = 8, COMPACTED_GROUPS = 64;

// Shortens the list of Observation of a location. Only writes of the location that still have an entry matter; `oldest`
// is the lowest of their serials. A Observation that covers none of these writes is dropped, and Seens of a warp that agree for
// all of these writes are merged. It is called rarely enough to cost little.
FAR void compact_observations(Race* r, Ref* cell, Location* v, u32 oldest) {
    u32 left[COMPACTED_WRITES], n = 0, kept = 0;
    Ref table[COMPACTED_GROUPS];
    LOOP for (u32 i = 0; i < COMPACTED_GROUPS; i++) table[i] = 0;
    LOOP for (Ref ref = *cell; ref && n <= COMPACTED_WRITES; ref = ((Entry*)arena_at(r, ref))->next) {
        Entry* e = (Entry*)arena_at(r, ref);
        if (e->kind & N_LOCATION || ~e->kind & (N_WRITE | N_STRONG) || !(e->bytes & v->bytes)) continue;
        if (n < COMPACTED_WRITES) left[n] = e->serial;
        n++;
    }
    LOOP for (Ref* link = &v->observations; *link;) {
        Ref ref = *link;
        Observation* s = (Observation*)arena_at(r, ref);
        u32 back = ~0u;  // from the last write that was seen back to the newest write that still has an entry
        LOOP for (u32 i = 0; i < n && n <= COMPACTED_WRITES; i++)
            if (s->last_serial - left[i] < back) back = s->last_serial - left[i];
        u32 useless = (s32)(s->last_serial - oldest) < 0;
        if (n <= COMPACTED_WRITES) {
            useless |= back > s->last_serial - s->first_serial;
            s->last_serial -= useless ? 0 : back;
        }
        Ref* place = &table[s->block * 33 + s->warp & COMPACTED_GROUPS - 1];
        Observation* other = *place ? (Observation*)arena_at(r, *place) : 0;
        if (!useless && other && other->op == s->op && other->block == s->block && other->warp == s->warp &&
            other->time == s->time && other->first_serial == s->first_serial && other->last_serial == s->last_serial) {
            other->lanes |= s->lanes;
            useless = 1;
        }
        if (useless) {
            *link = s->next;
            give_piece(r, ref, 0);
        } else {
            *place = ref;
            link = &s->next;
            kept++;
        }
    }
    v->observation_count = kept;
    v->observation_limit = 2 * kept + OBSERVATION_SLACK;
}

// Called for a strong write: if its scope is the system, it publishes reads (race.cuh). `continues`: it is an atomic
// that continues the chain of the location.
FN void publish_reads(Access* access, Location* v, u32 continues) {
    Race* r = access->race;
    if (!continues) assign(r, &v->published_reads, 0);
    if (r->strict || access->scope < SCOPE_SYS || (continues && access->block_state->barrier_time < 2)) return;
    u32 barriers = access->block_state->barrier_time, op = access->op, block = access->block;
    // An atomic publishes no reads of its own thread since the last barrier, as all threads may count on one word.
    Ref all = continues ? with_items(r, access->thread_state->clock, op, block, barriers, 0, 0, 0) : all_known(access), reads = reads_of(r, all, op);
    release(r, all);
    learn(r, &v->published_reads, reads);
    release(r, reads);
}

// Called for a strong write to the location `v`, or to a new location if that is null. `oldest` is the lowest serial of
// the strong writes that still have an entry.
FAR void write_location(Access* access, Ref* cell, Location* v, u32 mask, u32 oldest) {
    Race* r = access->race;
    RaceThread* t = access->thread_state;
    if (!v) {
        u32 size_class;
        Ref ref = take_piece(r, sizeof(Location), &size_class);
        v = (Location*)arena_at(r, ref);
        v->bytes = mask;
        v->published = v->last_release = v->observations = v->op = v->block = v->kind = v->published_reads = v->observation_count = 0;
        v->observation_limit = OBSERVATION_SLACK;
        v->next = *cell;
        *cell = ref;
    }
    u32 mine = same_block(access, v->op, v->block) && v->warp == access->warp && v->lanes == access->lane_bit;
    if (!mine && v->last_release) assign(r, &v->last_release, 0);
    u32 continues = access->kind & N_ATOMIC && morally_strong(access, v);
    publish_reads(access, v, continues);
    if (!continues) {
        v->chain_begin = r->write_serial;
        drop_published(r, v);
        if (v->last_release) publish_release(access, v, v->last_release_scope, v->last_release);
    }
    if (v->observation_count > v->observation_limit) compact_observations(r, cell, v, oldest);
    v->op = access->op;
    v->block = access->block;
    v->warp = access->warp;
    v->lanes = access->lane_bit;
    v->time = access->time;
    v->variant = access->variant;
    v->kind = (u8)(N_LOCATION | N_STRONG | (access->kind & 3 << ENTRY_SCOPE_SHIFT));
    v->site = access->site;
    v->serial = r->write_serial;
    u32 scope = access->scope;
    LOOP for (u32 k = 0; k <= scope; k++)
        if (t->fence_release[k] && (k != SCOPE_CLUSTER || access->launch->cluster_size > 1)) publish(access, v, k, t->fence_release[k]);
    if (access->releases) {
        Ref all = all_known(access);
        publish_release(access, v, scope, all);
        assign(r, &v->last_release, all);
        v->last_release_scope = scope;
    }
}
