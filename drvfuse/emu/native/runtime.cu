// SPDX-License-Identifier: Apache-2.0
// The native part of the emulated driver: the scheduler, which runs the threads of all emulated GPUs on one CPU thread,
// and the checks of every memory access. NVRTC compiles this file to runtime.ptx, and the translator makes native code
// of that PTX (in raw mode: without checks and suspends), so drvfuse needs no C compiler where it runs. Nothing here
// allocates memory.
//
// Layout. The engine (machine/run/engine.py) gives each launch an array of block slots, one for each resident block:
//
//     block slot = Block | Warp[warps] | frames[threads]
//
// A frame is a Thread and the registers that the kernel keeps across suspends. Each thread of each block slot also has
// a Poll, which lies outside of the block slot, as few threads use it.
//
// Spins. A thread suspends before each strong load and atomic. If a thread comes back to an earlier access (the same
// address and instruction), it is taken to poll in a loop, and is not resumed while no word that it polls has changed.
// That the access belongs to such a loop is a guess about the kernel. So before the engine reports that no thread can
// continue, a probe (probe.cuh) lets every such thread poll once more. The run continues if the probe makes progress:
// memory changed, a thread exited, a new address was polled, or a block started. Completed barriers and warp operations
// alone are no progress.
//
// Bounded calls. A call returns after a bounded amount of work, also in the middle of a pass, so that Python can handle
// signals. The next call continues from there.
//
// Determinism. The order in which threads run depends only on the seed and on the sequence of calls. So what the seed
// draws must not depend on an address, which depends on the other machines of the process, but on its distance from
// Launch::window_base. The budget of a call of rt_run, in time or in resumes, is checked between passes only.

#include "probe.cuh"

// Begins a call of the runtime. With `more`, the call continues the pass or probe that the last call left unfinished.
// Without it, that pass or probe is dropped; what threads have done in it remains done.
FN void begin(Engine* e, Launch** launches, u32 n, u32 more) {
    e->work = 0;
    if (more) return;
    e->advancing = e->watching = e->undecided = e->timed = 0;
    e->pass_open = e->probing = e->writes = e->wake_count = 0;
    LOOP for (u32 k = 0; k < n; k++) launches[k]->part = launches[k]->turn_warp = 0;
}

// What the budget of rt_run limits: the resumes so far or, without Engine::counted, the host's time in nanoseconds.
FN u64 spent(Engine* e) { return e->counted ? e->resumes : rt_now(); }

// Runs the launches together. Returns R_EVENT when a launch has ended, has faulted or has triggered in all its blocks,
// R_IDLE when no thread can continue, R_BUDGET when the budget (nanoseconds, or resumes if Engine::counted) is spent,
// and R_MORE when the caller has to call again with `more`.
API u32 rt_run(Engine* e, Launch** launches, u32 n, u64 budget, u32 more) {
    u64 deadline = spent(e) + budget;
    begin(e, launches, n, more);
    LOOP while (1) {
        u32 ran = 0;
        if (!e->probing) {
            ran = run_pass(e, launches, n, 0);
            if (e->pass_open) return R_MORE;
            if (e->progress != e->pass_before) e->wake_count = 0;
            if (has_event(launches, n)) {
                e->step = 0;
                return R_EVENT;
            }
        }
        if (!ran || e->quiet > QUIET_LIMIT) {
            if (!e->probing && idle_stores(launches, n)) continue;
            if (e->delay && !e->probing && !ran && delay_idle(e, launches, n)) continue;
            if (!e->probing && e->wake_count < 64 && e->quiet <= QUIET_LIMIT && wake_sleepers(e, launches, n)) {
                e->wake_count++;
                continue;
            }
            u32 moved = probe(e, launches, n, 1, ~0ull);
            if (e->probing) return R_MORE;
            if (!moved) return R_IDLE;
            if (moved == PROBE_EVENT) return R_EVENT;
            e->wake_count = 0;
        }
        if (spent(e) > deadline) return R_BUDGET;
    }
}

// Moves the virtual clock, by a growing step, and lets all threads poll. Called when rt_run has returned R_IDLE.
// Returns 1 if that made progress, or if a thread reads the clock and the step is still below a day; 0 if the threads
// wait for ever; or R_MORE. Before it returns 0, all threads poll until their states repeat, so that a loop that counts
// its polls reaches its end. If loop_limit ends this earlier, `undecided` is set.
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
    if (!moved) {  // poll on: a thread that reads the clock once in many polls may not have reached that read yet
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

// Moves the virtual clock by `ns` and lets all threads poll, in at most about `resumes` resumes. Called when rt_run has
// returned R_IDLE but the host or another process may still act. Returns 1 if that made progress, 0 if not, or R_MORE.
// A thread that reads the clock once in many polls may need more resumes, and thus further calls.
API u32 rt_pass_time(Engine* e, Launch** launches, u32 n, u64 ns, u64 resumes, u32 more) {
    begin(e, launches, n, more);
    if (!more) {
        e->advancing = e->timed = 1;
        e->clock += ns;
    }
    u32 moved = probe(e, launches, n, 2200, resumes);
    return e->probing ? R_MORE : moved != 0;
}
