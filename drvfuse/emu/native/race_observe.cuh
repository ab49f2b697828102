// SPDX-License-Identifier: Apache-2.0
// Locations: which reads have observed which strong writes, and the change of a location by a strong write.
//
// A strong read observes the last strong write of its location and, if that write is an atomic, the chain of writes
// that the atomic continues. An observation is recorded with the location, and not in the reader's clock, since it
// concerns these writes alone and no other access of their threads. Only writes that still have an entry matter, since
// accesses are checked against entries.
//
// Example (the litmus test observed-st-gpu). Thread A stores x with st.relaxed.gpu. Thread B of another block polls x
// with ld.relaxed.gpu until it finds A's value, then stores x by a plain st. A's store has published nothing, so B's
// clock does not include it. But B has observed A's store, so B's store is ordered after A's, and no race is reported.
//
// Serials. Strong writes are numbered (Race::write_serial). The chain of a location is a range of serials, from
// chain_begin to the serial of the last write. Serials of writes to other locations may lie in this range; they do no
// harm, since a range is only compared with serials of writes to the same bytes. Serials wrap around, so they are
// compared by their differences.
#pragma once

#include "race_publish.cuh"

// Returns 1 if an observation at `v` already records that the lane of the current access has observed the present chain
// of writes of `v`. Else returns 0, and the caller records that the lane observes this chain by the current access. For
// that, this function looks at the observations of the warp whose time (clock.cuh) is that of the current access. If
// one of them records that other lanes have observed the whole chain, stores it in *alike; the caller adds the lane to
// it. From those that record only the first writes of the chain, removes the lane, as the whole chain includes these.
FN u32 find_observation(Access* access, Location* v, Observation** alike) {
    Race* r = access->race;
    LOOP for (Ref* link = &v->observations; *link;) {
        Observation* s = (Observation*)arena_at(r, *link);
        if (same_block(access, s->op, s->block) && s->warp == access->warp && s->first_serial == v->chain_begin) {
            if (s->last_serial == v->serial && s->lanes & access->lane_bit) return 1;
            if (s->time == access->time) {
                if (s->last_serial == v->serial) *alike = s;
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
    return 0;
}

// Records that a strong read of a location has observed the last write, unless that write is ordered before the read
// anyway.
FAR void record_observation(Access* access, Location* v) {
    Race* r = access->race;
    if (!morally_strong(access, v) || ordered(access, v, v->lanes)) return;
    if (same_block(access, v->op, v->block) && v->warp == access->warp && v->lanes == access->lane_bit) return;
    Observation* alike = 0;
    // A thread that polls reads the same write many times, so an earlier read may have recorded the observation.
    if (~access->kind & N_WRITE && find_observation(access, v, &alike)) return;
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

// Whether the write of an entry was observed by a read of the current thread, or by a read that happens before the
// current access.
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
            u32 in_block = same_block(access, s->op, s->block);
            if (in_block && (!access->thread_state || s->time < access->block_state->barrier_time || (s->warp == access->warp && s->lanes & access->lane_bit))) return 1;
            LOOP for (u32 rest = s->lanes; rest; rest &= rest - 1)
                if (knows(r, access->clock, s->op, s->block, s->warp, rest & -rest, s->time)) return 1;
        }
    }
    return 0;
}

// Compaction ----------------------------------------------------------------------------------------------------------

const u32 OBSERVATION_SLACK = 16;  // a list is compacted when longer than this plus twice its last compacted length
// If more writes of a location than this have an entry, compact_observations merges only observations of equal serials.
const u32 COMPACTED_WRITES = 8;
const u32 COMPACTED_GROUPS = 64;  // entries of the table in which equal observations are found; a power of two

// Shortens the list of observations of a location. Only writes of the location that still have an entry matter;
// `oldest` is the lowest of their serials. An observation that includes none of them is dropped. Observations of one
// warp that include the same of these writes are merged. The list must then double in length before it is compacted
// again, so the cost per observation is bounded.
FAR void compact_observations(Race* r, Ref* cell, Location* v, u32 oldest) {
    u32 writes[COMPACTED_WRITES], n = 0, kept = 0;
    Ref table[COMPACTED_GROUPS];
    LOOP for (u32 i = 0; i < COMPACTED_GROUPS; i++) table[i] = 0;
    LOOP for (Ref ref = *cell; ref && n <= COMPACTED_WRITES; ref = ((Entry*)arena_at(r, ref))->next) {
        Entry* e = (Entry*)arena_at(r, ref);
        if (e->kind & N_LOCATION || ~e->kind & (N_WRITE | N_STRONG) || !(e->bytes & v->bytes)) continue;
        if (n < COMPACTED_WRITES) writes[n] = e->serial;
        n++;
    }
    LOOP for (Ref* link = &v->observations; *link;) {
        Ref ref = *link;
        Observation* s = (Observation*)arena_at(r, ref);
        // How far back, in serials, the newest write that still has an entry lies from the last observed write.
        u32 distance = ~0u;
        LOOP for (u32 i = 0; i < n && n <= COMPACTED_WRITES; i++)
            if (s->last_serial - writes[i] < distance) distance = s->last_serial - writes[i];
        u32 useless = (s32)(s->last_serial - oldest) < 0;
        if (n <= COMPACTED_WRITES) {
            useless |= distance > s->last_serial - s->first_serial;
            s->last_serial -= useless ? 0 : distance;
        }
        Ref* group = &table[s->block * 33 + s->warp & COMPACTED_GROUPS - 1];
        Observation* other = *group ? (Observation*)arena_at(r, *group) : 0;
        if (!useless && other && other->op == s->op && other->block == s->block && other->warp == s->warp &&
            other->time == s->time && other->first_serial == s->first_serial && other->last_serial == s->last_serial) {
            other->lanes |= s->lanes;
            useless = 1;
        }
        if (useless) {
            *link = s->next;
            give_piece(r, ref, 0);
        } else {
            *group = ref;
            link = &s->next;
            kept++;
        }
    }
    v->observation_count = kept;
    v->observation_limit = 2 * kept + OBSERVATION_SLACK;
}

// Strong writes -------------------------------------------------------------------------------------------------------

// A new location for these bytes, at the front of the list of its line.
FN Location* new_location(Race* r, Ref* cell, u32 mask) {
    u32 size_class;
    Ref ref = take_piece(r, sizeof(Location), &size_class);
    Location* v = (Location*)arena_at(r, ref);
    v->bytes = mask;
    v->published = v->last_release = v->observations = v->op = v->block = v->kind = v->published_reads = 0;
    v->observation_count = 0;
    v->observation_limit = OBSERVATION_SLACK;
    v->next = *cell;
    *cell = ref;
    return v;
}

// Makes the current access, a strong write, the last write of the location `v`, or of a new location if `v` is null,
// and publishes at this location. `oldest` is the lowest serial of the strong writes of the line that still have an
// entry.
FAR void write_location(Access* access, Ref* cell, Location* v, u32 mask, u32 oldest) {
    Race* r = access->race;
    if (!v) v = new_location(r, cell, mask);
    u32 same_thread =
        same_block(access, v->op, v->block) && v->warp == access->warp && v->lanes == access->lane_bit;
    if (!same_thread && v->last_release) assign(r, &v->last_release, 0);
    u32 continues_chain = access->kind & N_ATOMIC && morally_strong(access, v);
    publish_reads(access, v, continues_chain);
    if (!continues_chain) {
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
    publish_write(access, v);
}
