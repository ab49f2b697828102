// SPDX-License-Identifier: Apache-2.0
// Asynchronous copies: cp.async of 4, 8 or 16 bytes from global to shared memory, and the groups that threads wait for.
//
// A thread has a queue of the copies that it has issued and not waited for, oldest first. Each copy has the number of
// its group, which is the number of commits that the thread made before the issue of the copy. wait_group N completes
// the copies whose group is not among the N groups committed last; copies after the last commit stay pending. wait_all
// commits and waits for all copies. Copies for which a thread never waits stay in its queue when it exits, and are
// dropped when the block ends: we assume that PTX allows such a copy to be made so late that no thread can see it.
//
// Why each result is one that PTX allows. A copy is a weak access that may be made at any moment between its issue and
// the end of its thread's wait for it. Only that wait orders the copy: the thread's own accesses, other copies and
// barriers do not. Here the seed draws the moment for each copy: its issue, the thread's next commit, or the wait. Seed
// 0 always takes the wait. So programs with a missing wait go wrong:
//
//   - A read of the target before the wait finds the old contents of shared memory (a fault where nothing was written
//     yet), in every run with seed 0. This includes reads by other threads, which need a barrier after the wait.
//   - If the source is overwritten before the wait, the target gets the new bytes of the source, in every run with seed
//     0.
//   - If a copy to a buffer is issued while threads still read the buffer, these threads find the new bytes, in runs
//     with seeds that make this copy early.
//
// In one step, the bytes are read and written, in the view of memory that the thread's block has (delay.cuh), and
// marked as initialised. Bounds and alignment are checked when the copy is issued. The source is checked again when the
// copy is made, as it may have been freed. When the table of copies is full, a copy is made at its issue. A thread that
// polls the target until the copy has arrived, without having waited for the copy, polls for ever here if the copy's
// moment is the wait.
//
// To the race detector, the read and the write of a copy begin at the issue and end at the wait. Until the wait, their
// entries are ordered with no other access (AGENT_PENDING in race_entry.cuh); the wait makes them accesses of its
// thread. That does not depend on the moment at which the bytes are copied. The accesses of a copy for which no thread
// waits last until the launch ends, whatever barriers come in between, since only a wait completes a copy.
#pragma once

#include "access.cuh"
#include "race_copies.cuh"

const u32 COPIES = 1 << 20;  // entries of Copies::pool
const u32 BULKS = 1 << 16;   // entries of Copies::bulk

// Copy::moment and Bulk::moment: when the copy is to be made. M_ISSUE: at its issue. M_COMMIT: at the next commit of
// its thread; for a Bulk, at the end of the block's turn. M_WAIT: at the wait for it; for a Bulk, when no thread of the
// block can run. M_MADE: it was made.
enum { M_ISSUE, M_COMMIT, M_WAIT, M_MADE };

// A cp.async, or a piece of a bulk copy to global memory, in the queue of its thread from its issue to the wait for it.
struct Copy {
    u64 source, target;
    u64 bits[2];  // for a piece of a bulk copy: its data between its read and its write
    u32 size;     // bytes that are written
    u32 bytes;    // bytes that are read; the rest is written as zero
    u32 site;     // the instruction
    u32 group;    // the number of its group: how many commits the thread had made before the issue
    u32 moment;   // when it is to be made: a constant M_, or S_ for a piece of a bulk copy (store.cuh)
    u32 next;     // link in its thread's queue, or in the free list
    u32 number;   // for a cp.async: how many cp.async the thread had issued before it
    u32 how;      // for a piece of cp.reduce.async.bulk: the Reduce and the Element; else 0
};

// A pending bulk copy to shared memory, st.async, or reduction by one of these (bulk.cuh); or an arrival of
// cp.async.mbarrier, whose size is 0. It is in the list of the block whose memory it writes, from its issue until it is
// made.
struct Bulk {
    u64 source;  // 0 for an st.async, which has its bytes in `bits`
    u64 target;
    u64 mbarrier;  // the mbarrier at which it completes
    u64 bits[2];
    u32 size, site;
    u32 thread, from;  // the thread that issued it: its index in its block, and the block slot of the block
    u32 moment;        // when it is to be made: a constant M_
    u32 how;           // for a reduction: the Reduce and the Element; else 0
    u32 until;         // for an arrival: it waits for its thread's copies with numbers below this one
    u32 number;        // for an arrival: the number that the race detector gives it as an agent (race.cuh)
    u32 known;         // the clock that the mbarrier publishes when the copy has ended; this Bulk owns the reference
    u32 turns;         // the number of turns (turn.cuh) of the target's block since the issue
    u32 next;          // link in its block's list, oldest first, or in the free list
};

