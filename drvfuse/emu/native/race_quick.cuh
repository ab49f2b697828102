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

static_assert(sizeof(PoolChunk) == sizeof(Entry) && POOL_CHUNK == 16, "");

FAR void new_chunk(Race* r, Ref* pool) {
    u64 bytes = POOL_CHUNK * sizeof(Entry), first = (r->top + bytes - 1) & ~(bytes - 1);
    r->top = first + bytes;
    if (r->top + RESERVE > r->bytes) r->off = 1;
    *pool = (Ref)(first / 32);
    PoolChunk* c = (PoolChunk*)at(r, *pool);
    c->free = (1 << POOL_CHUNK) - 2;
    c->next = 0;
}

FN Ref take_entry(Race* r, Ref* pool) {
    if (!*pool) new_chunk(r, pool);
    PoolChunk* c = (PoolChunk*)at(r, *pool);
    Ref ref = *pool + FFS(c->free) - 1;
    c->free &= c->free - 1;
    if (!c->free) *pool = c->next;
    return ref;
}

FN void give_entry(Race* r, Ref* pool, Ref ref) {
    Ref chunk = ref & ~(POOL_CHUNK - 1);
    PoolChunk* c = (PoolChunk*)at(r, chunk);
    if (!c->free) {
        c->next = *pool;
        *pool = chunk;
    }
    c->free |= 1 << (ref & POOL_CHUNK - 1);
}

// Removes an entry or a location from its list.
FAR void drop(Race* r, Ref* pool, Ref* link) {
    Ref ref = *link;
    Entry* e = (Entry*)at(r, ref);
    *link = e->next;
    if (e->kind & N_LOCATION) {
        Location* v = (Location*)e;
        drop_published(r, v);
        release(r, v->released);
        release(r, v->reads);
    LOOP while (v->seen) {
            Ref seen = v->seen;
            v->seen = ((Seen*)at(r, seen))->next;
            give(r, seen, 0);
        }
        give(r, ref, 1);
    } else if (!(e->kind & N_COMMON)) {
        give_entry(r, pool, ref);
    }
}

// Replaces an entry that many lists share by a copy, which can then be changed.
FAR Entry* unshare(Race* r, Ref* pool, Ref* link) {
    Ref ref = take_entry(r, pool);
    Entry* e = (Entry*)at(r, ref);
    *e = *(Entry*)at(r, *link);
    e->kind &= ~N_COMMON;
    *link = ref;
    return e;
}

// The bytes from `addr` to `end` that lie in the line of `addr`, as a mask.
FN u32 line_mask(u64 addr, u64 end) {
    u64 base = addr & ~15ull;
    u32 first = (u32)(addr - base), last = end - base >= 16 ? 16 : (u32)(end - base);
    return (0xFFFFu << first) & (0xFFFFu >> (16 - last)) & 0xFFFF;
}

const u32 NOT_PLAIN = A_STRONG | A_ATOMIC | A_MBARRIER | A_BULK | A_MULTIMEM | A_VOLATILE | A_LATER | 0xFFu << UNREAD_SHIFT;

// A plain access of a thread inside one line.
struct Quick {
    Race* r;
    RaceBlock* rb;
    RaceThread* rt;
    u32 op, block, warp, bit, mask, spread, site;
    u32 read_only;  // by the read-only path, which may not see what the kernel itself has written
};

FN u32 own_warp(Quick* q, Entry* e) { return e->block == q->block && e->op == q->op && e->warp == q->warp; }

// Whether a quick check shows that the thread knows the entry's accesses to the bytes `both`.
FN u32 surely_known(Quick* q, Entry* e, u32 both) {
    Certain* c = &q->r->certain[e->op % CERTAIN];
    if (c->clock == q->rt->clock && c->op == e->op && c->clock) return 1;
    if (e->op != q->op || e->block != q->block || q->read_only) return 0;
    return e->time < q->rb->sync || (e->warp == q->warp && lanes_at(e, both) == q->bit);
}

