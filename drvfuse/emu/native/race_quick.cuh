// SPDX-License-Identifier: Apache-2.0
// The quick way of the race detector, for simple accesses.
//
// Nearly all accesses are plain, happen after all writes that they find, and can share an entry. Such an access races
// with nothing, and is recorded by one bit in that entry. The quick way handles these accesses. It leaves all others to
// check_line (race_check.cuh), which checks them from the start. The changes that the quick way has made to the list by
// then are changes that check_line would make, too.
#pragma once

#include "race_list.cuh"

const u32 NOT_PLAIN =
    A_STRONG | A_ATOMIC | A_MBARRIER | A_BULK | A_MULTIMEM | A_VOLATILE | A_LATER | 0xFFu << UNREAD_SHIFT;

// A plain access of a thread inside one line. Members without a comment are as in Access.
struct QuickAccess {
    Race* race;
    RaceBlock* block_state;
    RaceThread* thread_state;
    u32 op, block, warp, lane_bit;
    u32 mask;    // the bytes of the line that it touches
    u32 spread;  // Entry::spread for the access
    u32 site;
    u32 read_only;  // not 0 for a load by the read-only path, which may miss earlier writes of its own kernel
};

FN u32 own_warp(QuickAccess* access, Entry* e) {
    return e->block == access->block && e->op == access->op && e->warp == access->warp;
}

// Whether a cheap check shows that the thread knows the entry's accesses to the bytes `overlap`.
FN u32 surely_known(QuickAccess* access, Entry* e, u32 overlap) {
    KnownOp* c = &access->race->known_ops[e->op % KNOWN_OPS];
    if (c->clock == access->thread_state->clock && c->op == e->op && c->clock) return 1;
    if (e->op != access->op || e->block != access->block || access->read_only) return 0;
    return e->time < access->block_state->barrier_time ||
           (e->warp == access->warp && lanes_at(e, overlap) == access->lane_bit);
}

// Adds the access to the entry `e` if the entry records accesses of the same kind, by the same warp and instruction, at
// the same time (clock.cuh), and if merge_lane can add the lane and its bytes to them. Returns 1 if it did.
FN u32 merge_access(QuickAccess* access, Entry* e, u32 kind, u32 variant) {
    if (e->site != access->site || e->kind != kind || e->time != access->thread_state->time || e->variant != variant ||
        !own_warp(access, e))
        return 0;
    return merge_lane(e, access->lane_bit, access->mask, access->spread);
}

// Entries that a write must keep --------------------------------------------------------------------------------------

// Whether the entry `e` has to stay in the list when a plain write of its bytes, by block `block` of operation `op`, is
// recorded. `barrier_time` is RaceBlock::barrier_time of that block.
//
// Unless `strict`, a later store of the block that does not change the word does not race with this write, but it may
// race with a read by the block that was made before this write and since the block's last barrier. If the write
// replaced the entry of that read, the race would be missed. So three kinds of entries stay: those of reads, those of
// asynchronous copies, and those of writes whose thread had read the bytes (VARIANT_AFTER_READ).
//
// For a write that itself has VARIANT_AFTER_READ, this function is not needed: the write replaces all entries of its
// bytes. Its thread has read the bytes at the same time (clock.cuh) as the write, so a clock includes both accesses or
// neither, and a store that is not ordered after the write is reported as a race with the write.
FN u32 irreplaceable(Race* r, Entry* e, u32 op, u32 block, u32 barrier_time) {
    if (r->strict || !(~e->kind & N_WRITE || e->kind & N_ASYNC || e->variant == VARIANT_AFTER_READ)) return 0;
    return e->op == op && e->block == block && e->time >= barrier_time;
}

// Whether one of the first entries of a list records that this lane has read all bytes of `mask` at its present time.
FN u32 read_by(Race* r, Ref ref, u32 op, u32 block, u32 warp, u32 lane_bit, u32 time, u32 mask) {
    LOOP for (u32 i = 0; ref && i < 2 * CHECKED_READS && !r->strict; i++) {
        Entry* e = (Entry*)arena_at(r, ref);
        ref = e->next;
        if (e->op != op || e->block != block || e->warp != warp || e->time != time || mask & ~e->bytes) continue;
        if (e->kind && (e->kind != N_WRITE || e->variant != VARIANT_AFTER_READ)) continue;
        if (e->spread && POPC(mask) > e->spread >> 16) continue;
        if (lanes_at(e, mask) & lane_bit) return 1;
    }
    return 0;
}

// Changes of the list -------------------------------------------------------------------------------------------------