// The asynchronous copies of a launch. Python reserves the memory, zeroed (Launch::copy_pool).
struct Copies {
    u32 high, free;            // of `pool`: the highest index that was used, and the first free entry
    u32 bulk_high, bulk_free;  // the same for `bulk`
    Copy pool[COPIES];         // entry 0 is not used, as index 0 means no copy
    Bulk bulk[BULKS];          // entry 0 is not used, as index 0 means no copy
};

// A thread's queue of cp.async or, with `bulk`, of bulk copies to global memory (store.cuh).
FN CopyQueue* queue_of(Thread* t, u32 bulk) {
    return t->launch->copies + ((u64)t->block->slot * t->launch->threads + t->linear) * 2 + bulk;
}

// Draws a pseudo-random number, from the seed, which decides when the next copy of a queue is made.
FN u32 draw(Thread* t, CopyQueue* q) {
    u64 number =
        ((u64)t->launch->device << 42 | (u64)t->block->index << 10 | t->linear) * 0x9E3779B97F4A7C15ull + q->issued;
    return (u32)hash(hash(t->launch->engine->seed) + number);
}

// Takes a free entry of the table. Returns its index, or 0 if the table is full.
FN u32 take_copy(Copies* pool) {
    u32 i = pool->free;
    if (i) pool->free = pool->pool[i].next;
    else if (pool->high + 1 < COPIES) i = ++pool->high;
    return i;
}

// Appends a copy to a queue.
FN void append(Copies* pool, CopyQueue* q, u32 i) {
    if (q->first) pool->pool[q->last].next = i;
    else q->first = i;
    q->last = i;
}

// Removes the first copy of a queue and frees it.
FN void drop_first(Copies* pool, CopyQueue* q) {
    u32 i = q->first;
    Copy* c = &pool->pool[i];
    q->first = c->next;
    if (!q->first) q->last = 0;
    c->next = pool->free;
    pool->free = i;
}

// Returns the site, plus 1, of a pending copy to the byte at `addr`, or 0 if there is none. Looks for copies that
// threads of the block have issued, and for bulk copies to its shared memory.
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

// Returns the site, plus 1, of a pending copy of a launch to the byte at `addr`, or 0 if there is none.
FAR u32 copying_to(Launch* l, u64 addr) {
    u32 site = 0;
    LOOP for (u32 slot = 0; l->copies && slot < l->slots_used && !site; slot++) {
        Block* b = (Block*)(l->slots + slot * l->slot_stride);
        if (b->active) site = copying_in(l, b, addr);
    }
    return site;
}

// Returns 1, after recording a fault, if a thread must not read the source of a copy of up to 16 bytes. The source is
// aligned to the size of the copy, so `bytes` is a sum of different powers of two, largest first, each of which is
// checked as one aligned access.
FAR u32 unreadable(Thread* t, u64 source, u32 bytes, u32 site, u32* word) {
    LOOP for (u32 piece = 16; piece; piece >>= 1) {
        if (!(bytes & piece)) continue;
        if (refused(t, source, piece, 0, site, word)) return 1;
        source += piece;
    }
    return 0;
}

// Makes a copy, and marks its bytes as initialised. Returns 0, or 1 after recording a fault.
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

// Completes and removes the first copy of a queue. For the race detector, the read and the write of the copy become
// accesses of its thread at `time` or, unless `arrival` is NO_ARRIVAL, of the arrival with that number. Returns 0, or 1
// after recording a fault.
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

// Completes the copies of a queue that are in groups before `group`. Returns 0, or 1 after recording a fault.
FAR u32 end_groups(Thread* t, CopyQueue* q, u32 group) {
    Copies* pool = t->launch->copy_pool;
    u32 time = t->launch->engine->race ? race_thread(t->block, t->linear)->time : 0;
    LOOP while (q->first && pool->pool[q->first].group < group)
        if (end_first(t, q, time, NO_ARRIVAL)) return 1;
    return 0;
}

// Empties the queues of a thread. Called when the thread starts.
FN void start_copies(Thread* t) {
    LOOP for (u32 bulk = 0; bulk < 2; bulk++) {
        CopyQueue* q = queue_of(t, bulk);
        q->first = q->last = q->commits = q->issued = q->unread = 0;
    }
}

// cp.async of `size` bytes: the first `bytes` are read, the others are zero. Returns 0, or 1 after recording a fault.
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

// cp.async.commit_group. Returns 0, or 1 after recording a fault.
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

// cp.async.wait_group: completes the copies of all groups but the `newest` groups committed last. Returns 0, or 1 after
// recording a fault.
API u32 rt_copy_wait(Thread* t, u32 newest, u32 site) {
    CopyQueue* q = queue_of(t, 0);
    u32 group = q->commits > newest ? q->commits - newest : 0;
    if (q->first && t->launch->copy_pool->pool[q->first].group < group)
        note(t->launch, t->block, t->linear, V_COPY_WAIT, site, 0, newest, 0);
    return end_groups(t, q, group);
}
