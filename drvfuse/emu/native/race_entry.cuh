// SPDX-License-Identifier: Apache-2.0
// The entries of the race detector: records of past accesses, and where they are kept.
//
// Each line of 16 bytes has a cell of 32 bits, in an area that is parallel to the data (Race::cells). A cell is the
// head of the list of the line's entries and locations: writes first, then reads, newest first. Each entry has a mask
// of the bytes that it touched.
//
// An entry is dropped when a later access is ordered after it and conflicts with every access with which the entry
// conflicts. So the first race on a byte is never missed. Three measures keep the lists short:
//
//     Lanes. Plain accesses by lanes of one warp, at one time and by one instruction, share an entry if they touch the
//     same bytes, or if each lane touches the element after that of the lane before (Entry::spread).
//
//     Repeats. A plain access needs no further check if its thread knows all writes that it finds, and if there is an
//     entry that it can share (race_quick.cuh).
//
//     Chains of atomics. Each atomic of a chain on one word has observed the earlier ones, so an access that is ordered
//     after an atomic of the chain is ordered after those before it. For each instruction, two entries of a chain are
//     kept: the last atomic of the present block, and the last one of any other block. An access that is not ordered
//     after the chain, or not strong enough, conflicts with one of the two.
#pragma once

#include "clock_join.cuh"

// One access, or the accesses of several lanes. It lies in a slab (race_list.cuh), near the entries of adjacent lines,
// until a later access replaces it, the memory is freed, or a new block gets the memory.
struct Entry {
    u32 op;                // the operation that made the access
    u32 block;             // its block, with AGENT_PENDING or AGENT_BULK for a copy
    u32 time;              // the time (clock.cuh) of the threads at the access
    u32 lanes;             // mask of the lanes that made it
    unsigned short bytes;  // mask of the bytes of the line that it touched
    u8 warp : 5,           // its warp
        variant : 3;       // of a strong access: log2 of an element's bytes; of an mbarrier or a plain access: VARIANT_
    u8 kind;               // flags N_ and, from bit ENTRY_SCOPE_SHIFT on, the scope
    u32 site;              // its instruction, or NO_SITE
    Ref next;              // the next entry or location of the line
    union {
        u32 serial;  // of a strong write: its number among all strong writes. Of a bulk copy: the issuing thread.
        u32 spread;  // of a plain access by threads: 0 if each lane touched all of `bytes`, else see spread_of
    };
};

// The state of bytes that strong writes of one size have written. A location is no access: its members of Entry
// describe the last strong write. The first strong write creates it. A write that overlaps it without having exactly
// its bytes drops it.
struct Location : Entry {
    Ref published;                             // list of Published
    Ref last_release;                          // the clock that the last writer published by a release, or 0
    u32 last_release_scope;                    // the scope of that release
    u32 chain_begin;                           // serial of the write that the chain of atomics continues
    Ref observations;                          // list of Observation
    Ref published_reads;                       // clock of the reads that strong writes of system scope have published
    u32 observation_count, observation_limit;  // the length of `observations`, and the length at which it is compacted
};

// Some lanes have observed, by a read or an atomic, the writes of a location with the serials `first_serial` to
// `last_serial`, and did not know the last of these before. This record is dropped with its location
// (race_observe.cuh).
struct Observation {
    u32 op, block, warp;  // who observed
    u32 lanes;            // mask of the lanes that observed the same writes
    u32 time;             // the time (clock.cuh) of these lanes when they observed the writes
    u32 first_serial, last_serial;
    Ref next;
};

// What strong writes have published at a location for one scope. There is one for each device that has published or,
// for SCOPE_CLUSTER and SCOPE_CTA, for each cluster or block.
struct Published {
    u32 device, scope;
    Ref clock;        // the join of the clocks that were published
    u32 op, block;    // the block that published last
    Ref block_clock;  // the part of `clock` that this block has published
    Ref next;
    u32 start_only;  // 1 if the clock published last was Launch::start, and thus includes nothing of the launch itself
};

static_assert(sizeof(Entry) == 32 && sizeof(Published) == 32 && sizeof(Location) == 64 && sizeof(Observation) == 32,
              "");

const u32 ENTRY_SCOPE_SHIFT = 4;

// Bit of Entry::block for a cp.async between its issue and its thread's wait for it. No clock has an item for such a
// block, so the access is ordered with no other access, not even with those of its own thread. The wait removes the bit
// and sets the flag N_COPIED. Lanes share neither the pending entry nor the one after the wait.
const u32 AGENT_PENDING = 1 << 25;

// Bits of Entry::block for a bulk copy. The copy counts as a thread of its own, whose accesses other threads learn
// through the copy's mbarrier. The bulk copies of a block are numbered. In the entries of copy n, `warp` and `lanes`
// stand for n % BULK_LANES, and `time` is n / BULK_LANES + 1. `serial` is the thread that issued the copy.
const u32 AGENT_BULK = AGENT_PENDING | 1 << 24, BULK_LANES = 64;

// Tags: bits of the block in the key of a clock's item. A tagged item covers only some accesses of the block. TAG_INIT:
// initialisations of mbarriers that a fence.mbarrier_init has followed. TAG_READS: reads. TAG_ALIASED: accesses that a
// fence.proxy.alias has followed.
const u32 TAG_INIT = 1 << 24, TAG_READS = TAG_INIT | 1 << 23, TAG_ALIASED = 1 << 23;

