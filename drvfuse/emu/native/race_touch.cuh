// SPDX-License-Identifier: Apache-2.0
// The race detector's check of an access against the entries of the same bytes, and the record of the access.
#pragma once

#include "race_quick.cuh"

// Whether the current access conflicts with every later access with which the entry's access conflicts, as far as their
// strength and kind of address decide that.
FN u32 covers_strength(Who* w, Entry* e) {
    if (!(w->kind & N_WRITE) && via_multicast(w->site) != via_multicast(e->site)) return 0;
    if (!(w->kind & N_STRONG)) return 1;
    return (e->kind & N_STRONG) && e->size == w->log && (e->kind >> N_SCOPE & 3) >= (w->kind >> N_SCOPE & 3);
}

// Whether a read by the read-only path may miss the write of an entry: that path may return what memory held when the
// launch began.
FN u32 stale(Who* w, Entry* e, u32 lanes) {
    if (!(w->flags & A_NC) || !(e->kind & N_WRITE)) return 0;
    if (knows(w->r, w->l->start, e->op, e->block, e->warp, lanes, e->time) == 1) return 0;
    return knows(w->r, w->l->primary, e->op, e->block, e->warp, lanes, e->time) != 1;
}

// Whether a bulk copy reads what its block has written by the generic proxy, without a fence.proxy.async in between.
FN u32 unfenced(Who* w, Entry* e, u32 lanes) {
    if (!(w->flags & A_BULK) || !same_block(w, e->op, e->block)) return 0;
    return knows(w->r, w->rb->proxied, e->op, e->block, e->warp, lanes, e->time) != 1;
}

// Whether the access of an entry used the other kind of address (race.cuh), without a fence.proxy.alias in between.
FN u32 unaliased(Who* w, Entry* e, u32 lanes) {
    if (via_multicast(w->site) == via_multicast(e->site) || morally_strong(w, e)) return 0;
    if (e->block & COPYING) return 0;  // clocks have no ALIASED items for copies
    u32 own = w->rt && same_block(w, e->op, e->block) && e->warp == w->warp && e->time < w->rt->aliased;
    if (own) lanes &= ~w->bit;
    return lanes && knows(w->r, w->clock, e->op, e->block | ALIASED, e->warp, lanes, e->time) != 1;
}

// If the current access is by a bulk copy, sets the members of its entry as BULK in race.cuh says.
FN void be_bulk(Who* w, Entry* e) {
    if ((w->agent & BULK) != BULK) return;
    e->warp = w->number % BULK_KINDS / 32;
    e->lanes = 1u << w->number % 32;
    e->time = 1 + w->number / BULK_KINDS;
    e->serial = w->thread;
}

// Whether two accesses are plain stores of one block, which are a race only if the second changes the bytes.
FN u32 doubtful(Who* w, Entry* e) {
    if (w->r->strict || !w->plain || !(w->kind & N_WRITE) || e->kind != N_WRITE || e->size) return 0;
    return same_block(w, e->op, e->block) && via_multicast(w->site) == via_multicast(e->site);
}

// Whether the entry of an atomic need not be kept, as the current atomic continues the chain of `v` (counters in
// race.cuh). *other is set when the last atomic of another block has been found, which is kept.
FN u32 outdated(Who* w, Location* v, Entry* e, u32* other) {
    if (!(e->kind & N_ATOMIC) || e->op != w->op || e->site != w->site || e->kind != w->kind) return 0;
    if (e->bytes != v->bytes || e->serial - v->first > v->serial - v->first) return 0;
    if (e->block == w->block) return 1;
    u32 met = *other;
    *other = 1;
    return met;
}

