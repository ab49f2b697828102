// SPDX-License-Identifier: Apache-2.0
// The race detector: two accesses of the same bytes, at least one a write, must be ordered by happens-before, or both be
// strong with scopes that include each other. It judges by the edges that the PTX memory model gives, not by what the
// schedule made of it, so a race shows in every schedule in which both accesses are made.
//
// Edges (what each thread knows is a clock, runtime_clock.cuh):
//
//     release -> acquire  A strong write publishes at its location what its thread knows (release) or knew at its last
//                         fence (relaxed), for the scope of both. Atomics keep what was published there before if the
//                         write that they saw was morally strong; other writes drop it, except what the same thread
//                         released there. A strong read learns what is published where the scopes of both sides include
//                         each other: at once (acquire), or at the thread's next fence of a sufficient scope (relaxed).
//                         The read of a reduction does not, and a compare-and-swap that fails is a read only.
//     observation         A strong read saw the last strong write of its location, and those which that one continued
//                         as an atomic: they, and nothing else of their threads, precede all that knows the read.
//     barriers            of a block (sync, red; arrive contributes, but learns nothing) and of a warp (bar.warp.sync).
//                         Shuffles and votes order nothing.
//     operations          A launch knows from its start what the operations know that it waited for, and what the host
//                         knew when it was queued. With a programmatic dependency it knows the kernel in front of it
//                         only after griddepcontrol.wait. Its end is a release of all its threads.
//
// Unless `strict`, two things count that the model does not have but hardware does: a volatile read acquires, and what
// other threads fenced (or read) before a barrier counts as fenced (or read) by each thread that passed it.
//
// The accesses of each 16 bytes are a list of entries, writes in front, from a cell (a Ref) in a window beside the data. An
// entry is dropped once a later access is ordered behind it that conflicts with everything that it conflicts with, so no
// first race is missed. Entries tell bytes apart; reads by lanes of a warp at one time share one.
#pragma once

#include "runtime_clock.cuh"

struct RaceThread {
    Ref clock;
    u32 time;
    // By scope (block, GPU, system): known at the last fence of at least that scope; read, and learnt at the next fence of
    // at least that scope.
    Ref fenced[3], held[3];
};

// A flag of another block that was seen without learning from it, and what it would have told.
struct Miss {
    u32 op, block, edge, store_site, load_site;
    Ref clock;
};

const u32 MISSES = 8;

struct RaceBlock {
    u32 sync;  // all its accesses before this time are known to all its threads
    Ref end;   // known to its threads that have exited
    Ref arrived[16];
    u32 misses, reserved;
    Miss miss[MISSES];
};

struct Entry {
    u32 op, block, time, lanes;
    unsigned short bytes;
    u8 warp : 5, size : 3;  // size: of a strong access (of each of its elements), log2
    u8 kind;
    u32 site;
    Ref next;
    u32 serial;  // of a strong write: they are counted
};

// Not an access but the state of a location that was written strongly: the last such write, and
struct Location : Entry {
    Ref published;       // list of Published
    Ref released;        // what the last writer released here, for
    u32 released_scope;
    u32 first;           // the write from which on there were only atomics, each of which saw the one before
    Ref seen;            // list of Seen
    u32 pad[3];
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
    u32 reserved;
};

static_assert(sizeof(RaceThread) == 32 && sizeof(RaceBlock) == 272 && sizeof(Entry) == 32, "");
static_assert(sizeof(Published) == 32 && sizeof(Location) == 64 && sizeof(Seen) == 32, "");

// Kinds of entries. COMMON: shared by many cells, never changed, the last of its list.
const u32 N_WRITE = 1, N_STRONG = 2, N_ATOMIC = 4, N_LOCATION = 8, N_SCOPE = 4, N_COMMON = 0x40;
const u32 POLLED = 0x80000000u;  // of a cell: races are the protocol here
const u32 READERS_LOOKED_AT = 4;
const u32 POOL = 10;         // shift: bytes of the window whose entries lie together
const u32 POOL_GROWTH = 16;  // entries
const u32 NO_SITE = 0xFFFFFFFFu;

// Why two accesses are not ordered.
enum { X_NONE, X_BARRIER, X_WARP, X_RELEASED_EARLIER, X_RELAXED_STORE, X_RELAXED_LOAD, X_STORE_SCOPE, X_LOAD_SCOPE,
       X_GDC_WAIT, X_ORDER, X_READ_ONLY_PATH, X_STRONG_SCOPES, X_STRONG_SIZES, X_FLAG_SIZES };

