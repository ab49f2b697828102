// SPDX-License-Identifier: Apache-2.0
// Delayed stores: a store of a block reaches other blocks late, at a moment that the seed decides, unless something orders
// it. Off (Engine::delay is null) they reach everybody at once, and memory is sequentially consistent.
//
// A plain, relaxed, volatile or release store to global memory becomes a Pending entry of its block. The block sees memory
// with its own entries on top, in the order in which they were made. An entry then passes to the device, on top of whose
// memory all blocks of the device see it, and from there to everybody: to other devices and the host. Exactly one view is
// in memory at a time. Entries of a view are put there by exchange(), which swaps what memory holds with what the entry
// holds, first to last, and taken out by the same, last to first; so no load has to look anything up. Only the block that
// runs has its view in memory; between turns of launches, and whenever the host may look, nobody has.
//
// Why each result shown is one that the PTX memory model allows. Passing on is the moment at which a store is performed
// for the device, or for all. The model asks for nothing but the following to be over before something else happens:
//
//   Release. A release (of a store, an atomic or a fence; fence.sc and membar too) by thread T at .gpu or wider passes on
//     what happens before it in its block, at .sys also all that the device holds: what T itself stored; what anybody stored
//     before the last barrier that completed in the block, or, in T's warp, before its last __syncwarp; what a release of
//     .cta scope covered, by whomever (`shared`); and what another thread's strong load has read, which passes it on to the
//     device at once (observation). So a store is in place before any thread that synchronises with T can go on; and since a
//     device's entries are all passed on at .sys, also if it got to T through releases of blocks of the device. Barriers of
//     some warps, and .cta releases that nobody acquired, count for the whole block: that delays less than is allowed.
//   Coherence. An entry never overtakes an older one of the same block, or device, that overlaps it, and a view has
//     the newest on top. So stores of a thread to a place stay in order, a thread reads its own newest, and what one reads
//     from a place never goes back. Where another block's entry is passed on later, it is later in the coherence order, and
//     whoever has it pending has seen nothing else there since. Two stores of a thread to the same place, with nothing
//     between that orders them, are one.
//   Atomicity. An atomic acts on what everybody sees: entries of its own block and device that overlap it are passed on
//     first; others are not performed yet, and come behind it in the coherence order.
//   Completion. A launch has ended when its blocks have and nothing that they stored is pending; then all that its device
//     holds is passed on too. So the stream's next operation, the host, and griddepcontrol.wait see it. The end of a block
//     alone orders nothing: its entries stay.
//   Proxies. fence.proxy counts as a release at .sys. Entries are told apart by address: where one page is mapped at two
//     addresses, stores by one do not wait for those by the other unless a fence.proxy is between, as the model says.
//
// With the race detector, stores that are not plain are not delayed: it takes a strong read for one of the newest strong
// write, so a read of an older value would learn what it must not.
//
// Passing on earlier is always allowed. Every store is passed on in the end: after a bounded number of passes over all
// blocks, when nothing else can run, and when there is no room for more entries a store is performed at once. Loads are
// performed in order and when they are made: what needs a load to be stale (a missing acquire, load buffering) is not shown,
// and fence.acq_rel orders a store before a later load here, as fence.sc does. Values of atomics are never delayed. What
// is initialised is marked at once, so a read of what is still pending is not reported as uninitialised.
#pragma once

#include "common.cuh"

const u32 PENDING = 1 << 13;
const u32 BUCKETS = 1 << 14;
const u32 CHUNK = 5;      // shift: accesses are aligned and at most 32 bytes, so each lies in one chunk
const u64 LATEST = 1024;  // passes for which a store may be pending at one level

enum {
    P_FREE,
    P_BLOCK,
    P_ENDED,
    P_DEVICE
};  // pending in a block that is resident, in one that has ended, on the device

