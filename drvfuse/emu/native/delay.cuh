// SPDX-License-Identifier: Apache-2.0
// Delayed stores: a store of a block reaches other blocks late, at a moment that the seed decides, unless an ordering
// operation forces it earlier. When this is off (Engine::delay is null), each store reaches all threads at once, and
// memory is sequentially consistent.
//
// A plain, relaxed, volatile or release store to global memory becomes a pending store of its block. It is passed on
// twice: to the device, whose blocks then all see it, and later to everybody, that is to other devices and the host. A
// block sees memory with the pending stores of its device and, above them, its own on top (delay_view.cuh). Memory
// holds the view of a block only while that block runs. Between turns of launches, and whenever the host may read
// memory, memory holds no pending store at all.
//
// Example (tests/emu/machine/test_delayed_stores.py). Block A stores data and then flag, both relaxed. Both stores are
// pending in A. The seed passes flag on first: block B of the same device finds flag set and data unset, as the memory
// model allows. With a fence.acq_rel.gpu between the two stores, data is passed on to the device at the fence, so B can
// never find flag set without data.
//
// Why each result is one that the PTX memory model allows. When a store is passed on, it is performed for the device,
// or for everybody. The model requires a store to be performed before another event only in these cases:
//
//     Release. A release by thread T (a store, an atomic or a fence; fence.sc and membar too) of scope GPU or wider
//     passes on the stores of the block that happen before it. A release of scope SYS also passes on all stores of the
//     device. The stores of the block that happen before it are those
//         - of T itself;
//         - of any thread before the last barrier that the block completed;
//         - of any thread of T's warp before the last __syncwarp of the warp;
//         - that a release of scope CTA by any thread covers (released_to_cta);
//         - that a strong load of another thread has read. Such a load passes the store on at once (observation).
//     So a store is performed before any thread that synchronises with T can continue. That includes stores that T
//     knows through releases of other blocks of the device, since scope SYS passes on all stores of the device. A
//     barrier of some of the warps, and a release of scope CTA that no thread acquired, count for the whole block. That
//     delays less than the model allows.
//
//     Coherence. A store never overtakes an older overlapping store of the same block, or device, and a view has the
//     newest store on top. So the stores of a thread to a location stay in order, a thread reads its own newest store,
//     and successive reads of a location never return to an older value. If a store of another block is passed on
//     later, it is later in the coherence order; the block that has it pending has seen no other store there since. Two
//     stores of a thread to the same location, with no ordering operation between them, are merged.
//
//     Atomicity. An atomic acts on the value that everybody sees: overlapping stores of its own block and device are
//     passed on first. Pending stores of others are not performed yet, and come after it in the coherence order.
//
//     Completion. A launch has ended when its blocks have ended and none of its stores is pending. Then all stores of
//     its device are passed on, too. So the next operation of the stream, the host, and griddepcontrol.wait see all
//     stores. The end of a block alone orders nothing: its stores stay pending.
//
//     Proxies. fence.proxy counts as a release of scope SYS. Stores are distinguished by address. Where one page is
//     mapped at two addresses, stores by one address do not wait for stores by the other without a fence.proxy between
//     them, as the model says.
//
// What does not occur. Loads are performed in order and at once, and values of atomics are never delayed. So results
// that need a stale load (a missing acquire, load buffering) do not occur, and fence.acq_rel orders a store before a
// later load, as fence.sc does. The bytes of a store are marked as initialised at once, so a read of them is not
// reported as uninitialised. With the race detector, only plain stores are delayed: the detector assumes that a strong
// read observes the newest strong write.
//
// Progress. To pass a store on earlier is always allowed, and every store is passed on in the end: after LATEST passes
// at each level, or when nothing else can run. When the table is full, a store is performed at once.
#pragma once

#include "delay_pass_on.cuh"

// Ordering operations -------------------------------------------------------------------------------------------------

// Called when a running thread makes a release of a scope: passes on the stores that happen before it.
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
        else pass_on(e, d, i);
    }
    if (scope == SCOPE_SYS) pass_on_device(d, t->launch->device);
}

// Called for a strong load: if it reads pending stores by other threads of its block, passes these on to the device.
FN void delay_observe(Engine* e, Thread* t, u64 addr, u32 size) {
    Delay* d = e->delay;
    Block* b = t->block;
    u32 i, bytes = bytes_of(addr, size);
    LOOP do {
        LOOP for (i = d->buckets[bucket_of(addr)]; i; i = d->pool[i].bucket_next) {
            PendingStore* p = &d->pool[i];
            if (p->level != P_BLOCK || p->owner != b->owner || p->thread == t->linear) continue;
            if (overlaps(p, addr, bytes)) {
                pass_on(e, d, i);
                break;
            }
        }
    } while (i);
}

// Called when a running thread makes a fence: passes on the stores that the fence releases.
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

