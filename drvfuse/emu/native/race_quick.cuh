// SPDX-License-Identifier: Apache-2.0
// The race detector's part for entries of a line, and its quick way for simple accesses.
//
// Nearly all accesses are plain and find only writes that their thread knows, and an entry that they can share. Such an
// access needs no check, and is recorded by one bit. All other accesses are left to `touch`, which starts again: the
// changes that the quick way has made by then are those that `touch` would make.
#pragma once

#include "race_flags.cuh"

// Entries of adjacent lines lie together in chunks, as lists that are spread over memory are slow to walk. A chunk is
// aligned to its size and begins with this header. It is in the list of chunks of its part of the window while it has a
// free entry.
struct PoolChunk {
    u32 free;  // a bit for each entry
    Ref next;
    u32 pad[6];
};

static_assert(sizeof(PoolChunk) == sizeof(Entry) && CHUNK_ENTRIES == 16, "");

FAR void new_chunk(Race* r, Ref* pool) {
    u64 bytes = CHUNK_ENTRIES * sizeof(Entry), first = (r->arena_top + bytes - 1) & ~(bytes - 1);
    r->arena_top = first + bytes;
    if (r->arena_top + RESERVE > r->arena_bytes) r->exhausted = 1;
    *pool = (Ref)(first / 32);
    PoolChunk* c = (PoolChunk*)arena_at(r, *pool);
    c->free = (1 << CHUNK_ENTRIES) - 2;
    c->next = 0;
}

FN Ref take_entry(Race* r, Ref* pool) {
    if (!*pool) new_chunk(r, pool);
    PoolChunk* c = (PoolChunk*)arena_at(r, *pool);
    Ref ref = *pool + FFS(c->free) - 1;
    c->free &= c->free - 1;
    if (!c->free) *pool = c->next;
    return ref;
}

FN void give_entry(Race* r, Ref* pool, Ref ref) {
    Ref chunk = ref & ~(CHUNK_ENTRIES - 1);
    PoolChunk* c = (PoolChunk*)arena_at(r, chunk);
    if (!c->free) {
        c->next = *pool;
        *pool = chunk;
    }
    c->free |= 1 << (ref & CHUNK_ENTRIES - 1);
}

// Removes an entry or a location from its list.
FAR void drop_entry(Race* r, Ref* pool, Ref* link) {
    Ref ref = *link;
    Entry* e = (Entry*)arena_at(r, ref);
    *link = e->next;
    if (e->kind & N_LOCATION) {
        Location* v = (Location*)e;
        drop_published(r, v);
        release(r, v->last_release);
        release(r, v->published_reads);
    LOOP while (v->observations) {
            Ref seen = v->observations;
            v->observations = ((Observation*)arena_at(r, seen))->next;
            give_piece(r, seen, 0);
        }
        give_piece(r, ref, 1);
    } else if (!(e->kind & N_COMMON)) {
        give_entry(r, pool, ref);
    }
}

// Replaces an entry that many lists share by a copy, which can then be changed.
FAR Entry* unshare(Race* r, Ref* pool, Ref* link) {
    Ref ref = take_entry(r, pool);
    Entry* e = (Entry*)arena_at(r, ref);
    *e = *(Entry*)arena_at(r, *link);
    e->kind &= ~N_COMMON;
    *link = ref;
    return e;
}

const u32 NOT_PLAIN = A_STRONG | A_ATOMIC | A_MBARRIER | A_BULK | A_MULTIMEM | A_VOLATILE | A_LATER | 0xFFu << UNREAD_SHIFT;

// A plain access of a thread inside one line.
struct QuickAccess {
    Race* race;
    RaceBlock* block_state;
    RaceThread* thread_state;
    u32 op, block, warp, lane_bit, mask, spread, site;
    u32 read_only;  // by the read-only path, which may not see what the kernel itself has written
};

FN u32 own_warp(QuickAccess* access, Entry* e) { return e->block == access->block && e->op == access->op && e->warp == access->warp; }

// Whether a quick check shows that the thread knows the entry's accesses to the bytes `both`.
FN u32 surely_known(QuickAccess* access, Entry* e, u32 both) {
    KnownOp* c = &access->race->known_ops[e->op % KNOWN_OPS];
    if (c->clock == access->thread_state->clock && c->op == e->op && c->clock) return 1;
    if (e->op != access->op || e->block != access->block || access->read_only) return 0;
    return e->time < access->block_state->barrier_time || (e->warp == access->warp && lanes_at(e, both) == access->lane_bit);
}

