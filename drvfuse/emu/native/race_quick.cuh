// SPDX-License-Identifier: Apache-2.0
// The race detector: the entries of a line, and the accesses that are over quickly.
//
// Nearly all accesses are plain, and find writes that are known to them and an entry that they can share: then there is
// nothing to judge, and what is to be remembered is a bit. Whatever else comes is left to `touch`, which decides anew:
// what has been done here by then is what it would have done.
#pragma once

#include "race_flags.cuh"

// Entries of neighbours are kept together, in chunks: lists that are spread over memory are slow to walk. A chunk is
// aligned to its size, begins with this header, and is in the list of its neighbourhood as long as any of its entries
// is free.
struct PoolChunk {
    u32 free;  // bits
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

// A common entry is about to be changed or linked behind: give this list one of its own.
FAR Entry* unshare(Race* r, Ref* pool, Ref* link) {
    Ref ref = take_entry(r, pool);
    Entry* e = (Entry*)at(r, ref);
    *e = *(Entry*)at(r, *link);
    e->kind &= ~N_COMMON;
    *link = ref;
    return e;
}

FN u32 line_mask(u64 addr, u64 end) {
    u64 base = addr & ~15ull;
    u32 first = (u32)(addr - base), last = end - base >= 16 ? 16 : (u32)(end - base);
    return (0xFFFFu << first) & (0xFFFFu >> (16 - last)) & 0xFFFF;
}

const u32 NOT_PLAIN = A_STRONG | A_ATOMIC | A_MBARRIER | A_BULK | A_MULTIMEM | A_VOLATILE | A_LATER | 0xFFu << UNREAD_SHIFT;

// A plain access of this thread, in one line.
struct Quick {
    Race* r;
    RaceBlock* rb;
    RaceThread* rt;
    u32 op, block, warp, bit, mask, spread, site;
    u32 read_only;  // by the read-only path, which need not see what the kernel itself has written
};

FN u32 own_warp(Quick* q, Entry* e) { return e->block == q->block && e->op == q->op && e->warp == q->warp; }

// Whether it is sure, at a glance, that an entry conflicts with no access of these bytes.
FN u32 surely_known(Quick* q, Entry* e, u32 both) {
    Certain* c = &q->r->certain[e->op % CERTAIN];
    if (c->clock == q->rt->clock && c->op == e->op && c->clock) return 1;
    if (e->op != q->op || e->block != q->block || q->read_only) return 0;
    return e->time < q->rb->sync || (e->warp == q->warp && lanes_at(e, both) == q->bit);
}

FN u32 joins(Quick* q, Entry* e, u32 kind, u32 size) {
    if (e->site != q->site || e->kind != kind || e->time != q->rt->time || e->size != size || !own_warp(q, e)) return 0;
    return shares(e, q->bit, q->mask, q->spread);
}

// Whether the entry `e` of an earlier access has to stay beside that of the plain write which is being made.
//
// Unless `strict`, threads of a block may store the same value to a word without an order between them. Such a store,
// made later, does not race with this write, but it may race with an earlier access of the block since its last
// barrier. If this write replaced the entry of that access, the race would be missed; so the entry stays.
//
// Two exceptions. Strong writes are replaced all the same, as what was seen of them is forgotten with their location.
// And a read by the writing thread itself is replaced where both were made at the same time: whoever knows of the one
// knows of the other, and a store that is not ordered behind the write is reported as a race with it.
FN u32 irreplaceable(Race* r, Entry* e, u32 op, u32 block, u32 sync) {
    if (r->strict || !(~e->kind & N_WRITE || e->kind & N_ASYNC || e->size == AFTER_READ)) return 0;
    return e->op == op && e->block == block && e->time >= sync;
}

// Whether only this lane of the warp has read, or read and written, these bytes at its present time.
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

// Takes bytes from an entry that does not need to tell of them any more; the link that is to be looked at next.
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

// Whether an older read of this warp is known: of this lane, or of others that a barrier of the warp has told of.
FN u32 known_of_warp(Quick* q, Entry* e, u32 both) {
    if (!own_warp(q, e) || e->time >= q->rt->time) return 0;
    u32 others = lanes_at(e, both) & ~q->bit;
    return !others || knows(q->r, q->rt->clock, q->op, q->block, q->warp, others, e->time) == 1;
}

// Of the reads that follow, those that the current one knows, which stands for them: as far as they are of other
// operations, and the next `own` of this one, which a write may have left (`irreplaceable`).
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

const u32 LOOK = 2;  // as a result: left to `touch`, which shall look at all reads

// The writes come first, and all are looked at; then some reads, for an entry to share. A list that begins with as many
// of this operation that cannot be shared is now and then looked at as a whole; not in step with anything, or some
// never were.
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

// 1 if the access has been judged and is remembered, 0 if not, or LOOK.
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