// Checks the current access to bytes of one line against the entries of the line, and records it.
FAR void touch(Who* w, u64 addr, u32 mask) {
    Race* r = w->r;
    Ref* cell = list_at(r, addr, &mask);
    if (!mask) return;
    Ref* pool = pool_at(r, addr);
    u32 write = w->kind & N_WRITE, own = w->agent == w->block;  // own: not asynchronous, so it can publish clocks
    u32 spread = w->plain ? spread_of(FFS(w->bit) - 1, mask) : 0;
    r->stamp += write;
    if (write && w->plain) w->log = read_by(r, *cell, w->op, w->block, w->warp, w->bit, w->time, mask) ? AFTER_READ : 0;
    Location *location = 0, *chain = 0;
    if (w->kind & N_STRONG && own) {
        u32 read = !write || (w->kind & N_ATOMIC);
    LOOP for (Ref ref = *cell; ref; ref = ((Entry*)at(r, ref))->next) {
            Entry* e = (Entry*)at(r, ref);
            if (!(e->kind & N_LOCATION) || !(e->bytes & mask)) continue;
            if (e->bytes == mask) location = (Location*)e;
            else if (read) missed(w, e->op, e->block, X_FLAG_SIZES, e->site, 0);
        }
        if (location && read) {
            if (!(w->flags & A_REDUCTION)) acquire(w, location);
            observe(w, location);
            if (write && morally_strong(w, location)) chain = location;
        }
    }
    Ref *link = cell, *behind = cell;  // behind: the link after all writes, where a read is inserted
    u32 merged = 0, locations = 0, oldest = r->serial + 1, other = 0;
    // A read checks all other reads of the list in three cases: when a read of another operation can be dropped, as
    // when a kernel is launched again; rarely and at random, since a fixed interval could miss some lists for ever; and
    // when it is a poll that sees the same value again, which then finds the entry of its warp. Otherwise polls would
    // make the list grow without bound.
    r->random = r->random * 1664525 + 1013904223;
    u32 readers = 0, looks_at_all = write || w->again || r->random >> 26 == 0;
    LOOP while (*link) {
        Entry* e = (Entry*)at(r, *link);
        u32 kind = e->kind, both = e->bytes & mask;
        if (kind & N_LOCATION) {
            locations |= both;
            link = behind = &e->next;
            continue;
        }
        if (!(kind & N_WRITE)) {
            if (!write && !looks_at_all && ++readers > READERS_LOOKED_AT) break;
        }
        u32 same_warp = same_block(w, e->op, e->block) && e->warp == w->warp;
        u32 lanes = both ? lanes_at(e, both) : e->lanes, others = same_warp ? lanes & ~w->bit : lanes;
        u32 known = !others;
        u32 alike = same_warp && w->plain && e->time == w->time && kind == w->kind && e->site == w->site && e->size == w->log;
        if (both && (write || kind & N_WRITE)) {
            if (!known) known = ordered(w, e, others);
            u64 at_addr = (addr & ~15ull) + FFS(both) - 1;
            if (!known) {
                if (morally_strong(w, e)) {
                    known = chain && outdated(w, chain, e, &other);
                } else if (!doubtful(w, e)) {
                    if (!observed(w, cell, e)) found(w, e, others, at_addr, 0);
                    known = 1;
                    alike = 0;
                } else {
                    doubt(w, e, others, at_addr, both);
                }
            } else if (stale(w, e, lanes)) {
                found(w, e, lanes, at_addr, X_READ_ONLY_PATH);
            } else if (unfenced(w, e, lanes)) {
                found(w, e, lanes, at_addr, X_PROXY);
            } else if (unaliased(w, e, lanes)) {
                found(w, e, lanes, at_addr, X_ALIAS);
            }
        }
        if (alike && !(kind & N_COMMON) && !merged && shares(e, w->bit, mask, spread)) {
            merged = 1;
            link = &e->next;
            if (kind & N_WRITE) behind = link;
            continue;
        }
        if (both) {
            if (!write && !(kind & N_WRITE)) {
                if (same_warp) {
                    if (e->time == w->time && kind == w->kind && e->bytes == mask && e->site == w->site && !merged && !w->plain) {
                        e->lanes |= w->bit;
                        merged = 1;
                        link = &e->next;
                        continue;
                    }
                    if (!known && (e->lanes & w->bit) && both == e->bytes && covers_strength(w, e)) e->lanes &= ~w->bit;
                } else if (e->op != w->op && covers_strength(w, e)) {
                    known = ordered(w, e, others);
                    looks_at_all |= known;
                }
            }
            if (write && w->plain && !w->log && irreplaceable(r, e, w->op, w->block, w->rb->sync)) known = 0;
            if (known && (write || !(kind & N_WRITE)) && covers_strength(w, e)) {
                if (both == e->bytes) {
                    drop(r, pool, link);
                    continue;
                }
                if (kind & N_COMMON) e = unshare(r, pool, link);
                e->lanes = lanes_at(e, e->bytes & ~both);
                e->bytes &= ~both;
            }
        }
        if (e->kind & N_COMMON) e = unshare(r, pool, link);
        link = &e->next;
        if (e->kind & N_WRITE) {
            behind = link;
            if ((e->kind & N_STRONG) && (s32)(e->serial - oldest) < 0) oldest = e->serial;
        }
    }
    if (write && locations) {  // other locations with these bytes have an older last write: drop them
        LOOP for (link = cell; *link;) {
            Entry* e = (Entry*)at(r, *link);
            if ((e->kind & N_LOCATION) && e->bytes & mask && e != location) drop(r, pool, link);
            else link = &e->next;
        }
    }
    if (write && (w->kind & N_STRONG)) r->serial++;
    if (!merged) {
        if (!*cell && w->common && mask == 0xFFFF) {
            *cell = w->common;
        } else {
            Ref ref = take_entry(r, pool);
            Entry* e = (Entry*)at(r, ref);
            Ref* to = write ? cell : behind;
            e->op = w->op;
            e->block = w->agent;
            e->time = w->time;
            e->lanes = w->bit;
            e->bytes = (unsigned short)mask;
            e->warp = w->warp;
            e->kind = (u8)w->kind;
            e->site = w->site;
            e->next = *to;
            e->size = w->log;
            if (w->kind & N_STRONG) e->serial = r->serial;
            else e->spread = spread;
            *to = ref;
            if (w->agent != w->block) be_bulk(w, e);
        }
    }
    if (write && (w->kind & N_STRONG) && own) write_location(w, cell, location, mask, oldest);
}

