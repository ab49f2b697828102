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

#include "race_values.cuh"
#include "store.cuh"
#include "wait.cuh"

FAR void settle_writes(Engine* e) {
    LOOP for (u32 i = 0; i < e->writes; i++) {
        Write* w = &e->write[i];
        if (low_of(w->addr, w->size) != w->low || high_of(w->addr, w->size) != w->high) e->progress++;
    }
    e->writes = 0;
}

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

// A hash of all that decides how a thread goes on: its place, and the registers that it has saved.
FAR u64 state_of(Launch* l, Thread* t) {
    u64* words = (u64*)(t + 1);
    u64 h = (u64)t + t->resume;
    LOOP for (u32 i = 0; i < (l->frame_stride - sizeof(Thread)) / 8; i++) {
        h = (h ^ words[i]) * 0x9E3779B97F4A7C15ull;
        h ^= h >> 29;
    }
    return h;
}

// Runs one thread until it suspends; 1 if it may be run again at once.
FN u32 run_thread(Launch* l, Block* b, Warp* warp, Thread* t) {
    Engine* e = l->engine;
    u32 bit = 1u << t->lane;
    u32 watched = 0;
    u64 addr = 0, low = 0, high = 0;
    u32 size = 0;
    if (e->delay) view_block(e->delay, b);
    e->fruitless = e->idle = 0;
    if (t->status == GDC_WAIT) {
        note(l, b, t->linear, V_GDC_WAIT, t->site, 0, 0, 0);
        if (e->race) race_gdc_wait(t);
    }
    if (t->status == YIELD && in_window(l, t->op_addr, t->op_size)) {
        watched = 1;
        addr = t->op_addr;
        size = t->op_size;
        low = polled_low(e, addr, size);
        high = high_of(addr, size);
        remember(l, b, t, low, high);
    }
    b->begun = 1;
    e->clock++;
    e->quiet += watched;
    e->tank = e->fuel = e->loop_limit < FUEL ? e->loop_limit : FUEL;
    e->rounds = 0;
    e->resumes++;
    l->resumes++;
    if (e->watching) e->state -= state_of(l, t);
    u32 mark;
    e->stack = (u64)&mark;
    u32 status = rt_call(l->function, t);
    t->status = status;
    if (e->race && e->race->doubts) settle_doubts(e->race);
    if (e->watching) e->state += state_of(l, t);
    if (!e->advancing) {
        e->strain += watched ? STRAIN : 1;
        if (e->strain > e->loop_limit * STRAIN && status != FAULT) {
            fault(l, t, F_ENDLESS, t->site, ENDLESS_RESUMES, 0, 0, e->loop_limit);
            e->strain = 0;
            return 0;
        }
    }
    e->work += RESUME_WORK + e->tank - e->fuel + e->rounds;
    if (watched) {
        if (low != polled_low(e, addr, size) || high != high_of(addr, size)) {
            e->progress++;
            e->quiet = 0;
        }
    }
    if (e->writes) settle_writes(e);
    if (status == YIELD) {
        look_up(b, t);
        warp->yielded |= bit;
    } else if (status == WARPOP) {
        if (t->op_kind == ACTIVEMASK) {
            warp->asking |= bit;
        } else {
            if (!warp->warpop) {
                warp->alike = 1;
                warp->alike_mask = t->op_mask;
                warp->alike_kind = t->op_kind;
            } else if (warp->alike_mask != t->op_mask || warp->alike_kind != t->op_kind) {
                warp->alike = 0;
            }
            warp->warpop |= bit;
        }
    } else if (status == BARRIER) {
        warp->barrier |= bit;
        warp->gathered |= bit;
        if (warp->gathered == warp->live) arrive(l, b, warp);
    } else if (status == CLUSTER) {
        warp->cluster |= bit;
        if (t->op_kind & CB_UNALIGNED) {
            cluster_barrier(l, b, t->warp, bit);
        } else {
            warp->gathered |= bit;
            if (warp->gathered == warp->live) arrive(l, b, warp);
        }
    } else if (status == EXIT) {
        exit_thread(l, b, warp, bit);
    } else if (status == GDC_WAIT) {
        if (l->gdc_open) return 1;
        warp->gdc |= bit;
        e->progress++;
    } else if (status == SLEEP) {
        t->wake = e->clock + t->op_a;
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

const u32 TURN = 8192;  // resumes after which a warp or block lets others on, even if it could go on for ever

// One turn of a warp: all that its lanes can do now. `force` lets lanes poll that have no reason to.
FAR u32 run_warp(Launch* l, Block* b, u32 w, u32 force) {
    Warp* warp = &b->warps[w];
    u32 ready = warp->ready, ran = 0;
    warp->ready = 0;
    if (warp->gdc && l->gdc_open) {
        ready |= warp->gdc;
        warp->gdc = 0;
    }
    u32 lanes = warp->yielded;
    l->engine->work += POPC(lanes) * LOOK_WORK;
    LOOP while (lanes) {
        u32 lane = FFS(lanes) - 1;
        lanes &= lanes - 1;
        if (!spinning(l, b, thread_at(l, b, w * 32 + lane)) || force) ready |= 1u << lane;
    }
    warp->yielded &= ~ready;
    lanes = warp->sleeping;
    LOOP while (lanes) {
        u32 lane = FFS(lanes) - 1;
        lanes &= lanes - 1;
        if (thread_at(l, b, w * 32 + lane)->wake <= l->engine->clock) ready |= 1u << lane;
    }
    warp->sleeping &= ~ready;
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
        if (warp->asking) ready |= resolve_activemask(l, b, w);
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

// The warps of a block that a seed other than 0 holds back for some passes, so that the others run ahead of them.
FN u32 held_warps(Launch* l, Block* b) {
    Engine* e = l->engine;
    if (!e->seed || e->probing) return 0;
    u64 r = hash(e->seed * 0x9E3779B97F4A7C15ull + (e->pass >> 4) * 0x2545F491ull + ((u64)l->device << 32 | b->index));
    return (u32)(r & r >> 32);
}

// Goes on where `turn_warp` says. That is set again if the call has done enough. Where no warp is held back because nothing
// else can run, that is over as soon as a barrier completes.
FAR u32 run_block(Launch* l, Block* b, u32 force) {
    u32 ran = 0, w = l->turn_warp ? l->turn_warp - 1 : 0;
    u32 held = force || l->engine->pass_held == 2 ? 0 : held_warps(l, b);
    l->turn_warp = 0;
    l->engine->work += l->warps;
    if (l->engine->delay && l->engine->delay->block != b) view_block(l->engine->delay, 0);
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

FAR void start_block(Launch* l, u32 slot, u32 group, u32 rank) {
    Block* b = (Block*)(l->slots + slot * l->slot_stride);
    u32 cx = l->cluster & 0xFF, cy = l->cluster >> 8 & 0xFF, cz = l->cluster >> 16 & 0xFF;
    if (!l->cluster) cx = cy = cz = 1;
    u32 gx = l->nctaid[0] / cx, gy = l->nctaid[1] / cy;
    b->ctaid[0] = group % gx * cx + rank % cx;
    b->ctaid[1] = group / gx % gy * cy + rank / cx % cy;
    b->ctaid[2] = group / gx / gy * cz + rank / cx / cy;
    b->index = b->ctaid[0] + l->nctaid[0] * (b->ctaid[1] + l->nctaid[1] * b->ctaid[2]);
    b->cluster_rank = rank;
    b->smid = slot % (l->sm_count ? l->sm_count : 1);
    b->slot = slot;
    b->shared_base = l->shared_base + slot * l->shared_stride;
    b->cluster_shared_base = l->shared_base + (slot - rank) * l->shared_stride;
    b->active = 1;
    b->live = l->threads;
    b->woken = b->triggered = b->bulks = b->stores = b->begun = 0;
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
        p->yielded = p->warpop = p->barrier = p->gdc = p->sleeping = p->asking = p->gathered = p->syncs = 0;
        p->cluster = p->joined = p->passed = 0;
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
        t->wake = 0;
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

// A turn for each resident block of a launch, then new blocks in free slots; threads resumed (and blocks started). `part`
// is left set if the call has done enough before the end of that.
FAR u32 turn_launch(Launch* l, u32 force, u64 random) {
    u32 ran = 0, high = l->high;
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
            l->turn = l->high;
            return ran;
        }
        u32 first = l->free_groups[--l->free_count] * size;
        u32 group = l->next / size;
        l->next += size;
        // borrowed memory holds values of its last user
        LOOP for (; l->high < first + size; l->high++) ((Block*)(l->slots + l->high * l->slot_stride))->active = 0;
        l->engine->progress++;
        l->engine->quiet = l->engine->strain = 0;
        ran++;
        LOOP for (u32 i = 0; i < size; i++) start_block(l, first + i, group, i);
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
    if (l->state == DONE) pass_on_device(d, l->device);
    return ran;
}

// One pass over the launches. Returns how many threads it resumed and blocks it started. `pass_open` stays set if the call
// has done enough before the end of the pass.
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
        // A seed other than 0 now and then holds a launch back for a while.
        if (e->seed && !force && (hash(e->seed + (e->pass >> 5) * 0x2545F491ull + k) & 7) == 0) {
            e->pass_held = 1;
            continue;
        }
        e->pass_ran += run_launch(l, force, random);
        if (l->part && l->state == RUNNING) return e->pass_ran;
    }
    if (!e->pass_ran && e->pass_held) e->pass_held = 2;
    if (e->pass_held == 2) {  // one launch that can run is enough: the others go on being held back
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
