// SPDX-License-Identifier: Apache-2.0
// Bulk copies to shared memory, and st.async, which complete transactions of an mbarrier.
//
// In one step, at some moment after the issue of a copy, its bytes are written and their number is subtracted at the
// mbarrier. Seed 0 waits until no thread of the block can run, then makes one copy at a time, oldest first. Other seeds
// draw one of three moments for each copy: its issue, the end of the block's turn, or a time when no thread of the
// block can run. Copies of the last kind are made one at a time, in an order that the seed draws. If threads of the
// block never stop running, a copy is made after LATEST_TURN turns. No copy is made before some thread has arrived at
// the mbarrier or has expected bytes there. An st.async keeps its bytes from its issue on; all else that is said of
// copies here holds for it, too.
//
// In this file, the block of a copy is the block whose shared memory it writes; this block has the copy in its list.
// When a block ends, the pending copies to its shared memory that its own threads issued are dropped. One that a thread
// of another block issued is a fault (CTA not present).
//
// The race detector treats a copy as a thread of its own, an agent, that reads and writes (race_copies.cuh). Once the
// bytes of the copy are subtracted, threads that acquire the mbarrier know the copy's accesses, but no other access of
// the issuing thread; for st.async see race_cluster.cuh. For these copies, the detector does not distinguish the async
// proxy from the generic one, so it does not find a missing fence.proxy.async.
#pragma once

#include "mbarrier.cuh"
#include "reduce.cuh"

const u32 LATEST_TURN = 64;  // a pending copy is made at the latest after this many turns of its block

// The end of a copy ---------------------------------------------------------------------------------------------------

// Removes a copy from the list of its block and frees it. *link is the index of the copy.
FAR void drop_bulk(Launch* l, u32* link) {
    Copies* pool = l->copy_pool;
    u32 i = *link;
    Bulk* c = &pool->bulk[i];
    if (l->engine->race) release(l->engine->race, c->known);
    *link = c->next;
    c->next = pool->bulk_free;
    pool->bulk_free = i;
}

// Whether a copy may be made now: not while its mbarrier is as mbarrier.init left it. An arrival of cp.async.mbarrier
// (size 0) may be made at any time.
FN u32 can_end(Bulk* c) {
    return !c->size || (*(u64*)c->mbarrier & (MBARRIER_VALID | MBARRIER_USED)) != MBARRIER_VALID;
}

// Checks that a thread may read a range, which consists of aligned pieces of 16 bytes. Returns 0 if it may, or 1 after
// recording a fault.
FAR u32 unreadable_range(Thread* t, u64 source, u32 size, u32 site, u32* word) {
    LOOP for (u32 i = 0; i < size; i += 16)
        if (refused(t, source + i, 16, 0, site, word)) return 1;
    return 0;
}

// Makes an arrival of cp.async.mbarrier, after completing the copies that its thread had issued before it.
FAR void end_arrival(Launch* l, Thread* t, Bulk* c) {
    Engine* e = l->engine;
    CopyQueue* q = queue_of(t, 0);
    u32 error = E_NONE;
    LOOP while (q->first && (s32)(l->copy_pool->pool[q->first].number - c->until) < 0)
        if (end_first(t, q, 0, c->number)) return;
    u64 after = changed_barrier(*(u64*)c->mbarrier, 1, 0, &error);
    if (error) {
        fault(l, t, F_MBARRIER, c->site, c->mbarrier, 8, error, 1);
        return;
    }
    *(u64*)c->mbarrier = after | MBARRIER_USED;
    e->progress++;
    e->quiet = 0;
    if (e->race) race_bulk_end(t, c->mbarrier, c->known);
}

// Writes the bytes of a bulk copy or an st.async, or combines them with the target, and marks them as initialised.
FN void write_bulk(Bulk* c) {
    u64 bytes = c->source ? c->source : (u64)c->bits;
    if (c->size == 4) {
        u32 value = *(u32*)bytes;
        *(u32*)c->target = c->how ? (u32)combine_word(*(u32*)c->target, value, c->how, 32) : value;
        *(u32*)(c->target + SHADOW_OFFSET) = 0x03030303;
    }
    LOOP for (u32 i = 0; i < c->size / 8; i++) {
        u64 value = ((u64*)bytes)[i];
        ((u64*)c->target)[i] = c->how ? combine_word(((u64*)c->target)[i], value, c->how, 64) : value;
        ((u64*)(c->target + SHADOW_OFFSET))[i] = 0x0303030303030303ull;
    }
}