FN void touch_range(Who* w, u64 addr, u64 end) {
    LOOP while (addr < end) {
        touch(w, addr, line_mask(addr, end));
        addr = (addr & ~15ull) + 16;
    }
}

// Describes an access by a block as a whole, at its end.
FN void of_block(Who* w, Launch* l, Block* b) {
    w->r = l->engine->race;
    w->l = l;
    w->rb = b->race;
    w->rt = 0;
    w->op = l->op;
    w->block = w->agent = b->index;
    w->warp = w->thread = w->bit = w->time = w->scope = w->log = w->acquires = w->releases = w->flags = w->again = w->plain = 0;
    w->kind = N_WRITE;
    w->site = NO_SITE;
    w->device = l->device;
    w->clock = b->race->end;
    w->common = 0;
    w->now = l->engine->event_count;
}

// Describes an access by a thread. The caller adds what the access is.
FN void who(Who* w, Thread* t) {
    Launch* l = t->launch;
    Block* b = t->block;
    w->r = l->engine->race;
    if (w->r->doubts) settle_doubts(w->r);
    w->l = l;
    w->rb = b->race;
    w->rt = race_thread(b, t->linear);
    w->op = l->op;
    w->block = w->agent = b->index;
    w->warp = t->warp;
    w->bit = 1u << t->lane;
    w->time = w->rt->time;
    w->device = l->device;
    w->clock = w->rt->clock;
    w->common = 0;
    w->now = l->engine->event_count;
    w->thread = t->linear;
    w->again = l->engine->fruitless;
    w->plain = 0;
}

