// SPDX-License-Identifier: Apache-2.0
// The probe: all waiting threads poll again, to find out whether any of them can go on.
#pragma once

#include "pass.cuh"

// Wakes the threads that sleep the shortest by moving the clock, or all of them; 0 if none sleeps.
FAR u32 wake_sleepers(Engine* e, Launch** launches, u32 n) {
    u64 first = ~0ull, last = 0;
    LOOP for (u32 k = 0; k < n; k++) {
        Launch* l = launches[k];
        if (l->state != RUNNING) continue;
        LOOP for (u32 slot = 0; slot < l->high; slot++) {
            Block* b = (Block*)(l->slots + slot * l->slot_stride);
            if (!b->active) continue;
            LOOP for (u32 w = 0; w < l->warps; w++) {
                u32 lanes = b->warps[w].sleeping;
                LOOP while (lanes) {
                    u64 wake = thread_at(l, b, w * 32 + FFS(lanes) - 1)->wake;
                    lanes &= lanes - 1;
                    if (wake < first) first = wake;
                    if (wake > last) last = wake;
                }
            }
        }
    }
    if (first == ~0ull) return 0;
    if (e->watching) first = last;
    if (e->clock < first) e->clock = first;
    return 1;
}

FAR u32 has_event(Launch** launches, u32 n) {
    u32 event = 0;
    LOOP for (u32 k = 0; k < n; k++) {
        Launch* l = launches[k];
        u32 now = l->state != RUNNING ? 2 : l->triggered == l->blocks ? 1 : 0;
        if (now > l->reported) {
            l->reported = now;
            event = 1;
        }
    }
    return event;
}

// While watching, all wait again: 1 if everything is as it was some rounds ago. Then it will be for ever.
FN u32 repeats(Engine* e) {
    if (e->state == e->state_kept && e->clock_reads == e->state_reads) return 1;
    if (!--e->state_rounds) {
        e->state_kept = e->state;
        e->state_reads = e->clock_reads;
        e->state_rounds = e->state_period *= 2;
    }
    return 0;
}

// Somebody has read the clock since it moved, and it can move on: what comes of that is seen before anything is decided.
FN u32 awaits_clock(Engine* e) { return e->clock_reads != e->reads_before && e->step < LAST_STEP; }

const u32 PROBE_EVENT = 2;

// Lets everything poll up to `rounds` times (fewer if that takes more than `limit` resumes); 1 as soon as anything came
// of it, PROBE_EVENT if that is for R_EVENT. Between polls all that they set free runs until it waits again: a barrier inside
// a spin loop belongs to a round. `probing` is left set if the call has done enough before that.
FAR u32 probe(Engine* e, Launch** launches, u32 n, u32 rounds, u64 limit) {
    if (!e->probing) {
        if (e->delay) delay_flush(e);
        e->probing = e->probe_force = 1;
        e->probe_rounds = rounds;
        e->probe_before = e->resumes;
        e->probe_streak = 0;
        e->progress = 0;
        e->state = e->state_kept = 0;
        e->state_reads = e->clock_reads;
        e->state_rounds = e->state_period = 1;
    }
    u32 event = 0;
    LOOP while (e->pass_open || (e->probe_rounds && !e->progress && e->resumes - e->probe_before < limit)) {
        u32 ran = run_pass(e, launches, n, e->probe_force);
        if (e->pass_open) return 0;
        event = has_event(launches, n);
        e->progress += event;
        u32 force = !ran || e->quiet > QUIET_LIMIT;
        e->probe_force = force;
        e->probe_streak = force ? 0 : e->probe_streak + 1;
        if (e->probe_streak > STREAK) e->progress++;
        e->probe_rounds -= force;
        if (force && !e->timed) wake_sleepers(e, launches, n);
        if (force && e->watching && (awaits_clock(e) || repeats(e))) e->probe_rounds = 0;
    }
    e->probing = 0;
    e->writes = 0;
    return event ? PROBE_EVENT : e->progress != 0;
}
