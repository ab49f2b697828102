// SPDX-License-Identifier: Apache-2.0
// The turn of a block, in which each of its threads runs until it waits.
//
// A kernel's function runs one thread until the thread suspends, and returns the reason (a Status). A turn runs the
// runnable lanes of each warp in order, completes warp operations and barriers, and ends when all lanes wait.
#pragma once

#include "calls.cuh"
#include "race_values.cuh"
#include "store.cuh"
#include "warp.cuh"

// Counts each recorded write that has changed memory as progress. Called in a probe, when the thread has suspended.
FAR void settle_writes(Engine* e) {
    LOOP for (u32 i = 0; i < e->writes; i++) {
        Write* w = &e->write[i];
        if (low_of(w->addr, w->size) != w->low || high_of(w->addr, w->size) != w->high) e->progress++;
    }
    e->writes = 0;
}

// Removes a thread that has exited from its warp and its block. `bit` is the mask of its lane. Completes barriers that
// waited for this thread alone.
FAR void exit_thread(Launch* l, Block* b, Warp* warp, u32 bit) {
    Engine* e = l->engine;
    if (e->race) race_exit(thread_at(l, b, (u32)(warp - b->warps) * 32 + FFS(bit) - 1));
    warp->live &= ~bit;
    b->live--;
    e->progress++;
    e->quiet = e->strain = 0;
    if (warp->gathered && warp->gathered == warp->live) arrive(l, b, warp);
    u32 w = (u32)(warp - b->warps);
    cluster_exit(l, b, warp, bit, thread_at(l, b, w * 32 + FFS(bit) - 1));
    LOOP for (u32 i = 0; i < BARRIERS; i++)
        if (b->barrier[i].arrived) try_barrier(l, b, i);
}

// A hash of all that decides how a thread continues: the place where it is suspended, and its saved registers.
FAR u64 state_of(Launch* l, Thread* t) {
    u64* words = (u64*)(t + 1);
    u64 h = (u64)t + t->resume;
    LOOP for (u32 i = 0; i < (l->frame_stride - sizeof(Thread)) / 8; i++) {
        h = (h ^ words[i]) * 0x9E3779B97F4A7C15ull;
        h ^= h >> 29;
    }
    return h;
}

// The run of a thread -------------------------------------------------------------------------------------------------

// The word of the access before which a thread is suspended, and the value that it had before the thread ran.
struct Watch {
    u64 addr, low, high;
    u32 size;  // bytes; 0: the thread was not suspended before an access
};

// Begins to watch the word that a thread is about to access, and remembers its value for polls.
FN Watch begin_watch(Launch* l, Block* b, Thread* t) {
    Watch w = {0, 0, 0, 0};
    if (t->status != YIELD || !in_window(l, t->op_addr, t->op_size)) return w;
    w.addr = t->op_addr;
    w.size = t->op_size;
    w.low = polled_low(l->engine, w.addr, w.size);
    w.high = high_of(w.addr, w.size);
    remember(l, b, t, w.low, w.high);
    return w;
}

// Counts as progress a change of the watched word.
FN void end_watch(Engine* e, Watch* w) {
    if (!w->size || (w->low == polled_low(e, w->addr, w->size) && w->high == high_of(w->addr, w->size))) return;
    e->progress++;
    e->quiet = 0;
}

// Counts a resume towards the limit of Engine::strain. Returns 1, after recording a fault, if the limit is reached.
FN u32 count_strain(Launch* l, Thread* t, u32 watched) {
    Engine* e = l->engine;
    if (e->advancing) return 0;
    e->strain += watched ? STRAIN : 1;
    if (e->strain <= e->loop_limit * STRAIN || t->status == FAULT) return 0;
    fault(l, t, F_ENDLESS, t->site, ENDLESS_RESUMES, 0, 0, e->loop_limit);
    e->strain = 0;
    return 1;
}

