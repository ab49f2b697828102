// SPDX-License-Identifier: Apache-2.0
// Delayed stores: a store of a block reaches other blocks late, at a moment that the seed decides, unless an ordering
// operation forces it earlier. When this is off (Engine::delay is null), each store reaches all threads at once, and
// memory is sequentially consistent.
//
// A plain, relaxed, volatile or release store to global memory becomes a Pending entry of its block. The block sees
// memory with its own entries on top, in the order of the stores. An entry is passed on twice: to the device, whose
// blocks then all see it, and later to everybody, that is to other devices and the host. Memory holds exactly one view
// at a time. exchange() swaps the bytes of an entry with those in memory. To put a view in memory, its entries are
// exchanged from first to last; to take it out, from last to first. So a load needs no search. Memory holds a block's
// view only while that block runs; between turns of launches, and whenever the host may read memory, it holds no entry
// at all.
//
// Why each result is one that the PTX memory model allows. When an entry is passed on, its store is performed for the
// device, or for everybody. The model requires a store to be performed before another event only in these cases:
//
//   Release. A release (by a store, an atomic or a fence; fence.sc and membar too) by thread T at .gpu scope or wider
//     passes on the entries of the block that happen before it; at .sys scope it also passes on all entries of the
//     device. The entries that happen before it are: stores of T; stores of any thread before the last barrier that the
//     block completed, or, in T's warp, before its last __syncwarp; stores that a release of .cta scope by any thread
//     covered (`shared`); and stores that a strong load of another thread has read, which that load passes on to the
//     device at once (observation). So a store is performed before any thread that synchronises with T can continue.
//     This also holds for a store that T knows through releases of other blocks of the device, since .sys passes on all
//     entries of the device. A barrier of some of the warps, and a .cta release that no thread acquired, count for the
//     whole block, which delays less than the model allows.
//   Coherence. An entry never overtakes an older overlapping entry of the same block, or device, and a view has the
//     newest entry on top. So the stores of a thread to a location stay in order, a thread reads its own newest store,
//     and successive reads of a location never return to an older value. An entry of another block that is passed on
//     later is later in the coherence order; the block that has it pending has seen no other store there since. Two
//     stores of a thread to the same location, with no ordering operation between them, are merged.
//   Atomicity. An atomic acts on the value that everybody sees: overlapping entries of its own block and device are
//     passed on first. Entries of others are not performed yet, and come after it in the coherence order.
//   Completion. A launch has ended when its blocks have ended and no store of theirs is pending; then all entries of
//     its device are passed on too. So the next operation of the stream, the host, and griddepcontrol.wait see all
//     stores. The end of a block alone orders nothing: its entries stay pending.
//   Proxies. fence.proxy counts as a release at .sys scope. Entries are distinguished by address. Where one page is
//     mapped at two addresses, stores by one address do not wait for stores by the other without a fence.proxy between
//     them, as the model says.
//
// With the race detector, only plain stores are delayed: the detector assumes that a strong read sees the newest strong
// write, so a read of an older value would make it learn clocks that the reader does not know.
//
// Passing on earlier is always allowed. Every entry is passed on in the end: after a bounded number of passes over all
// blocks, or when nothing else can run. When the table of entries is full, a store is performed at once. Loads are
// performed in order and at once. So results that need a stale load (a missing acquire, load buffering) do not occur
// here, and fence.acq_rel orders a store before a later load, as fence.sc does. Values of atomics are never delayed.
// The bytes of a store are marked as initialised at once, so a read of bytes whose store is pending is not reported as
// uninitialised.
#pragma once

#include "common.cuh"

const u32 PENDING = 1 << 13;
const u32 BUCKETS = 1 << 14;
const u32 CHUNK = 5;      // shift: accesses are aligned and have at most 32 bytes, so each lies in one chunk
const u64 LATEST = 1024;  // passes for which an entry may stay at one level

// The level of an entry: pending in a resident block, in a block that has ended, or on the device.
enum { P_FREE, P_BLOCK, P_ENDED, P_DEVICE };

struct Pending {
    u64 addr;
    u64 bits[4];  // the value of the store; while that is in memory, the value that was there before
    Launch* launch;
    Block* block;
    u64 owner;       // Block::owner, as another block may use the slot later
    u64 order, due;  // larger for newer entries; the pass after which the entry is passed on
    u32 size, thread, warp, epoch, syncs;
    u32 level, shared, device;
    u32 next, previous;  // links in the list of its block or device, oldest first; `next` also links the free list
    u32 chain, back;     // links in its bucket of the hash table
};

struct Delay {
    Block* block;  // the block whose view is in memory, or null
    u32 device;    // the device whose view is in memory, plus one; 0: none
    u32 live, high, free;
    u64 owners, order, pass, next_due, looked;
    List devices[8];
    u32 bucket[BUCKETS];
    Pending pool[PENDING];  // entry 0 is not used
};

FN List* list_of(Delay* d, Pending* p) { return p->level == P_DEVICE ? &d->devices[p->device] : &p->block->pending; }

FN u32 bucket_of(u64 addr) { return (u32)(((addr >> CHUNK) * 0x9E3779B97F4A7C15ull) >> 48) & (BUCKETS - 1); }

// The bytes that an access touches, as a mask of the bytes of its chunk.
FN u32 bytes_of(u64 addr, u32 size) { return (size >= 32 ? ~0u : (1u << size) - 1) << (addr & 31); }