// Makes an entry that describes the access, and inserts it into a list before the entry to which `link` refers.
FN void add_plain(QuickAccess* access, Ref* pool, Ref* link, u32 kind, u32 variant) {
    Ref ref = take_entry(access->race, pool);
    Entry* e = (Entry*)arena_at(access->race, ref);
    e->op = access->op;
    e->block = access->block;
    e->time = access->thread_state->time;
    e->lanes = access->lane_bit;
    e->bytes = (unsigned short)access->mask;
    e->warp = access->warp;
    e->variant = variant;
    e->kind = (u8)kind;
    e->site = access->site;
    e->next = *link;
    e->spread = access->spread;
    *link = ref;
}

// Whether the thread knows an older read by its own warp: a read of its own lane, or of lanes whose accesses a barrier
// of the warp has made known.
FN u32 known_of_warp(QuickAccess* access, Entry* e, u32 overlap) {
    if (!own_warp(access, e) || e->time >= access->thread_state->time) return 0;
    u32 others = lanes_at(e, overlap) & ~access->lane_bit;
    return !others || knows(access->race, access->thread_state->clock, access->op, access->block, access->warp, others, e->time);
}

// Drops the reads after `link` that the current thread knows, since its new read replaces them. Looks at reads by other
// operations, and at up to `own_count` reads by the present operation. `own_count` is 0 unless the list has a write of
// the present operation: such a write may have left older reads in the list (irreplaceable).
FN void forget_outlived(QuickAccess* access, Ref* pool, Ref* link, u32 own_count) {
    LOOP while (*link) {
        Entry* e = (Entry*)arena_at(access->race, *link);
        if (e->kind & (N_STRONG | N_LOCATION) || via_multicast(e->site)) return;
        if (e->op == access->op && !own_count--) return;
        u32 overlap = e->bytes & access->mask;
        u32 known = overlap && (surely_known(access, e, overlap) || known_of_warp(access, e, overlap));
        if (overlap && !known && e->op != access->op) return;
        link = forget_bytes(access->race, pool, link, known ? overlap : 0);
    }
}

// The quick way -------------------------------------------------------------------------------------------------------

// A result of quick_read and race_quick: the read is neither checked nor recorded. The caller has to call check_line,
// with a check of all reads of the list.
const u32 CHECK_ALL_READS = 2;

// Returns 1 with a probability of 1 in 64: then a read checks the whole list. A fixed interval could miss some lists
// for ever.
FN u32 draws_whole_list(Race* r) {
    r->random = r->random * 1664525 + 1013904223;
    return r->random >> 26 == 0;
}

// The quick way for a read: checks all writes, which come first in the list, and then looks for an entry to share among
// the first reads. If there is none, the read gets an entry of its own.
FN u32 quick_read(QuickAccess* access, Ref* link, Ref* pool) {
    Entry* e = 0;
    u32 own_count = 0;
    LOOP while (*link) {
        e = (Entry*)arena_at(access->race, *link);
        if (~e->kind & N_WRITE) break;
        if (e->op == access->op && !access->race->strict) own_count = CHECKED_READS;
        if (via_multicast(e->site)) return 0;
        u32 overlap = e->bytes & access->mask;
        if (overlap && !surely_known(access, e, overlap)) return 0;
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
            if (e->bytes != bytes) forget_outlived(access, pool, &e->next, own_count);
            return 1;
        }
        if (e->op != access->op) break;
        first = e->next;
    }
    if (*link && ((Entry*)arena_at(access->race, *link))->op == access->op) {
        if (draws_whole_list(access->race)) return CHECK_ALL_READS;
    }
    add_plain(access, pool, link, 0, 0);
    forget_outlived(access, pool, &((Entry*)arena_at(access->race, *link))->next, own_count);
    return 1;
}

// The quick way for a write: checks all entries and drops those that the write replaces.
FN u32 quick_write(QuickAccess* access, Ref* cell, Ref* pool) {
    Entry* shared = 0;
    u32 entry_count = 0, after_read = read_by(access->race, *cell, access->op, access->block, access->warp, access->lane_bit, access->thread_state->time, access->mask);
    u32 variant = after_read ? VARIANT_AFTER_READ : 0;
    LOOP for (Ref* link = cell; *link;) {
        Entry* e = (Entry*)arena_at(access->race, *link);
        if (e->kind & N_LOCATION || via_multicast(e->site) || entry_count++ == 2 * CHECKED_READS) return 0;
        u32 overlap = e->bytes & access->mask;
        if (overlap && !surely_known(access, e, overlap)) return 0;
        if (!shared && merge_access(access, e, N_WRITE, variant)) {
            shared = e;
            link = &e->next;
        } else if (!after_read && irreplaceable(access->race, e, access->op, access->block, access->block_state->barrier_time)) {
            link = &e->next;
        } else {
            link = forget_bytes(access->race, pool, link, overlap);
        }
    }
    if (!shared) add_plain(access, pool, cell, N_WRITE, variant);
    return 1;
}

// Tries the quick way for an access. Returns 1 if the access is checked and recorded. Otherwise the caller has to call
// check_line: after CHECK_ALL_READS with a check of all reads of the list, after 0 without.
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
