// SPDX-License-Identifier: Apache-2.0
// The table of pending stores, and which of them memory shows (delay.cuh says why stores are pending).
//
// Memory holds one view at a time: the common view, which has no pending stores, or the view of a device or a block. A
// pending store is shown by exchanging its bytes with those in memory. To put a view in memory, its stores are
// exchanged from the oldest to the newest; to take it out, from the newest to the oldest. So a load needs no search.
// Invariant: while a store is shown, PendingStore::bits are the bytes that were in memory before; otherwise they are
// the bytes of the store.
#pragma once

#include "common.cuh"

const u32 PENDING_STORES = 1 << 13;  // entries of the table
const u32 BUCKETS = 1 << 14;         // lists of the hash table; a power of two
// A sector is 32 aligned bytes. An access is aligned and has at most 32 bytes, so it lies in one sector.
const u32 SECTOR_SHIFT = 5;

// PendingStore::level. P_FREE: the entry has no store. P_BLOCK: the store is visible to its block alone. P_ENDED: the
// same, and the block has ended. P_DEVICE: the store is visible to all blocks of the device.
enum { P_FREE, P_BLOCK, P_ENDED, P_DEVICE };

struct PendingStore {
    u64 addr;
    u64 bits[4];  // the bytes of the store or, while it is shown, those that were in memory before
    Launch* launch;
    Block* block;
    u64 owner;            // Block::owner of the block, whose block slot another block may use later
    u64 order;            // grows with each store that is made or propagated: larger for newer stores
    u64 due_pass;         // the pass of the scheduler after which it is propagated at the latest
    u32 size;             // bytes
    u32 thread, warp;     // who stored: the index of the thread in its block, and its warp
    u32 epoch, syncs;     // Block::epoch and Warp::syncs at the store
    u32 level;            // where it is visible: a constant P_
    u32 released_to_cta;  // 1 if a release of scope CTA covers it
    u32 device;
    u32 next, previous;  // links in the list of its block or device, oldest first; `next` also links free entries
    u32 bucket_next, bucket_previous;  // links in its list of the hash table
};

// The table of a machine. Python reserves it, zeroed (Engine::delay). Indices of stores are those in `pool`; 0 is none.
struct Delay {
    Block* shown_block;          // the block whose view is in memory, or null
    u32 shown_device;            // the index, plus 1, of the device whose view is in memory; 0 for none
    u32 live_count;              // stores in the table
    u32 highest;                 // the highest index that is in use or on the free list
    u32 free_list;               // the first free entry
    u64 last_owner, last_order;  // the last values given to PendingStore::owner and PendingStore::order
    u64 pass;                    // the number of passes of the scheduler so far
    u64 earliest_due;            // a lower bound of all due_pass
    u64 last_check;              // the pass in which the table was last searched for due stores
    List devices[8];             // the stores of level P_DEVICE
    u32 buckets[BUCKETS];        // the hash table, by sector: the first store of each list
    PendingStore pool[PENDING_STORES];
};

FN List* list_of(Delay* d, PendingStore* p) {
    return p->level == P_DEVICE ? &d->devices[p->device] : &p->block->pending;
}

FN u32 bucket_of(u64 addr) { return (u32)(((addr >> SECTOR_SHIFT) * 0x9E3779B97F4A7C15ull) >> 48) & (BUCKETS - 1); }

// The bytes that an access touches, as a mask of the 32 bytes of their sector.
FN u32 bytes_of(u64 addr, u32 size) { return (size >= 32 ? ~0u : (1u << size) - 1) << (addr & 31); }

FN u32 same_sector(PendingStore* p, u64 addr) { return p->addr >> SECTOR_SHIFT == addr >> SECTOR_SHIFT; }

FN u32 overlaps(PendingStore* p, u64 addr, u32 bytes) {
    return same_sector(p, addr) && bytes_of(p->addr, p->size) & bytes;
}

// Views ---------------------------------------------------------------------------------------------------------------

// Swaps the bytes of a store with those in memory.
FAR void exchange(PendingStore* p) {
    u64 addr = p->addr, old;
    if (p->size == 4) {
        old = *(u32*)addr;
        *(u32*)addr = (u32)p->bits[0];
    } else if (p->size == 2) {
        old = *(unsigned short*)addr;
        *(unsigned short*)addr = (unsigned short)p->bits[0];
    } else if (p->size == 1) {
        old = *(u8*)addr;
        *(u8*)addr = (u8)p->bits[0];
    } else {
    LOOP for (u32 i = 0; i < p->size / 8; i++) {
            old = ((u64*)addr)[i];
            ((u64*)addr)[i] = p->bits[i];
            p->bits[i] = old;
        }
        return;
    }
    p->bits[0] = old;
}

// Shows the stores of a list: puts their bytes in memory, and keeps the old bytes in their entries.
FAR void show(Delay* d, List* list) {
    LOOP for (u32 i = list->first; i; i = d->pool[i].next) exchange(&d->pool[i]);
}

// Hides the stores of a list: puts the old bytes back in memory.
FAR void hide(Delay* d, List* list) {
    LOOP for (u32 i = list->last; i; i = d->pool[i].previous) exchange(&d->pool[i]);
}

// Hides the own stores of the block whose view is in memory, if there is one. Then shows those of block `b`, so that
// memory holds the view of `b`, unless `b` is null. Memory must hold the view of the device of `b` already.
FAR void view_block(Delay* d, Block* b) {
    if (d->shown_block == b) return;
    if (d->shown_block) hide(d, &d->shown_block->pending);
    d->shown_block = b;
    if (b) show(d, &b->pending);
}

// Puts the view of device `device` - 1 in memory or, if `device` is 0, the common view.
FAR void view_device(Delay* d, u32 device) {
    view_block(d, 0);
    if (d->shown_device == device) return;
    if (d->shown_device) hide(d, &d->devices[d->shown_device - 1]);
    d->shown_device = device;
    if (device) show(d, &d->devices[device - 1]);
}

// Lists ---------------------------------------------------------------------------------------------------------------

// Appends a store to the list of its block or device.
FN void append_to_list(Delay* d, u32 i) {
    List* list = list_of(d, &d->pool[i]);
    d->pool[i].next = 0;
    d->pool[i].previous = list->last;
    if (list->last) d->pool[list->last].next = i;
    else list->first = i;
    list->last = i;
}

// Removes a store from the list of its block or device.
FN void remove_from_list(Delay* d, u32 i) {
    PendingStore* p = &d->pool[i];
    List* list = list_of(d, p);
    if (p->previous) d->pool[p->previous].next = p->next;
    else list->first = p->next;
    if (p->next) d->pool[p->next].previous = p->previous;
    else list->last = p->previous;
}

// Removes a store from its list of the hash table.
FN void remove_from_bucket(Delay* d, PendingStore* p) {
    if (p->bucket_next) d->pool[p->bucket_next].bucket_previous = p->bucket_previous;
    if (p->bucket_previous) d->pool[p->bucket_previous].bucket_next = p->bucket_next;
    else d->buckets[bucket_of(p->addr)] = p->bucket_next;
}