// Makes what an entry of Copies::bulk stands for: a bulk copy, an st.async, or an arrival of cp.async.mbarrier.
FAR void end_bulk(Launch* l, Bulk* c) {
    Engine* e = l->engine;
    Block* from = (Block*)(l->slots + c->from * l->slot_stride);
    Thread* t = thread_at(l, from, c->thread);
    u32 word, error = E_NONE;
    if (e->delay) view_block(e->delay, from);
    if (!c->size) {
        end_arrival(l, t, c);
        return;
    }
    if (c->source && unreadable_range(t, c->source, c->size, c->site, &word)) return;
    LOOP for (u32 i = 0, piece = c->size < 16 ? c->size : 16; c->how && i < c->size; i += piece)
        if (refused(t, c->target + i, piece, A_WRITE | A_ATOMIC, c->site, &word)) return;
    u64 after = changed_barrier(*(u64*)c->mbarrier, 0, -(s32)c->size, &error);
    if (error) {
        fault(l, t, F_MBARRIER, c->site, c->mbarrier, 8, error, c->size);
        return;
    }
    write_bulk(c);
    *(u64*)c->mbarrier = after;
    e->progress++;
    e->quiet = 0;
    e->work += c->size / 16;
    if (e->race) race_bulk_end(t, c->mbarrier, c->known);
}

// Called at the end of a block's turn. Makes the pending copies of the block whose moment has come. If there are none
// and no thread of the block ran in the turn (`idle`), makes one of the others. Returns the number of copies made.
FAR u32 run_bulks(Launch* l, Block* b, u32 idle) {
    Engine* e = l->engine;
    Bulk* pool = l->copy_pool->bulk;
    u32 ended = 0, waiting = 0;
    LOOP for (u32* link = &b->bulks; *link && l->state == RUNNING;) {
        Bulk* c = &pool[*link];
        if ((c->moment == M_WAIT && c->turns++ < LATEST_TURN) || !can_end(c)) {
            waiting += can_end(c);
            link = &c->next;
            continue;
        }
        end_bulk(l, c);
        drop_bulk(l, link);
        ended++;
    }
    if (ended || !waiting || !idle) return ended;
    u32 skip = e->seed ? (u32)hash(hash(e->seed) + e->pass) % waiting : 0;
    LOOP for (u32* link = &b->bulks; *link; link = &pool[*link].next) {
        if (!can_end(&pool[*link]) || skip--) continue;
        end_bulk(l, &pool[*link]);
        drop_bulk(l, link);
        break;
    }
    return 1;
}

// The issue of a copy -------------------------------------------------------------------------------------------------

// Returns 1, after recording a fault, if a bulk copy does not consist of aligned pieces of 16 bytes.
FAR u32 uneven(Thread* t, u64 target, u64 source, u32 size, u32 site) {
    u32 kind = size & 15 || !size ? F_COPY_SIZE : (target | source) & 15 ? F_MISALIGNED : F_NONE;
    u32 reads = kind == F_MISALIGNED && source & 15, bytes = kind == F_MISALIGNED ? 16 : size;
    if (kind) fault(t->launch, t, kind, site, reads ? source : target, bytes, reads ? 0 : A_WRITE, size);
    return kind != F_NONE;
}

