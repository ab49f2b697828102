// SPDX-License-Identifier: Apache-2.0
// The native part of the emulated driver: the scheduler that runs GPU threads on one CPU thread, and the checks behind every
// memory access. Plain functions over raw pointers: NVRTC compiles this to runtime.ptx, the translator turns that into native
// code (raw mode: no checks, no suspends), so no C compiler is needed where drvfuse runs. Nothing here allocates.
//
// Layout: the engine (machine/engine.py) gives every launch an array of slots, one a resident block:
//
//     slot = Block | Warp[warps] | frames[threads]
//
// and, apart from them because few threads need it, a Poll for each thread of each slot.
//
// A frame is a Thread and the kernel's saved registers. The kernel's function runs one thread until it suspends and says
// why. A block's turn runs each warp's runnable lanes in order, completes warp operations and barriers, and ends when all
// lanes wait. A pass gives every resident block a turn and starts blocks in empty slots.
//
// Spins. A thread suspends before each strong load and atomic. If it comes back to an access (address and instruction) that
// it made before, and no word that it polled has changed since, it is left alone: nothing it can see has changed. That is a
// guess about the kernel, so before the engine calls itself idle it lets every such thread poll once more, and if anything
// but another fruitless poll comes of it, the run goes on. Progress, while probing, is: memory that changed, an exit, a new
// address polled, a block started. Barriers and warp operations alone are not.
//
// A call returns after a bounded amount of work, also in the middle of a pass, so that Python can handle signals. The next
// call goes on from there.
//
// Order depends on the seed and on the calls alone; the budget, of time or of resumes, is only looked at between passes.

#include "probe.cuh"

// `more`: goes on with what the last call left unfinished. Else that is forgotten, which loses no work of any thread.
FN void begin(Engine* e, Launch** launches, u32 n, u32 more) {
    e->work = 0;
    if (more) return;
    e->advancing = e->watching = e->undecided = e->timed = 0;
    e->pass_open = e->probing = e->writes = e->slept = 0;
    LOOP for (u32 k = 0; k < n; k++) launches[k]->part = launches[k]->turn_warp = 0;
}

FN u64 spent(Engine* e) { return e->counted ? e->resumes : rt_now(); }

// Runs the launches together until one ends, faults or has triggered everywhere (R_EVENT), nothing can move (R_IDLE), or
// the budget is spent (R_BUDGET): nanoseconds, or resumes where they are counted. R_MORE: call again, with `more`.
API u32 rt_run(Engine* e, Launch** launches, u32 n, u64 budget, u32 more) {
    u64 deadline = spent(e) + budget;
    begin(e, launches, n, more);
    LOOP while (1) {
        u32 ran = 0;
        if (!e->probing) {
            ran = run_pass(e, launches, n, 0);
            if (e->pass_open) return R_MORE;
            if (e->progress != e->pass_before) e->slept = 0;
            if (has_event(launches, n)) {
                e->step = 0;
                return R_EVENT;
            }
        }
        if (!ran || e->quiet > QUIET_LIMIT) {
            if (!e->probing && idle_stores(launches, n)) continue;
            if (e->delay && !e->probing && !ran && delay_idle(e, launches, n)) continue;
            if (!e->probing && e->slept < 64 && e->quiet <= QUIET_LIMIT && wake_sleepers(e, launches, n)) {
                e->slept++;
                continue;
            }
            u32 moved = probe(e, launches, n, 1, ~0ull);
            if (e->probing) return R_MORE;
            if (!moved) return R_IDLE;
            if (moved == PROBE_EVENT) return R_EVENT;
            e->slept = 0;
        }
        if (spent(e) > deadline) return R_BUDGET;
    }
}

// Everything is idle: moves the clock (by ever more while nothing comes of it) and lets everything poll. 1 if that led
// anywhere, or if somebody reads the clock and it has not moved by a day yet; 0 if not; or R_MORE. Before that is said, all
// poll until their states repeat, so that a loop that counts its polls comes to its end; `undecided` if the limit ended that.
API u32 rt_advance(Engine* e, Launch** launches, u32 n, u32 more) {
    begin(e, launches, n, more);
    if (!more) {
        e->advancing = 1;
        e->reads_before = e->clock_reads;
        e->step = !e->step ? 1000000 : e->step < LAST_STEP ? e->step * 4 : e->step;
        e->clock += e->step;
    }
    u32 moved = 0;
    if (!e->watching) {
        moved = probe(e, launches, n, 2200, ~0ull);
        if (e->probing) return R_MORE;
        if (!moved && awaits_clock(e)) return 1;
    }
    if (!moved) {  // who reads the clock once in many polls may not have come to it yet
        e->watching = 1;
        moved = probe(e, launches, n, ~0u, e->loop_limit);
        if (e->probing) return R_MORE;
        e->watching = 0;
        if (!moved && awaits_clock(e)) return 1;
        e->undecided = e->probe_rounds != 0;
    }
    if (moved) e->step = 0;
    return moved != 0;
}

// Everything is idle, and somebody outside may still do something: lets so much time pass and everything poll, for about so
// many resumes: who reads the clock once in many polls may not come to it in this call. 1 if anything came of it, 0 if not;
// or R_MORE.
API u32 rt_pass_time(Engine* e, Launch** launches, u32 n, u64 ns, u64 resumes, u32 more) {
    begin(e, launches, n, more);
    if (!more) {
        e->advancing = e->timed = 1;
        e->clock += ns;
    }
    u32 moved = probe(e, launches, n, 2200, resumes);
    return e->probing ? R_MORE : moved != 0;
}
