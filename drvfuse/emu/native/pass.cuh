// SPDX-License-Identifier: Apache-2.0
// A pass gives every resident block of every launch a turn, and starts blocks in free block slots.
#pragma once

#include "block.cuh"

// Gives each resident block of a launch a turn, then starts blocks in free block slots and gives them a turn. Returns
// the number of resumes plus the number of clusters started. Launch::part stays 1 if the work limit of the call ends
// the function early.
FAR u32 turn_launch(Launch* l, u32 force, u64 random) {
    u32 ran = 0, high = l->slots_used;
    u32 start = high && random ? (u32)(random % high) : 0;
    if (!l->part) l->turn = 0;
    l->part = 1;
    LOOP for (; l->turn < high; l->turn++) {
        u32 i = l->turn;
        u32 slot = start + i < high ? start + i : start + i - high;
        Block* b = (Block*)(l->slots + slot * l->slot_stride);
        if (!b->active) continue;
        ran += run_block(l, b, force);
        if (l->state != RUNNING) return ran + 1;
        if (l->turn_warp) return ran;
        if (!b->live && !b->stores) finish_block(l, b);
        if (l->state != RUNNING) return ran + 1;
    }
    u32 size = l->cluster_size, begun = ran;
    LOOP while (l->next < l->blocks && l->free_count && ran - begun < TURN) {
        if (l->engine->work > WORK_LIMIT) {
            l->turn = l->slots_used;
            return ran;
        }
        u32 first = l->free_groups[--l->free_count] * size;
        u32 cluster_index = l->next / size;
        l->next += size;
        // Block slots that were never used contain arbitrary bytes, so they are marked as free.
        LOOP for (; l->slots_used < first + size; l->slots_used++) ((Block*)(l->slots + l->slots_used * l->slot_stride))->active = 0;
        l->engine->progress++;
        l->engine->quiet = l->engine->strain = 0;
        ran++;
        LOOP for (u32 i = 0; i < size; i++) start_block(l, first + i, cluster_index, i);
        LOOP for (u32 i = 0; i < size; i++) {
            Block* b = (Block*)(l->slots + (first + (u32)((random % size + i) % size)) * l->slot_stride);
            ran += run_block(l, b, 0);
            l->turn_warp = 0;
            if (l->state != RUNNING) return ran;
            if (!b->live && !b->stores) finish_block(l, b);
            if (l->state == FAULTED) return ran;
        }
    }
    l->part = 0;
    return ran;
}

// Runs turn_launch. If stores are delayed, memory meanwhile holds the view of the launch's device.
FN u32 run_launch(Launch* l, u32 force, u64 random) {
    Delay* d = l->engine->delay;
    if (!d) return turn_launch(l, force, random);
    view_device(d, l->device + 1);
    u32 ran = l->finished == l->blocks ? 0 : turn_launch(l, force, random);
    view_device(d, 0);
    if (l->finished == l->blocks && !l->pending) {
        l->state = DONE;
        ran++;
    }
    if (l->state == DONE) propagate_device(d, l->device);
    return ran;
}

// Makes one pass over the launches. Returns the number of resumes plus the number of clusters started.
// Engine::pass_open stays 1 if the work limit of the call ends the pass early.
FAR u32 run_pass(Engine* e, Launch** launches, u32 n, u32 force) {
    if (!e->pass_open) {
        e->pass_open = 1;
        e->pass_at = e->pass_ran = e->pass_held = 0;
        e->pass_before = e->progress;
        e->pass_random = e->seed ? hash(e->seed * 0x9E3779B97F4A7C15ull + ++e->pass) : 0;
    }
    u64 random = e->pass_random;
    u32 start = (u32)(random >> 32) % n;
    LOOP for (; e->pass_at < n; e->pass_at++) {
        u32 i = e->pass_at;
        u32 k = start + i < n ? start + i : start + i - n;
        Launch* l = launches[k];
        if (l->state != RUNNING) continue;
        // With a seed other than 0, a launch is now and then held back for 32 passes.
        if (e->seed && !force && (hash(e->seed + (e->pass >> 5) * 0x2545F491ull + k) & 7) == 0) {
            e->pass_held = 1;
            continue;
        }
        e->pass_ran += run_launch(l, force, random);
        if (l->part && l->state == RUNNING) return e->pass_ran;
    }
    if (!e->pass_ran && e->pass_held) e->pass_held = 2;
    if (e->pass_held == 2) {  // nothing ran because warps or launches were held back: run the first launch that can run
        LOOP for (; e->pass_at < 2 * n; e->pass_at++) {
            u32 i = e->pass_at - n;
            Launch* l = launches[start + i < n ? start + i : start + i - n];
            if (l->state != RUNNING) continue;
            e->pass_ran += run_launch(l, 0, random);
            if (l->part && l->state == RUNNING) return e->pass_ran;
            if (e->pass_ran && !e->probing) break;
        }
    }
    e->pass_open = 0;
    if (e->delay) delay_pass(e);
    return e->pass_ran;
}