// Returns the block to whose shared memory a bulk copy or an st.async writes. The mbarrier must lie in the shared
// memory of the same block. Returns null after recording a fault.
FAR Block* written_block(Thread* t, u64 target, u32 size, u64 mbarrier, u32 site) {
    Launch* l = t->launch;
    Block* b = shared_of(t, target, size);
    u32 word = 0, full = !l->copy_pool->bulk_free && l->copy_pool->bulk_high + 1 == BULKS;
    if (!b) {
        fault(l, t, F_FOREIGN_SHARED, site, target, size, A_WRITE | SPACE_CLUSTER << SPACE_SHIFT, size);
        return 0;
    }
    if (b != t->block && !present(b)) {
        fault(l, t, F_CLUSTER_ABSENT, site, target, size, A_WRITE, absence(b));
        return 0;
    }
    if (!--l->engine->fuel && refuel(t, target, size, A_WRITE, site)) return 0;
    if (refused(t, mbarrier, 8, 0, site, &word)) return 0;
    u32 error = shared_of(t, mbarrier, 8) != b ? E_ELSEWHERE : full ? E_PENDING : E_NONE;
    if (!error && !(*(u64*)mbarrier & MBARRIER_VALID)) error = E_NO_BARRIER;
    if (error) fault(l, t, F_MBARRIER, site, mbarrier, 8, error, BULKS - 1);
    return error ? 0 : b;
}

// Issues a copy, which is added to the list of the block `to`. Returns 0, or 1 after recording a fault.
FAR u32 begin_bulk(Thread* t, Block* to, Bulk* c) {
    Launch* l = t->launch;
    Engine* e = l->engine;
    Copies* pool = l->copy_pool;
    u32 i = pool->bulk_free;
    if (i) pool->bulk_free = pool->bulk[i].next;
    else i = ++pool->bulk_high;
    note(l, t->block, t->linear, V_COPY, c->site, c->target, 0, 0);
    c->from = t->block->slot;
    c->thread = t->linear;
    c->next = c->turns = 0;
    u64 number = (c->target - l->window_base) ^ e->event_count << 32 ^ (u64)t->block->index << 20;
    c->moment = e->seed ? (u32)hash(hash(e->seed) + number) & 3 : M_WAIT;
    if (c->moment == M_MADE) c->moment = M_WAIT;
    u32 element = c->how ? bytes_of_element(c->how) : 0;
    c->known = !e->race  ? 0
               : c->size ? race_bulk(t, c->target, c->source, c->size, c->mbarrier, c->site, element)
                         : race_copy_arrival(t, &c->number);
    pool->bulk[i] = *c;
    u32* link = &to->bulks;
    LOOP while (*link) link = &pool->bulk[*link].next;
    *link = i;
    if (c->moment != M_ISSUE || !can_end(c)) return 0;
    end_bulk(l, &pool->bulk[i]);
    drop_bulk(l, link);
    return l->state != RUNNING;
}

// cp.async.bulk to shared memory: from global memory, or from the block's own shared memory to another block's. `ranks`
// is 0 without .multicast::cluster. With it, bit 16 is set, and bits 0 to 15 say which ranks of the cluster receive the
// copy. `how` is 0 for a plain copy; for cp.reduce.async.bulk it holds the Reduce and the Element. Returns 0, or 1
// after recording a fault.
API u32 rt_bulk(Thread* t, u64 target, u64 source, u32 size, u64 mbarrier, u32 ranks, u32 how, u32 site) {
    Launch* l = t->launch;
    u32 word = 0;
    if (uneven(t, target, source, size, site)) return 1;
    LOOP for (u32 rank = 0; rank < 16; rank++) {
        if (ranks ? !(ranks >> rank & 1) : rank) continue;
        u64 shift = 0;
        if (ranks) shift = ((u64)rank << CLUSTER_SHIFT) - (target - t->block->cluster_shared_base >> CLUSTER_SHIFT << CLUSTER_SHIFT);
        Bulk c;
        c.source = source;
        c.target = target + shift;
        c.mbarrier = mbarrier + shift;
        c.size = size;
        c.how = how;
        c.site = site;
        Block* to = written_block(t, c.target, size, c.mbarrier, site);
        if (!to || unreadable_range(t, source, size, site, &word)) return 1;
        Site* count = &l->sites[site];
        count->size = 16;
        count->reads[l->owner_class[word >> 16 & 0xFF]] += size / 16;
        count->writes[OF_SHARED] += size / 16;
        if (how) count->reads[OF_SHARED] += size / 16;
        if (begin_bulk(t, to, &c)) return 1;
    }
    return 0;
}