// The access being judged: of a thread, or of a copy (without `rt`).
struct Who {
    Race* r;
    Launch* l;
    RaceBlock* rb;
    RaceThread* rt;
    u32 op, block, warp, bit, time, site, flags, kind, device, scope, acquires, releases;
    Ref clock, common;
    u64 addr, now;  // events so far
    u32 size, thread, log;  // log: Entry::size
};

FN Ref* cell_at(Race* r, u64 addr) { return (Ref*)(r->cells + ((addr - r->window_base) >> 4) * 4); }
FN Ref* pool_at(Race* r, u64 addr) { return &r->pools[(addr - r->window_base) >> POOL]; }
FN u32 level(u32 scope) { return scope < SCOPE_GPU ? 0 : scope - 1; }
FN u32 size_of_races(Launch* l) { return sizeof(RaceBlock) + l->threads * sizeof(RaceThread); }
FN RaceThread* race_thread(Block* b, u32 i) { return (RaceThread*)(b->race + 1) + i; }

// 1 if strong accesses by these two are within each other's scope.
FN u32 include(u32 same_block, u32 same_device, u32 a, u32 b) {
    u32 need = same_block ? 0 : same_device ? 1 : 2;
    return level(a) >= need && level(b) >= need;
}

FN u32 same_block(Who* w, u32 op, u32 block) { return op == w->op && block == w->block; }

// Two accesses that may conflict without being a race.
FN u32 morally_strong(Who* w, Entry* e) {
    if (!(e->kind & w->kind & N_STRONG) || e->size != w->log) return 0;
    u32 local = w->r->ops[e->op].device == w->device;
    return include(same_block(w, e->op, e->block), local, e->kind >> N_SCOPE & 3, w->scope);
}

FN u32 ordered(Who* w, Entry* e, u32 lanes) {
    if (same_block(w, e->op, e->block)) {
        if (!w->rt || e->time < w->rb->sync) return 1;
    }
    return knows(w->r, w->clock, e->op, e->block, e->warp, lanes, e->time) == 1;
}

FAR void missed(Who* w, u32 op, u32 block, u32 edge, u32 store_site, Ref what) {
    Race* r = w->r;
    RaceBlock* b = w->rb;
    Miss* m = 0;
    if (!b) return;
    LOOP for (u32 i = 0; i < MISSES && !m; i++)
        if (b->miss[i].op == op && b->miss[i].block == block && b->miss[i].edge == edge) m = &b->miss[i];
    if (!m) {
        m = &b->miss[b->misses++ % MISSES];
        m->op = op;
        m->block = block;
        m->edge = edge;
        m->store_site = store_site;
        m->load_site = w->site;
    }
    if (m->clock != what) put(r, &m->clock, retain(r, what));
}

// What would have ordered the current access behind an entry; its sites, if a flag was seen.
FAR u32 missing_edge(Who* w, Entry* e, Found* f) {
    if (e->kind & w->kind & N_STRONG) return e->size == w->log ? X_STRONG_SCOPES : X_STRONG_SIZES;
    if (same_block(w, e->op, e->block)) return e->warp == w->warp ? X_WARP : X_BARRIER;
    if (!w->rt) return X_ORDER;
    // A flag that would have told of it, else any flag of that block.
    LOOP for (u32 i = 0; i < 2 * MISSES; i++) {
        Miss* m = &w->rb->miss[i % MISSES];
        if (!m->op) continue;
        if (i < MISSES ? knows(w->r, m->clock, e->op, e->block, e->warp, f->other_lanes, e->time) == 1
                       : m->op == e->op && m->block == e->block) {
            f->store_op = m->op;
            f->store_site = m->store_site;
            f->load_site = m->load_site;
            return m->edge;
        }
    }
    Op* ops = w->r->ops;
    if (ops[w->op].primary == e->op || ops[e->op].primary == w->op) return X_GDC_WAIT;
    if (knows(w->r, w->clock, e->op, e->block, e->warp, e->lanes, e->time) == 2) return X_RELEASED_EARLIER;
    return e->op == w->op ? X_NONE : X_ORDER;
}

