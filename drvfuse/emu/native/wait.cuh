// SPDX-License-Identifier: Apache-2.0
// What threads wait for: words that they poll, barriers, the other lanes of a warp operation.
#pragma once

#include "cluster.cuh"
#include "multimem.cuh"

// Spins ---------------------------------------------------------------------------------------------------------------

FN Poll* poll_of(Block* b, Thread* t) { return b->polls + t->linear; }

// Sets POLL_KNOWN in Thread::polls if a thread that is suspended before an access has made this access before.
FAR void look_up(Block* b, Thread* t) {
    Poll* p = poll_of(b, t);
    u32 n = t->polls & POLL_COUNT;
    t->polls &= ~POLL_KNOWN;
    LOOP for (u32 i = 0; i < n; i++)
        if (p->word[i].addr == t->op_addr && p->word[i].site == t->site) {
            t->polls |= POLL_KNOWN;
            return;
        }
}

// Whether a thread that comes back to an access that it has made before has no reason to repeat it, as the polled word
// has not changed. If another word that the thread polls has changed, the thread may poll CREDIT times, so that its
// loop reaches the access of that word.
FAR u32 spinning(Launch* l, Block* b, Thread* t) {
    u32 state = t->polls;
    if (!(state & POLL_KNOWN)) return 0;
    if (state >> POLL_CREDIT) {
        t->polls = state - (1u << POLL_CREDIT);
        return 0;
    }
    Poll* p = poll_of(b, t);
    u32 n = state & POLL_COUNT;
    u32 changed = 0;
    LOOP for (u32 i = 0; i < n; i++) {
        Polled* w = &p->word[i];
        if (l->engine->delay) delay_look(l->engine->delay, b, w->addr);
        u64 low = polled_low(l->engine, w->addr, w->size), high = high_of(w->addr, w->size);
        if (low != w->low || high != w->high) {
            if (w->addr == t->op_addr && w->site == t->site) return 0;
            w->low = low;
            w->high = high;
            changed = 1;
        }
    }
    if (changed) t->polls |= CREDIT << POLL_CREDIT;
    return !changed;
}

// Called before the access of a poll: stores the value that the poll will see.
FAR void remember(Launch* l, Block* b, Thread* t, u64 low, u64 high) {
    Engine* e = l->engine;
    Poll* p = poll_of(b, t);
    u32 n = t->polls & POLL_COUNT;
    u32 i = 0;
    if (t->polls & POLL_KNOWN) {
        LOOP while (p->word[i].addr != t->op_addr || p->word[i].site != t->site) i++;
        Polled* w = &p->word[i];
        if (w->low != low || w->high != high) {
            e->progress++;
        } else {
            e->fruitless = 1;
            e->idle = e->race && w->change_count == e->race->change_count && w->thread_time == race_thread(b, t->linear)->time;
        }
    } else {
        if (n == POLL_WORDS) {
            // The thread polls too many words to watch: it runs in every pass, and QUIET_LIMIT ends a deadlock.
            n = 0;
        } else if (e->quiet < QUIET_LIMIT) {
            e->progress++;
        }
        i = n;
        t->polls = n + 1;
        p->word[i].addr = t->op_addr;
        p->word[i].site = t->site;
        p->word[i].size = t->op_size;
    }
    p->word[i].low = low;
    p->word[i].high = high;
    if (e->race) {
        p->word[i].change_count = e->race->change_count;
        p->word[i].thread_time = race_thread(b, t->linear)->time;
    }
}

// Barriers ------------------------------------------------------------------------------------------------------------