// Entry::variant of accesses that are not strong, or operate on an mbarrier. VARIANT_AFTER_READ: a plain write of bytes
// that its thread has read since the thread's time (clock.cuh) last grew.
const u32 VARIANT_AFTER_READ = 1;
const u32 VARIANT_MBARRIER_INIT = 6;  // mbarrier.init or .inval
const u32 VARIANT_MBARRIER = 7;       // any other operation on an mbarrier

const u32 VIA_MULTICAST = 1u << 31;  // bit of Entry::site: the access was made by a multicast address
const u32 CHECKED_READS = 4;         // a read is usually compared with only this many reads, the first of its line
const u32 SLAB_ENTRIES = 16;         // the number of entries of a slab (race_list.cuh), its header included

FN u32 via_multicast(u32 site) { return site != NO_SITE && site & VIA_MULTICAST; }
FN u32 plain_site(u32 site) { return site == NO_SITE ? site : site & ~VIA_MULTICAST; }

// Lines ---------------------------------------------------------------------------------------------------------------

const u32 UNCHECKED = 0x80000000u;  // bit of a cell: some bytes of the line are not checked

// A line with bytes that are not checked, because a protocol accesses them without an order, on purpose
// (rt_race_polled). The line's cell has the bit UNCHECKED and the Ref of this structure. If no byte of the line is
// checked, the Ref is 0 and there is no structure.
struct UncheckedLine {
    u32 bytes;  // mask of the bytes that are not checked
    Ref list;   // the list of the entries of the line's other bytes
    u32 pad[6];
};

FN Ref* cell_at(Race* r, u64 addr) { return (Ref*)(r->cells + ((addr - r->window_base) >> LINE_SHIFT) * 4); }

// Returns the head of the list of a line's entries. Clears those bits of *mask whose bytes are not checked.
FN Ref* list_at(Race* r, u64 addr, u32* mask) {
    Ref* cell = cell_at(r, addr);
    if (!(*cell & UNCHECKED)) return cell;
    if (*cell == UNCHECKED) {
        *mask = 0;
        return cell;
    }
    UncheckedLine* line = (UncheckedLine*)arena_at(r, *cell & ~UNCHECKED);
    *mask &= ~line->bytes;
    return &line->list;
}

// Returns the head of the list of slabs (race_list.cuh) from which entries for the memory around `addr` are taken.
FN Ref* pool_at(Race* r, u64 addr) { return &r->pools[(addr - r->window_base) >> POOL_SHIFT]; }

// The bytes from `addr` to `end` that lie in the line of `addr`, as a mask.
FN u32 line_mask(u64 addr, u64 end) {
    u64 base = addr & ~15ull;
    u32 first = (u32)(addr - base), last = end - base >= 16 ? 16 : (u32)(end - base);
    return (0xFFFFu << first) & (0xFFFFu >> (16 - last)) & 0xFFFF;
}

// Lanes ---------------------------------------------------------------------------------------------------------------

// Returns Entry::spread for an access to the bytes `mask` by one lane, or 0 if `mask` is no aligned element of 1, 2, 4
// or 8 bytes. The format is n << 16 | period << 8 | first: adjacent lanes touch adjacent elements of n bytes. The first
// element of the line belongs to lane `first`, and to the lanes that differ from it by a multiple of `period`. The
// period is 32 for one lane; merge_lane reduces it when several lanes touch the same element.
FN u32 spread_of(u32 lane, u32 mask) {
    u32 n = POPC(mask), first = FFS(mask) - 1;
    if (n > 8 || n & (n - 1) || first & (n - 1) || mask >> first != (1u << n) - 1) return 0;
    return n << 16 | 32 << 8 | (lane - first / n & 31);
}

// The lanes of an entry that have accessed any of `bytes`. These must be bytes of the entry.
FN u32 lanes_at(Entry* e, u32 bytes) {
    if (e->kind & (N_STRONG | N_ASYNC) || !e->spread) return e->lanes;
    u32 n = e->spread >> 16, period = e->spread >> 8 & 0xFF, lanes = 0;
    u32 each = period == 32 ? 1 : period == 16 ? 0x10001 : period == 8 ? 0x01010101 : 0x11111111;
    LOOP while (bytes) {
        u32 i = (FFS(bytes) - 1) / n, lane = (e->spread & 0xFF) + i & 31;
        lanes |= lane ? each << lane | each >> 32 - lane : each;
        bytes &= ~(((1u << n) - 1) << i * n);
    }
    return lanes & e->lanes;
}

// Adds a plain access by one lane to an entry of the same warp, time, kind and site, if one value of `spread` can
// describe both. Returns 1 if it did.
FN u32 merge_lane(Entry* e, u32 lane_bit, u32 mask, u32 spread) {
    if (e->bytes == mask && (!e->spread || !(e->lanes & (e->lanes - 1)))) {
        if (e->lanes != lane_bit) e->spread = 0;
    } else if (e->spread != spread) {
        u32 n = spread >> 16, period = e->spread >> 8 & 0xFF, distance = e->spread - spread & 0x1F;
        if (!n || e->spread >> 16 != n) return 0;
        LOOP while (distance & (period - 1)) period >>= 1;
        if (period < 4 || period * n < 16) return 0;
        e->spread = e->spread & ~0xFF00u | period << 8;
    } else if (!spread) {
        return 0;
    }
    e->lanes |= lane_bit;
    e->bytes |= (unsigned short)mask;
    return 1;
}