// Adds the access to an entry if it can be shared. Returns 1 then.
FN u32 joins(Quick* q, Entry* e, u32 kind, u32 size) {
    if (e->site != q->site || e->kind != kind || e->time != q->rt->time || e->size != size || !own_warp(q, e)) return 0;
    return shares(e, q->bit, q->mask, q->spread);
}

// Whether the entry `e` of an earlier access has to stay in the list when the entry of the current plain write is
// added.
//
// Unless `strict`, threads of a block may store the same value to a word without an order between them. Such a store,
// made later, does not race with this write, but it may race with an earlier access of the block since its last
// barrier. If this write replaced the entry of that access, the race would be missed; so the entry stays.
//
// Two exceptions. Strong writes are replaced all the same, since the record of who has seen them is dropped with their
// location. And a read by the writing thread itself is replaced if both were made at the same time: whoever knows one
// of them knows the other, and a store that is not ordered after the write is reported as a race with the write.
FN u32 irreplaceable(Race* r, Entry* e, u32 op, u32 block, u32 sync) {
    if (r->strict || !(~e->kind & N_WRITE || e->kind & N_ASYNC || e->size == AFTER_READ)) return 0;
    return e->op == op && e->block == block && e->time >= sync;
}

// Whether there is an entry by which this lane has read all of these bytes, or read and written them, at its present
// time.
FN u32 read_by(Race* r, Ref ref, u32 op, u32 block, u32 warp, u32 bit, u32 time, u32 mask) {
    LOOP for (u32 i = 0; ref && i < 2 * READERS_LOOKED_AT && !r->strict; i++) {
        Entry* e = (Entry*)at(r, ref);
        ref = e->next;
        if (e->op != op || e->block != block || e->warp != warp || e->time != time || mask & ~e->bytes) continue;
        if (e->kind && (e->kind != N_WRITE || e->size != AFTER_READ)) continue;
        if (e->spread && POPC(mask) > e->spread >> 16) continue;
        if (lanes_at(e, mask) & bit) return 1;
    }
    return 0;
}

FN void add_plain(Quick* q, Ref* pool, Ref* link, u32 kind, u32 size) {
    Ref ref = take_entry(q->r, pool);
    Entry* e = (Entry*)at(q->r, ref);
    e->op = q->op;
    e->block = q->block;
    e->time = q->rt->time;
    e->lanes = q->bit;
    e->bytes = (unsigned short)q->mask;
    e->warp = q->warp;
    e->size = size;
    e->kind = (u8)kind;
    e->site = q->site;
    e->next = *link;
    e->spread = q->spread;
    *link = ref;
}