FAR void found(Who* w, Entry* e, u32 lanes, u64 addr, u32 edge) {
    Race* r = w->r;
    LOOP for (u32 i = 0; i < r->found_count; i++) {
        Found* f = &r->found[i];
        if (f->op == w->op && f->site == w->site && f->other_op == e->op && f->other_site == e->site) return;
    }
    if (r->found_count == FOUND) return;
    Found* f = &r->found[r->found_count++];
    u32 unordered = 0;
    LOOP for (u32 rest = lanes; rest; rest &= rest - 1)
        if (!ordered(w, e, rest & -rest)) unordered |= rest & -rest;
    f->other_lanes = unordered ? unordered : lanes;
    f->store_op = 0;
    f->store_site = f->load_site = NO_SITE;
    f->edge = edge ? edge : missing_edge(w, e, f);
    f->addr = addr;
    f->events = w->now;
    f->size = w->size;
    f->op = w->op;
    f->block = w->block;
    f->thread = w->thread;
    f->site = w->site;
    f->flags = w->kind;
    f->other_op = e->op;
    f->other_block = e->block;
    f->other_warp = e->warp;
    f->other_site = e->site;
    f->other_flags = e->kind;
}

// Publishing ----------------------------------------------------------------------------------------------------------------

FAR void drop_published(Race* r, Location* v) {
    LOOP while (v->published) {
        Published* p = (Published*)at(r, v->published);
        Ref next = p->next;
        release(r, p->clock);
        release(r, p->last);
        give(r, v->published, 0);
        v->published = next;
    }
}

FAR void publish(Who* w, Location* v, u32 scope, Ref what) {
    Race* r = w->r;
    Published* p = 0;
    LOOP for (Ref ref = v->published; ref; ref = p->next) {
        p = (Published*)at(r, ref);
        if (p->device == w->device && p->scope == scope && (scope || same_block(w, p->op, p->block))) {
            learn(r, &p->clock, what);
            if (same_block(w, p->op, p->block)) learn(r, &p->last, what);
            else put(r, &p->last, retain(r, what));
            p->op = w->op;
            p->block = w->block;
            return;
        }
    }
    u32 klass;
    Ref ref = take(r, sizeof(Published), &klass);
    p = (Published*)at(r, ref);
    p->device = w->device;
    p->scope = scope;
    p->clock = retain(r, what);
    p->last = retain(r, what);
    p->op = w->op;
    p->block = w->block;
    p->next = v->published;
    v->published = ref;
}

// What the thread knows, its own accesses up to now included (a new reference).
FN Ref all_known(Who* w) {
    return with_items(w->r, w->rt->clock, w->op, w->block, w->rb->sync, w->warp, w->bit, w->rt->time + 1);
}

// A strong read sees a location that was last written by what is published there.
FAR void acquire(Who* w, Location* v) {
    Race* r = w->r;
    u32 published = same_block(w, v->op, v->block);
    LOOP for (Ref ref = v->published; ref;) {
        Published* p = (Published*)at(r, ref);
        ref = p->next;
        if (p->op == v->op && p->block == v->block) published = 1;
        u32 own = same_block(w, p->op, p->block), local = p->device == w->device;
        u32 need = local ? 1 : 2, theirs = p->scope, ours = level(w->scope);
        Ref what = theirs >= need && ours >= need ? p->clock : own ? p->last : 0;
        if (!what) {
            missed(w, p->op, p->block, theirs < need ? X_STORE_SCOPE : X_LOAD_SCOPE, v->site, p->clock);
        } else if (w->acquires) {
            learn(r, &w->rt->clock, what);
        } else {
            if (!own) missed(w, p->op, p->block, X_RELAXED_LOAD, v->site, p->clock);
            if (own) learn(r, &w->rt->held[0], p->last);
            if (what == p->clock) learn(r, &w->rt->held[need], what);
        }
    }
    if (!published) missed(w, v->op, v->block, X_RELAXED_STORE, v->site, 0);
    w->clock = w->rt->clock;
}

