// SPDX-License-Identifier: Apache-2.0
// The start and the end of threads, blocks and launches in the race detector.
//
// A thread starts with the clock of its launch (Launch::start), as if a fence of system scope followed: the thread's
// strong writes publish that clock. When a thread exits, what it knows is joined to the end clock of its block. When
// all threads of a block have exited, its end clock is joined to that of the launch (Launch::end). The accesses of the
// launch itself are added by rt_clock_end, as a whole.
#pragma once

#include "race_barriers.cuh"
#include "race_range.cuh"

// Sets up the race detector's state for a block that starts in a block slot.
FAR void race_start_block(Launch* l, Block* b, u32 slot) {
    Race* r = l->engine->race;
    RaceBlock* state = b->race = (RaceBlock*)(l->races + (u64)slot * size_of_races(l));
    state->barrier_time = 1;
    state->end_clock = state->proxy_fence_clock = state->alias_clock_before = state->alias_clock_after = 0;
    state->cluster_arrivals = state->cluster_phase_clock = 0;
    state->missed_flag_count = state->bulk_count = state->relaxed_arrival_time = 0;
    LOOP for (u32 i = 0; i < BARRIERS; i++) state->arrivals[i] = 0;
    LOOP for (u32 i = 0; i < MISSED_FLAGS; i++) state->missed_flags[i].op = state->missed_flags[i].clock = 0;
    LOOP for (u32 i = 0; i < l->threads; i++) {
        RaceThread* t = race_thread(b, i);
        t->clock = retain(r, l->start);
        t->time = 1;
        t->alias_fence_time = t->flag_reads = 0;
        LOOP for (u32 k = 0; k < 4; k++) t->fence_release[k] = t->fence_acquire[k] = 0;
        t->fence_release[SCOPE_SYS] = retain(r, l->start);
    }
    race_clear(r, b->shared_base, l->shared_bytes);
}

// Adds to the end clock of a block what is known to a thread that exits: its clock, what its relaxed reads have found
// published, and the reads that it has learnt by flags (flag_reads).
FAR void race_exit(Thread* t) {
    Race* r = t->launch->engine->race;
    RaceThread* rt = race_thread(t->block, t->linear);
    Ref* end = &t->block->race->end_clock;
    if (rt->clock != *end) learn(r, end, rt->clock);
    assign(r, &rt->clock, 0);
    if (rt->flag_reads) {
        learn(r, end, rt->flag_reads);
        assign(r, &rt->flag_reads, 0);
    }
    LOOP for (u32 k = 0; k < 4; k++) {
        if (rt->fence_acquire[k]) learn(r, end, rt->fence_acquire[k]);
        assign(r, &rt->fence_release[k], 0);
        assign(r, &rt->fence_acquire[k], 0);
    }
}

// Joins the end clock of a block to that of its launch, and releases the clocks of the block. Called when all threads
// of the block have exited.
FAR void race_finish_block(Launch* l, Block* b) {
    Race* r = l->engine->race;
    learn(r, &l->end, b->race->end_clock);
    assign(r, &b->race->end_clock, 0);
    assign(r, &b->race->proxy_fence_clock, 0);
    assign(r, &b->race->alias_clock_before, 0);
    assign(r, &b->race->alias_clock_after, 0);
    LOOP for (u32 i = 0; i < BARRIERS; i++) assign(r, &b->race->arrivals[i], 0);
    LOOP for (u32 i = 0; i < MISSED_FLAGS; i++) assign(r, &b->race->missed_flags[i].clock, 0);
}

// Releases the clocks of a cluster. Called when all its blocks have ended. `lead` is the block of rank 0.
FN void race_finish_cluster(Race* r, RaceBlock* lead) {
    assign(r, &lead->cluster_arrivals, 0);
    assign(r, &lead->cluster_phase_clock, 0);
}

// Records a griddepcontrol.wait by a thread. The thread learns Launch::primary, the clock of the primary kernel, as if
// a fence of system scope followed: the thread's later strong writes publish that clock.
FAR void race_gdc_wait(Thread* t) {
    Launch* l = t->launch;
    RaceThread* rt = race_thread(t->block, t->linear);
    learn(l->engine->race, &rt->clock, l->primary);
    learn(l->engine->race, &rt->fence_release[SCOPE_SYS], l->primary);
}

// Returns the join of what the threads of a launch knew at their ends, as a reference that the caller owns. Called by
// Python when the launch has ended or was stopped.
API u32 rt_race_settle(Launch* l) {
    LOOP for (u32 slot = 0; slot < l->slots_used; slot++) {
        Block* b = (Block*)(l->slots + slot * l->slot_stride);
        if (!b->active) continue;
        LOOP for (u32 i = 0; i < l->threads; i++) race_exit(thread_at(l, b, i));
        race_finish_block(l, b);
        race_finish_cluster(l->engine->race, block_of_rank(l, b, 0)->race);
    }
    Ref end = l->end;
    l->end = 0;
    return end ? end : retain(l->engine->race, l->start);
}