struct Pending {
    u64 addr;
    u64 bits[4];  // the value; while it is in memory, what was there before
    Launch* launch;
    Block* block;
    u64 owner;       // the block's number: slots are used again
    u64 order, due;  // age in its list; the pass after which it is passed on
    u32 size, thread, warp, epoch, syncs;
    u32 level, shared, device;
    u32 next, previous;  // links of its block's or device's list, oldest first; `next` also links the free list
    u32 chain, back;     // links of its bucket
};

struct Delay {
    Block* block;  // whose entries are in memory, if any
    u32 device;    // and whose (plus one)
    u32 live, high, free;
    u64 owners, order, pass, next_due, looked;
    List devices[8];
    u32 bucket[BUCKETS];
    Pending pool[PENDING];  // the first is not used
};

FN List* list_of(Delay* d, Pending* p) { return p->level == P_DEVICE ? &d->devices[p->device] : &p->block->pending; }

FN u32 bucket_of(u64 addr) { return (u32)(((addr >> CHUNK) * 0x9E3779B97F4A7C15ull) >> 48) & (BUCKETS - 1); }

// The bytes of its chunk that an access touches.
FN u32 bytes_of(u64 addr, u32 size) { return (size >= 32 ? ~0u : (1u << size) - 1) << (addr & 31); }

FN u32 same_chunk(Pending* p, u64 addr) { return p->addr >> CHUNK == addr >> CHUNK; }

