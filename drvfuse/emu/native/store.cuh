// SPDX-License-Identifier: Apache-2.0
// Bulk copies from shared to global memory (cp.async.bulk with a bulk_group), and the groups that threads wait for.
//
// A thread has a queue of these copies, in pieces of 16 bytes, oldest first; its cp.async have another queue. Each
// piece has the number of its group, which is the number of the thread's commits before its issue. wait_group.read N
// waits until all pieces have been read whose group is not among the N groups committed last; wait_group N waits until
// they have been written too.
//
// Why each result is one that PTX allows. A piece may be read at any moment between its issue and the end of its
// thread's first wait for it, with .read or without. It may be written, by a weak access, at any moment between its
// read and the end of the wait without .read or, if there is no such wait, the end of the launch. Only these waits
// order the read and the write. Here the seed draws both moments for each piece: it is read at its issue or at the
// wait, and written at once or at the wait without .read. Seed 0 always takes the later moment. So programs with a
// missing wait go wrong:
//
//   - If the source is overwritten before the wait, the target gets the new bytes of the source, in every run with seed
//     0.
//   - If the thread stores a flag without a wait, or after a wait with .read only, another thread that has found the
//     flag set still reads the old bytes of the target (a fault where nothing was written yet), in every run with seed
//     0.
//   - If a copy is issued while threads still read its target, these threads find the new bytes, in runs with seeds
//     that write this copy early.
//
// A piece for which no thread waits is written when nothing else can run, or after LATEST_TURN turns of its block. A
// block that has ended keeps its block slot and its shared memory until then. So one case does not occur here: that
// hardware gives the shared memory to another block before the piece of a thread that did not wait has been read.
//
// Bounds, access rights and alignment are checked when a copy is issued. The target is checked again when it is
// written, as it may have been freed. A reduction (cp.reduce.async.bulk) reads its target when it writes it. Before a
// piece is written, the delayed stores of its block and device to the target are propagated (delay.cuh). For the race
// detector, each piece makes two accesses: a read and a write, each of which lasts until the wait for it
// (race_copies.cuh).
#pragma once

#include "bulk.cuh"

// Values of Copy::moment for a piece. S_AT_ONCE: it will be written when it is read. S_APART: it will be written some
// time after it is read. S_READ: it has been read. A piece that has been written has M_MADE.
enum { S_AT_ONCE, S_APART, S_READ };

static_assert(S_READ < M_MADE, "");

// Writes a piece of a bulk copy that has been read. Returns 0, or 1 after recording a fault.
FAR u32 write_piece(Thread* t, Copy* c) {
    Launch* l = t->launch;
    Engine* e = l->engine;
    u32 word;
    if (refused(t, c->target, 16, c->how ? A_WRITE | A_ATOMIC : A_WRITE, c->site, &word)) return 1;
    if (e->delay) propagate_overlapping(e, t->block, l->device, c->target, 16);
    u64* to = (u64*)c->target;
    LOOP for (u32 i = 0; c->how && i < 2; i++) c->bits[i] = combine_word(to[i], c->bits[i], c->how, 64);
    // A copy that changes no byte is no progress: otherwise a deadlock in a loop that polls and copies would not be
    // found.
    e->progress += to[0] != c->bits[0] || to[1] != c->bits[1];
    LOOP for (u32 i = 0; i < 2; i++) to[i] = c->bits[i];
    c->moment = M_MADE;
    t->block->stores--;
    e->quiet = 0;
    e->work++;
    return 0;
}

// Reads a piece of a bulk copy. Writes it, too, if its moment is S_AT_ONCE. Returns 0, or 1 after recording a fault.
FAR u32 read_piece(Thread* t, Copy* c) {
    u32 at_once = c->moment == S_AT_ONCE;
    LOOP for (u32 i = 0; i < 2; i++) c->bits[i] = ((u64*)c->source)[i];
    c->moment = S_READ;
    return at_once && write_piece(t, c);
}

// Issues a piece of a bulk copy, 16 bytes. Returns 0, or 1 after recording a fault.
FAR u32 issue_piece(Thread* t, u64 target, u64 source, u32 how, u32 site) {
    Engine* e = t->launch->engine;
    Copies* pool = t->launch->copy_pool;
    CopyQueue* q = queue_of(t, 1);
    u32 i = take_copy(pool), late = !i ? 0 : e->seed ? draw(t, q) : ~0u;
    Copy alone;
    Copy* c = i ? &pool->pool[i] : &alone;
    c->source = source;
    c->target = target;
    c->size = c->bytes = 16;
    c->site = site;
    c->how = how;
    c->group = q->commits;
    c->moment = late & 1 ? S_APART : S_AT_ONCE;
    c->next = 0;
    q->issued++;
    if (e->race) {
        race_copy(t, source, 16, A_BULK, site, i, 0);
        race_copy(t, target, 16, A_WRITE, site, i, how ? bytes_of_element(how) : 0);
    }
    if (!t->block->stores++) t->block->store_turns = 0;
    if (i) {
        append(pool, q, i);
        if (!q->unread) q->unread = i;
    }
    return !(late & 2) && read_piece(t, c);
}

