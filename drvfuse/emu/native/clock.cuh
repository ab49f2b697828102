// SPDX-License-Identifier: Apache-2.0
// Sparse vector clocks: which accesses a thread or an operation knows of, that is, which happened before it. They lie
// in an arena that Python reserves.
//
// Every launch, copy and fill is an operation with a number and a place in a chain (a stream, or a branch of a graph).
// A thread's time is the number of its releases; all threads of a block have the same time after a barrier of the whole
// block. A clock consists of
//
//     chains   pairs of a chain and a place: all operations of the chain up to that place are known as a whole
//     items    known accesses of other operations, by block: all accesses of the block before a time (sub 0), or those
//              of some lanes of one warp before a later time (sub 1 + warp); block WHOLE: the operation as a whole, but
//              not the operations before it in its chain
//
// A clock is never changed after it is made. A Ref is a counted reference to one; Ref 0 is the clock that knows
// nothing.
#pragma once

#include "common.cuh"

struct Chain {
    u32 chain, upto;
};

struct Item {
    u64 key;  // op << 32 | block << 6 | sub; items are sorted by key, then by descending time
    u32 time, lanes;
};

struct Clock {
    u32 refs, klass, chains, items;  // followed by the chains and, from a multiple of 16 bytes on, the items
};

const u32 WHOLE = 0x3FFFFFF;
const u64 RESERVE = 64 << 20;  // bytes of the arena that are kept free; more than one access needs

FN u64 key_of(u32 op, u32 block, u32 sub) { return (u64)op << 32 | (u64)block << 6 | sub; }
FN void* at(Race* r, Ref ref) { return (void*)(r->arena + (u64)ref * 32); }
FN Chain* chains_of(Clock* c) { return (Chain*)(c + 1); }
FN Item* items_of(Clock* c) { return (Item*)((u8*)(c + 1) + ((c->chains * 8 + 15) & ~15u)); }
FN u32 bytes_of(u32 chains, u32 items) { return 16 + ((chains * 8 + 15) & ~15u) + items * 16; }

// Takes a piece of the arena, whose size class is stored in *klass.
FAR Ref take(Race* r, u32 bytes, u32* klass) {
    u32 k = 0;
    LOOP while ((32ull << k) < bytes) k++;
    *klass = k;
    Ref ref = r->free[k];
    if (ref) {
        r->free[k] = *(Ref*)at(r, ref);
    } else {
        ref = (Ref)(r->top / 32);
        r->top += 32ull << k;
        if (r->top + RESERVE > r->bytes) r->off = 1;
    }
    return ref;
}

FN void give(Race* r, Ref ref, u32 klass) {
    *(Ref*)at(r, ref) = r->free[klass];
    r->free[klass] = ref;
}

FN Ref retain(Race* r, Ref ref) {
    if (ref) ((Clock*)at(r, ref))->refs++;
    return ref;
}

FN void release(Race* r, Ref ref) {
    if (!ref) return;
    Clock* c = (Clock*)at(r, ref);
    if (--c->refs) return;
    LOOP for (u32 i = 0; i < CERTAIN; i++)
        if (r->certain[i].clock == ref) r->certain[i].clock = 0;
    give(r, ref, c->klass);
}

// Replaces the reference in *slot by `ref`, a reference of the caller that passes to the slot.
FN void put(Race* r, Ref* slot, Ref ref) {
    release(r, *slot);
    *slot = ref;
}

// The place up to which a clock knows all operations of a chain.
FN u32 upto(Clock* c, u32 chain) {
    Chain* list = chains_of(c);
    u32 low = 0, high = c->chains;
    LOOP while (low < high) {
        u32 mid = (low + high) / 2;
        if (list[mid].chain < chain) low = mid + 1;
        else high = mid;
    }
    return low < c->chains && list[low].chain == chain ? list[low].upto : 0;
}

// The index of the first item whose key is at least `key`.
FN u32 lower(Clock* c, u64 key) {
    Item* list = items_of(c);
    u32 low = 0, high = c->items;
    LOOP while (low < high) {
        u32 mid = (low + high) / 2;
        if (list[mid].key < key) low = mid + 1;
        else high = mid;
    }
    return low;
}

FN u32 has_whole(Race* r, Clock* c, u32 op) {
    if (!r->wholes) return 0;
    u32 i = lower(c, key_of(op, WHOLE, 0));
    return i < c->items && items_of(c)[i].key == key_of(op, WHOLE, 0);
}

FN u32 knows_op(Race* r, Clock* c, u32 op) {
    Op* o = &r->ops[op];
    return upto(c, o->chain) >= o->place || has_whole(r, c, op);
}