// Marks a lane as waiting for the warp operation at which it has suspended.
FN void wait_for_warp(Warp* warp, Thread* t, u32 bit) {
    if (t->op_kind == ACTIVEMASK) {
        warp->at_activemask |= bit;
        return;
    }
    if (!warp->warpop) {
        warp->is_uniform = 1;
        warp->uniform_mask = t->op_mask;
        warp->uniform_kind = t->op_kind;
    } else if (warp->uniform_mask != t->op_mask || warp->uniform_kind != t->op_kind) {
        warp->is_uniform = 0;
    }
    warp->warpop |= bit;
}

// Marks a lane as waiting at a barrier. The warp arrives when all of its live lanes have suspended at a barrier.
FN void gather(Launch* l, Block* b, Warp* warp, u32 bit) {
    warp->gathered |= bit;
    if (warp->gathered == warp->live) arrive(l, b, warp);
}

// Handles a thread that has suspended for the reason `status`: records in a member of Warp, by the bit of the thread's
// lane, what the thread waits for; or removes the thread if it has exited; or records a fault. Returns 1 if the
// thread need not wait.
FN u32 suspended(Launch* l, Block* b, Warp* warp, Thread* t, u32 bit, u32 status) {
    Engine* e = l->engine;
    if (status == YIELD) {
        look_up(b, t);
        warp->yielded |= bit;
    } else if (status == WARPOP) {
        wait_for_warp(warp, t, bit);
    } else if (status == BARRIER) {
        warp->barrier |= bit;
        gather(l, b, warp, bit);
    } else if (status == CLUSTER) {
        warp->cluster |= bit;
        if (t->op_kind & CB_UNALIGNED) cluster_barrier(l, b, t->warp, bit);
        else gather(l, b, warp, bit);
    } else if (status == EXIT) {
        exit_thread(l, b, warp, bit);
    } else if (status == GDC_WAIT) {
        if (l->gdc_open) return 1;
        warp->gdc |= bit;
        e->progress++;
    } else if (status == SLEEP) {
        t->wake_time = e->clock + t->op_a;
        warp->sleeping |= bit;
        if (!(t->polls & POLL_COUNT)) e->progress++;
    } else if (status == TRAP) {
        u32 kind = t->op_kind == TRAP_ASSERT ? F_ASSERT : t->op_kind == TRAP_NO_FUNCTION ? F_NO_FUNCTION : F_TRAP;
        fault(l, t, kind, t->site, t->op_addr, 0, t->op_kind, (u64)t);
    } else if (status != FAULT || !l->fault.kind) {
        fault(l, t, F_UNSUPPORTED, t->site, 0, 0, status, 0);
    }
    return 0;
}

// Runs one thread until it suspends. Returns 1 if it can be run again at once.
FN u32 run_thread(Launch* l, Block* b, Warp* warp, Thread* t) {
    Engine* e = l->engine;
    u32 bit = 1u << t->lane;
    if (e->delay) view_block(e->delay, b);
    e->repeats_poll = e->skips_check = 0;
    if (t->status == GDC_WAIT) {
        note(l, b, t->linear, V_GDC_WAIT, t->site, 0, 0, 0);
        if (e->race) race_gdc_wait(t);
    }
    Watch watch = begin_watch(l, b, t);
    u32 watched = watch.size != 0;
    b->has_run = 1;
    e->clock++;
    e->quiet += watched;
    e->fuel_given = e->fuel = e->loop_limit < FUEL ? e->loop_limit : FUEL;
    e->rounds = 0;
    e->resumes++;
    l->resumes++;
    if (e->watching) e->state -= state_of(l, t);
    u32 mark;
    e->stack = (u64)&mark;
    u32 status = rt_call(l->function, t);
    t->status = status;
    if (e->race && e->race->doubt_count) settle_doubts(e->race);
    if (e->watching) e->state += state_of(l, t);
    if (count_strain(l, t, watched)) return 0;
    e->work += RESUME_WORK + e->fuel_given - e->fuel + e->rounds;
    end_watch(e, &watch);
    if (e->writes) settle_writes(e);
    return suspended(l, b, warp, t, bit, status);
}

// Turns ---------------------------------------------------------------------------------------------------------------

const u32 TURN = 8192;  // resumes after which a warp's or block's turn ends although it could continue