// Removes bytes from an entry, or the entry if no byte is left. Returns the link from which to continue in the list.
FN Ref* forget(Race* r, Ref* pool, Ref* link, u32 bytes) {
    Entry* e = (Entry*)at(r, *link);
    if (bytes == e->bytes) {
        drop(r, pool, link);
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
FN u32 known_of_warp(Quick* q, Entry* e, u32 both) {
    if (!own_warp(q, e) || e->time >= q->rt->time) return 0;
    u32 others = lanes_at(e, both) & ~q->bit;
    return !others || knows(q->r, q->rt->clock, q->op, q->block, q->warp, others, e->time) == 1;
}

// Drops the reads after `link` that the current read knows, since its entry replaces theirs. It covers reads of other
// operations, and the next `own` reads of the present one, which a write may have kept (`irreplaceable`).
FN void forget_outlived(Quick* q, Ref* pool, Ref* link, u32 own) {
    LOOP while (*link) {
        Entry* e = (Entry*)at(q->r, *link);
        if (e->kind & (N_STRONG | N_LOCATION) || via_multicast(e->site)) return;
        if (e->op == q->op && !own--) return;
        u32 both = e->bytes & q->mask;
        u32 known = both && (surely_known(q, e, both) || known_of_warp(q, e, both));
        if (both && !known && e->op != q->op) return;
        link = forget(q->r, pool, link, known ? both : 0);
    }
}

const u32 LOOK = 2;  // a result: the access is left to `touch`, which has to check all reads of the list

// The quick way for a read. It checks all writes, which come first in the list, and then some reads, to find an entry
// to share. If there is none among them, it chooses at random, and rarely, to have the whole list checked; a fixed
// interval could miss some lists for ever.
FN u32 quick_read(Quick* q, Ref* link, Ref* pool) {
    Entry* e = 0;
    u32 own = 0;
    LOOP while (*link) {
        e = (Entry*)at(q->r, *link);
        if (~e->kind & N_WRITE) break;
        if (e->op == q->op && !q->r->strict) own = READERS_LOOKED_AT;
        if (via_multicast(e->site)) return 0;
        u32 both = e->bytes & q->mask;
        if (both && !surely_known(q, e, both)) return 0;
        if (e->kind & N_COMMON) e = unshare(q->r, pool, link);
        link = &e->next;
    }
    if (!e) return 0;
    Ref first = *link;
    LOOP for (u32 i = 0; first && i < READERS_LOOKED_AT; i++) {
        e = (Entry*)at(q->r, first);
        if (e->kind & N_LOCATION) return 0;
        u32 bytes = e->bytes;
        if (joins(q, e, 0, 0)) {
            if (e->bytes != bytes) forget_outlived(q, pool, &e->next, own);
            return 1;
        }
        if (e->op != q->op) break;
        first = e->next;
    }
    if (*link && ((Entry*)at(q->r, *link))->op == q->op) {
        q->r->random = q->r->random * 1664525 + 1013904223;
        if (q->r->random >> 26 == 0) return LOOK;
    }
    add_plain(q, pool, link, 0, 0);
    forget_outlived(q, pool, &((Entry*)at(q->r, *link))->next, own);
    return 1;
}

FN u32 quick_write(Quick* q, Ref* cell, Ref* pool) {
    Entry* joined = 0;
    u32 n = 0, all = read_by(q->r, *cell, q->op, q->block, q->warp, q->bit, q->rt->time, q->mask);
    u32 size = all ? AFTER_READ : 0;
    LOOP for (Ref* link = cell; *link;) {
        Entry* e = (Entry*)at(q->r, *link);
        if (e->kind & N_LOCATION || via_multicast(e->site) || n++ == 2 * READERS_LOOKED_AT) return 0;
        u32 both = e->bytes & q->mask;
        if (both && !surely_known(q, e, both)) return 0;
        if (!joined && joins(q, e, N_WRITE, size)) {
            joined = e;
            link = &e->next;
        } else if (!all && irreplaceable(q->r, e, q->op, q->block, q->rb->sync)) {
            link = &e->next;
        } else {
            link = forget(q->r, pool, link, both);
        }
    }
    if (!joined) add_plain(q, pool, cell, N_WRITE, size);
    return 1;
}

// Tries the quick way. Returns 1 if the access is checked and recorded, else 0 or LOOK.
FN u32 race_quick(Thread* t, u64 addr, u32 size, u32 flags, u32 site) {
    Launch* l = t->launch;
    Block* b = t->block;
    Quick q;
    q.r = l->engine->race;
    if (q.r->doubts) settle_doubts(q.r);
    if (flags & NOT_PLAIN || size > 16 || l->cluster_size > 1 || q.r->off) return 0;
    Ref *cell = cell_at(q.r, addr), *pool = pool_at(q.r, addr);
    if (*cell & POLLED) return 0;
    u32 in_line = (u32)addr & 15;
    q.rb = b->race;
    q.rt = race_thread(b, t->linear);
    q.op = l->op;
    q.block = b->index;
    q.warp = t->warp;
    q.bit = 1u << t->lane;
    q.mask = ((1u << size) - 1) << in_line;
    q.spread = size > 8 ? 0 : size << 16 | 32 << 8 | (t->lane - in_line / size & 31);
    q.site = site;
    q.read_only = flags & A_NC;
    if (flags & A_WRITE) {
        q.r->stamp++;
        return quick_write(&q, cell, pool);
    }
    if (q.read_only && q.rt->clock != l->start) return 0;
    return quick_read(&q, cell, pool);
}