// A strong read sees the last write of a location: notes that, unless it is known to it and to all behind it anyway.
FAR void observe(Who* w, Location* v) {
    Race* r = w->r;
    if (!morally_strong(w, v) || ordered(w, v, v->lanes)) return;
    if (same_block(w, v->op, v->block) && v->warp == w->warp && v->lanes == w->bit) return;
    Seen* alike = 0;
    LOOP for (Ref* link = &v->seen; *link;) {
        Seen* s = (Seen*)at(r, *link);
        if (same_block(w, s->op, s->block) && s->warp == w->warp && s->first == v->first) {
            if (s->last == v->serial && s->lanes & w->bit) return;
            if (s->time == w->time) {
                if (s->last == v->serial) alike = s;
                else s->lanes &= ~w->bit;
            }
            if (!s->lanes) {
                Ref ref = *link;
                *link = s->next;
                give(r, ref, 0);
                continue;
            }
        }
        link = &s->next;
    }
    if (alike) {
        alike->lanes |= w->bit;
        return;
    }
    u32 klass;
    Ref ref = take(r, sizeof(Seen), &klass);
    Seen* s = (Seen*)at(r, ref);
    s->op = w->op;
    s->block = w->block;
    s->warp = w->warp;
    s->lanes = w->bit;
    s->time = w->time;
    s->first = v->first;
    s->last = v->serial;
    s->next = v->seen;
    v->seen = ref;
}

// A write was seen by a read that this thread made, or knows.
FAR u32 observed(Who* w, Ref* cell, Entry* e) {
    Race* r = w->r;
    if (~e->kind & (N_WRITE | N_STRONG)) return 0;
    LOOP for (Ref ref = *cell; ref; ref = ((Entry*)at(r, ref))->next) {
        Location* v = (Location*)at(r, ref);
        if (!(v->kind & N_LOCATION) || !(v->bytes & e->bytes)) continue;
        LOOP for (Ref next = v->seen; next;) {
            Seen* s = (Seen*)at(r, next);
            next = s->next;
            if (e->serial - s->first > s->last - s->first) continue;
            if (same_block(w, s->op, s->block) && (s->time < w->rb->sync || (s->warp == w->warp && s->lanes & w->bit)))
                return 1;
            LOOP for (u32 rest = s->lanes; rest; rest &= rest - 1)
                if (knows(r, w->clock, s->op, s->block, s->warp, rest & -rest, s->time) == 1) return 1;
        }
    }
    return 0;
}

// Forgets what was seen of a location before the write `oldest`.
FAR void drop_seen(Race* r, Location* v, u32 oldest) {
    LOOP for (Ref* link = &v->seen; *link;) {
        Ref ref = *link;
        Seen* s = (Seen*)at(r, ref);
        if ((s32)(s->last - oldest) < 0) {
            *link = s->next;
            give(r, ref, 0);
        } else {
            link = &s->next;
        }
    }
}

// A strong write to the location `v`, or to a new one. `oldest`: of the strong writes that are not known to all later ones.
FAR void write_location(Who* w, Ref* cell, Location* v, u32 mask, u32 oldest) {
    Race* r = w->r;
    RaceThread* t = w->rt;
    if (!v) {
        u32 klass;
        Ref ref = take(r, sizeof(Location), &klass);
        v = (Location*)at(r, ref);
        v->bytes = mask;
        v->published = v->released = v->seen = v->op = v->block = v->kind = 0;
        v->next = *cell;
        *cell = ref;
    }
    u32 mine = same_block(w, v->op, v->block) && v->warp == w->warp && v->lanes == w->bit;
    if (!mine && v->released) put(r, &v->released, 0);
    if (!(w->kind & N_ATOMIC) || !morally_strong(w, v)) {
        v->first = r->serial;
        drop_published(r, v);
        if (v->released) publish(w, v, v->released_scope, v->released);
    }
    if (v->seen) drop_seen(r, v, oldest);
    v->op = w->op;
    v->block = w->block;
    v->warp = w->warp;
    v->lanes = w->bit;
    v->time = w->time;
    v->size = w->log;
    v->kind = (u8)(N_LOCATION | N_STRONG | w->scope << N_SCOPE);
    v->site = w->site;
    v->serial = r->serial;
    u32 scope = level(w->scope);
    LOOP for (u32 k = 0; k <= scope; k++)
        if (t->fenced[k]) publish(w, v, k, t->fenced[k]);
    if (w->releases) {
        Ref all = all_known(w);
        publish(w, v, scope, all);
        put(r, &v->released, all);
        v->released_scope = scope;
    }
}

// Accesses -----------------------------------------------------------------------------------------------------------------

// Entries of neighbours are kept together: lists that are spread over memory are slow to walk.
FAR void fill_pool(Race* r, Ref* pool) {
    u32 klass;
    Ref first = take(r, POOL_GROWTH * sizeof(Entry), &klass);
    LOOP for (u32 i = 0; i < POOL_GROWTH; i++) *(Ref*)at(r, first + i) = i + 1 < POOL_GROWTH ? first + i + 1 : 0;
    *pool = first;
}

