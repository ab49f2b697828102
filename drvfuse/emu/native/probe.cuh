// SPDX-License-Identifier: Apache-2.0
// The probe, in which all waiting threads poll again to find out whether any of them can continue.
#pragma once

#include "pass.cuh"

// Moves the clock to the time at which the first sleeping thread wakes; if Engine::watching, to the time at which the
// last one wakes. Returns 0 if no thread sleeps.
FAR u32 wake_sleepers(Engine* e, Launch** launches, u32 n) {
    u64 first = ~0ull, last = 0;
    LOOP for (u32 k = 0; k < n; k++) {
        Launch* l = launches[k];
        if (l->state != RUNNING) continue;
        LOOP for (u32 slot = 0; slot < l->slots_used; slot++) {
            Block* b = (Block*)(l->slots + slot * l->slot_stride);
            if (!b->active) continue;
            LOOP for (u32 w = 0; w < l->warps; w++) {
                u32 lanes = b->warps[w].sleeping;
                LOOP while (lanes) {
                    u64 wake = thread_at(l, b, w * 32 + FFS(lanes) - 1)->wake_time;
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

// Whether a launch has ended, has faulted, or has triggered in all its blocks since the last call of this function.
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

// Whether the states of all threads are as they were some rounds ago, so that the threads would go through these rounds
// for ever. Called if Engine::watching, when all threads wait again.
FN u32 repeats(Engine* e) {
    if (e->state == e->state_kept && e->clock_reads == e->state_reads) return 1;
    if (!--e->state_rounds) {
        e->state_kept = e->state;
        e->state_reads = e->clock_reads;
        e->state_rounds = e->state_period *= 2;
    }
    return 0;
}

// Whether the next step of rt_advance may let a thread continue: a thread has read the virtual clock since rt_advance
// last moved the clock, and the step by which rt_advance moves it can still grow.
FN u32 awaits_clock(Engine* e) { return e->clock_reads != e->reads_before && e->step < LAST_STEP; }

const u32 PROBE_EVENT = 2;  // a result of `probe`: a launch has had an event (has_event)

// Lets all threads poll, in up to `rounds` rounds; ends early once these have taken `limit` resumes. Returns
// PROBE_EVENT as soon as a launch has had an event, 1 as soon as there is other progress, else 0. In a round, threads
// whose poll has succeeded run until they wait again, since a spin loop may contain a barrier. Engine::probing stays 1
// if the work limit of the call ends the probe early.
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