// Adds the access to an entry if it can be shared. Returns 1 then.
FN u32 merge_access(QuickAccess* access, Entry* e, u32 kind, u32 size) {
    if (e->site != access->site || e->kind != kind || e->time != access->thread_state->time || e->variant != size || !own_warp(access, e)) return 0;
    return merge_lane(e, access->lane_bit, access->mask, access->spread);
}

// Whether the entry `e` of an earlier access has to stay in the list when the entry of the current plain write is
// added.
//
// Unless `strict`, threads of a block may store the same value to a word without an order between them. Such a store,
// made later, does not race with this write, but it may race with an earlier access of the block since its last
// barrier. If this write replaced the entry of that access, the race would be missed; so the entry stays.
//
// Two exceptions. Strong writes are replaced all the same, since the record of begin_access has seen them is dropped with their
// location. And a read by the writing thread itself is replaced if both were made at the same time: whoever knows one
// of them knows the other, and a store that is not ordered after the write is reported as a race with the write.
FN u32 irreplaceable(Race* r, Entry* e, u32 op, u32 block, u32 sync) {
    if (r->strict || !(~e->kind & N_WRITE || e->kind & N_ASYNC || e->variant == VARIANT_AFTER_READ)) return 0;
    return e->op == op && e->block == block && e->time >= sync;
}

// Whether there is an entry by which this lane has read all of these bytes, or read and written them, at its present
// time.
FN u32 read_by(Race* r, Ref ref, u32 op, u32 block, u32 warp, u32 bit, u32 time, u32 mask) {
    LOOP for (u32 i = 0; ref && i < 2 * CHECKED_READS && !r->strict; i++) {
        Entry* e = (Entry*)arena_at(r, ref);
        ref = e->next;
        if (e->op != op || e->block != block || e->warp != warp || e->time != time || mask & ~e->bytes) continue;
        if (e->kind && (e->kind != N_WRITE || e->variant != VARIANT_AFTER_READ)) continue;
        if (e->spread && POPC(mask) > e->spread >> 16) continue;
        if (lanes_at(e, mask) & bit) return 1;
    }
    return 0;
}

FN void add_plain(QuickAccess* access, Ref* pool, Ref* link, u32 kind, u32 size) {
    Ref ref = take_entry(access->race, pool);
    Entry* e = (Entry*)arena_at(access->race, ref);
    e->op = access->op;
    e->block = access->block;
    e->time = access->thread_state->time;
    e->lanes = access->lane_bit;
    e->bytes = (unsigned short)access->mask;
    e->warp = access->warp;
    e->variant = size;
    e->kind = (u8)kind;
    e->site = access->site;
    e->next = *link;
    e->spread = access->spread;
    *link = ref;
}

// Removes bytes from an entry, or the entry if no byte is left. Returns the link from which to continue in the list.
FN Ref* forget_bytes(Race* r, Ref* pool, Ref* link, u32 bytes) {
    Entry* e = (Entry*)arena_at(r, *link);
    if (bytes == e->bytes) {
        drop_entry(r, pool, link);
        return link;
    }
    if (bytes) {
        if (e->kind & N_COMMON) e = unshare(r, pool, link);
        e->lanes = lanes_at(e, e->bytes & ~bytes);
        e->bytes &= ~bytes;
    }
    return &e->next;
}

// Whether an older read of the thread's warp is known to it: a read of its own lane, or of lanes whose accesses a
// barrier of the warp has made known.
FN u32 known_of_warp(QuickAccess* access, Entry* e, u32 both) {
    if (!own_warp(access, e) || e->time >= access->thread_state->time) return 0;
    u32 others = lanes_at(e, both) & ~access->lane_bit;
    return !others || knows(access->race, access->thread_state->clock, access->op, access->block, access->warp, others, e->time);
}

// Drops the reads after `link` that the current read knows, since its entry replaces theirs. It covers reads of other
// operations, and the next `own` reads of the present one, which a write may have kept (`irreplaceable`).
FN void forget_outlived(QuickAccess* access, Ref* pool, Ref* link, u32 own) {
    LOOP while (*link) {
        Entry* e = (Entry*)arena_at(access->race, *link);
        if (e->kind & (N_STRONG | N_LOCATION) || via_multicast(e->site)) return;
        if (e->op == access->op && !own--) return;
        u32 both = e->bytes & access->mask;
        u32 known = both && (surely_known(access, e, both) || known_of_warp(access, e, both));
        if (both && !known && e->op != access->op) return;
        link = forget_bytes(access->race, pool, link, known ? both : 0);
    }
}