FAR void complete_barrier(Launch* l, Block* b, u32 id) {
    Barrier* r = &b->barrier[id];
    l->barriers++;
    b->epoch++;
    u32 all = r->plain && r->kind == B_SYNC && r->threads == b->live;
    note(l, b, r->last->linear, V_BARRIER, r->site, 0, id, all);
    if (l->engine->race) race_barrier(l, b, id, all);
    u32 result = r->kind == B_POPC ? r->count : r->kind == B_AND ? r->every : r->count != 0;
    LOOP for (u32 w = 0; w < l->warps; w++) {
        Warp* warp = &b->warps[w];
        u32 lanes = warp->barrier & ~warp->gathered;
        if (all) {
            warp->ready |= lanes;
            warp->barrier = 0;
            continue;
        }
        LOOP while (lanes) {
            u32 lane = FFS(lanes) - 1;
            lanes &= lanes - 1;
            Thread* t = thread_at(l, b, w * 32 + lane);
            if (t->op_a != id) continue;
            t->op_result = result;
            warp->barrier &= ~(1u << lane);
            warp->ready |= 1u << lane;
        }
    }
    r->arrived = 0;
    b->woken = 1;
}

// Completes a barrier if enough threads have arrived.
FAR void try_barrier(Launch* l, Block* b, u32 id) {
    Barrier* r = &b->barrier[id];
    if (r->arrived && (r->expected ? r->arrived >= r->expected : r->threads >= b->live)) complete_barrier(l, b, id);
}

// A warp arrives at a barrier when all of its lanes that have not exited are there.
FAR void arrive(Launch* l, Block* b, Warp* warp) {
    u32 lanes = warp->gathered;
    u32 w = (u32)(warp - b->warps);
    Thread* first = thread_at(l, b, w * 32 + FFS(lanes) - 1);
    u32 id = first->op_a;
    if (first->status == CLUSTER) {
        LOOP for (u32 rest = lanes; rest; rest &= rest - 1) {
            Thread* t = thread_at(l, b, w * 32 + FFS(rest) - 1);
            if (t->site == first->site) continue;
            fault(l, t, F_BARRIER_DIVERGENCE, t->site, 0, 0, first->site, t->op_a);
            return;
        }
        warp->gathered = 0;
        cluster_barrier(l, b, w, lanes);
        return;
    }
    if (id >= BARRIERS) {
        fault(l, first, F_BARRIER_COUNT, first->site, COUNT_NUMBER, 0, 0, id);
        return;
    }
    Barrier* r = &b->barrier[id];
    u32 gone = 0;
    LOOP for (u32 rest = lanes; rest; rest &= rest - 1) {
        u32 lane = FFS(rest) - 1;
        Thread* t = thread_at(l, b, w * 32 + lane);
        u32 kind = t->op_kind & ~B_UNALIGNED, every = t->op_kind & first->op_kind & B_UNALIGNED;
        u32 reduces = kind >= B_POPC ? kind : B_SYNC;
        if (t->op_a != id || (t->site != first->site && !every)) {
            fault(l, t, F_BARRIER_DIVERGENCE, t->site, 0, 0, first->site, t->op_a);
            return;
        }
        if (t->op_b & 31 || (kind == B_ARRIVE && !t->op_b)) {
            fault(l, t, F_BARRIER_COUNT, t->site, COUNT_THREADS, 0, 0, t->op_b);
            return;
        }
        if (!r->arrived && t == first) {
            r->expected = t->op_b;
            r->threads = r->count = 0;
            r->every = r->plain = 1;
            r->kind = reduces;
        }
        if (r->expected != t->op_b) {
            fault(l, t, F_BARRIER_COUNT, t->site, COUNT_OTHERS_DIFFER, 0, r->expected, t->op_b);
            return;
        }
        if (r->kind != reduces) {
            fault(l, t, F_BARRIER_KINDS, t->site, 0, 0, 0, id);
            return;
        }
        if (kind == B_ARRIVE) {
            r->plain = 0;
            gone |= 1u << lane;
            warp->barrier &= ~(1u << lane);
            warp->ready |= 1u << lane;
        } else if (reduces) {
            r->count += t->op_c != 0;
            r->every &= t->op_c != 0;
        }
    }
    if (lanes != warp->lanes && l->engine->race && l->engine->race->strict) notice(l, first, NOTICE_BARRIER, 0);
    if (gone && l->engine->race) race_arrive(l, b, &b->race->arrivals[id], w, gone);
    warp->gathered = 0;
    r->arrived += 32;
    r->threads += POPC(lanes);
    r->site = first->site;
    r->last = first;
    try_barrier(l, b, id);
}

