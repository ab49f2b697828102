// SPDX-License-Identifier: Apache-2.0
// Delayed stores: a store of a block reaches other blocks late, at a moment that the seed decides, unless an ordering
// operation forces it earlier. If stores are not delayed (Engine::delay is null), each store reaches all threads at
// once, and memory is sequentially consistent.
//
// A plain, relaxed, volatile or release store to global memory becomes a pending store of its block. It is propagated
// in two steps: first to the device, whose blocks then all see it, and later to all devices and the host. A block sees
// memory with the stores that were propagated to its device and, on top of them, its own pending stores
// (delay_view.cuh). Memory holds this view of a block only while the block runs. Between turns of launches, and
// whenever the host may read memory, memory holds no pending store at all.
//
// Example (tests/emu/machine/test_delayed_stores.py). Block A stores data and then flag, both relaxed. Both stores are
// pending in A. If the seed propagates flag first, block B of the same device finds flag set and data unset, as the
// memory model allows. With a fence.acq_rel.gpu between the two stores, data is propagated to the device at the fence,
// so B can never find flag set without data.
//
// Why each result is one that the PTX memory model allows. A store that is propagated is performed for the device, or
// for all devices and the host. The model requires a store to be performed before another event only in these cases:
//
//     Release. A release by thread T (a store, an atomic or a fence; fence.sc and membar too) of scope GPU or wider
//     propagates, to the device, the stores of T's block that happen before it. A release of scope SYS then propagates
//     all stores that the device sees to all devices and the host. The stores of the block that happen before the
//     release are those
//         - of T itself;
//         - of any thread before the last barrier that the block completed;
//         - of any thread of T's warp before the last __syncwarp of the warp;
//         - that a release of scope CTA by any thread covers (released_to_cta);
//         - that a strong load of another thread has read. Such a load propagates the store at once (observation).
//     So a store is performed before any thread that synchronises with T can continue. That includes stores that T has
//     learnt of by releases of other blocks of the device, since scope SYS propagates all stores that the device sees.
//     A barrier of some of the warps counts as one of the whole block, and a release of scope CTA counts even if no
//     thread acquires it. So some stores are propagated earlier than the model requires.
//
//     Coherence. A store never overtakes an older overlapping store of the same block, or device, and a view has the
//     newest store on top. So the stores of a thread to a location stay in order, a thread reads its own newest store,
//     and successive reads of a location never return to an older value. If the stores of two blocks overlap, the one
//     that is propagated later is later in the coherence order. That is allowed, since a block with a pending store to
//     a location sees no other block's store there. Two stores of a thread to the same location, with no ordering
//     operation between them, are merged.
//
//     Atomicity. An atomic acts on the value that all devices and the host see: overlapping stores of its own block and
//     device are propagated first. Pending stores of other blocks and devices are not performed yet, and come after the
//     atomic in the coherence order.
//
//     Completion. A launch has ended when its blocks have ended and none of its stores is pending. At this moment, all
//     stores that its device sees are propagated to all devices and the host, too. So the next operation of the stream,
//     the host, and griddepcontrol.wait see all stores. The end of a block alone orders nothing: its stores stay
//     pending.
//
//     Proxies. fence.proxy counts as a release of scope SYS. Stores are distinguished by address. Where one page is
//     mapped at two addresses, a store by one address may overtake an older store by the other, unless there is a
//     fence.proxy between them. The model allows that.
//
// What does not occur. Loads are performed in order and at once, and values of atomics are never delayed. So results
// that need a stale load (a missing acquire, load buffering) do not occur, and fence.acq_rel orders a store before a
// later load, as fence.sc does. The bytes of a store are marked as initialised at once, so a read of them is not
// reported as uninitialised. With the race detector, only plain stores are delayed: the detector assumes that a strong
// read observes the newest strong write.
//
// Progress. A store may always be propagated earlier, and every store is propagated in the end: each of the two steps
// comes after at most LATEST passes, or when nothing else can run. When the table is full, a store is performed at
// once.
#pragma once

#include "delay_propagate.cuh"

// Ordering operations -------------------------------------------------------------------------------------------------

// Propagates the stores that happen before a release of scope `scope` by a running thread.
FAR void delay_release(Thread* t, u32 scope) {
    Engine* e = t->launch->engine;
    Delay* d = e->delay;
    Block* b = t->block;
    u32 next;
    LOOP for (u32 i = b->pending.first; i; i = next) {
        PendingStore* p = &d->pool[i];
        next = p->next;
        if (p->thread != t->linear && !p->released_to_cta && p->epoch == b->epoch &&
            (p->warp != t->warp || p->syncs == b->warps[t->warp].syncs))
            continue;
        if (scope == SCOPE_CTA) p->released_to_cta = 1;
        else propagate(e, d, i);
    }
    if (scope == SCOPE_SYS) propagate_device(d, t->launch->device);
}

