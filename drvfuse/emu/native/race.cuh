// SPDX-License-Identifier: Apache-2.0
// The race detector: two accesses of the same bytes, at least one a write, must be ordered by happens-before, or both be
// strong with scopes that include each other. It judges by the edges that the PTX memory model gives, not by what the
// schedule made of it, so a race shows in every schedule in which both accesses are made.
//
// Edges (what each thread knows is a clock, clock.cuh):
//
//     release -> acquire  A strong write publishes at its location what its thread knows (release) or knew at its last
//                         fence (relaxed), for the scope of both. Atomics keep what was published there before if the
//                         write that they saw was morally strong; other writes drop it, except what the same thread
//                         released there. A strong read learns what is published where the scopes of both sides include
//                         each other: at once (acquire), or at the thread's next fence of a sufficient scope (relaxed).
//                         The read of a reduction does not, and a compare-and-swap that fails is a read only.
//     observation         A strong read saw the last strong write of its location, and those which that one continued
//                         as an atomic: they, and nothing else of their threads, precede all that knows the read.
//     barriers            of a block (sync, red; arrive contributes, but learns nothing), of a warp (bar.warp.sync) and of
//                         a cluster (race_cluster.cuh). Shuffles and votes order nothing.
//     operations          A launch knows from its start what the operations know that it waited for, and what the host
//                         knew when it was queued. With a programmatic dependency it knows the kernel in front of it
//                         only after griddepcontrol.wait. What it so knows counts as fenced at the scope of the system;
//                         its end is a release, and a fence, of all its threads.
//
// Unless `strict`, some things count that the model does not have but hardware does: a volatile read acquires, what
// other threads fenced (or read) before a barrier counts as fenced (or read) by each thread that passed it, and operations
// on mbarriers have at least the scope of the cluster. And a relaxed flag at the scope of the system tells of reads: when the
// kernel has ended that has seen it, all reads are complete that the flag's thread had made, or that barriers had told it
// of. All-reduces rely on that where their last barrier keeps inputs from being written too early.
//
// Bulk copies access memory by the async proxy. Of a bulk copy to global memory that reads what its block has written by
// ordinary stores or cp.async, a fence.proxy.async is asked for too, by any thread of the block that knew of the write.
// Such a fence on the way from the write to the copy is never missed; one beside that way counts as well.
//
// Memory that is bound to a multicast object has two kinds of address, its own and the object's. Where one of two accesses
// that conflict was made by the one and one by the other, and they are not morally strong, it is not enough that they are
// ordered: a fence.proxy.alias, of any thread, has to be on the way from the first to the second. Such a fence adds to what
// its thread knows, under the tag ALIASED, everything that it knows, and the tags spread as knowledge does. An operation that
// has ended as a whole needs none.
//
// The accesses of each 16 bytes (a line) are a list of entries, writes in front, from a cell (a Ref) in a window beside the
// data. An entry is dropped once a later access is ordered behind it that conflicts with everything that it conflicts with,
// so no first race is missed. Entries tell bytes apart. What keeps lists short, and most accesses cheap:
//
//     lanes      Plain accesses by lanes of a warp, at one time and place in the code, share an entry: where they are of the
//                same bytes, or where each lane has an element beside that of the lane before it (Entry::spread).
//     repeats    A plain access that finds only writes that it knows and an entry to share is over by then (race_quick.cuh).
//     counters   Each atomic of a chain of them on one word has seen those before it, so what knows it knows them. Of each
//                place in the code the last one of a block is kept, and the last one of any other: an access that is not
//                ordered behind the chain, or not strong enough for it, is not behind one of these two either.
//
// Unless `strict`, plain stores of one block that leave the bytes of a word as the ones before them did are no race among one
// another. That is seen after the store, when the thread enters the runtime again or suspends: till then it is in doubt.
// Accesses by others, and by other blocks, conflict with each of these stores. So such a store does not conflict with all that
// an access before it conflicts with, and must not take its place (`irreplaceable`).
#pragma once

#include "clock.cuh"

struct Entry {
    u32 op, block, time, lanes;
    unsigned short bytes;
    u8 warp : 5,
        size : 3;  // size: of a strong access (of each of its elements), log2; or MADE, OF_MBARRIER, AFTER_READ
    u8 kind;
    u32 site;
    Ref next;
    union {
        u32 serial;  // of a strong write: they are counted
        u32 spread;  // of a plain access by threads: 0 if all lanes accessed all bytes, else what spread_of gives
    };
};

// Not an access but the state of a location that was written strongly: the last such write, and
struct Location : Entry {
    Ref published;  // list of Published
    Ref released;   // what the last writer released here, for
    u32 released_scope;
    u32 first;                 // the write from which on there were only atomics, each of which saw the one before
    Ref seen;                  // list of Seen
    Ref reads;                 // of which strong writes at the scope of the system tell
    u32 seens, seens_allowed;  // their number, and that at which they are tidied
};

// A read, or atomic, of a location that saw the writes from `first` to `last`, of which the last was not known to it.
struct Seen {
    u32 op, block, warp, lanes, time, first, last;
    Ref next;
};

// What strong writes of one device have published at a location, for one scope.
struct Published {
    u32 device, scope;
    Ref clock;
    u32 op, block;  // of the last; of the only block, if the scope is that
    Ref last;       // what that block published
    Ref next;
    u32 old;  // the last published no more than what it knew when it started
};

static_assert(sizeof(Entry) == 32 && sizeof(Published) == 32 && sizeof(Location) == 64 && sizeof(Seen) == 32, "");

