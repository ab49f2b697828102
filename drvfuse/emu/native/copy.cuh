// SPDX-License-Identifier: Apache-2.0
// Asynchronous copies: cp.async of 4, 8 or 16 bytes from global to shared memory, and the groups that threads wait for.
//
// A thread has a queue of the copies that it has issued and not waited for, oldest first, each with the number of its
// group: how often the thread had committed before. wait_group N ends those whose group is not among the N committed
// last; the open group is not committed, so it stays. wait_all commits and waits for all. What a thread has never
// waited for stays in its queue when it exits, and is dropped when the block ends: we assume that such a copy may be
// made that late, when nobody can see it any more.
//
// Why each result shown is one that PTX allows. A copy is a weak access that is made at any moment between its issue
// and the end of its thread's wait for it; nothing but that wait orders it, neither with the thread's own accesses, nor
// with other copies, nor at a barrier. Here that moment is drawn for each copy: at its issue, at the thread's next
// commit, or at the wait, which with seed 0 it always is. So
//
//   a read without a wait, or by another thread without a barrier after it, finds what was in shared memory before (a
//     fault where nobody has written yet), in every run with seed 0;
//   a source that is overwritten before the wait gives the new bytes, in every run with seed 0;
//   a buffer that is still read when the next copy to it is issued is overwritten under the reader where the copy is made
//     early, so under other seeds.
//
// The bytes are read and written in one step, in the view of memory that the thread's block has (delay.cuh). What the
// shadow knows as initialised is marked then too. Bounds and alignment are checked when the copy is issued; the source
// once more when it is made, as it may have been freed. Where there is no room for more, a copy is made when it is
// issued. A thread that polls shared memory for a copy that is only waited for later, or never, waits for ever here.
//
// The race detector takes the read and the write of a copy for accesses that begin at the issue and end at the wait:
// their entries count as unordered with everything (COPYING in race.cuh) until the wait makes them accesses of its
// thread. That does not depend on the moment at which the bytes were copied. For a copy that nobody waited for, it
// lasts until the launch has ended, whatever barriers come: no thread of the block may count on it.
#pragma once

#include "access.cuh"
#include "race_copies.cuh"

const u32 COPIES = 1 << 20;

enum { M_ISSUE, M_COMMIT, M_WAIT, M_MADE };  // when a copy is made, or that it was made

struct Copy {
    u64 source, target;
    u64 bits[2];      // data of a piece of a bulk copy to global memory that was read and is not yet written
    u32 size, bytes;  // bytes: of the source; the rest is zero
    u32 site, group, moment;
    u32 next;    // link of its thread's queue, or of the free list
    u32 number;  // position among all copies that were ever in its queue
    u32 how;     // for a piece of cp.reduce.async.bulk: how it reduces
};

// A bulk copy to shared memory, or an st.async (mbarrier.cuh), or a reduction of either kind, in the list of the block
// whose memory it writes; or an arrival of cp.async.mbarrier, of no bytes.
struct Bulk {
    u64 source, target, mbarrier;
    u64 bits[2];  // without a source: what is stored
    u32 size, site, thread, moment;
    u32 how;            // how it reduces, or 0
    u32 until, number;  // of an arrival: it waits for its thread's copies before `until`; the detector's number for it
    u32 from;           // the slot of the block of `thread`, which has issued it
    u32 known;          // what acquirers of its mbarrier will know: a reference to a clock
    u32 turns;          // turns of its block since its issue
    u32 next;           // link of its block's list, oldest first, or of the free list
};

const u32 BULKS = 1 << 16;

struct Copies {
    u32 high, free, bulk_high, bulk_free;
    Copy pool[COPIES];  // entry 0 is not used
    Bulk bulk[BULKS];   // entry 0 is not used
};

// Of cp.async, or with `bulk` of bulk copies to global memory (store.cuh).
FN CopyQueue* queue_of(Thread* t, u32 bulk) {
    return t->launch->copies + ((u64)t->block->slot * t->launch->threads + t->linear) * 2 + bulk;
}