// Warp operations -----------------------------------------------------------------------------------------------------

FN void shuffle(Launch* l, Block* b, u32 w, u32 mask, u32 lane, Thread* t) {
    u32 delta = t->op_b & 31, clamp = t->op_c & 31, segment = t->op_c >> 8 & 31;
    u32 last = (lane & segment) | (clamp & ~segment);
    u32 first = lane & segment;
    s32 j;
    u32 ok;
    if (t->op_kind == SHFL_UP) {
        j = (s32)lane - (s32)delta;
        ok = j >= (s32)last;
    } else {
        j = t->op_kind == SHFL_DOWN ? lane + delta : t->op_kind == SHFL_BFLY ? lane ^ delta : first | (delta & ~segment);
        ok = j <= (s32)last;
    }
    if (!ok) j = lane;
    // The value of a lane that does not participate is undefined: return a value that makes the error visible.
    u32 present = mask >> j & 1;
    t->op_result = present ? thread_at(l, b, w * 32 + j)->op_a : 0xDEADBEEFu;
    if (!present) notice(l, t, NOTICE_SHUFFLE, j);
    t->op_pred = ok;
}

// A matrix instruction, which all lanes of a warp execute together by a function of a native library.
FAR void matrix_operation(Launch* l, Block* b, u32 w, u32 mask) {
    Thread* first = thread_at(l, b, w * 32 + FFS(mask) - 1);
    if (mask != ~0u) {
        fault(l, first, F_MATRIX_LANES, first->site, 0, 0, 0, mask);
        return;
    }
    LOOP for (u32 lane = 1; lane < 32; lane++) {
        Thread* t = thread_at(l, b, w * 32 + lane);
        if (t->site == first->site) continue;
        fault(l, t, F_WARP_MISMATCH, t->site, 0, 0, first->site, t->op_mask);
        return;
    }
    l->engine->work += MATRIX_WORK;
    if (first->op_value) rt_call((void*)first->op_value, first);
}

FAR void warp_operation(Launch* l, Block* b, u32 w, u32 mask, u32 kind) {
    u32 rest = mask;
    l->warp_ops++;
    if (kind == WARP_SYNC) b->warps[w].syncs++;
    if (kind == WARP_SYNC && l->engine->race) race_warp_sync(l, b, w, mask);
    if (kind == MATRIX) {
        matrix_operation(l, b, w, mask);
        return;
    }
    if (kind <= SHFL_IDX) {
        LOOP while (rest) {
            u32 lane = FFS(rest) - 1;
            rest &= rest - 1;
            shuffle(l, b, w, mask, lane, thread_at(l, b, w * 32 + lane));
        }
        return;
    }
    u32 ballot = 0, sum = 0, low = 0xFFFFFFFFu, high = 0, each = 0xFFFFFFFFu, any = 0, odd = 0;
    s32 slow = 0x7FFFFFFF, shigh = -0x7FFFFFFF - 1;
    u32 equal = 1;
    u32 leader = FFS(mask) - 1;
    if (kind <= REDUX_XOR && thread_at(l, b, w * 32 + leader)->op_mask != mask)
        notice(l, thread_at(l, b, w * 32 + leader), NOTICE_VOTE, 0);
    u64 first = thread_at(l, b, w * 32 + leader)->op_value;
    rest = mask;
    LOOP while (rest) {
        u32 lane = FFS(rest) - 1;
        rest &= rest - 1;
        Thread* t = thread_at(l, b, w * 32 + lane);
        u32 a = t->op_a;
        if (kind >= VOTE_ALL && kind <= VOTE_BALLOT) ballot |= (u32)(a != 0) << lane;
        sum += a;
        low = a < low ? a : low;
        high = a > high ? a : high;
        slow = (s32)a < slow ? (s32)a : slow;
        shigh = (s32)a > shigh ? (s32)a : shigh;
        each &= a;
        any |= a;
        odd ^= a;
        if (t->op_value != first) equal = 0;
    }
    rest = mask;
    LOOP while (rest) {
        u32 lane = FFS(rest) - 1;
        rest &= rest - 1;
        Thread* t = thread_at(l, b, w * 32 + lane);
        u32 r = 0;
        if (kind == VOTE_ALL) r = ballot == mask;
        else if (kind == VOTE_ANY) r = ballot != 0;
        else if (kind == VOTE_UNI) r = ballot == mask || ballot == 0;
        else if (kind == VOTE_BALLOT) r = ballot;
        else if (kind == MATCH_ANY) {
            u32 others = mask;
            LOOP while (others) {
                u32 other = FFS(others) - 1;
                others &= others - 1;
                if (thread_at(l, b, w * 32 + other)->op_value == t->op_value) r |= 1u << other;
            }
        } else if (kind == MATCH_ALL) {
            r = equal ? mask : 0;
            t->op_pred = equal;
        } else if (kind == REDUX_ADD) r = sum;
        else if (kind == REDUX_MIN_S) r = (u32)slow;
        else if (kind == REDUX_MAX_S) r = (u32)shigh;
        else if (kind == REDUX_MIN_U) r = low;
        else if (kind == REDUX_MAX_U) r = high;
        else if (kind == REDUX_AND) r = each;
        else if (kind == REDUX_OR) r = any;
        else if (kind == REDUX_XOR) r = odd;
        else if (kind == ELECT) {
            r = leader;
            t->op_pred = lane == leader;
        }
        t->op_result = r;
    }
}