// st.async of up to 16 bytes or, with `how`, red.async of 4 or 8 bytes. Returns 0, or 1 after recording a fault.
API u32 rt_st_async(Thread* t, u64 target, u64 low, u64 high, u32 size, u64 mbarrier, u32 how, u32 site) {
    if (!t->launch->cluster) {
        fault(t->launch, t, F_NO_CLUSTER, site, target, size, A_WRITE, 0);
        return 1;
    }
    if (target & size - 1) {
        fault(t->launch, t, F_MISALIGNED, site, target, size, A_WRITE, size);
        return 1;
    }
    Block* to = written_block(t, target, size, mbarrier, site);
    if (!to) return 1;
    Site* count = &t->launch->sites[site];
    count->size = size;
    count->writes[OF_SHARED]++;
    if (how) count->reads[OF_SHARED]++;
    Bulk c;
    c.source = 0;
    c.bits[0] = low;
    c.bits[1] = high;
    c.target = target;
    c.mbarrier = mbarrier;
    c.size = size;
    c.how = how;
    c.site = site;
    return begin_bulk(t, to, &c);
}

// cp.async.mbarrier.arrive: issues an arrival at the mbarrier, which is made when all cp.async that the thread has
// issued so far are complete. Without .noinc, the current phase expects one more arrival from now on. Returns 0, or 1
// after recording a fault.
API u32 rt_copy_arrive(Thread* t, u64 mbarrier, u32 noinc, u32 site) {
    Launch* l = t->launch;
    u32 word, error = E_NONE, flags = A_WRITE | A_ATOMIC | A_STRONG | A_MBARRIER | SPACE_SHARED << SPACE_SHIFT;
    if (refused(t, mbarrier, 8, SPACE_SHARED << SPACE_SHIFT, site, &word)) return 1;
    u64* word_at = (u64*)mbarrier;
    if (!(*word_at & MBARRIER_VALID)) error = E_NO_BARRIER;
    else if (!noinc && (*word_at & MBARRIER_COUNT_MASK) == MBARRIER_COUNT_MASK) error = E_MOST;
    else if (!l->copy_pool->bulk_free && l->copy_pool->bulk_high + 1 == BULKS) error = E_PENDING;
    if (error) {
        fault(l, t, F_MBARRIER, site, mbarrier, 8, error, BULKS - 1);
        return 1;
    }
    if (access(t, mbarrier, 8, flags, site)) return 1;
    *word_at = (*word_at | MBARRIER_USED) + !noinc;
    Bulk c;
    c.source = c.size = c.how = 0;
    c.target = c.mbarrier = mbarrier;
    c.site = site;
    c.until = queue_of(t, 0)->issued;
    return begin_bulk(t, t->block, &c);
}

// The end of a block --------------------------------------------------------------------------------------------------

// Records a fault if another block's copy to the shared memory of block `b` is pending. Called when `b` has ended.
FAR void late_bulks(Launch* l, Block* b) {
    Bulk* c;
    LOOP for (u32 k = b->bulks; k; k = c->next) {
        c = &l->copy_pool->bulk[k];
        if (c->from == b->slot) continue;
        Block* from = (Block*)(l->slots + c->from * l->slot_stride);
        fault(l, thread_at(l, from, c->thread), F_CLUSTER_ABSENT, c->site, c->target, c->size, A_WRITE,
              (u64)b->index << 32 | ABSENT_LATE);
    }
}

// Drops the pending copies of a block. Called when the block has ended or is stopped, as its shared memory is gone.
FAR void drop_copies(Launch* l, Block* b) {
    LOOP while (b->bulks) drop_bulk(l, &b->bulks);
    LOOP for (u32 i = 0; i < 2 * l->threads; i++) {
        CopyQueue* q = queue_of(thread_at(l, b, i / 2), i & 1);
        LOOP while (q->first) drop_first(l->copy_pool, q);
    }
}

// Returns the bytes that Launch::copy_pool needs. The memory must be zeroed.
API u64 rt_copy_bytes() { return sizeof(Copies); }

// Drops the pending copies of a launch. Called by Python when the launch has ended or is stopped.
API void rt_copy_end(Launch* l) {
    LOOP for (u32 slot = 0; slot < l->slots_used; slot++) {
        Block* b = (Block*)(l->slots + slot * l->slot_stride);
        if (b->active) drop_copies(l, b);
    }
}
