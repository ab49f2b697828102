// SPDX-License-Identifier: Apache-2.0
// The race detector. Two accesses to the same bytes, at least one of them a write, race unless happens-before orders
// them, or both are strong with scopes that include each other (morally strong). The detector uses the order that the
// PTX memory model gives, and not the order in which the schedule made the accesses. So a race is found in every
// schedule that makes both.
//
// What makes order. A thread knows of an access if the access happens before the thread's next access. What a thread
// knows is a clock (clock.cuh); in this file "published", "learns" and "knows" speak of clocks.
//
//     release -> acquire  A strong write publishes a clock at its location: for its scope what its thread knows, if it
//                         is a release, and for each scope up to its own what the thread knew at its last fence of at
//                         least that scope. An atomic keeps what was published there before if the write that it saw
//                         was morally strong. Any other write removes it, except what its thread released there. A
//                         strong read learns what is published at its location if the scopes of both sides include each
//                         other: at once if it is an acquire, else at its thread's next fence of a sufficient scope.
//                         The read of a reduction learns nothing. A compare-and-swap that fails is only a read.
//     observation         A strong read sees the last strong write of its location, and the writes that this write
//                         continued as an atomic. These writes, and no other access of their threads, happen before all
//                         accesses that the read happens before.
//     barriers            Barriers of a block (sync and red; a thread at an arrive publishes, but learns nothing), of a
//                         warp (bar.warp.sync) and of a cluster (race_cluster.cuh). Shuffles and votes order nothing.
//     operations          A launch knows from its start what the operations know that it waited for, and what the host
//                         knew when it queued the launch. A programmatic dependent knows the kernel in front of it only
//                         after griddepcontrol.wait. What a launch knows from its start counts as fenced at system
//                         scope. The end of a launch is a release, and a fence, by all its threads.
//
// Unless `strict`, some order counts that the model does not give but hardware does. A volatile read is an acquire.
// What a thread has fenced (or has read by relaxed loads) before a barrier counts as fenced (or read) by each thread
// that passes the barrier. Operations on mbarriers have at least cluster scope. And a relaxed flag of system scope
// publishes reads: the reads that the thread of the flag made before it, or knows by barriers, happen before the end of
// each kernel that has seen the flag. All-reduces whose last barrier keeps inputs from being written too early rely on
// that.
//
// Async proxy. Bulk copies access memory by the async proxy. If a bulk copy to global memory reads bytes that its block
// has written by ordinary stores or cp.async, order is not enough: a thread of the block that knew of the write must
// have executed a fence.proxy.async. Any such thread counts, even if its fence does not happen before the copy, so a
// few missing fences are not found; a fence that is there is never reported as missing.
//
// Multicast. Memory that is bound to a multicast object has two kinds of address: its own, and those of the object. If
// two conflicting accesses use different kinds, and are not morally strong, order is not enough: a fence.proxy.alias of
// any thread must come after the first and before the second in that order. Such a fence adds to its thread's clock a
// copy of all that the thread knows, with the tag ALIASED; tagged items are learnt as other items are. An operation
// that is known as a whole needs no such fence.
//
// Entries. The accesses to each 16 bytes (a line) are a list of entries, writes first. The head of the list is a cell
// (a Ref) in an area beside the data. Each entry has a mask of bytes. An entry is dropped when a later access is
// ordered after it and conflicts with every access with which the entry conflicts; so the first race on a byte is never
// missed. To keep lists short and most accesses cheap:
//
//     lanes      Plain accesses by lanes of a warp at one time and at one instruction share an entry if they touch the
//                same bytes, or if each lane touches an element next to the element of the lane before it
//                (Entry::spread).
//     repeats    A plain access that finds only writes that its thread knows, and an entry that it can share, needs no
//                further checks (race_quick.cuh).
//     counters   Each atomic in a chain of atomics on one word has seen the earlier ones, so whoever knows it knows
//                them. For each instruction, two entries of a chain are kept: the last atomic of the present block and
//                the last one of any other block. An access that is not ordered after the chain, or not strong enough,
//                conflicts with one of them.
//
// Equal values. Unless `strict`, plain stores of one block to the same word do not race with one another if the later
// store does not change the word. That is known only after the store, when the thread next enters the runtime or
// suspends; until then the pair is a doubt. Loads, and accesses of other blocks, do conflict with each of these stores.
// So the store may conflict with fewer accesses than an earlier access of its block does, and must not replace the
// entry of that access (`irreplaceable`).
#pragma once

#include "clock.cuh"

struct Entry {
    u32 op, block, time, lanes;
    unsigned short bytes;
    u8 warp : 5,
        size : 3;  // of a strong access: log2 of the bytes of each element; else 0, MADE, OF_MBARRIER or AFTER_READ
    u8 kind;
    u32 site;
    Ref next;
    union {
        u32 serial;  // of a strong write: its number among all strong writes
        u32 spread;  // of a plain access by threads: 0 if each lane accessed all of the bytes, else see spread_of
    };
};