// The lanes of a warp that can run now. With `force`, that includes lanes whose polled words have not changed.
FN u32 ready_lanes(Launch* l, Block* b, u32 w, u32 force) {
    Warp* warp = &b->warps[w];
    u32 ready = warp->ready;
    warp->ready = 0;
    if (warp->gdc && l->gdc_open) {
        ready |= warp->gdc;
        warp->gdc = 0;
    }
    l->engine->work += POPC(warp->yielded) * LOOK_WORK;
    LOOP for (u32 rest = warp->yielded; rest; rest &= rest - 1)
        if (!spinning(l, b, thread_at(l, b, w * 32 + FFS(rest) - 1)) || force) ready |= rest & -rest;
    warp->yielded &= ~ready;
    LOOP for (u32 rest = warp->sleeping; rest; rest &= rest - 1)
        if (thread_at(l, b, w * 32 + FFS(rest) - 1)->wake_time <= l->engine->clock) ready |= rest & -rest;
    warp->sleeping &= ~ready;
    return ready;
}

// Gives a warp one turn: runs its lanes until all wait. With `force`, lanes poll even if no word that they poll has
// changed. Returns the number of resumes.
FAR u32 run_warp(Launch* l, Block* b, u32 w, u32 force) {
    Warp* warp = &b->warps[w];
    u32 ready = ready_lanes(l, b, w, force), ran = 0;
    LOOP while (1) {
        LOOP while (ready) {
            u32 lane = FFS(ready) - 1;
            ready &= ready - 1;
            ran++;
            if (run_thread(l, b, warp, thread_at(l, b, w * 32 + lane))) ready |= 1u << lane;
            if (l->state != RUNNING) return ran;
            if (ready && l->engine->work > WORK_LIMIT) {
                warp->ready |= ready;
                return ran;
            }
        }
        if (warp->warpop) {
            ready |= resolve(l, b, w);
            if (l->state != RUNNING) return ran;
        }
        if (warp->at_activemask) ready |= resolve_activemask(l, b, w);
        ready |= warp->ready;
        warp->ready = 0;
        if (!ready) break;
        if (ran > TURN) {
            warp->ready = ready;
            break;
        }
    }
    return ran;
}

// Returns a mask of the block's warps that do not run in this pass, so that the other warps get ahead of them. With
// seed 0, the mask is empty.
FN u32 held_warps(Launch* l, Block* b) {
    Engine* e = l->engine;
    if (!e->seed || e->probing) return 0;
    u64 r = hash(e->seed * 0x9E3779B97F4A7C15ull + (e->pass >> 4) * 0x2545F491ull + ((u64)l->device << 32 | b->index));
    return (u32)(r & r >> 32);
}

// Gives a block one turn, and returns the number of resumes. The turn begins with the warp in Launch::turn_warp, or
// with warp 0. If the work limit of the call ends the turn, turn_warp is set to the warp with which the next call
// continues. With `force`, or if Engine::pass_held is 2, warps are held back (held_warps) only after a barrier has
// completed in the turn.
FAR u32 run_block(Launch* l, Block* b, u32 force) {
    u32 ran = 0, w = l->turn_warp ? l->turn_warp - 1 : 0;
    u32 held = force || l->engine->pass_held == 2 ? 0 : held_warps(l, b);
    l->turn_warp = 0;
    l->engine->work += l->warps;
    if (l->engine->delay && l->engine->delay->shown_block != b) view_block(l->engine->delay, 0);
    LOOP do {
        if (!w) b->woken = 0;
        LOOP for (; w < l->warps; w++) {
            if (l->engine->work > WORK_LIMIT) {
                l->turn_warp = w + 1;
                return ran;
            }
            Warp* p = &b->warps[w];
            if (!(p->ready | p->yielded | p->sleeping | p->gdc)) continue;
            if (held >> w & 1) {
                if (!l->engine->pass_held) l->engine->pass_held = 1;
                continue;
            }
            ran += run_warp(l, b, w, force);
            if (l->state != RUNNING) return ran;
        }
        w = 0;
        force = 0;
        held = held_warps(l, b);
    } while (b->woken && ran < TURN);
    if (b->bulks && b->live) ran += run_bulks(l, b, !ran);
    if (b->stores && ++b->store_turns > LATEST_TURN) ran += write_stores(l, b);
    return ran;
}