// Draws the moment of the next copy from the seed.
FN u32 draw(Thread* t, CopyQueue* q) {
    u64 number =
        ((u64)t->launch->device << 42 | (u64)t->block->index << 10 | t->linear) * 0x9E3779B97F4A7C15ull + q->issued;
    return (u32)hash(hash(t->launch->engine->seed) + number);
}

FN u32 take_copy(Copies* pool) {
    u32 i = pool->free;
    if (i) pool->free = pool->pool[i].next;
    else if (pool->high + 1 < COPIES) i = ++pool->high;
    return i;
}

FN void append(Copies* pool, CopyQueue* q, u32 i) {
    if (q->first) pool->pool[q->last].next = i;
    else q->first = i;
    q->last = i;
}

FN void drop_first(Copies* pool, CopyQueue* q) {
    u32 i = q->first;
    Copy* c = &pool->pool[i];
    q->first = c->next;
    if (!q->first) q->last = 0;
    c->next = pool->free;
    pool->free = i;
}

FN u32 copying_in(Launch* l, Block* b, u64 addr) {
    Bulk* bulk;
    LOOP for (u32 k = b->bulks; k; k = bulk->next) {
        bulk = &l->copy_pool->bulk[k];
        if (addr - bulk->target < bulk->size) return bulk->site + 1;
    }
    LOOP for (u32 i = 0; i < 2 * l->threads; i++) {
        Copy* c;
        LOOP for (u32 k = queue_of(thread_at(l, b, i / 2), i & 1)->first; k; k = c->next) {
            c = &l->copy_pool->pool[k];
            if (c->moment != M_MADE && addr - c->target < c->size) return c->site + 1;
        }
    }
    return 0;
}

// The site (plus one) of a copy to this byte that has been issued by a thread of a launch, and not made; or 0.
FAR u32 copying_to(Launch* l, u64 addr) {
    u32 site = 0;
    LOOP for (u32 slot = 0; l->copies && slot < l->high && !site; slot++) {
        Block* b = (Block*)(l->slots + slot * l->slot_stride);
        if (b->active) site = copying_in(l, b, addr);
    }
    return site;
}

// The source is aligned to the size of the copy, so each power of two in `bytes` is an aligned access.
FAR u32 unreadable(Thread* t, u64 source, u32 bytes, u32 site, u32* word) {
    LOOP for (u32 piece = 16; piece; piece >>= 1) {
        if (!(bytes & piece)) continue;
        if (refused(t, source, piece, 0, site, word)) return 1;
        source += piece;
    }
    return 0;
}

FAR u32 make_copy(Thread* t, Copy* c) {
    Engine* e = t->launch->engine;
    u32 word;
    if (unreadable(t, c->source, c->bytes, c->site, &word)) return 1;
    e->quiet = 0;
    if (e->probing) note_write(e, c->target, c->size);
    LOOP for (u32 i = 0; i < c->size; i += 4) {
        u32 value = 0;
        if (i + 4 <= c->bytes) value = *(u32*)(c->source + i);
        else LOOP for (u32 k = i; k < c->bytes; k++) value |= (u32) * (u8*)(c->source + k) << (k - i) * 8;
        *(u32*)(c->target + i) = value;
        *(u32*)(c->target + i + SHADOW_OFFSET) = 0x03030303;
    }
    c->moment = M_MADE;
    return 0;
}

// The first copy of a queue is over: to the race detector an access of its thread at that time, or of an arrival.
FAR u32 end_first(Thread* t, CopyQueue* q, u32 time, u32 arrival) {
    Copies* pool = t->launch->copy_pool;
    Copy* c = &pool->pool[q->first];
    if (c->moment != M_MADE && make_copy(t, c)) return 1;
    if (t->launch->engine->race) {
        if (c->bytes) race_copied(t, c->source, c->bytes, 0, c->site, time, arrival);
        race_copied(t, c->target, c->size, N_WRITE, c->site, time, arrival);
    }
    drop_first(pool, q);
    return 0;
}