// A location that was written by strong writes. It is in the list of its line, but is no access: the members of Entry
// describe the last strong write.
struct Location : Entry {
    Ref published;       // list of Published
    Ref released;        // the clock that the last writer published here by a release
    u32 released_scope;  // the scope of that release
    u32 first;  // serial of the write that began the chain: later writes were atomics, each of which saw the last
    Ref seen;   // list of Seen
    Ref reads;  // the clock of the reads that strong writes of system scope have published
    u32 seens, seens_allowed;  // the length of `seen`, and the length at which it is shortened
};

// A read or atomic of a location that saw the writes with the serials `first` to `last`, and did not know the last one
// before.
struct Seen {
    u32 op, block, warp, lanes, time, first, last;
    Ref next;
};

// What strong writes of one device have published at a location for one scope.
struct Published {
    u32 device, scope;
    Ref clock;
    u32 op, block;  // the block of the last of these writes
    Ref last;       // the part of `clock` that this block has published
    Ref next;
    u32 old;  // 1 if the last write published only what its launch knew at its start
};

static_assert(sizeof(Entry) == 32 && sizeof(Published) == 32 && sizeof(Location) == 64 && sizeof(Seen) == 32, "");

// Entry::kind has the flags N_ and, from bit N_SCOPE on, the scope.
const u32 N_SCOPE = 4;
// Bit of Entry::block for a cp.async between its issue and its thread's wait for it: no clock knows such a block, so
// the access is ordered with no other, not even of the same thread. After the wait, the entry has the flag N_COPIED
// instead. Neither is merged with other entries.
const u32 COPYING = 1 << 25;
// Bits of Entry::block for a bulk copy, which counts as a thread of its own that is known through its mbarrier. The
// bulk copies of a block are numbered: `warp` and `lanes` are the number modulo BULK_KINDS, `time` is the quotient plus
// 1. `serial` is the thread that issued the copy.
const u32 BULK = COPYING | 1 << 24, BULK_KINDS = 64;
const u32 VIA_MULTICAST = 1u << 31;  // or-ed to the site of an access by a multicast address
const u32 POLLED = 0x80000000u;      // bit of a cell: accesses to some bytes of the line are not checked
// Values of Entry::size: mbarrier.init or .inval; any other operation on an mbarrier; a plain write of bytes that its
// thread has read at the same time.
const u32 MADE = 6, OF_MBARRIER = 7, AFTER_READ = 1;
const u32 READERS_LOOKED_AT = 4;  // the number of reads at the front of a list that a read usually checks
const u32 POOL_CHUNK = 16;        // entries

// The access that is being checked: of a thread, or of a copy or fill (then `rt` is null).
struct Who {
    Race* r;
    Launch* l;
    RaceBlock* rb;
    RaceThread* rt;
    u32 op, block, warp, bit, time, site, flags, kind, device, acquires, releases;
    u32 scope;   // of acquire and release; the scope in `kind` is that in which the access is morally strong
    u32 agent;   // its block, with the bits COPYING or BULK where they apply
    u32 number;  // the number of a bulk copy in its block
    u32 again;   // 1 for a poll that sees the same value as the last poll
    u32 plain;   // 1 for a weak access of a thread that is no operation on an mbarrier
    Ref clock, common;
    u64 addr, now;          // now: the number of events so far
    u32 size, thread, log;  // log: the value for Entry::size
};

// A line with bytes that are not checked (rt_race_polled). Its cell has the bit POLLED and a reference to this
// structure, or to nothing if no byte of the line is checked.
struct PolledLine {
    u32 bytes;  // the bytes that are not checked
    Ref list;   // entries of the other bytes
    u32 pad[6];
};

FN Ref* cell_at(Race* r, u64 addr) { return (Ref*)(r->cells + ((addr - r->window_base) >> LINE_SHIFT) * 4); }

// The list of entries of a line. Removes the bytes that are not checked from *mask.
FN Ref* list_at(Race* r, u64 addr, u32* mask) {
    Ref* cell = cell_at(r, addr);
    if (!(*cell & POLLED)) return cell;
    if (*cell == POLLED) {
        *mask = 0;
        return cell;
    }
    PolledLine* line = (PolledLine*)at(r, *cell & ~POLLED);
    *mask &= ~line->bytes;
    return &line->list;
}

FN Ref* pool_at(Race* r, u64 addr) { return &r->pools[(addr - r->window_base) >> POOL_SHIFT]; }
FN u32 size_of_races(Launch* l) { return sizeof(RaceBlock) + l->threads * sizeof(RaceThread); }
FN RaceThread* race_thread(Block* b, u32 i) { return (RaceThread*)(b->race + 1) + i; }

// Entry::spread for an access to the bytes `mask` by one lane, where each lane accesses an element of n bytes next to
// the element of the lane before it: n << 16 | period << 8 | first. The first element of the line is accessed by lane
// `first` and by the lanes that differ from it by a multiple of the period; with a period below 32, rows of threads
// share an entry too. 0 if the bytes are no aligned element of 1 to 8 bytes.
FN u32 spread_of(u32 lane, u32 mask) {
    u32 n = POPC(mask), at = FFS(mask) - 1;
    if (n > 8 || n & (n - 1) || at & (n - 1) || mask >> at != (1u << n) - 1) return 0;
    return n << 16 | 32 << 8 | (lane - at / n & 31);
}

