// SPDX-License-Identifier: Apache-2.0
// The lists of entries: where entries are allocated, and how they are removed from a list or changed in it.
//
// A list is walked by links. A link is the address of a Ref: the cell of the line, or the member `next` of an entry.
#pragma once

#include "race_observe.cuh"

// Entries of adjacent lines lie together in slabs, as lists whose entries are spread over memory are slow to walk. A
// slab is aligned to its size and begins with this header. While it has a free entry, it is in the list of slabs of its
// part of the window (Race::pools).
struct Slab {
    u32 free;  // a bit for each free entry; bit 0 belongs to this header and is never set
    Ref next;
    u32 pad[6];
};

static_assert(sizeof(Slab) == sizeof(Entry) && SLAB_ENTRIES == 16, "");

// Adds a new slab to an empty list of slabs.
FAR void new_slab(Race* r, Ref* pool) {
    u64 bytes = SLAB_ENTRIES * sizeof(Entry), first = (r->arena_top + bytes - 1) & ~(bytes - 1);
    r->arena_top = first + bytes;
    if (r->arena_top + RESERVE > r->arena_bytes) r->exhausted = 1;
    *pool = (Ref)(first / 32);
    Slab* c = (Slab*)arena_at(r, *pool);
    c->free = (1 << SLAB_ENTRIES) - 2;
    c->next = 0;
}

FN Ref take_entry(Race* r, Ref* pool) {
    if (!*pool) new_slab(r, pool);
    Slab* c = (Slab*)arena_at(r, *pool);
    Ref ref = *pool + FFS(c->free) - 1;
    c->free &= c->free - 1;
    if (!c->free) *pool = c->next;
    return ref;
}

FN void give_entry(Race* r, Ref* pool, Ref ref) {
    Ref slab = ref & ~(SLAB_ENTRIES - 1);
    Slab* c = (Slab*)arena_at(r, slab);
    if (!c->free) {
        c->next = *pool;
        *pool = slab;
    }
    c->free |= 1 << (ref & SLAB_ENTRIES - 1);
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

// Replaces an entry that many lists share (N_COMMON) by a copy, which can be changed.
FAR Entry* unshare(Race* r, Ref* pool, Ref* link) {
    Ref ref = take_entry(r, pool);
    Entry* e = (Entry*)arena_at(r, ref);
    *e = *(Entry*)arena_at(r, *link);
    e->kind &= ~N_COMMON;
    *link = ref;
    return e;
}

// Removes bytes from an entry, or the entry if no byte is left. Returns the link at which the walk continues.
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
