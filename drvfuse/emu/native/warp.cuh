// SPDX-License-Identifier: Apache-2.0
// Operations of a warp: shuffles, votes, matches, reductions, __syncwarp, elect, activemask and matrix instructions.
//
// A lane suspends with its operands in Thread::op_kind, op_mask and op_a to op_c. When all lanes of the mask that have
// not exited are suspended at the operation, it is carried out and they continue with op_result and op_pred.
#pragma once

#include "barrier.cuh"

// Computes the result of a shuffle for one lane.
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
        j = t->op_kind == SHFL_DOWN   ? lane + delta
            : t->op_kind == SHFL_BFLY ? lane ^ delta
                                      : first | (delta & ~segment);
        ok = j <= (s32)last;
    }
    if (!ok) j = lane;
    // The value of a lane that does not participate is undefined: the result is a number that makes the error visible.
    u32 present = mask >> j & 1;
    t->op_result = present ? thread_at(l, b, w * 32 + j)->op_a : 0xDEADBEEFu;
    if (!present) notice(l, t, NOTICE_SHUFFLE, j);
    t->op_pred = ok;
}

// Executes a matrix instruction for all lanes of a warp together, by a function of a native library.
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

// What votes, matches and reductions compute from the operands of all lanes.
struct WarpValues {
    u32 ballot;                               // mask of the lanes whose predicate is true
    u32 sum, bits_and, bits_or, bits_xor;     // of the values op_a
    u32 unsigned_min, unsigned_max;           // of the values op_a
    s32 signed_min, signed_max;               // of the values op_a
    u32 all_equal;                            // 1 if op_value is the same in all lanes
    u32 leader;                               // the lowest lane
};

FN void gather_values(Launch* l, Block* b, u32 w, u32 mask, u32 kind, WarpValues* v) {
    v->ballot = v->sum = v->bits_or = v->bits_xor = v->unsigned_max = 0;
    v->unsigned_min = v->bits_and = 0xFFFFFFFFu;
    v->signed_min = 0x7FFFFFFF;
    v->signed_max = -0x7FFFFFFF - 1;
    v->all_equal = 1;
    u64 first = thread_at(l, b, w * 32 + v->leader)->op_value;
    LOOP for (u32 rest = mask; rest; rest &= rest - 1) {
        u32 lane = FFS(rest) - 1;
        Thread* t = thread_at(l, b, w * 32 + lane);
        u32 a = t->op_a;
        if (kind >= VOTE_ALL && kind <= VOTE_BALLOT) v->ballot |= (u32)(a != 0) << lane;
        v->sum += a;
        v->unsigned_min = a < v->unsigned_min ? a : v->unsigned_min;
        v->unsigned_max = a > v->unsigned_max ? a : v->unsigned_max;
        v->signed_min = (s32)a < v->signed_min ? (s32)a : v->signed_min;
        v->signed_max = (s32)a > v->signed_max ? (s32)a : v->signed_max;
        v->bits_and &= a;
        v->bits_or |= a;
        v->bits_xor ^= a;
        if (t->op_value != first) v->all_equal = 0;
    }
}

// match.any: the mask of the lanes with the value of this lane.
FN u32 matching(Launch* l, Block* b, u32 w, u32 mask, Thread* t) {
    u32 result = 0;
    LOOP for (u32 rest = mask; rest; rest &= rest - 1)
        if (thread_at(l, b, w * 32 + FFS(rest) - 1)->op_value == t->op_value) result |= rest & -rest;
    return result;
}

FN u32 result_of(u32 kind, u32 mask, WarpValues* v) {
    if (kind == VOTE_ALL) return v->ballot == mask;
    if (kind == VOTE_ANY) return v->ballot != 0;
    if (kind == VOTE_UNI) return v->ballot == mask || v->ballot == 0;
    if (kind == VOTE_BALLOT) return v->ballot;
    if (kind == MATCH_ALL) return v->all_equal ? mask : 0;
    if (kind == REDUX_ADD) return v->sum;
    if (kind == REDUX_MIN_S) return (u32)v->signed_min;
    if (kind == REDUX_MAX_S) return (u32)v->signed_max;
    if (kind == REDUX_MIN_U) return v->unsigned_min;
    if (kind == REDUX_MAX_U) return v->unsigned_max;
    if (kind == REDUX_AND) return v->bits_and;
    if (kind == REDUX_OR) return v->bits_or;
    if (kind == REDUX_XOR) return v->bits_xor;
    return kind == ELECT ? v->leader : 0;
}

// Carries out an operation for the lanes of `mask`.
FAR void warp_operation(Launch* l, Block* b, u32 w, u32 mask, u32 kind) {
    l->warp_ops++;
    if (kind == WARP_SYNC) b->warps[w].syncs++;
    if (kind == WARP_SYNC && l->engine->race) race_warp_sync(l, b, w, mask);
    if (kind == MATRIX) {
        matrix_operation(l, b, w, mask);
        return;
    }
    if (kind <= SHFL_IDX) {
        LOOP for (u32 rest = mask; rest; rest &= rest - 1) {
            u32 lane = FFS(rest) - 1;
            shuffle(l, b, w, mask, lane, thread_at(l, b, w * 32 + lane));
        }
        return;
    }
    WarpValues values;
    values.leader = FFS(mask) - 1;
    if (kind <= REDUX_XOR && thread_at(l, b, w * 32 + values.leader)->op_mask != mask)
        notice(l, thread_at(l, b, w * 32 + values.leader), NOTICE_VOTE, 0);
    gather_values(l, b, w, mask, kind, &values);
    LOOP for (u32 rest = mask; rest; rest &= rest - 1) {
        u32 lane = FFS(rest) - 1;
        Thread* t = thread_at(l, b, w * 32 + lane);
        if (kind == MATCH_ALL) t->op_pred = values.all_equal;
        if (kind == ELECT) t->op_pred = lane == values.leader;
        t->op_result = kind == MATCH_ANY ? matching(l, b, w, mask, t) : result_of(kind, mask, &values);
    }
}

// Completes activemask when no lane of the warp can run any more. The result is the mask of the lanes that wait at the
// same instruction: of all results that PTX allows, the one with the most lanes. Returns the lanes that may continue.
FAR u32 resolve_activemask(Launch* l, Block* b, u32 w) {
    Warp* warp = &b->warps[w];
    u32 lanes = warp->at_activemask;
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
    u32 all = warp->at_activemask;
    warp->at_activemask = 0;
    return all;
}

// Completes the warp operations that can be completed, and returns the lanes that may continue. A warp operation does
// not wait for lanes of its mask that have exited or never existed.
FAR u32 resolve(Launch* l, Block* b, u32 w) {
    Warp* warp = &b->warps[w];
    u32 waiting = warp->warpop, continuing = 0;
    if (warp->is_uniform && waiting == (warp->uniform_mask & warp->live)) {
        warp->warpop = 0;
        warp_operation(l, b, w, waiting, warp->uniform_kind);
        return waiting;
    }
    LOOP while (waiting) {
        u32 lane = FFS(waiting) - 1;
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
        waiting &= ~(same | 1u << lane);
        if (same == (mask & warp->live)) {
            warp_operation(l, b, w, same, t->op_kind);
            continuing |= same;
            warp->warpop &= ~same;
        }
    }
    return continuing;
}