// Kinds of entries are the flags N_, and from bit N_SCOPE on the scope.
const u32 N_SCOPE = 4;
// Of a cp.async: between its issue and its thread's wait for it, the entry's block has the bit COPYING, so it counts as a
// thread that nobody has heard of, the issuing one included; then it has the bit N_COPIED. Either way it is not merged.
const u32 COPYING = 1 << 25;
// A bulk copy is a thread of its own for good, which its mbarrier tells of. A block numbers them: `warp` and `lanes` say
// which of BULK_KINDS, `time` in which round; `serial` is the thread that has issued it.
const u32 BULK = COPYING | 1 << 24, BULK_KINDS = 64;
const u32 VIA_MULTICAST = 1u << 31;  // or-ed to the site of an access by a multicast address
const u32 POLLED = 0x80000000u;      // of a cell: races are the protocol here
// As Entry::size: mbarrier.init or .inval; any other operation on an mbarrier; a plain write of what its thread has just read.
const u32 MADE = 6, OF_MBARRIER = 7, AFTER_READ = 1;
const u32 READERS_LOOKED_AT = 4;
const u32 POOL_CHUNK = 16;  // entries

// The access being judged: of a thread, or of a copy (without `rt`).
struct Who {
    Race* r;
    Launch* l;
    RaceBlock* rb;
    RaceThread* rt;
    u32 op, block, warp, bit, time, site, flags, kind, device, acquires, releases;
    u32 scope;   // of what it synchronises with; `kind` has that in which it is atomic
    u32 agent;   // its block, with COPYING or BULK or without
    u32 number;  // of a bulk copy
    u32 again;   // a poll that sees what the last one saw
    u32 plain;   // a weak access of a thread, to no mbarrier
    Ref clock, common;
    u64 addr, now;          // events so far
    u32 size, thread, log;  // log: Entry::size
};

// A line of which some bytes are polled: the cell has POLLED and a reference to this, or to nothing if all are.
struct PolledLine {
    u32 bytes;
    Ref list;  // of the accesses of the others
    u32 pad[6];
};

FN Ref* cell_at(Race* r, u64 addr) { return (Ref*)(r->cells + ((addr - r->window_base) >> LINE_SHIFT) * 4); }

// The list of a line; of the bytes *mask those that are not polled stay.
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

// Entry::spread: of lanes that have each accessed an element of n bytes, the one beside that of the lane before it:
// n << 16 | period << 8 | first. The first element of the line is that of lane `first`, counted modulo the period, so that
// the rows of a block of less than 32 columns share an entry too. 0: it is no element, or it is the line.
FN u32 spread_of(u32 lane, u32 mask) {
    u32 n = POPC(mask), at = FFS(mask) - 1;
    if (n > 8 || n & (n - 1) || at & (n - 1) || mask >> at != (1u << n) - 1) return 0;
    return n << 16 | 32 << 8 | (lane - at / n & 31);
}

// The lanes that have accessed any of these bytes, which are some of an entry's.
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

// Adds a plain access to an entry of the same warp, time, kind and place in the code, if the entry can tell of both.
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

// The number of a block's cluster in its launch.
FAR u32 cluster_of(Launch* l, u32 block) {
    u32 cx = l->cluster & 0xFF, cy = l->cluster >> 8 & 0xFF, cz = l->cluster >> 16 & 0xFF;
    u32 x = block % l->nctaid[0], y = block / l->nctaid[0] % l->nctaid[1], z = block / l->nctaid[0] / l->nctaid[1];
    return x / cx + l->nctaid[0] / cx * (y / cy + l->nctaid[1] / cy * (z / cz));
}

// Blocks without a cluster are clusters of one.
FN u32 same_cluster(Who* w, u32 op, u32 block) {
    if (op != w->op || !w->l || w->l->cluster_size < 2) return same_block(w, op, block);
    return cluster_of(w->l, block) == cluster_of(w->l, w->block);
}

// The narrowest scope that includes the thread of the current access and those of another block.
FN u32 scope_needed(Who* w, u32 op, u32 block) {
    if (same_block(w, op, block)) return SCOPE_CTA;
    if (same_cluster(w, op, block)) return SCOPE_CLUSTER;
    return w->r->ops[op].device == w->device ? SCOPE_GPU : SCOPE_SYS;
}

// Two accesses that may conflict without being a race.
FN u32 morally_strong(Who* w, Entry* e) {
    if (!(e->kind & w->kind & N_STRONG) || e->size != w->log) return 0;
    u32 need = scope_needed(w, e->op, e->block & ~BULK);
    return (e->kind >> N_SCOPE & 3) >= need && (w->kind >> N_SCOPE & 3) >= need;
}

// Or-ed to a block in a clock: not its accesses are known, but that its mbarriers were initialised (fence.mbarrier_init),
// or what it has read, or that a fence.proxy.alias has come behind its accesses.
const u32 INIT = 1 << 24, READS = INIT | 1 << 23, ALIASED = 1 << 23;

FN u32 via_multicast(u32 site) { return site != NO_SITE && site & VIA_MULTICAST; }
FN u32 plain_site(u32 site) { return site == NO_SITE ? site : site & ~VIA_MULTICAST; }

FN u32 ordered(Who* w, Entry* e, u32 lanes) {
    if (same_block(w, e->op, e->block)) {
        if (!w->rt || e->time < w->rb->sync) return 1;
    }
    if (knows(w->r, w->clock, e->op, e->block, e->warp, lanes, e->time) == 1) return 1;
    u32 how = !(e->kind & N_WRITE) ? READS : e->size == MADE && w->log == OF_MBARRIER ? INIT : 0;
    return how && !(e->block & BULK) && knows(w->r, w->clock, e->op, e->block | how, e->warp, lanes, e->time) == 1;
}
