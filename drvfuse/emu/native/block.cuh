// SPDX-License-Identifier: Apache-2.0
// The start of a block in a block slot of its launch, and the end of a block.
#pragma once

#include "turn.cuh"

// Starts a block in block slot `slot`: the block of rank `rank` in the cluster with the index `cluster_index`. Without
// clusters, each block is a cluster of its own.
FAR void start_block(Launch* l, u32 slot, u32 cluster_index, u32 rank) {
    Block* b = (Block*)(l->slots + slot * l->slot_stride);
    u32 cx = l->cluster & 0xFF, cy = l->cluster >> 8 & 0xFF, cz = l->cluster >> 16 & 0xFF;
    if (!l->cluster) cx = cy = cz = 1;
    u32 gx = l->nctaid[0] / cx, gy = l->nctaid[1] / cy;
    b->ctaid[0] = cluster_index % gx * cx + rank % cx;
    b->ctaid[1] = cluster_index / gx % gy * cy + rank / cx % cy;
    b->ctaid[2] = cluster_index / gx / gy * cz + rank / cx / cy;
    b->index = b->ctaid[0] + l->nctaid[0] * (b->ctaid[1] + l->nctaid[1] * b->ctaid[2]);
    b->cluster_rank = rank;
    b->smid = slot % (l->sm_count ? l->sm_count : 1);
    b->slot = slot;
    b->shared_base = l->shared_base + slot * l->shared_stride;
    b->cluster_shared_base = l->shared_base + (slot - rank) * l->shared_stride;
    b->active = 1;
    b->live = l->threads;
    b->woken = b->triggered = b->bulks = b->stores = b->has_run = 0;
    b->cluster_phase = b->cluster_arrived = 0;
    b->cluster_missing = l->threads * l->cluster_size;
    LOOP for (u32 i = 0; i < BARRIERS; i++) b->barrier[i].arrived = 0;
    if (l->engine->delay) delay_start_block(l->engine->delay, b);
    note(l, b, 0, V_START, NO_SITE, 0, 0, 0);
    if (l->engine->race) race_start_block(l, b, slot);
    u64* shadow = (u64*)(b->shared_base + SHADOW_OFFSET);
    LOOP for (u32 i = 0; i < (l->shared_bytes + 7) / 8; i++) shadow[i] = 0x0101010101010101ull;
    b->warps = (Warp*)(b + 1);
    b->frames = (u8*)(b->warps + l->warps);
    b->polls = l->polls + (u64)slot * l->threads;
    u32 x = 0, y = 0, z = 0;
    LOOP for (u32 w = 0; w < l->warps; w++) {
        Warp* p = &b->warps[w];
        u32 left = l->threads - w * 32;
        p->lanes = p->live = p->ready = left >= 32 ? 0xFFFFFFFFu : (1u << left) - 1;
        p->yielded = p->warpop = p->barrier = p->gdc = p->sleeping = p->at_activemask = p->gathered = p->syncs = 0;
        p->cluster = p->cluster_arrived = p->cluster_passed = 0;
    }
    LOOP for (u32 i = 0; i < l->threads; i++) {
        Thread* t = thread_at(l, b, i);
        t->resume = t->status = 0;
        t->tid[0] = x;
        t->tid[1] = y;
        t->tid[2] = z;
        t->lane = i & 31;
        t->warp = i >> 5;
        t->linear = i;
        t->local_base = l->local_base + ((u64)slot * l->threads + i) * l->local_stride;
        t->block = b;
        t->launch = l;
        t->polls = 0;
        t->wake_time = 0;
        if (l->copies) start_copies(t);
        if (++x == l->ntid[0]) {
            x = 0;
            if (++y == l->ntid[1]) {
                y = 0;
                z++;
            }
        }
    }
}

// Ends a block, all of whose threads have exited. When the whole cluster has ended, frees its block slots.
FAR void finish_block(Launch* l, Block* b) {
    LOOP for (u32 i = 0; i < BARRIERS; i++) {
        Barrier* r = &b->barrier[i];
        if (r->arrived) fault(l, r->last, F_BARRIER_LEFT, r->site, 0, 0, 0, i);
    }
    if (b->bulks) late_bulks(l, b);
    if (l->state != RUNNING) return;
    if (l->engine->delay) delay_end_block(l->engine->delay, b);
    if (l->copies) drop_copies(l, b);
    note(l, b, 0, V_END, NO_SITE, 0, 0, 0);
    if (l->engine->race) {
        race_end_shared(l, b);
        race_finish_block(l, b);
    }
    b->active = 0;
    l->finished++;
    if (!b->triggered) l->triggered++;
    u32 size = l->cluster_size, first = b->slot / size * size;
    LOOP for (u32 i = 0; i < size; i++)
        if (((Block*)(l->slots + (first + i) * l->slot_stride))->active) return;
    if (l->engine->race) race_finish_cluster(l->engine->race, block_of_rank(l, b, 0)->race);
    l->free_groups[l->free_count++] = first / size;
    if (l->finished == l->blocks && !l->pending) l->state = DONE;
}