// 1 if a clock includes the accesses that these lanes of a warp made at a time; 2 if it does not, but includes other
// accesses of the block; else 0.
FAR u32 knows(Race* r, Ref ref, u32 op, u32 block, u32 warp, u32 lanes, u32 time) {
    if (!ref) return 0;
    Certain* certain = &r->certain[op % CERTAIN];
    if (certain->clock == ref && certain->op == op) return 1;
    Clock* c = (Clock*)at(r, ref);
    if (knows_op(r, c, op)) {
        certain->clock = ref;
        certain->op = op;
        return 1;
    }
    Item* list = items_of(c);
    u32 i = lower(c, key_of(op, block, 0)), some = 0;
    LOOP for (; i < c->items && list[i].key <= key_of(op, block, warp + 1); i++) {
        some = 2;
        if (list[i].time <= time) continue;
        if ((list[i].key & 63) == 0) return 1;
        if ((list[i].key & 63) == warp + 1) lanes &= ~list[i].lanes;
        if (!lanes) return 1;
    }
    return some;
}

FN void add_item(Item* out, u32* n, u64 key, u32 time, u32 lanes) {
    if (*n && out[*n - 1].key == key && out[*n - 1].time == time) {
        out[*n - 1].lanes |= lanes;
        return;
    }
    out[*n].key = key;
    out[*n].time = time;
    out[*n].lanes = lanes;
    ++*n;
}

// Joins two groups of items of the same block, [i, ie) of `a` and [j, je) of `b`.
FAR void join_block(Item* a, u32 i, u32 ie, Item* b, u32 j, u32 je, Item* out, u32* n) {
    u32 all = 0;
    u64 first = i < ie ? a[i].key : b[j].key;
    if (i < ie && !(a[i].key & 63)) all = a[i++].time;
    if (j < je && !(b[j].key & 63)) {
        if (b[j].time > all) all = b[j].time;
        j++;
    }
    if (all) add_item(out, n, first & ~63ull, all, 0xFFFFFFFFu);
    u64 key = 0;
    u32 taken = 0;
    LOOP while (i < ie || j < je) {
        u32 from_a = j == je || (i < ie && (a[i].key < b[j].key || (a[i].key == b[j].key && a[i].time >= b[j].time)));
        Item* x = from_a ? &a[i++] : &b[j++];
        if (x->key != key) {
            key = x->key;
            taken = 0;
        }
        u32 lanes = x->lanes & ~taken;
        if (lanes && x->time > all) add_item(out, n, key, x->time, lanes);
        taken |= x->lanes;
    }
}

FN u32 same_clock(Clock* a, Clock* b) {
    if (a->chains != b->chains || a->items != b->items) return 0;
    u64 *x = (u64*)chains_of(a), *y = (u64*)chains_of(b);
    LOOP for (u32 i = 0; i < a->chains; i++)
        if (x[i] != y[i]) return 0;
    x = (u64*)items_of(a);
    y = (u64*)items_of(b);
    LOOP for (u32 i = 0; i < a->items * 2; i++)
        if (x[i] != y[i]) return 0;
    return 1;
}

// The join of two clocks, as a new clock with one reference.
FAR Ref merge(Race* r, Clock* a, Clock* b) {
    u32 klass;
    Ref ref = take(r, bytes_of(a->chains + b->chains, a->items + b->items), &klass);
    Clock* c = (Clock*)at(r, ref);
    c->refs = 1;
    c->klass = klass;
    Chain *x = chains_of(a), *y = chains_of(b), *out = chains_of(c);
    u32 i = 0, j = 0, n = 0;
    LOOP while (i < a->chains || j < b->chains) {
        if (j == b->chains || (i < a->chains && x[i].chain < y[j].chain)) {
            out[n++] = x[i++];
        } else if (i == a->chains || y[j].chain < x[i].chain) {
            out[n++] = y[j++];
        } else {
            out[n] = x[i++];
            if (y[j].upto > out[n].upto) out[n].upto = y[j].upto;
            n++;
            j++;
        }
    }
    c->chains = n;
    c->items = 0;
    Item *p = items_of(a), *q = items_of(b), *to = items_of(c);
    u32 op = ~0u, drop = 0;
    i = j = n = 0;
    LOOP while (i < a->items || j < b->items) {
        u64 block = i == a->items ? q[j].key >> 6 : p[i].key >> 6;
        if (j < b->items && q[j].key >> 6 < block) block = q[j].key >> 6;
        u32 ie = i, je = j;
        LOOP while (ie < a->items && p[ie].key >> 6 == block) ie++;
        LOOP while (je < b->items && q[je].key >> 6 == block) je++;
        if ((u32)(block >> 26) != op) {
            op = (u32)(block >> 26);
            Op* o = &r->ops[op];
            drop = upto(c, o->chain) >= o->place ? 2 : has_whole(r, a, op) || has_whole(r, b, op);
        }
        if (!drop || (drop == 1 && (block & WHOLE) == WHOLE)) {
            if (je == j) {
                LOOP for (; i < ie; i++) to[n++] = p[i];
            } else if (ie == i) {
                LOOP for (; j < je; j++) to[n++] = q[j];
            } else {
                join_block(p, i, ie, q, j, je, to, &n);
            }
        }
        i = ie;
        j = je;
    }
    c->items = n;
    return ref;
}

