// SPDX-License-Identifier: Apache-2.0
// The accesses and fences of threads: how they are checked, and what they change in the state of their thread.
#pragma once

#include "race_check.cuh"

// Fills in an Access that stands for the end of a block: as a write, it conflicts with every access to the same memory.
// The caller adds the address.
FN void begin_block_access(Access* access, Launch* l, Block* b) {
    access->race = l->engine->race;
    access->launch = l;
    access->block_state = b->race;
    access->thread_state = 0;
    access->op = l->op;
    access->block = access->agent = b->index;
    access->warp = access->thread = access->lane_bit = access->time = access->scope = access->variant =
        access->acquires = access->releases = access->flags = access->repeats_poll = access->is_plain = 0;
    access->kind = N_WRITE;
    access->site = NO_SITE;
    access->device = l->device;
    access->clock = b->race->end_clock;
    access->shared_entry = 0;
    access->event_count = l->engine->event_count;
}

// Fills in an Access for a thread. The caller adds the address, the size, the flags, the kind and the site. Also
// settles the doubts of the store before it (race_report.cuh).
FN void begin_access(Access* access, Thread* t) {
    Launch* l = t->launch;
    Block* b = t->block;
    access->race = l->engine->race;
    if (access->race->doubt_count) settle_doubts(access->race);
    access->launch = l;
    access->block_state = b->race;
    access->thread_state = race_thread(b, t->linear);
    access->op = l->op;
    access->block = access->agent = b->index;
    access->warp = t->warp;
    access->lane_bit = 1u << t->lane;
    access->time = access->thread_state->time;
    access->device = l->device;
    access->clock = access->thread_state->clock;
    access->shared_entry = 0;
    access->event_count = l->engine->event_count;
    access->thread = t->linear;
    access->repeats_poll = l->engine->repeats_poll;
    access->is_plain = 0;
}

// Reports an access to the shared memory of another block of the cluster, unless the start of that block is ordered
// before the access, for example by a barrier of the cluster.
FAR void race_other_block(Access* access, Thread* t, u64 addr) {
    u64 off = addr - t->block->cluster_shared_base;
    if (off >= access->launch->cluster_window) return;
    Block* b = block_of_rank(access->launch, t->block, (u32)(off >> CLUSTER_SHIFT));
    if (b == t->block || knowledge(access->race, access->clock, access->op, b->index, 31, 1, 0) != KNOWS_NONE) return;
    Entry e;
    e.op = access->op;
    e.block = b->index;
    e.time = e.warp = e.variant = 0;
    e.lanes = 1;
    e.kind = N_WRITE;
    e.site = NO_SITE;
    report_race(access, &e, 1, addr, X_CLUSTER_START);
}

// Whether a compare-and-swap will find the value with which it compares. If not, it is only a read.
FN u32 swap_succeeds(Thread* t, u64 addr, u32 size) {
    return low_of(addr, size) == t->op_value && (size < 16 || high_of(addr, size) == t->op_seen);
}

// The scope that decides whether an operation on an mbarrier is morally strong with another one: at least the cluster,
// since hardware has no narrower scope for these operations. So two operations on one mbarrier never race.
FN u32 mbarrier_scope(u32 scope) { return scope < SCOPE_CLUSTER ? SCOPE_CLUSTER : scope; }

// Checks and records an access that a thread is about to make.
FAR void race_access(Thread* t, u64 addr, u32 size, u32 flags, u32 site) {
    u32 quick_result = race_quick(t, addr, size, flags, site);
    if (quick_result == 1) return;
    Access access;
    begin_access(&access, t);
    if (access.race->exhausted) return;
    access.repeats_poll |= quick_result == CHECK_ALL_READS;
    u32 order = flags >> ORDER_SHIFT & 3, strong = flags & A_STRONG, elements = flags >> ELEMENTS_SHIFT & 3;
    u32 unread = flags >> UNREAD_SHIFT;
    u32 writes = flags & (A_WRITE | A_ATOMIC);
    if (flags & A_SWAP && !swap_succeeds(t, addr, size)) writes = 0;
    access.site = flags & A_MULTIMEM ? site | VIA_MULTICAST : site;
    access.flags = flags;
    access.addr = addr;
    access.size = size;
    access.scope = strong ? flags >> SCOPE_SHIFT & 3 : 0;
    access.variant = strong ? FFS(size >> elements) - 1 : 0;
    access.is_plain = !(flags & NOT_PLAIN);
    u32 strong_scope = access.scope;
    if (flags & A_MBARRIER) {
        access.variant = strong ? VARIANT_MBARRIER : VARIANT_MBARRIER_INIT;
        if (strong) strong_scope = mbarrier_scope(access.scope);
        if (!access.race->strict) access.scope = strong_scope;
    }
    access.kind = (writes ? N_WRITE : 0) | (flags & A_ATOMIC ? N_ATOMIC : 0) | (strong ? N_STRONG : 0) |
                  strong_scope << ENTRY_SCOPE_SHIFT;
    access.acquires = order & ORDER_ACQUIRE;
    access.releases = order & ORDER_RELEASE;
    if ((flags & A_VOLATILE) && !access.race->strict) access.acquires = 1;
    u32 element_bytes = size >> elements;
    if (access.launch->cluster_size > 1) race_other_block(&access, t, addr);
    LOOP for (u64 a = addr; a < addr + size; a += element_bytes, unread >>= 1)
        if (!(unread & 1)) check_range(&access, a, a + element_bytes);
    if (access.releases && (access.kind & N_WRITE)) access.thread_state->time++;
}

// Records a fence of `scope` by a thread. If `acquires`, the thread learns what its relaxed reads have found. If
// `releases`, the thread's later strong writes publish what it knows now.
FAR void race_fence(Thread* t, u32 scope, u32 acquires, u32 releases) {
    Access access;
    begin_access(&access, t);
    Race* r = access.race;
    if (r->exhausted) return;
    LOOP for (u32 k = 0; acquires && k <= scope; k++) {
        if (!access.thread_state->fence_acquire[k]) continue;
        learn(r, &access.thread_state->clock, access.thread_state->fence_acquire[k]);
        assign(r, &access.thread_state->fence_acquire[k], 0);
    }
    if (!releases) return;
    Ref all = all_known(&access);
    LOOP for (u32 k = 0; k <= scope; k++) assign(r, &access.thread_state->fence_release[k], retain(r, all));
    release(r, all);
    access.thread_state->time++;
}

// Records a fence.proxy.async by a thread: the block's bulk copies may now read what the thread knows.
FAR void race_proxy_fence(Thread* t) {
    Access access;
    begin_access(&access, t);
    if (access.race->exhausted) return;
    Ref all = all_known(&access);
    learn(access.race, &access.block_state->proxy_fence_clock, all);
    release(access.race, all);
    access.thread_state->time++;
}