FN Ref take_entry(Race* r, Ref* pool) {
    if (!*pool) fill_pool(r, pool);
    Ref ref = *pool;
    *pool = *(Ref*)at(r, ref);
    return ref;
}

FAR void drop(Race* r, Ref* pool, Ref* link) {
    Ref ref = *link;
    Entry* e = (Entry*)at(r, ref);
    *link = e->next;
    if (e->kind & N_LOCATION) {
        Location* v = (Location*)e;
        drop_published(r, v);
        release(r, v->released);
        LOOP while (v->seen) {
            Ref seen = v->seen;
            v->seen = ((Seen*)at(r, seen))->next;
            give(r, seen, 0);
        }
        give(r, ref, 1);
    } else if (!(e->kind & N_COMMON)) {
        *(Ref*)e = *pool;
        *pool = ref;
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

FN u32 covers_strength(Who* w, Entry* e) {
    if (!(w->kind & N_STRONG)) return 1;
    return (e->kind & N_STRONG) && e->size == w->log && level(e->kind >> N_SCOPE & 3) >= level(w->scope);
}

// The read-only path may hold what was there when the launch began.
FN u32 stale(Who* w, Entry* e) {
    if (!(w->flags & A_NC) || !(e->kind & N_WRITE)) return 0;
    if (knows(w->r, w->l->start, e->op, e->block, e->warp, e->lanes, e->time) == 1) return 0;
    return knows(w->r, w->l->primary, e->op, e->block, e->warp, e->lanes, e->time) != 1;
}

FAR void touch(Who* w, u64 addr, u32 mask) {
    Race* r = w->r;
    Ref* cell = cell_at(r, addr);
    if (*cell & POLLED) return;
    Ref* pool = pool_at(r, addr);
    u32 write = w->kind & N_WRITE;
    Location* location = 0;
    if (w->kind & N_STRONG) {
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
        }
    }
    Ref *link = cell, *behind = cell;  // reads are put there: behind all writes
    u32 merged = 0, locations = 0, oldest = r->serial + 1;
    // A read looks at all other ones where one of another operation can be dropped, as when a kernel comes anew, and now and
    // then; not in step with anything, or some lists would never be looked at.
    r->random = r->random * 1664525 + 1013904223;
    u32 readers = 0, looks_at_all = write || r->random >> 26 == 0;
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
        u32 others = same_warp ? e->lanes & ~w->bit : e->lanes;
        u32 known = !others;
        if (both) {
            if (write || (kind & N_WRITE)) {
                if (!known) known = ordered(w, e, others);
                u64 at_addr = (addr & ~15ull) + FFS(both) - 1;
                if (!known) {
                    if (!morally_strong(w, e)) {
                        if (!observed(w, cell, e)) found(w, e, others, at_addr, 0);
                        known = 1;
                    }
                } else if (stale(w, e)) {
                    found(w, e, e->lanes, at_addr, X_READ_ONLY_PATH);
                }
            } else if (same_warp) {
                if (e->time == w->time && kind == w->kind && e->bytes == mask && e->site == w->site) {
                    e->lanes |= w->bit;
                    merged = 1;
                    link = &e->next;
                    continue;
                }
                if (!known && (e->lanes & w->bit) && both == e->bytes && covers_strength(w, e)) e->lanes = others;
            } else if (e->op != w->op && covers_strength(w, e)) {
                known = ordered(w, e, others);
                looks_at_all |= known;
            }
            if (known && (write || !(kind & N_WRITE)) && covers_strength(w, e)) {
                if (both == e->bytes) {
                    drop(r, pool, link);
                    continue;
                }
                if (kind & N_COMMON) e = unshare(r, pool, link);
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
    if (write && locations) {  // the last write of other locations is not a strong one of theirs any more
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
            e->block = w->block;
            e->time = w->time;
            e->lanes = w->bit;
            e->bytes = (unsigned short)mask;
            e->warp = w->warp;
            e->kind = (u8)w->kind;
            e->site = w->site;
            e->next = *to;
            e->size = w->log;
            e->serial = r->serial;
            *to = ref;
        }
    }
    if (write && (w->kind & N_STRONG)) write_location(w, cell, location, mask, oldest);
}

FN u32 line_mask(u64 addr, u64 end) {
    u64 base = addr & ~15ull;
    u32 first = (u32)(addr - base), last = end - base >= 16 ? 16 : (u32)(end - base);
    return (0xFFFFu << first) & (0xFFFFu >> (16 - last)) & 0xFFFF;
}

FN void touch_range(Who* w, u64 addr, u64 end) {
    LOOP while (addr < end) {
        touch(w, addr, line_mask(addr, end));
        addr = (addr & ~15ull) + 16;
    }
}

FN void who(Who* w, Thread* t) {
    Launch* l = t->launch;
    Block* b = t->block;
    w->r = l->engine->race;
    w->l = l;
    w->rb = b->race;
    w->rt = race_thread(b, t->linear);
    w->op = l->op;
    w->block = b->index;
    w->warp = t->warp;
    w->bit = 1u << t->lane;
    w->time = w->rt->time;
    w->device = l->device;
    w->clock = w->rt->clock;
    w->common = 0;
    w->now = l->engine->event_count;
    w->thread = t->linear;
}

// A compare-and-swap that finds what it compares with: else it is a read.
FN u32 swaps(Thread* t, u64 addr, u32 size) {
    return low_of(addr, size) == t->op_value && (size < 16 || high_of(addr, size) == t->op_seen);
}

FAR void race_access(Thread* t, u64 addr, u32 size, u32 flags, u32 site) {
    Who w;
    who(&w, t);
    if (w.r->off) return;
    u32 order = flags >> A_ORDER & 3, strong = flags & A_STRONG, elements = strong ? flags >> A_ELEMENTS & 3 : 0;
    u32 writes = flags & (A_WRITE | A_ATOMIC);
    if (flags & A_SWAP && !swaps(t, addr, size)) writes = 0;
    w.site = site;
    w.flags = flags;
    w.addr = addr;
    w.size = size;
    w.scope = strong ? flags >> A_SCOPE & 3 : 0;
    w.log = strong ? FFS(size >> elements) - 1 : 0;
    w.kind = (writes ? N_WRITE : 0) | (flags & A_ATOMIC ? N_ATOMIC : 0) |
             (strong ? N_STRONG : 0) | w.scope << N_SCOPE;
    w.acquires = order & ORDER_ACQUIRE;
    w.releases = order & ORDER_RELEASE;
    if ((flags & A_VOLATILE) && !w.r->strict) w.acquires = 1;
    u32 each = size >> elements;
    LOOP for (u64 a = addr; a < addr + size; a += each) touch_range(&w, a, a + each);
    if (w.releases && (w.kind & N_WRITE)) w.rt->time++;
}

// A fence of `scope` that orders what came before it (releases) and after it (acquires).
FAR void race_fence(Thread* t, u32 scope, u32 acquires, u32 releases) {
    Who w;
    who(&w, t);
    Race* r = w.r;
    if (r->off) return;
    LOOP for (u32 k = 0; acquires && k <= level(scope); k++) {
        if (!w.rt->held[k]) continue;
        learn(r, &w.rt->clock, w.rt->held[k]);
        put(r, &w.rt->held[k], 0);
    }
    if (!releases) return;
    Ref all = all_known(&w);
    LOOP for (u32 k = 0; k <= level(scope); k++) put(r, &w.rt->fenced[k], retain(r, all));
    release(r, all);
    w.rt->time++;
}

// Blocks, barriers ----------------------------------------------------------------------------------------------------------

FAR void race_clear(Race* r, u64 addr, u64 nbytes) {
    LOOP for (u64 a = addr & ~15ull; a < addr + nbytes; a += 16) {
        Ref* cell = cell_at(r, a);
        if (!*cell) continue;
        *cell &= ~POLLED;
        LOOP while (*cell) drop(r, pool_at(r, a), cell);
    }
}

FAR void race_start_block(Launch* l, Block* b, u32 slot) {
    Race* r = l->engine->race;
    RaceBlock* rb = b->race = (RaceBlock*)(l->races + (u64)slot * size_of_races(l));
    rb->sync = 1;
    rb->end = 0;
    rb->misses = 0;
    LOOP for (u32 i = 0; i < 16; i++) rb->arrived[i] = 0;
    LOOP for (u32 i = 0; i < MISSES; i++) rb->miss[i].op = rb->miss[i].clock = 0;
    LOOP for (u32 i = 0; i < l->threads; i++) {
        RaceThread* t = race_thread(b, i);
        t->clock = retain(r, l->start);
        t->time = 1;
        LOOP for (u32 k = 0; k < 3; k++) t->fenced[k] = t->held[k] = 0;
    }
    race_clear(r, b->shared_base, l->shared_bytes);
}

FAR void race_exit(Thread* t) {
    Race* r = t->launch->engine->race;
    RaceThread* rt = race_thread(t->block, t->linear);
    learn(r, &t->block->race->end, rt->clock);
    put(r, &rt->clock, 0);
    LOOP for (u32 k = 0; k < 3; k++) {
        put(r, &rt->fenced[k], 0);
        put(r, &rt->held[k], 0);
    }
}

FAR void race_finish_block(Launch* l, Block* b) {
    Race* r = l->engine->race;
    learn(r, &l->end, b->race->end);
    put(r, &b->race->end, 0);
    LOOP for (u32 i = 0; i < 16; i++) put(r, &b->race->arrived[i], 0);
    LOOP for (u32 i = 0; i < MISSES; i++) put(r, &b->race->miss[i].clock, 0);
}

FAR void race_gdc_wait(Thread* t) {
    Launch* l = t->launch;
    learn(l->engine->race, &race_thread(t->block, t->linear)->clock, l->primary);
}

// These lanes of a warp meet others: what they know goes to *known; the latest of their times.
FAR u32 race_meet(Race* r, Block* b, u32 w, u32 lanes, Ref* known, Ref* fenced, Ref* held, u32 share) {
    u32 last = 0;
    LOOP for (u32 rest = lanes; rest; rest &= rest - 1) {
        RaceThread* t = race_thread(b, w * 32 + FFS(rest) - 1);
        if (t->time > last) last = t->time;
        if (t->clock != *known) learn(r, known, t->clock);
        if (!share) continue;
        LOOP for (u32 k = 0; k < 3; k++) {
            if (t->fenced[k] != fenced[k]) learn(r, &fenced[k], t->fenced[k]);
            if (t->held[k] != held[k]) learn(r, &held[k], t->held[k]);
        }
    }
    return last;
}

// And go on together.
FAR void race_part(Race* r, Block* b, u32 w, u32 lanes, u32 time, Ref known, Ref* fenced, Ref* held, u32 share) {
    LOOP for (u32 rest = lanes; rest; rest &= rest - 1) {
        RaceThread* t = race_thread(b, w * 32 + FFS(rest) - 1);
        t->time = time;
        if (t->clock != known) put(r, &t->clock, retain(r, known));
        if (!share) continue;
        LOOP for (u32 k = 0; k < 3; k++) {
            if (t->fenced[k] != fenced[k]) put(r, &t->fenced[k], retain(r, fenced[k]));
            if (t->held[k] != held[k]) put(r, &t->held[k], retain(r, held[k]));
        }
    }
}

FN void learn_lanes(Race* r, Launch* l, Block* b, Ref* known, u32 w, u32 lanes, u32 time) {
    put(r, known, with_items(r, *known, l->op, b->index, b->race->sync, w, lanes, time));
}

FAR void race_warp_sync(Launch* l, Block* b, u32 w, u32 lanes) {
    Race* r = l->engine->race;
    Ref known = 0, none[3] = {0, 0, 0};
    u32 time = race_meet(r, b, w, lanes, &known, none, none, 0) + 1;
    learn_lanes(r, l, b, &known, w, lanes, time);
    race_part(r, b, w, lanes, time, known, none, none, 0);
    release(r, known);
}

// Lanes of a warp have arrived at a barrier and do not wait for it.
FAR void race_arrive(Launch* l, Block* b, u32 id, u32 w, u32 lanes) {
    Race* r = l->engine->race;
    Ref* known = &b->race->arrived[id];
    Ref none[3] = {0, 0, 0};
    u32 time = race_meet(r, b, w, lanes, known, none, none, 0) + 1;
    learn_lanes(r, l, b, known, w, lanes, time);
    LOOP for (u32 rest = lanes; rest; rest &= rest - 1) race_thread(b, w * 32 + FFS(rest) - 1)->time = time;
}

// The lanes of a warp that wait at a barrier.
FN u32 waiting_at(Launch* l, Block* b, u32 id, u32 w) {
    u32 lanes = b->warps[w].barrier & ~b->warps[w].gathered;
    LOOP for (u32 rest = lanes; rest; rest &= rest - 1)
        if (thread_at(l, b, w * 32 + FFS(rest) - 1)->op_a != id) lanes &= ~(1u << (FFS(rest) - 1));
    return lanes;
}

// Before a barrier's threads go on. `all`: they are all of the block that are left.
FAR void race_barrier(Launch* l, Block* b, u32 id, u32 all) {
    Race* r = l->engine->race;
    RaceBlock* rb = b->race;
    u32 share = !r->strict, last = 0;
    Ref known = rb->arrived[id], fenced[3] = {0, 0, 0}, held[3] = {0, 0, 0};
    rb->arrived[id] = 0;
    LOOP for (u32 w = 0; w < l->warps; w++) {
        u32 lanes = waiting_at(l, b, id, w);
        u32 time = lanes ? race_meet(r, b, w, lanes, &known, fenced, held, share) : 0;
        if (time > last) last = time;
    }
    if (all && b->live == l->threads) {
        rb->sync = last + 1;
    } else {
        LOOP for (u32 w = 0; w < l->warps; w++) {
            u32 lanes = waiting_at(l, b, id, w);
            if (lanes) learn_lanes(r, l, b, &known, w, lanes, last + 1);
        }
    }
    LOOP for (u32 w = 0; w < l->warps; w++) {
        u32 lanes = waiting_at(l, b, id, w);
        if (lanes) race_part(r, b, w, lanes, last + 1, known, fenced, held, share);
    }
    release(r, known);
    LOOP for (u32 k = 0; k < 3; k++) {
        release(r, fenced[k]);
        release(r, held[k]);
    }
}

// For Python ----------------------------------------------------------------------------------------------------------------

// A copy or fill accesses a range of the window, knowing `clock`. `write`: 0, 1, or 2 if the memory is freed, which is a
// write of what has been accessed.
API void rt_race_range(Race* r, u32 op, u32 clock, u64 addr, u64 nbytes, u32 write, u64 now) {
    if (r->off) return;
    Who w;
    w.r = r;
    w.l = 0;
    w.rb = 0;
    w.rt = 0;
    w.op = op;
    w.block = w.warp = w.thread = w.flags = w.scope = w.acquires = w.releases = w.log = 0;
    w.bit = w.time = 1;
    w.site = NO_SITE;
    w.kind = write ? N_WRITE : 0;
    w.device = r->ops[op].device;
    w.clock = clock;
    w.addr = addr;
    w.size = nbytes > 0xFFFFFFFFull ? 0xFFFFFFFFu : (u32)nbytes;
    w.now = now;
    w.common = 0;
    if (write == 2) {
        LOOP for (u64 a = addr & ~15ull; a < addr + nbytes; a += 16)
            if (*cell_at(r, a)) touch(&w, a, 0xFFFF);
        return;
    }
    u32 klass;
    w.common = take(r, sizeof(Entry), &klass);
    Entry* e = (Entry*)at(r, w.common);
    e->op = op;
    e->block = 0;
    e->time = e->lanes = 1;
    e->bytes = 0xFFFF;
    e->warp = 0;
    e->kind = (u8)(w.kind | N_COMMON);
    e->site = NO_SITE;
    e->next = e->serial = e->size = 0;
    touch_range(&w, addr, addr + nbytes);
}

// Forget all accesses of a range: it is other memory from now on.
API void rt_race_clear(Race* r, u64 addr, u64 nbytes) { race_clear(r, addr, nbytes); }

// Unordered accesses of this range, given in whole lines of 16 bytes, are the protocol.
API void rt_race_polled(Race* r, u64 addr, u64 nbytes) {
    race_clear(r, addr, nbytes);
    LOOP for (u64 a = addr; a < addr + nbytes; a += 16) *cell_at(r, a) = POLLED;
}

// A launch has ended, or been stopped: what its threads knew (a reference).
API u32 rt_race_settle(Launch* l) {
    LOOP for (u32 slot = 0; slot < l->high; slot++) {
        Block* b = (Block*)(l->slots + slot * l->slot_stride);
        if (!b->active) continue;
        LOOP for (u32 i = 0; i < l->threads; i++) race_exit(thread_at(l, b, i));
        race_finish_block(l, b);
    }
    Ref end = l->end;
    l->end = 0;
    return end ? end : retain(l->engine->race, l->start);
}