// cp.async.bulk or, with `how`, cp.reduce.async.bulk from shared to global memory. Returns 0, or 1 after recording a
// fault.
API u32 rt_bulk_store(Thread* t, u64 target, u64 source, u32 size, u32 how, u32 site) {
    Launch* l = t->launch;
    Engine* e = l->engine;
    u32 word = 0;
    if (uneven(t, target, source, size, site)) return 1;
    if (unreadable_range(t, source, size, site, &word)) return 1;
    LOOP for (u32 i = 0; i < size; i += 16)
        if (refused(t, target + i, 16, how ? A_WRITE | A_ATOMIC : A_WRITE | A_LATER, site, &word)) return 1;
    Site* count = &l->sites[site];
    count->size = 16;
    count->reads[OF_SHARED] += size / 16;
    count->writes[l->owner_class[word >> 16 & 0xFF]] += size / 16;
    if (how) count->reads[l->owner_class[word >> 16 & 0xFF]] += size / 16;
    note(l, t->block, t->linear, V_COPY, site, target, 0, 0);
    LOOP for (u32 i = 0; i < size; i += 16) {
        if (!--e->fuel && refuel(t, target + i, 16, A_WRITE, site)) return 1;
        if (issue_piece(t, target + i, source + i, how, site)) return 1;
    }
    return 0;
}

API void rt_bulk_commit(Thread* t) { queue_of(t, 1)->commits++; }

// Waits until all pieces are written or, with `read`, until they are read. Does not wait for pieces of the last
// `newest` groups that were committed, nor for pieces issued after the last commit. Returns 0, or 1 after recording a
// fault.
API u32 rt_bulk_wait(Thread* t, u32 newest, u32 read, u32 site) {
    Launch* l = t->launch;
    Copy* pool = l->copy_pool->pool;
    CopyQueue* q = queue_of(t, 1);
    u32 group = q->commits > newest ? q->commits - newest : 0, first = read ? q->unread : q->first;
    if (first && pool[first].group < group) note(l, t->block, t->linear, V_COPY_WAIT, site, 0, newest, 0);
    u32 time = l->engine->race ? race_thread(t->block, t->linear)->time : 0;
    LOOP while (q->unread && pool[q->unread].group < group) {
        Copy* c = &pool[q->unread];
        if (c->moment < S_READ && read_piece(t, c)) return 1;
        if (l->engine->race) race_copied(t, c->source, 16, 0, c->site, time, NO_ARRIVAL);
        q->unread = c->next;
    }
    LOOP while (!read && q->first && pool[q->first].group < group) {
        Copy* c = &pool[q->first];
        if (c->moment == S_READ && write_piece(t, c)) return 1;
        if (l->engine->race) race_copied(t, c->target, 16, N_WRITE, c->site, time, NO_ARRIVAL);
        drop_first(l->copy_pool, q);
    }
    return 0;
}

// Writes all pending pieces of a block's bulk copies. Returns 1, which callers add to a count of what was done.
FAR u32 write_stores(Launch* l, Block* b) {
    Copy* pool = l->copy_pool->pool;
    b->store_turns = 0;
    LOOP for (u32 i = 0; i < l->threads && b->stores && l->state == RUNNING; i++) {
        Thread* t = thread_at(l, b, i);
        LOOP for (u32 k = queue_of(t, 1)->first; k; k = pool[k].next) {
            if (pool[k].moment < S_READ && read_piece(t, &pool[k])) break;
            if (pool[k].moment == S_READ && write_piece(t, &pool[k])) break;
        }
    }
    return 1;
}

// Writes all pending pieces of bulk copies. Called when nothing else can run. Returns 0 if there were none.
FAR u32 idle_stores(Launch** launches, u32 n) {
    u32 wrote = 0;
    LOOP for (u32 k = 0; k < n; k++) {
        Launch* l = launches[k];
        LOOP for (u32 slot = 0; l->copies && l->state == RUNNING && slot < l->slots_used; slot++) {
            Block* b = (Block*)(l->slots + slot * l->slot_stride);
            if (b->active && b->stores) wrote += write_stores(l, b);
        }
    }
    return wrote;
}