// For an access to the shared memory of another block of the cluster: checks that the start of that block is ordered
// before the access, by a barrier of the cluster for example.
FAR void race_other_block(Who* w, Thread* t, u64 addr) {
    u64 off = addr - t->block->cluster_shared_base;
    if (off >= w->l->cluster_window) return;
    Block* b = block_of_rank(w->l, t->block, (u32)(off >> CLUSTER_SHIFT));
    if (b == t->block || knows(w->r, w->clock, w->op, b->index, 31, 1, 0)) return;
    Entry e;
    e.op = w->op;
    e.block = b->index;
    e.time = e.warp = e.size = 0;
    e.lanes = 1;
    e.kind = N_WRITE;
    e.site = NO_SITE;
    found(w, &e, 1, addr, X_CLUSTER_START);
}

// Whether a compare-and-swap finds the value that it compares with. If not, it is only a read.
FN u32 swaps(Thread* t, u64 addr, u32 size) {
    return low_of(addr, size) == t->op_value && (size < 16 || high_of(addr, size) == t->op_seen);
}

// Checks and records an access of a thread, which is about to be made.
FAR void race_access(Thread* t, u64 addr, u32 size, u32 flags, u32 site) {
    u32 quick = race_quick(t, addr, size, flags, site);
    if (quick == 1) return;
    Who w;
    who(&w, t);
    if (w.r->off) return;
    w.again |= quick == LOOK;
    u32 order = flags >> ORDER_SHIFT & 3, strong = flags & A_STRONG, elements = flags >> ELEMENTS_SHIFT & 3;
    u32 unread = flags >> UNREAD_SHIFT;
    u32 writes = flags & (A_WRITE | A_ATOMIC);
    if (flags & A_SWAP && !swaps(t, addr, size)) writes = 0;
    w.site = flags & A_MULTIMEM ? site | VIA_MULTICAST : site;
    w.flags = flags;
    w.addr = addr;
    w.size = size;
    w.scope = strong ? flags >> SCOPE_SHIFT & 3 : 0;
    w.log = strong ? FFS(size >> elements) - 1 : 0;
    w.plain = !(flags & NOT_PLAIN);
    u32 atomic_in = w.scope;
    if (flags & A_MBARRIER) {
        w.log = strong ? OF_MBARRIER : MADE;
        if (strong && w.scope < SCOPE_CLUSTER) atomic_in = SCOPE_CLUSTER;
        if (!w.r->strict) w.scope = atomic_in;
    }
    w.kind = (writes ? N_WRITE : 0) | (flags & A_ATOMIC ? N_ATOMIC : 0) | (strong ? N_STRONG : 0) | atomic_in << N_SCOPE;
    w.acquires = order & ORDER_ACQUIRE;
    w.releases = order & ORDER_RELEASE;
    if ((flags & A_VOLATILE) && !w.r->strict) w.acquires = 1;
    u32 each = size >> elements;
    if (w.l->cluster_size > 1) race_other_block(&w, t, addr);
    LOOP for (u64 a = addr; a < addr + size; a += each, unread >>= 1)
        if (!(unread & 1)) touch_range(&w, a, a + each);
    if (w.releases && (w.kind & N_WRITE)) w.rt->time++;
}

// A fence of `scope` by a thread. `acquires`: it orders later accesses; `releases`: it orders earlier accesses.
FAR void race_fence(Thread* t, u32 scope, u32 acquires, u32 releases) {
    Who w;
    who(&w, t);
    Race* r = w.r;
    if (r->off) return;
    LOOP for (u32 k = 0; acquires && k <= scope; k++) {
        if (!w.rt->held[k]) continue;
        learn(r, &w.rt->clock, w.rt->held[k]);
        put(r, &w.rt->held[k], 0);
    }
    if (!releases) return;
    Ref all = all_known(&w);
    LOOP for (u32 k = 0; k <= scope; k++) put(r, &w.rt->fenced[k], retain(r, all));
    release(r, all);
    w.rt->time++;
}

// fence.proxy.async by a thread.
FAR void race_proxy_fence(Thread* t) {
    Who w;
    who(&w, t);
    if (w.r->off) return;
    Ref all = all_known(&w);
    learn(w.r, &w.rb->proxied, all);
    release(w.r, all);
    w.rt->time++;
}