// Ends the first copies of a queue that are in groups before `group`.
FAR u32 end_groups(Thread* t, CopyQueue* q, u32 group) {
    Copies* pool = t->launch->copy_pool;
    u32 time = t->launch->engine->race ? race_thread(t->block, t->linear)->time : 0;
    LOOP while (q->first && pool->pool[q->first].group < group)
        if (end_first(t, q, time, ALONE)) return 1;
    return 0;
}

FN void start_copies(Thread* t) {
    LOOP for (u32 bulk = 0; bulk < 2; bulk++) {
        CopyQueue* q = queue_of(t, bulk);
        q->first = q->last = q->commits = q->issued = q->unread = 0;
    }
}

// cp.async of `size` bytes, of which the first `bytes` are read and the others are zero; 0, or 1 and a fault.
API u32 rt_copy(Thread* t, u64 target, u64 source, u32 size, u32 bytes, u32 site) {
    Launch* l = t->launch;
    Engine* e = l->engine;
    u64 off = target - t->block->shared_base;
    u32 kind = bytes > size ? F_COPY_SIZE : (target | source) & (size - 1) ? F_MISALIGNED : F_NONE;
    if (!kind && (off >= l->shared_bytes || off + size > l->shared_bytes)) kind = F_FOREIGN_SHARED;
    if (kind) {
        u32 reads = kind == F_MISALIGNED && source & (size - 1);
        fault(l, t, kind, site, reads ? source : target, size, reads ? 0 : A_WRITE, bytes);
        return 1;
    }
    if (!--e->fuel && refuel(t, target, size, A_WRITE, site)) return 1;
    u32 word = 0;
    if (unreadable(t, source, bytes, site, &word)) return 1;
    Site* count = &l->sites[site];
    count->size = size;
    count->reads[l->owner_class[word >> 16 & 0xFF]] += bytes != 0;
    count->writes[OF_SHARED]++;
    CopyQueue* q = queue_of(t, 0);
    Copies* pool = l->copy_pool;
    u32 i = take_copy(pool);
    Copy alone;
    Copy* c = i ? &pool->pool[i] : &alone;
    c->source = source;
    c->target = target;
    c->size = size;
    c->bytes = bytes;
    c->site = site;
    c->group = q->commits;
    c->next = c->how = 0;
    c->moment = e->seed ? draw(t, q) & 3 : M_WAIT;
    c->number = q->issued++;
    if (c->moment == M_MADE) c->moment = M_WAIT;
    if (!i) c->moment = M_ISSUE;
    if (e->race) {
        race_copy(t, source, bytes, 0, site, i, 0);
        race_copy(t, target, size, A_WRITE, site, i, 0);
    }
    if (i) {
        if (!q->first || pool->pool[q->last].group != c->group) note(l, t->block, t->linear, V_COPY, site, target, 0, 0);
        append(pool, q, i);
    }
    return c->moment == M_ISSUE && make_copy(t, c);
}

API u32 rt_copy_commit(Thread* t) {
    Copies* pool = t->launch->copy_pool;
    CopyQueue* q = queue_of(t, 0);
    q->commits++;
    Copy* c;
    LOOP for (u32 i = q->first; i; i = c->next) {
        c = &pool->pool[i];
        if (c->moment == M_COMMIT && make_copy(t, c)) return 1;
    }
    return 0;
}

// Waits until at most the `newest` groups that were committed last may be pending.
API u32 rt_copy_wait(Thread* t, u32 newest, u32 site) {
    CopyQueue* q = queue_of(t, 0);
    u32 group = q->commits > newest ? q->commits - newest : 0;
    if (q->first && t->launch->copy_pool->pool[q->first].group < group)
        note(t->launch, t->block, t->linear, V_COPY_WAIT, site, 0, newest, 0);
    return end_groups(t, q, group);
}