// The join of two clocks, as a new reference. The last joins are cached, as many threads often need the same join.
FAR Ref join(Race* r, Ref a, Ref b) {
    if (!b || a == b) return retain(r, a);
    if (!a) return retain(r, b);
    Joined* memo = &r->joined[(a * 31 + b) * 0x9E3779B1u >> 24];
    if (memo->a == a && memo->b == b) return retain(r, memo->result);
    Ref c = merge(r, (Clock*)at(r, a), (Clock*)at(r, b));
    if (same_clock((Clock*)at(r, a), (Clock*)at(r, c))) put(r, &c, retain(r, a));
    else if (same_clock((Clock*)at(r, b), (Clock*)at(r, c))) put(r, &c, retain(r, b));
    put(r, &memo->a, retain(r, a));
    put(r, &memo->b, retain(r, b));
    put(r, &memo->result, retain(r, c));
    return c;
}

FN void learn(Race* r, Ref* slot, Ref more) { put(r, slot, join(r, *slot, more)); }

// A new clock: `ref` joined with all accesses of a block before the time `all`, and with those of lanes of a warp
// before `time`.
FAR Ref with_items(Race* r, Ref ref, u32 op, u32 block, u32 all, u32 warp, u32 lanes, u32 time) {
    struct {
        Clock clock;
        Item item[2];
    } own, none;
    own.clock.chains = own.clock.items = none.clock.chains = none.clock.items = 0;
    u32 n = 0;
    if (all) add_item(own.item, &n, key_of(op, block, 0), all, 0xFFFFFFFFu);
    if (lanes) add_item(own.item, &n, key_of(op, block, warp + 1), time, lanes);
    own.clock.items = n;
    return merge(r, ref ? (Clock*)at(r, ref) : &none.clock, &own.clock);
}

FN Ref with_chain(Race* r, Ref ref, u32 chain, u32 place) {
    struct {
        Clock clock;
        Chain chain[2];
    } own, none;
    own.clock.items = none.clock.chains = none.clock.items = 0;
    own.clock.chains = 1;
    own.chain[0].chain = chain;
    own.chain[0].upto = place;
    return merge(r, ref ? (Clock*)at(r, ref) : &none.clock, &own.clock);
}

// For Python ----------------------------------------------------------------------------------------------------------

// The join of two clocks. Both references pass to the result.
API u32 rt_clock_join(Race* r, u32 a, u32 b) {
    Ref c = join(r, a, b);
    release(r, a);
    release(r, b);
    return c;
}

API void rt_clock_retain(Race* r, u32 a) { retain(r, a); }
API void rt_clock_release(Race* r, u32 a) { release(r, a); }

// The clock after the end of an operation that knew `ref`. The reference passes to the result.
API u32 rt_clock_end(Race* r, u32 ref, u32 op) {
    Op* o = &r->ops[op];
    Ref c;
    if ((ref ? upto((Clock*)at(r, ref), o->chain) : 0) + 1 == o->place) {
        c = with_chain(r, ref, o->chain, o->place);
    } else {
        r->wholes++;
        c = with_items(r, ref, op, WHOLE, 1, 0, 0, 0);
    }
    release(r, ref);
    // An operation that is known as an item (WHOLE) may follow the known part of its chain now: then it becomes part of
    // that.
    u32 again = r->wholes != 0;
    LOOP while (again) {
        again = 0;
        Clock* k = (Clock*)at(r, c);
        LOOP for (u32 i = 0; i < k->items && !again; i++) {
            u64 key = items_of(k)[i].key;
            Op* other = &r->ops[key >> 32];
            if ((key >> 6 & WHOLE) == WHOLE && upto(k, other->chain) + 1 == other->place) {
                put(r, &c, with_chain(r, c, other->chain, other->place));
                again = 1;
            }
        }
    }
    return c;
}