// Completes activemask when no lane of the warp can run any more. The result is the mask of the lanes that wait at the
// same instruction: of all results that PTX allows, the one with the most lanes.
FAR u32 resolve_activemask(Launch* l, Block* b, u32 w) {
    Warp* warp = &b->warps[w];
    u32 lanes = warp->asking;
    LOOP while (lanes) {
        u32 lane = FFS(lanes) - 1;
        lanes &= lanes - 1;
        Thread* t = thread_at(l, b, w * 32 + lane);
        u32 mask = 1u << lane, rest = lanes;
        LOOP while (rest) {
            u32 other = FFS(rest) - 1;
            rest &= rest - 1;
            Thread* o = thread_at(l, b, w * 32 + other);
            if (o->site == t->site) mask |= 1u << other;
        }
        lanes &= ~mask;
        rest = mask;
        LOOP while (rest) {
            thread_at(l, b, w * 32 + FFS(rest) - 1)->op_result = mask;
            rest &= rest - 1;
        }
    }
    u32 all = warp->asking;
    warp->asking = 0;
    return all;
}

// Completes the warp operations that can be completed, and returns the lanes that may continue. A warp operation does
// not wait for lanes of its mask that have exited or never existed.
FAR u32 resolve(Launch* l, Block* b, u32 w) {
    Warp* warp = &b->warps[w];
    u32 todo = warp->warpop, freed = 0;
    if (warp->alike && todo == (warp->alike_mask & warp->live)) {
        warp->warpop = 0;
        warp_operation(l, b, w, todo, warp->alike_kind);
        return todo;
    }
    LOOP while (todo) {
        u32 lane = FFS(todo) - 1;
        Thread* t = thread_at(l, b, w * 32 + lane);
        u32 mask = t->op_mask;
        if (!(mask >> lane & 1)) {
            fault(l, t, F_WARP_LANES, t->site, 0, 0, 0, mask);
            return 0;
        }
        u32 present = mask & warp->warpop, same = 0;
        LOOP while (present) {
            u32 other = FFS(present) - 1;
            present &= present - 1;
            Thread* o = thread_at(l, b, w * 32 + other);
            if (o->op_mask == mask && o->op_kind == t->op_kind) {
                same |= 1u << other;
            } else if (o->op_mask >> lane & 1) {  // two lanes wait for each other at different operations
                fault(l, o, F_WARP_MISMATCH, o->site, 0, 0, t->site, o->op_mask);
                return 0;
            }
        }
        todo &= ~(same | 1u << lane);
        if (same == (mask & warp->live)) {
            warp_operation(l, b, w, same, t->op_kind);
            freed |= same;
            warp->warpop &= ~same;
        }
    }
    return freed;
}