// The lanes of an entry that have accessed any of `bytes`, which are bytes of the entry.
FN u32 lanes_at(Entry* e, u32 bytes) {
    if (e->kind & (N_STRONG | N_ASYNC) || !e->spread) return e->lanes;
    u32 n = e->spread >> 16, period = e->spread >> 8 & 0xFF, lanes = 0;
    u32 each = period == 32 ? 1 : period == 16 ? 0x10001 : period == 8 ? 0x01010101 : 0x11111111;
    LOOP while (bytes) {
        u32 i = (FFS(bytes) - 1) / n, by = (e->spread & 0xFF) + i & 31;
        lanes |= by ? each << by | each >> 32 - by : each;
        bytes &= ~(((1u << n) - 1) << i * n);
    }
    return lanes & e->lanes;
}

// Adds a plain access to an entry of the same warp, time, kind and site, if one value of `spread` can describe both.
// Returns 1 then.
FN u32 shares(Entry* e, u32 bit, u32 mask, u32 spread) {
    if (e->bytes == mask && (!e->spread || !(e->lanes & (e->lanes - 1)))) {
        if (e->lanes != bit) e->spread = 0;
    } else if (e->spread != spread) {
        u32 n = spread >> 16, period = e->spread >> 8 & 0xFF, apart = e->spread - spread & 0x1F;
        if (!n || e->spread >> 16 != n) return 0;
        LOOP while (apart & (period - 1)) period >>= 1;
        if (period < 4 || period * n < 16) return 0;
        e->spread = e->spread & ~0xFF00u | period << 8;
    } else if (!spread) {
        return 0;
    }
    e->lanes |= bit;
    e->bytes |= (unsigned short)mask;
    return 1;
}

FN u32 same_block(Who* w, u32 op, u32 block) { return op == w->op && block == w->block; }

// The number, in its launch, of the cluster of a block.
FAR u32 cluster_of(Launch* l, u32 block) {
    u32 cx = l->cluster & 0xFF, cy = l->cluster >> 8 & 0xFF, cz = l->cluster >> 16 & 0xFF;
    u32 x = block % l->nctaid[0], y = block / l->nctaid[0] % l->nctaid[1], z = block / l->nctaid[0] / l->nctaid[1];
    return x / cx + l->nctaid[0] / cx * (y / cy + l->nctaid[1] / cy * (z / cz));
}

// Whether another block is in the cluster of the current access. Without clusters, each block is a cluster of one.
FN u32 same_cluster(Who* w, u32 op, u32 block) {
    if (op != w->op || !w->l || w->l->cluster_size < 2) return same_block(w, op, block);
    return cluster_of(w->l, block) == cluster_of(w->l, w->block);
}

// The narrowest scope that includes the thread of the current access and the threads of another block.
FN u32 scope_needed(Who* w, u32 op, u32 block) {
    if (same_block(w, op, block)) return SCOPE_CTA;
    if (same_cluster(w, op, block)) return SCOPE_CLUSTER;
    return w->r->ops[op].device == w->device ? SCOPE_GPU : SCOPE_SYS;
}

// Whether the current access and that of an entry are morally strong: then they are no race even without an order.
FN u32 morally_strong(Who* w, Entry* e) {
    if (!(e->kind & w->kind & N_STRONG) || e->size != w->log) return 0;
    u32 need = scope_needed(w, e->op, e->block & ~BULK);
    return (e->kind >> N_SCOPE & 3) >= need && (w->kind >> N_SCOPE & 3) >= need;
}

// Bits or-ed to the block of an item of a clock. The item then does not stand for all accesses of the block, but for
// its initialisations of mbarriers (INIT, by fence.mbarrier_init), for its reads (READS), or for its accesses that a
// fence.proxy.alias has followed (ALIASED).
const u32 INIT = 1 << 24, READS = INIT | 1 << 23, ALIASED = 1 << 23;

FN u32 via_multicast(u32 site) { return site != NO_SITE && site & VIA_MULTICAST; }
FN u32 plain_site(u32 site) { return site == NO_SITE ? site : site & ~VIA_MULTICAST; }

// Whether the accesses that these lanes made with an entry happen before the current access.
FN u32 ordered(Who* w, Entry* e, u32 lanes) {
    if (same_block(w, e->op, e->block)) {
        if (!w->rt || e->time < w->rb->sync) return 1;
    }
    if (knows(w->r, w->clock, e->op, e->block, e->warp, lanes, e->time) == 1) return 1;
    u32 how = !(e->kind & N_WRITE) ? READS : e->size == MADE && w->log == OF_MBARRIER ? INIT : 0;
    return how && !(e->block & BULK) && knows(w->r, w->clock, e->op, e->block | how, e->warp, lanes, e->time) == 1;
}
