// SPDX-License-Identifier: Apache-2.0
// The race detector's part for flags: what strong writes publish at a location, and what strong reads of it learn.
#pragma once

#include "race_found.cuh"

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

// Whether the current thread publishes in `p`. For each scope, a location has one Published per block, cluster or
// device.
FN u32 publishes_there(Who* w, Published* p) {
    if (p->scope == SCOPE_CTA) return same_block(w, p->op, p->block);
    if (p->scope == SCOPE_CLUSTER) return same_cluster(w, p->op, p->block);
    return p->device == w->device;
}

// Publishes the clock `what` at a location, for a scope.
FAR void publish(Who* w, Location* v, u32 scope, Ref what) {
    Race* r = w->r;
    Published* p = 0;
    LOOP for (Ref ref = v->published; ref; ref = p->next) {
        p = (Published*)at(r, ref);
        if (p->scope == scope && publishes_there(w, p)) {
            learn(r, &p->clock, what);
            if (same_block(w, p->op, p->block)) learn(r, &p->last, what);
            else put(r, &p->last, retain(r, what));
            p->op = w->op;
            p->block = w->block;
            p->old = what == w->l->start;
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
    p->old = what == w->l->start;
    p->next = v->published;
    v->published = ref;
}

// Publishes a release. A release for a wider scope than the cluster is also published for the cluster, since what is
// published for the wider scope may come from blocks of other clusters.
FN void publish_release(Who* w, Location* v, u32 scope, Ref what) {
    publish(w, v, scope, what);
    if (scope > SCOPE_CLUSTER && w->l->cluster_size > 1) publish(w, v, SCOPE_CLUSTER, what);
}

// What the thread knows, its own accesses so far included, as a new reference.
FN Ref all_known(Who* w) {
    Ref all = with_items(w->r, w->rt->clock, w->op, w->block, w->rb->sync, w->warp, w->bit, w->rt->time + 1);
    if (w->rt->aliased)
        put(w->r, &all, with_items(w->r, all, w->op, w->block | ALIASED, 0, w->warp, w->bit, w->rt->aliased));
    return all;
}

// A part of what a clock knows of the blocks of launch `op`, as a reference: its items for all accesses, restricted to
// the reads (tag READS); or, with `kept`, its items that have the tag READS already and those of copies.
FAR Ref part_of(Race* r, Ref known, u32 op, u32 kept) {
    Clock* all = (Clock*)at(r, known);
    u32 klass, n = 0;
    Ref ref = take(r, bytes_of(0u, all->items), &klass);
    Clock* c = (Clock*)at(r, ref);
    Item *from = items_of(all), *to = (Item*)(c + 1);
    LOOP for (u32 i = 0; i < all->items; i++) {
        u32 tag = (u32)(from[i].key >> 6) & (BULK | READS);
        if (from[i].key >> 32 != op || !tag == kept || tag == INIT) continue;
        to[n] = from[i];
        if (!tag) to[n].key |= (u64)READS << 6;
        n++;
    }
    c->refs = 1;
    c->klass = klass;
    c->chains = 0;
    c->items = n;
    return ref;
}

// The part of a clock that an st.async or a relaxed flag publishes, as a reference: the reads of launch `op`.
FAR Ref reads_of(Race* r, Ref known, u32 op) {
    Ref own = part_of(r, known, op, 0), kept = part_of(r, known, op, 1);
    Ref both = merge(r, (Clock*)at(r, own), (Clock*)at(r, kept));
    release(r, own);
    release(r, kept);
    return both;
}

// Called for a strong read of a location: learns what is published there, or remembers for reports why not.
FAR void acquire(Who* w, Location* v) {
    Race* r = w->r;
    u32 published = same_block(w, v->op, v->block);
    LOOP for (Ref ref = v->published; ref;) {
        Published* p = (Published*)at(r, ref);
        ref = p->next;
        if (p->op == v->op && p->block == v->block && !p->old) published = 1;
        u32 need = scope_needed(w, p->op, p->block), own = need == SCOPE_CTA, theirs = p->scope, ours = w->scope;
        u32 twin = need == SCOPE_CLUSTER && theirs > SCOPE_CLUSTER;  // the release is published for the cluster too
        if (twin && ours == SCOPE_CLUSTER) continue;
        if (need < SCOPE_GPU) need = theirs == SCOPE_CLUSTER ? SCOPE_CLUSTER : p->device == w->device ? SCOPE_GPU : SCOPE_SYS;
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
    if (v->reads && morally_strong(w, v)) learn(r, &w->rt->late, v->reads);
    if (!published) missed(w, v->op, v->block, X_RELAXED_STORE, v->site, 0);
    w->clock = w->rt->clock;
}

// Called for a strong read of a location: records that it has seen the last write, unless that write is ordered before
// it anyway.
FAR void observe(Who* w, Location* v) {
    Race* r = w->r;
    if (!morally_strong(w, v) || ordered(w, v, v->lanes)) return;
    if (same_block(w, v->op, v->block) && v->warp == w->warp && v->lanes == w->bit) return;
    Seen* alike = 0;
    u32 poll = ~w->kind & N_WRITE;  // a read may have been recorded here by an earlier poll
    LOOP for (Ref* link = &v->seen; poll && *link;) {
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
                v->seens--;
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
    v->seens++;
}

// Whether the write of an entry was seen by a read that the current thread has made or knows.
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
            u32 own = same_block(w, s->op, s->block);
            if (own && (!w->rt || s->time < w->rb->sync || (s->warp == w->warp && s->lanes & w->bit))) return 1;
            LOOP for (u32 rest = s->lanes; rest; rest &= rest - 1)
                if (knows(r, w->clock, s->op, s->block, s->warp, rest & -rest, s->time) == 1) return 1;
        }
    }
    return 0;
}

const u32 SEEN_KEPT = 16, WRITES_LEFT = 8, SEEN_TABLE = 64;

// Shortens the list of Seen of a location. Only writes of the location that still have an entry matter; `oldest`
// is the lowest of their serials. A Seen that covers none of these writes is dropped, and Seens of a warp that agree for
// all of these writes are merged. It is called rarely enough to cost little.
FAR void tidy_seen(Race* r, Ref* cell, Location* v, u32 oldest) {
    u32 left[WRITES_LEFT], n = 0, kept = 0;
    Ref table[SEEN_TABLE];
    LOOP for (u32 i = 0; i < SEEN_TABLE; i++) table[i] = 0;
    LOOP for (Ref ref = *cell; ref && n <= WRITES_LEFT; ref = ((Entry*)at(r, ref))->next) {
        Entry* e = (Entry*)at(r, ref);
        if (e->kind & N_LOCATION || ~e->kind & (N_WRITE | N_STRONG) || !(e->bytes & v->bytes)) continue;
        if (n < WRITES_LEFT) left[n] = e->serial;
        n++;
    }
    LOOP for (Ref* link = &v->seen; *link;) {
        Ref ref = *link;
        Seen* s = (Seen*)at(r, ref);
        u32 back = ~0u;  // from the last write that was seen back to the newest write that still has an entry
        LOOP for (u32 i = 0; i < n && n <= WRITES_LEFT; i++)
            if (s->last - left[i] < back) back = s->last - left[i];
        u32 useless = (s32)(s->last - oldest) < 0;
        if (n <= WRITES_LEFT) {
            useless |= back > s->last - s->first;
            s->last -= useless ? 0 : back;
        }
        Ref* place = &table[s->block * 33 + s->warp & SEEN_TABLE - 1];
        Seen* other = *place ? (Seen*)at(r, *place) : 0;
        if (!useless && other && other->op == s->op && other->block == s->block && other->warp == s->warp &&
            other->time == s->time && other->first == s->first && other->last == s->last) {
            other->lanes |= s->lanes;
            useless = 1;
        }
        if (useless) {
            *link = s->next;
            give(r, ref, 0);
        } else {
            *place = ref;
            link = &s->next;
            kept++;
        }
    }
    v->seens = kept;
    v->seens_allowed = 2 * kept + SEEN_KEPT;
}

// Called for a strong write: if its scope is the system, it publishes reads (race.cuh). `continues`: it is an atomic
// that continues the chain of the location.
FN void tell_reads(Who* w, Location* v, u32 continues) {
    Race* r = w->r;
    if (!continues) put(r, &v->reads, 0);
    if (r->strict || w->scope < SCOPE_SYS || (continues && w->rb->sync < 2)) return;
    u32 barriers = w->rb->sync, op = w->op, block = w->block;
    // An atomic publishes no reads of its own thread since the last barrier, as all threads may count on one word.
    Ref all = continues ? with_items(r, w->rt->clock, op, block, barriers, 0, 0, 0) : all_known(w), reads = reads_of(r, all, op);
    release(r, all);
    learn(r, &v->reads, reads);
    release(r, reads);
}

// Called for a strong write to the location `v`, or to a new location if that is null. `oldest` is the lowest serial of
// the strong writes that still have an entry.
FAR void write_location(Who* w, Ref* cell, Location* v, u32 mask, u32 oldest) {
    Race* r = w->r;
    RaceThread* t = w->rt;
    if (!v) {
        u32 klass;
        Ref ref = take(r, sizeof(Location), &klass);
        v = (Location*)at(r, ref);
        v->bytes = mask;
        v->published = v->released = v->seen = v->op = v->block = v->kind = v->reads = v->seens = 0;
        v->seens_allowed = SEEN_KEPT;
        v->next = *cell;
        *cell = ref;
    }
    u32 mine = same_block(w, v->op, v->block) && v->warp == w->warp && v->lanes == w->bit;
    if (!mine && v->released) put(r, &v->released, 0);
    u32 continues = w->kind & N_ATOMIC && morally_strong(w, v);
    tell_reads(w, v, continues);
    if (!continues) {
        v->first = r->serial;
        drop_published(r, v);
        if (v->released) publish_release(w, v, v->released_scope, v->released);
    }
    if (v->seens > v->seens_allowed) tidy_seen(r, cell, v, oldest);
    v->op = w->op;
    v->block = w->block;
    v->warp = w->warp;
    v->lanes = w->bit;
    v->time = w->time;
    v->size = w->log;
    v->kind = (u8)(N_LOCATION | N_STRONG | (w->kind & 3 << N_SCOPE));
    v->site = w->site;
    v->serial = r->serial;
    u32 scope = w->scope;
    LOOP for (u32 k = 0; k <= scope; k++)
        if (t->fenced[k] && (k != SCOPE_CLUSTER || w->l->cluster_size > 1)) publish(w, v, k, t->fenced[k]);
    if (w->releases) {
        Ref all = all_known(w);
        publish_release(w, v, scope, all);
        put(r, &v->released, all);
        v->released_scope = scope;
    }
}