// A free entry of the table, or 0.
FN u32 take_pending(Delay* d) {
    u32 i = d->free_list;
    if (i) d->free_list = d->pool[i].next;
    else if (d->highest < PENDING_STORES - 1) i = ++d->highest;
    return i;
}

// Called before a store: makes an entry for it, with the bytes that are in memory now. The store itself follows.
FN void delay_store(Engine* e, Thread* t, u64 addr, u32 size) {
    Delay* d = e->delay;
    Block* b = t->block;
    u32 newest = newest_overlapping(d, b, addr, size);
    if (newest && can_merge(&d->pool[newest], t, addr, size)) return;
    u32 i = take_pending(d);
    if (!i) {
        pass_on_overlapping(e, b, t->launch->device, addr, size);
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

// Called before each store and before each strong access to global or shared memory, after its checks. During a probe
// (probe.cuh) no store is pending and none is delayed.
FAR void delay_access(Thread* t, u64 addr, u32 size, u32 flags, u32 is_shared) {
    Engine* e = t->launch->engine;
    if (e->probing) return;
    if (flags & (A_WRITE | A_ATOMIC) && flags >> ORDER_SHIFT & ORDER_RELEASE) delay_release(t, flags >> SCOPE_SHIFT & 3);
    if (is_shared) return;
    if (flags & A_ATOMIC) pass_on_overlapping(e, t->block, t->launch->device, addr, size);
    else if (flags & A_WRITE && e->race && flags & A_STRONG) pass_on_overlapping(e, t->block, t->launch->device, addr, size);
    else if (flags & A_WRITE) delay_store(e, t, addr, size);
    else delay_observe(e, t, addr, size);
}

// Blocks and the scheduler --------------------------------------------------------------------------------------------

FN void delay_start_block(Delay* d, Block* b) {
    b->owner = ++d->last_owner;
    b->epoch = 0;
    b->pending.first = b->pending.last = 0;
}

// Called when a block has ended. Its slot may be used again afterwards.
FN void delay_end_block(Delay* d, Block* b) {
    view_block(d, 0);
    LOOP for (u32 i = b->pending.first; i; i = d->pool[i].next) d->pool[i].level = P_ENDED;
    b->pending.first = b->pending.last = 0;
}

// Called before the scheduler checks whether a polled word has changed: puts the view of the block in memory if the
// block has a pending store near that word.
FN void delay_look(Delay* d, Block* b, u64 addr) {
    if (!b->pending.first || d->shown_block == b) return;
    LOOP for (u32 i = d->buckets[bucket_of(addr)]; i; i = d->pool[i].bucket_next)
        if (d->pool[i].owner == b->owner && d->pool[i].level == P_BLOCK && same_chunk(&d->pool[i], addr)) {
            view_block(d, b);
            return;
        }
}

// Called at the end of a pass: passes on the stores that are due. The more stores the table has, the more rarely it is
// searched.
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
        if (p->due_pass <= now) pass_on(e, d, i);
        if (p->level != P_FREE && p->due_pass < d->earliest_due) d->earliest_due = p->due_pass;
    }
    e->work += d->highest;
}

// Passes all stores on to everybody.
FAR void delay_flush(Engine* e) {
    Delay* d = e->delay;
    LOOP for (u32 i = 1; i <= d->highest; i++)
        if (d->pool[i].level == P_BLOCK || d->pool[i].level == P_ENDED) pass_on(e, d, i);
    LOOP for (u32 k = 0; k < 8; k++) pass_on_device(d, k);
}

// The place of a store in the order in which delay_idle passes stores on, highest first: the newest with seed 0, else
// pseudo-random.
FN u64 idle_rank(Engine* e, PendingStore* p) { return e->seed ? hash(e->seed + p->order * 0x9E3779B97F4A7C15ull) >> 16 : p->order; }

// Called when nothing else can run: passes one store on by one level, or up to an eighth of the stores if there are
// many. Returns 0 if no store was pending.
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
    u64 last = d->last_order;  // an entry that reaches the device in this loop gets a larger number and is skipped
    LOOP for (u32 i = 1; i <= d->highest; i++) {
        PendingStore* p = &d->pool[i];
        if (p->level != P_FREE && p->order <= last && idle_rank(e, p) >= low) pass_on(e, d, i);
    }
    e->work += d->highest * 2;
    return 1;
}

// For Python ----------------------------------------------------------------------------------------------------------

// The size of the zeroed memory for Engine::delay.
API u64 rt_delay_bytes() { return sizeof(Delay); }

// Called when a launch is stopped before its end: its stores are performed.
API void rt_delay_end(Engine* e, Launch* l) {
    if (!l->pending) return;
    Delay* d = e->delay;
    LOOP for (u32 i = 1; i <= d->highest; i++) {
        PendingStore* p = &d->pool[i];
        if ((p->level == P_BLOCK || p->level == P_ENDED) && p->launch == l) pass_on(e, d, i);
    }
    pass_on_device(d, l->device);
}