// If a strong load reads pending stores by other threads of its block, propagates these to the device.
FN void delay_observe(Engine* e, Thread* t, u64 addr, u32 size) {
    Delay* d = e->delay;
    Block* b = t->block;
    u32 i, bytes = bytes_of(addr, size);
    LOOP do {
        LOOP for (i = d->buckets[bucket_of(addr)]; i; i = d->pool[i].bucket_next) {
            PendingStore* p = &d->pool[i];
            if (p->level != P_BLOCK || p->owner != b->owner || p->thread == t->linear) continue;
            if (overlaps(p, addr, bytes)) {
                propagate(e, d, i);
                break;
            }
        }
    } while (i);
}

// Propagates the stores that a fence of a running thread releases.
FN void delay_fence(Thread* t, u32 flags) {
    if (flags & FENCE_PROXY) delay_release(t, SCOPE_SYS);
    else if (flags & FENCE_SC || flags >> ORDER_SHIFT & ORDER_RELEASE) delay_release(t, flags >> SCOPE_SHIFT & 3);
}

// Stores --------------------------------------------------------------------------------------------------------------

// The newest pending store of a block that overlaps a range, or 0.
FN u32 newest_overlapping(Delay* d, Block* b, u64 addr, u32 size) {
    u32 bytes = bytes_of(addr, size), newest = 0;
    LOOP for (u32 i = d->buckets[bucket_of(addr)]; i; i = d->pool[i].bucket_next) {
        PendingStore* p = &d->pool[i];
        if (p->owner != b->owner || p->level != P_BLOCK || !overlaps(p, addr, bytes)) continue;
        if (!newest || p->order > d->pool[newest].order) newest = i;
    }
    return newest;
}

// Whether a new store of a thread can be merged with a pending one: it is the same thread's last store to exactly these
// bytes, and no ordering operation came in between.
FN u32 can_merge(PendingStore* p, Thread* t, u64 addr, u32 size) {
    Block* b = t->block;
    return p->addr == addr && p->size == size && p->thread == t->linear && !p->released_to_cta && p->epoch == b->epoch &&
           p->syncs == b->warps[t->warp].syncs;
}

// Takes a free entry of the table. Returns its index, or 0 if the table is full.
FN u32 take_pending(Delay* d) {
    u32 i = d->free_list;
    if (i) d->free_list = d->pool[i].next;
    else if (d->highest < PENDING_STORES - 1) i = ++d->highest;
    return i;
}

// Makes an entry for a store, with the bytes that are in memory now. Called before the store itself.
FN void delay_store(Engine* e, Thread* t, u64 addr, u32 size) {
    Delay* d = e->delay;
    Block* b = t->block;
    u32 newest = newest_overlapping(d, b, addr, size);
    if (newest && can_merge(&d->pool[newest], t, addr, size)) return;
    u32 i = take_pending(d);
    if (!i) {
        propagate_overlapping(e, b, t->launch->device, addr, size);
        return;
    }
    t->launch->pending++;
    if (!d->live_count++) d->earliest_due = ~0ull;
    PendingStore* p = &d->pool[i];
    p->addr = addr;
    p->launch = t->launch;
    p->block = b;
    p->owner = b->owner;
    p->size = size;
    p->thread = t->linear;
    p->warp = t->warp;
    p->epoch = b->epoch;
    p->syncs = b->warps[t->warp].syncs;
    p->level = P_BLOCK;
    p->released_to_cta = 0;
    p->device = t->launch->device;
    if (size == 4) p->bits[0] = *(u32*)addr;
    else if (size == 2) p->bits[0] = *(unsigned short*)addr;
    else if (size == 1) p->bits[0] = *(u8*)addr;
    else LOOP for (u32 k = 0; k < size / 8; k++) p->bits[k] = ((u64*)addr)[k];
    set_age(e, d, p);
    append_to_list(d, i);
    u32 bucket = bucket_of(addr);
    p->bucket_previous = 0;
    p->bucket_next = d->buckets[bucket];
    if (p->bucket_next) d->pool[p->bucket_next].bucket_previous = i;
    d->buckets[bucket] = i;
}

// Propagates the pending stores that an access must follow and, if the access is a store that can be delayed, makes an
// entry for it. Called before each store and before each strong access to global or shared memory, after its checks. In
// a probe (probe.cuh), no store is pending and none is delayed.
FAR void delay_access(Thread* t, u64 addr, u32 size, u32 flags, u32 is_shared) {
    Engine* e = t->launch->engine;
    if (e->probing) return;
    if (flags & (A_WRITE | A_ATOMIC) && flags >> ORDER_SHIFT & ORDER_RELEASE) delay_release(t, flags >> SCOPE_SHIFT & 3);
    if (is_shared) return;
    if (flags & A_ATOMIC) propagate_overlapping(e, t->block, t->launch->device, addr, size);
    else if (flags & A_WRITE && e->race && flags & A_STRONG) propagate_overlapping(e, t->block, t->launch->device, addr, size);
    else if (flags & A_WRITE) delay_store(e, t, addr, size);
    else delay_observe(e, t, addr, size);
}

// Blocks and the scheduler --------------------------------------------------------------------------------------------