const u32 CHECK_ALL_READS = 2;  // a result: the access is left to `touch`, which has to check all reads of the list

// The quick way for a read. It checks all writes, which come first in the list, and then some reads, to find an entry
// to share. If there is none among them, it chooses at random, and rarely, to have the whole list checked; a fixed
// interval could miss some lists for ever.
FN u32 quick_read(QuickAccess* access, Ref* link, Ref* pool) {
    Entry* e = 0;
    u32 own = 0;
    LOOP while (*link) {
        e = (Entry*)arena_at(access->race, *link);
        if (~e->kind & N_WRITE) break;
        if (e->op == access->op && !access->race->strict) own = CHECKED_READS;
        if (via_multicast(e->site)) return 0;
        u32 both = e->bytes & access->mask;
        if (both && !surely_known(access, e, both)) return 0;
        if (e->kind & N_COMMON) e = unshare(access->race, pool, link);
        link = &e->next;
    }
    if (!e) return 0;
    Ref first = *link;
    LOOP for (u32 i = 0; first && i < CHECKED_READS; i++) {
        e = (Entry*)arena_at(access->race, first);
        if (e->kind & N_LOCATION) return 0;
        u32 bytes = e->bytes;
        if (merge_access(access, e, 0, 0)) {
            if (e->bytes != bytes) forget_outlived(access, pool, &e->next, own);
            return 1;
        }
        if (e->op != access->op) break;
        first = e->next;
    }
    if (*link && ((Entry*)arena_at(access->race, *link))->op == access->op) {
        access->race->random = access->race->random * 1664525 + 1013904223;
        if (access->race->random >> 26 == 0) return CHECK_ALL_READS;
    }
    add_plain(access, pool, link, 0, 0);
    forget_outlived(access, pool, &((Entry*)arena_at(access->race, *link))->next, own);
    return 1;
}

FN u32 quick_write(QuickAccess* access, Ref* cell, Ref* pool) {
    Entry* joined = 0;
    u32 n = 0, all = read_by(access->race, *cell, access->op, access->block, access->warp, access->lane_bit, access->thread_state->time, access->mask);
    u32 size = all ? VARIANT_AFTER_READ : 0;
    LOOP for (Ref* link = cell; *link;) {
        Entry* e = (Entry*)arena_at(access->race, *link);
        if (e->kind & N_LOCATION || via_multicast(e->site) || n++ == 2 * CHECKED_READS) return 0;
        u32 both = e->bytes & access->mask;
        if (both && !surely_known(access, e, both)) return 0;
        if (!joined && merge_access(access, e, N_WRITE, size)) {
            joined = e;
            link = &e->next;
        } else if (!all && irreplaceable(access->race, e, access->op, access->block, access->block_state->barrier_time)) {
            link = &e->next;
        } else {
            link = forget_bytes(access->race, pool, link, both);
        }
    }
    if (!joined) add_plain(access, pool, cell, N_WRITE, size);
    return 1;
}

// Tries the quick way. Returns 1 if the access is checked and recorded, else 0 or CHECK_ALL_READS.
FN u32 race_quick(Thread* t, u64 addr, u32 size, u32 flags, u32 site) {
    Launch* l = t->launch;
    Block* b = t->block;
    QuickAccess access;
    access.race = l->engine->race;
    if (access.race->doubt_count) settle_doubts(access.race);
    if (flags & NOT_PLAIN || size > 16 || l->cluster_size > 1 || access.race->exhausted) return 0;
    Ref *cell = cell_at(access.race, addr), *pool = pool_at(access.race, addr);
    if (*cell & UNCHECKED) return 0;
    u32 in_line = (u32)addr & 15;
    access.block_state = b->race;
    access.thread_state = race_thread(b, t->linear);
    access.op = l->op;
    access.block = b->index;
    access.warp = t->warp;
    access.lane_bit = 1u << t->lane;
    access.mask = ((1u << size) - 1) << in_line;
    access.spread = size > 8 ? 0 : size << 16 | 32 << 8 | (t->lane - in_line / size & 31);
    access.site = site;
    access.read_only = flags & A_NC;
    if (flags & A_WRITE) {
        access.race->change_count++;
        return quick_write(&access, cell, pool);
    }
    if (access.read_only && access.thread_state->clock != l->start) return 0;
    return quick_read(&access, cell, pool);
}