FN u32 same_chunk(Pending* p, u64 addr) { return p->addr >> CHUNK == addr >> CHUNK; }

// Swaps the bytes of an entry with those in memory.
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

// Makes `b` the block whose view is in memory, on top of the view of its device, which is there already. Null: no
// block.
FAR void view_block(Delay* d, Block* b) {
    if (d->block == b) return;
    if (d->block) hide(d, &d->block->pending);
    d->block = b;
    if (b) show(d, &b->pending);
}

// Makes the device with this number plus one the device whose view is in memory. 0: no device.
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

// Sets when an entry is passed on at the latest. Seed 0 keeps all entries as long as possible, other seeds keep some
// for a shorter time.
FN void set_age(Engine* e, Delay* d, Pending* p) {
    p->order = ++d->order;
    u64 random = e->seed ? hash(e->seed * 0x9E3779B97F4A7C15ull + d->order) : ~0ull;
    u32 kind = random & 3;
    p->due = d->pass + (kind == 0 ? 0 : kind == 1 ? 1 + (random >> 2 & 15) : LATEST);
    if (p->due < d->next_due) d->next_due = p->due;
}

// Passes an entry on from its block to the device.
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

// Makes an entry, which its device sees already, visible to all devices. Memory has the view of the entry's device, or
// that of no device.
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

// Passes an entry on by one level, after the older entries of its block, or device, that it must not overtake.
FAR void pass_on(Engine* e, Delay* d, u32 i) {
    Pending* p = &d->pool[i];
    u32 head = d->bucket[bucket_of(p->addr)], level = p->level, bytes = bytes_of(p->addr, p->size), known;
    u64 owner = level == P_DEVICE ? p->device : p->owner, order = p->order, addr = p->addr;
    if (head == i && !p->chain) {  // the usual case: the bucket has no other entry
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

// Called when a running thread makes a release of this scope.
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

// Passes the entries of a block and of its device that overlap a range on to everybody.
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

// Called for a strong load: entries of other threads of the block that it reads are passed on to the device.
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

// Called before a store: makes an entry for it, or merges it with the entry of the same thread's last store there.
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

// Called before each store and before each strong access to global or shared memory, after its checks. During a probe
// (probe.cuh) no store is pending and none is delayed.
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

// Called when a block has ended. Its slot may be used again afterwards.
FN void delay_end_block(Delay* d, Block* b) {
    view_block(d, 0);
    LOOP for (u32 i = b->pending.first; i; i = d->pool[i].next) d->pool[i].level = P_ENDED;
    b->pending.first = b->pending.last = 0;
}

// Called before the scheduler checks whether a polled word has changed: puts the block's view in memory if the block
// has an entry near that word.
FN void delay_look(Delay* d, Block* b, u64 addr) {
    if (!b->pending.first || d->block == b) return;
    LOOP for (u32 i = d->bucket[bucket_of(addr)]; i; i = d->pool[i].chain)
        if (d->pool[i].owner == b->owner && d->pool[i].level == P_BLOCK && same_chunk(&d->pool[i], addr)) {
            view_block(d, b);
            return;
        }
}

// Called at the end of a pass: passes on the entries that are due. The more entries there are, the more rarely they are
// checked.
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

// Passes all entries on to everybody.
FAR void delay_flush(Engine* e) {
    Delay* d = e->delay;
    LOOP for (u32 i = 1; i <= d->high; i++)
        if (d->pool[i].level == P_BLOCK || d->pool[i].level == P_ENDED) pass_on(e, d, i);
    LOOP for (u32 k = 0; k < 8; k++) pass_on_device(d, k);
}

FN u64 rank_of(Engine* e, Pending* p) { return e->seed ? hash(e->seed + p->order * 0x9E3779B97F4A7C15ull) >> 16 : p->order; }

// Called when nothing else can run: passes one entry on by one level, or up to an eighth of the entries if there are
// many. With seed 0 the newest go first, with another seed a hash decides. Returns 0 if no entry was pending.
FAR u32 delay_idle(Engine* e, Launch** launches, u32 n) {
    Delay* d = e->delay;
    if (!d->live) return 0;
    u32 watched = 0;
    LOOP for (u32 k = 0; k < n; k++) watched |= launches[k]->state == RUNNING && launches[k]->finished < launches[k]->blocks;
    if (!watched) {  // no block is left that could observe the order of the entries
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
    u64 last = d->order;  // an entry that reaches the device in this loop gets a larger number and is skipped
    LOOP for (u32 i = 1; i <= d->high; i++) {
        Pending* p = &d->pool[i];
        if (p->level != P_FREE && p->order <= last && rank_of(e, p) >= low) pass_on(e, d, i);
    }
    e->work += d->high * 2;
    return 1;
}

// The size of the zeroed memory for Engine::delay.
API u64 rt_delay_bytes() { return sizeof(Delay); }

// Called when a launch is stopped before its end: its stores are performed.
API void rt_delay_end(Engine* e, Launch* l) {
    if (!l->pending) return;
    Delay* d = e->delay;
    LOOP for (u32 i = 1; i <= d->high; i++) {
        Pending* p = &d->pool[i];
        if ((p->level == P_BLOCK || p->level == P_ENDED) && p->launch == l) pass_on(e, d, i);
    }
    pass_on_device(d, l->device);
}