FAR void exchange(Pending* p) {
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

FAR void show(Delay* d, List* list) {
    LOOP for (u32 i = list->first; i; i = d->pool[i].next) exchange(&d->pool[i]);
}

FAR void hide(Delay* d, List* list) {
    LOOP for (u32 i = list->last; i; i = d->pool[i].previous) exchange(&d->pool[i]);
}

// Puts a block's view in memory (on top of its device's, which is there already), or takes the present view out.
FAR void view_block(Delay* d, Block* b) {
    if (d->block == b) return;
    if (d->block) hide(d, &d->block->pending);
    d->block = b;
    if (b) show(d, &b->pending);
}

// The same for a device, given as its number plus one; 0 is none.
FAR void view_device(Delay* d, u32 device) {
    view_block(d, 0);
    if (d->device == device) return;
    if (d->device) hide(d, &d->devices[d->device - 1]);
    d->device = device;
    if (device) show(d, &d->devices[device - 1]);
}

FN void link(Delay* d, u32 i) {
    List* list = list_of(d, &d->pool[i]);
    d->pool[i].next = 0;
    d->pool[i].previous = list->last;
    if (list->last) d->pool[list->last].next = i;
    else list->first = i;
    list->last = i;
}

FN void unlink(Delay* d, u32 i) {
    Pending* p = &d->pool[i];
    List* list = list_of(d, p);
    if (p->previous) d->pool[p->previous].next = p->next;
    else list->first = p->next;
    if (p->next) d->pool[p->next].previous = p->previous;
    else list->last = p->previous;
}

// When an entry is passed on at the latest. Seed 0 keeps all as long as may be, others some for a shorter time.
FN void set_age(Engine* e, Delay* d, Pending* p) {
    p->order = ++d->order;
    u64 random = e->seed ? hash(e->seed * 0x9E3779B97F4A7C15ull + d->order) : ~0ull;
    u32 kind = random & 3;
    p->due = d->pass + (kind == 0 ? 0 : kind == 1 ? 1 + (random >> 2 & 15) : LATEST);
    if (p->due < d->next_due) d->next_due = p->due;
}

// From the block to the device.
FAR void to_device(Engine* e, Delay* d, u32 i) {
    Pending* p = &d->pool[i];
    u32 shown = p->level == P_BLOCK && d->block == p->block;
    if (p->level == P_BLOCK) unlink(d, i);
    p->level = P_DEVICE;
    set_age(e, d, p);
    link(d, i);
    if (!shown && d->device == p->device + 1) exchange(p);
}

FN u32 is_freed(Launch* l, u64 addr) {
    return (*(u32*)(l->access_base + (addr - l->window_base >> 16) * 4) >> 24 & 0x3F) == K_FREED;
}

// From the device to everybody. No other device's view is in memory.
FAR void to_all(Delay* d, u32 i) {
    Pending* p = &d->pool[i];
    if (d->device != p->device + 1 && !is_freed(p->launch, p->addr)) exchange(p);
    p->launch->pending--;
    unlink(d, i);
    if (p->chain) d->pool[p->chain].back = p->back;
    if (p->back) d->pool[p->back].chain = p->chain;
    else d->bucket[bucket_of(p->addr)] = p->chain;
    p->level = P_FREE;
    p->next = d->free;
    d->free = i;
    if (!--d->live) d->high = d->free = 0;
}

// Passes an entry on by one level, behind those of the same block, or device, that it must not overtake.
FAR void pass_on(Engine* e, Delay* d, u32 i) {
    Pending* p = &d->pool[i];
    u32 head = d->bucket[bucket_of(p->addr)], level = p->level, bytes = bytes_of(p->addr, p->size), known;
    u64 owner = level == P_DEVICE ? p->device : p->owner, order = p->order, addr = p->addr;
    if (head == i && !p->chain) {  // nothing else is near, as mostly
        if (level == P_DEVICE) to_all(d, i);
        else to_device(e, d, i);
        return;
    }
    LOOP do {
        known = bytes;
        LOOP for (u32 j = head; j; j = d->pool[j].chain) {
            Pending* q = &d->pool[j];
            if (q->level != level || (level == P_DEVICE ? q->device : q->owner) != owner || q->order > order) continue;
            u32 others = same_chunk(q, addr) ? bytes_of(q->addr, q->size) : 0;
            if (others & bytes) bytes |= others;
        }
    } while (bytes != known);
    u32 first;
    LOOP do {
        first = i;
        LOOP for (u32 j = d->bucket[bucket_of(addr)]; j; j = d->pool[j].chain) {
            Pending* q = &d->pool[j];
            if (q->level != level || (level == P_DEVICE ? q->device : q->owner) != owner) continue;
            if (!same_chunk(q, addr) || !(bytes_of(q->addr, q->size) & bytes)) continue;
            if (q->order < d->pool[first].order) first = j;
        }
        if (level == P_DEVICE) to_all(d, first);
        else to_device(e, d, first);
    } while (first != i);
}

FAR void pass_on_device(Delay* d, u32 device) {
    LOOP while (d->devices[device].first) to_all(d, d->devices[device].first);
}

// Called for a release by a running thread.
FAR void release(Thread* t, u32 scope) {
    Engine* e = t->launch->engine;
    Delay* d = e->delay;
    Block* b = t->block;
    u32 next;
    LOOP for (u32 i = b->pending.first; i; i = next) {
        Pending* p = &d->pool[i];
        next = p->next;
        if (p->thread != t->linear && !p->shared && p->epoch == b->epoch &&
            (p->warp != t->warp || p->syncs == b->warps[t->warp].syncs))
            continue;
        if (scope == SCOPE_CTA) p->shared = 1;
        else pass_on(e, d, i);
    }
    if (scope == SCOPE_SYS) pass_on_device(d, t->launch->device);
}

// Entries of the block, and of its device, that overlap: passed on to everybody.
FAR void pass_on_overlapping(Engine* e, Block* b, u32 device, u64 addr, u32 size) {
    Delay* d = e->delay;
    u32 i, bytes = bytes_of(addr, size);
    LOOP do {
        LOOP for (i = d->bucket[bucket_of(addr)]; i; i = d->pool[i].chain) {
            Pending* p = &d->pool[i];
            if (!same_chunk(p, addr) || !(bytes_of(p->addr, p->size) & bytes)) continue;
            if (p->level == P_DEVICE ? p->device == device : p->owner == b->owner) {
                pass_on(e, d, i);
                break;
            }
        }
    } while (i);
}

// A strong load: what it reads of another thread of the block is passed on to the device.
FN void observe(Engine* e, Thread* t, u64 addr, u32 size) {
    Delay* d = e->delay;
    Block* b = t->block;
    u32 i, bytes = bytes_of(addr, size);
    LOOP do {
        LOOP for (i = d->bucket[bucket_of(addr)]; i; i = d->pool[i].chain) {
            Pending* p = &d->pool[i];
            if (p->level != P_BLOCK || p->owner != b->owner || p->thread == t->linear) continue;
            if (same_chunk(p, addr) && bytes_of(p->addr, p->size) & bytes) {
                pass_on(e, d, i);
                break;
            }
        }
    } while (i);
}

// Called for a store that is about to be made.
FN void delay_store(Engine* e, Thread* t, u64 addr, u32 size) {
    Delay* d = e->delay;
    Block* b = t->block;
    u32 bytes = bytes_of(addr, size), newest = 0, bucket = bucket_of(addr);
    LOOP for (u32 i = d->bucket[bucket]; i; i = d->pool[i].chain) {
        Pending* p = &d->pool[i];
        if (p->owner != b->owner || p->level != P_BLOCK || !same_chunk(p, addr)) continue;
        if (bytes_of(p->addr, p->size) & bytes && (!newest || p->order > d->pool[newest].order)) newest = i;
    }
    Warp* warp = &b->warps[t->warp];
    Pending* p = &d->pool[newest];
    if (newest && p->addr == addr && p->size == size && p->thread == t->linear && !p->shared && p->epoch == b->epoch &&
        p->syncs == warp->syncs)
        return;
    u32 i = d->free;
    if (i) {
        d->free = d->pool[i].next;
    } else if (d->high < PENDING - 1) {
        i = ++d->high;
    } else {
        pass_on_overlapping(e, b, t->launch->device, addr, size);
        return;
    }
    t->launch->pending++;
    if (!d->live++) d->next_due = ~0ull;
    p = &d->pool[i];
    p->addr = addr;
    p->launch = t->launch;
    p->block = b;
    p->owner = b->owner;
    p->size = size;
    p->thread = t->linear;
    p->warp = t->warp;
    p->epoch = b->epoch;
    p->syncs = warp->syncs;
    p->level = P_BLOCK;
    p->shared = 0;
    p->device = t->launch->device;
    if (size == 4) p->bits[0] = *(u32*)addr;
    else if (size == 2) p->bits[0] = *(unsigned short*)addr;
    else if (size == 1) p->bits[0] = *(u8*)addr;
    else LOOP for (u32 k = 0; k < size / 8; k++) p->bits[k] = ((u64*)addr)[k];
    set_age(e, d, p);
    link(d, i);
    p->back = 0;
    p->chain = d->bucket[bucket];
    if (p->chain) d->pool[p->chain].back = i;
    d->bucket[bucket] = i;
}

// Each store, and each strong access to global or shared memory, when it has been checked and is about to be made. While
// the engine probes whether anything can still move, nothing is pending and nothing is delayed.
FAR void delay_access(Thread* t, u64 addr, u32 size, u32 flags, u32 is_shared) {
    Engine* e = t->launch->engine;
    if (e->probing) return;
    if (flags & (A_WRITE | A_ATOMIC) && flags >> ORDER_SHIFT & ORDER_RELEASE) release(t, flags >> SCOPE_SHIFT & 3);
    if (is_shared) return;
    if (flags & A_ATOMIC) pass_on_overlapping(e, t->block, t->launch->device, addr, size);
    else if (flags & A_WRITE && e->race && flags & A_STRONG) pass_on_overlapping(e, t->block, t->launch->device, addr, size);
    else if (flags & A_WRITE) delay_store(e, t, addr, size);
    else observe(e, t, addr, size);
}

FN void delay_fence(Thread* t, u32 flags) {
    if (flags & FENCE_PROXY) release(t, SCOPE_SYS);
    else if (flags & FENCE_SC || flags >> ORDER_SHIFT & ORDER_RELEASE) release(t, flags >> SCOPE_SHIFT & 3);
}

FN void delay_start_block(Delay* d, Block* b) {
    b->owner = ++d->owners;
    b->epoch = 0;
    b->pending.first = b->pending.last = 0;
}

// Called when the block has ended and its slot may be used again.
FN void delay_end_block(Delay* d, Block* b) {
    view_block(d, 0);
    LOOP for (u32 i = b->pending.first; i; i = d->pool[i].next) d->pool[i].level = P_ENDED;
    b->pending.first = b->pending.last = 0;
}

// A spinning thread is about to be asked whether the word that it polls has changed: for what its block sees, if it has
// stores of its own there.
FN void delay_look(Delay* d, Block* b, u64 addr) {
    if (!b->pending.first || d->block == b) return;
    LOOP for (u32 i = d->bucket[bucket_of(addr)]; i; i = d->pool[i].chain)
        if (d->pool[i].owner == b->owner && d->pool[i].level == P_BLOCK && same_chunk(&d->pool[i], addr)) {
            view_block(d, b);
            return;
        }
}

// The end of a pass: passes on the entries that are due. Large numbers of entries are looked at more rarely.
FAR void delay_pass(Engine* e) {
    Delay* d = e->delay;
    d->pass++;
    if (!d->live || d->pass <= d->next_due || d->pass < d->looked + d->high / 256) return;
    d->looked = d->pass;
    u64 now = d->pass - 1;
    d->next_due = ~0ull;
    LOOP for (u32 i = 1; i <= d->high; i++) {
        Pending* p = &d->pool[i];
        if (p->level == P_FREE) continue;
        if (p->due <= now) pass_on(e, d, i);
        if (p->level != P_FREE && p->due < d->next_due) d->next_due = p->due;
    }
    e->work += d->high;
}

FAR void delay_flush(Engine* e) {
    Delay* d = e->delay;
    LOOP for (u32 i = 1; i <= d->high; i++)
        if (d->pool[i].level == P_BLOCK || d->pool[i].level == P_ENDED) pass_on(e, d, i);
    LOOP for (u32 k = 0; k < 8; k++) pass_on_device(d, k);
}

FN u64 rank_of(Engine* e, Pending* p) { return e->seed ? hash(e->seed + p->order * 0x9E3779B97F4A7C15ull) >> 16 : p->order; }

// Nothing else can run: passes on one entry by one level, or a small part of many; the newest first, or what the seed says.
// 0 if nothing was pending.
FAR u32 delay_idle(Engine* e, Launch** launches, u32 n) {
    Delay* d = e->delay;
    if (!d->live) return 0;
    u32 watched = 0;
    LOOP for (u32 k = 0; k < n; k++) watched |= launches[k]->state == RUNNING && launches[k]->finished < launches[k]->blocks;
    if (!watched) {  // their order cannot be observed
        delay_flush(e);
        return 1;
    }
    u64 low = ~0ull, high = 0;
    LOOP for (u32 i = 1; i <= d->high; i++) {
        if (d->pool[i].level == P_FREE) continue;
        u64 rank = rank_of(e, &d->pool[i]);
        if (rank < low) low = rank;
        if (rank > high) high = rank;
    }
    low = high - (d->live < 32 ? 0 : (high - low) / 8);
    u64 last = d->order;  // what this makes new is not looked at again
    LOOP for (u32 i = 1; i <= d->high; i++) {
        Pending* p = &d->pool[i];
        if (p->level != P_FREE && p->order <= last && rank_of(e, p) >= low) pass_on(e, d, i);
    }
    e->work += d->high * 2;
    return 1;
}

// Bytes of zeroed memory that Engine::delay needs.
API u64 rt_delay_bytes() { return sizeof(Delay); }

// The launch is given up before its end: what it has stored takes its place.
API void rt_delay_end(Engine* e, Launch* l) {
    if (!l->pending) return;
    Delay* d = e->delay;
    LOOP for (u32 i = 1; i <= d->high; i++) {
        Pending* p = &d->pool[i];
        if ((p->level == P_BLOCK || p->level == P_ENDED) && p->launch == l) pass_on(e, d, i);
    }
    pass_on_device(d, l->device);
}
