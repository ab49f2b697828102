// SPDX-License-Identifier: Apache-2.0
// How pending stores are propagated: from a block to its device, and from the device to all devices and the host.
#pragma once

#include "delay_view.cuh"

const u64 LATEST = 1024;  // the most passes of the scheduler (pass.cuh) before a store is propagated by one step

// Gives a store a new `order`, and draws the pass of the scheduler after which it is propagated at the latest. Seed 0
// keeps all stores as long as possible, other seeds keep some for a shorter time.
FN void set_age(Engine* e, Delay* d, PendingStore* p) {
    p->order = ++d->last_order;
    u64 random = e->seed ? hash(e->seed * 0x9E3779B97F4A7C15ull + d->last_order) : ~0ull;
    u32 kind = random & 3;
    p->due_pass = d->pass + (kind == 0 ? 0 : kind == 1 ? 1 + (random >> 2 & 15) : LATEST);
    if (p->due_pass < d->earliest_due) d->earliest_due = p->due_pass;
}

// Propagates a store of a block to its device.
FAR void to_device(Engine* e, Delay* d, u32 i) {
    PendingStore* p = &d->pool[i];
    u32 shown = p->level == P_BLOCK && d->shown_block == p->block;
    if (p->level == P_BLOCK) remove_from_list(d, i);
    p->level = P_DEVICE;
    set_age(e, d, p);
    append_to_list(d, i);
    if (!shown && d->shown_device == p->device + 1) exchange(p);
}

FN u32 is_freed(Launch* l, u64 addr) {
    return (*(u32*)(l->access_base + (addr - l->window_base >> 16) * 4) >> 24 & 0x3F) == K_FREED;
}

// Propagates a store of a device to all devices and the host, and frees its entry. Memory must hold the view of that
// device, or the common view.
FAR void to_all(Delay* d, u32 i) {
    PendingStore* p = &d->pool[i];
    if (d->shown_device != p->device + 1 && !is_freed(p->launch, p->addr)) exchange(p);
    p->launch->pending--;
    remove_from_list(d, i);
    remove_from_bucket(d, p);
    p->level = P_FREE;
    p->next = d->free_list;
    d->free_list = i;
    if (!--d->live_count) d->highest = d->free_list = 0;
}

// Propagates a store by one step: to its device or, if the device sees it already, to all devices and the host. First
// does the same for the older stores of its block, or device, that it must not overtake: those that overlap it, those
// that overlap these, and so on.
FAR void propagate(Engine* e, Delay* d, u32 i) {
    PendingStore* p = &d->pool[i];
    u32 head = d->buckets[bucket_of(p->addr)], level = p->level, bytes = bytes_of(p->addr, p->size), known;
    u64 owner = level == P_DEVICE ? p->device : p->owner, order = p->order, addr = p->addr;
    if (head == i && !p->bucket_next) {  // the usual case: the bucket has no other entry
        if (level == P_DEVICE) to_all(d, i);
        else to_device(e, d, i);
        return;
    }
    LOOP do {
        known = bytes;
        LOOP for (u32 j = head; j; j = d->pool[j].bucket_next) {
            PendingStore* q = &d->pool[j];
            if (q->level != level || (level == P_DEVICE ? q->device : q->owner) != owner || q->order > order) continue;
            u32 others = same_sector(q, addr) ? bytes_of(q->addr, q->size) : 0;
            if (others & bytes) bytes |= others;
        }
    } while (bytes != known);
    u32 first;
    LOOP do {
        first = i;
        LOOP for (u32 j = d->buckets[bucket_of(addr)]; j; j = d->pool[j].bucket_next) {
            PendingStore* q = &d->pool[j];
            if (q->level != level || (level == P_DEVICE ? q->device : q->owner) != owner) continue;
            if (!overlaps(q, addr, bytes)) continue;
            if (q->order < d->pool[first].order) first = j;
        }
        if (level == P_DEVICE) to_all(d, first);
        else to_device(e, d, first);
    } while (first != i);
}

// Propagates the stores of a device to all devices and the host.
FAR void propagate_device(Delay* d, u32 device) {
    LOOP while (d->devices[device].first) to_all(d, d->devices[device].first);
}

// Propagates stores to all devices and the host: those of a block and of its device that overlap a range.
FAR void propagate_overlapping(Engine* e, Block* b, u32 device, u64 addr, u32 size) {
    Delay* d = e->delay;
    u32 i, bytes = bytes_of(addr, size);
    LOOP do {
        LOOP for (i = d->buckets[bucket_of(addr)]; i; i = d->pool[i].bucket_next) {
            PendingStore* p = &d->pool[i];
            if (!overlaps(p, addr, bytes)) continue;
            if (p->level == P_DEVICE ? p->device == device : p->owner == b->owner) {
                propagate(e, d, i);
                break;
            }
        }
    } while (i);
}