FN void delay_start_block(Delay* d, Block* b) {
    b->owner = ++d->last_owner;
    b->epoch = 0;
    b->pending.first = b->pending.last = 0;
}

// Marks the pending stores of a block that has ended as P_ENDED, and empties the block's list of them, since another
// block may use the block slot afterwards.
FN void delay_end_block(Delay* d, Block* b) {
    view_block(d, 0);
    LOOP for (u32 i = b->pending.first; i; i = d->pool[i].next) d->pool[i].level = P_ENDED;
    b->pending.first = b->pending.last = 0;
}

// Puts the view of a block in memory if the block has a pending store in the sector (delay_view.cuh) of a polled word.
// Called before the scheduler checks whether the word has changed.
FN void delay_look(Delay* d, Block* b, u64 addr) {
    if (!b->pending.first || d->shown_block == b) return;
    LOOP for (u32 i = d->buckets[bucket_of(addr)]; i; i = d->pool[i].bucket_next)
        if (d->pool[i].owner == b->owner && d->pool[i].level == P_BLOCK && same_sector(&d->pool[i], addr)) {
            view_block(d, b);
            return;
        }
}

// Propagates the stores that are due, by one step. Called at the end of a pass. The more stores the table has, the more
// rarely it is searched.
FAR void delay_pass(Engine* e) {
    Delay* d = e->delay;
    d->pass++;
    if (!d->live_count || d->pass <= d->earliest_due || d->pass < d->last_check + d->highest / 256) return;
    d->last_check = d->pass;
    u64 now = d->pass - 1;
    d->earliest_due = ~0ull;
    LOOP for (u32 i = 1; i <= d->highest; i++) {
        PendingStore* p = &d->pool[i];
        if (p->level == P_FREE) continue;
        if (p->due_pass <= now) propagate(e, d, i);
        if (p->level != P_FREE && p->due_pass < d->earliest_due) d->earliest_due = p->due_pass;
    }
    e->work += d->highest;
}

// Propagates all stores to all devices and the host.
FAR void delay_flush(Engine* e) {
    Delay* d = e->delay;
    LOOP for (u32 i = 1; i <= d->highest; i++)
        if (d->pool[i].level == P_BLOCK || d->pool[i].level == P_ENDED) propagate(e, d, i);
    LOOP for (u32 k = 0; k < 8; k++) propagate_device(d, k);
}

// The priority of a store in delay_idle, which propagates the stores of the highest priorities. With seed 0, newer
// stores have higher priorities; with other seeds, the priorities are pseudo-random.
FN u64 idle_rank(Engine* e, PendingStore* p) { return e->seed ? hash(e->seed + p->order * 0x9E3779B97F4A7C15ull) >> 16 : p->order; }

// Called when nothing else can run. Propagates the store of the highest priority by one step; from 32 stores on, the
// stores in the upper eighth of the range of priorities. If no block is left that could see the order of the stores,
// propagates all to all devices and the host. Returns 0 if no store was pending, else 1.
FAR u32 delay_idle(Engine* e, Launch** launches, u32 n) {
    Delay* d = e->delay;
    if (!d->live_count) return 0;
    u32 observers = 0;
    LOOP for (u32 k = 0; k < n; k++) observers |= launches[k]->state == RUNNING && launches[k]->finished < launches[k]->blocks;
    if (!observers) {  // no block is left that could observe the order of the entries
        delay_flush(e);
        return 1;
    }
    u64 low = ~0ull, high = 0;
    LOOP for (u32 i = 1; i <= d->highest; i++) {
        if (d->pool[i].level == P_FREE) continue;
        u64 rank = idle_rank(e, &d->pool[i]);
        if (rank < low) low = rank;
        if (rank > high) high = rank;
    }
    low = high - (d->live_count < 32 ? 0 : (high - low) / 8);
    // A store that is propagated to the device gets an `order` above `last`. If this happens before the loop reaches
    // the store's entry, the loop skips the entry, so that no store is propagated by two steps.
    u64 last = d->last_order;
    LOOP for (u32 i = 1; i <= d->highest; i++) {
        PendingStore* p = &d->pool[i];
        if (p->level != P_FREE && p->order <= last && idle_rank(e, p) >= low) propagate(e, d, i);
    }
    e->work += d->highest * 2;
    return 1;
}

// For Python ----------------------------------------------------------------------------------------------------------

// Returns the bytes that Engine::delay needs. The memory must be zeroed.
API u64 rt_delay_bytes() { return sizeof(Delay); }

// Propagates the stores of a launch to all devices and the host. Called when the launch is stopped before its end.
API void rt_delay_end(Engine* e, Launch* l) {
    if (!l->pending) return;
    Delay* d = e->delay;
    LOOP for (u32 i = 1; i <= d->highest; i++) {
        PendingStore* p = &d->pool[i];
        if ((p->level == P_BLOCK || p->level == P_ENDED) && p->launch == l) propagate(e, d, i);
    }
    propagate_device(d, l->device);
}
