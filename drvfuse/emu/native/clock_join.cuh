// SPDX-License-Identifier: Apache-2.0
// How clocks are made: from the join of two clocks, or by adding items or a chain to a clock. The functions at the end
// are for Python.
//
// Each function returns a new reference, which the caller owns, and leaves the references of its arguments alone unless
// it says otherwise.
#pragma once

#include "clock.cuh"

// Appends an item to `out`, or adds its lanes to the last item if that has the same key and time.
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

// Joins the items of one block: [i, i_end) of `a` with [j, j_end) of `b`. For each lane the latest time is kept.
FAR void join_block(Item* a, u32 i, u32 i_end, Item* b, u32 j, u32 j_end, Item* out, u32* n) {
    u32 all = 0;
    u64 first = i < i_end ? a[i].key : b[j].key;
    if (i < i_end && !(a[i].key & 63)) all = a[i++].time;
    if (j < j_end && !(b[j].key & 63)) {
        if (b[j].time > all) all = b[j].time;
        j++;
    }
    if (all) add_item(out, n, first & ~63ull, all, 0xFFFFFFFFu);
    u64 key = 0;
    u32 taken = 0;
    LOOP while (i < i_end || j < j_end) {
        u32 from_a = j == j_end || (i < i_end && (a[i].key < b[j].key || (a[i].key == b[j].key && a[i].time >= b[j].time)));
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

// Whether two clocks have the same contents.
FN u32 same_clock(Clock* a, Clock* b) {
    if (a->chain_count != b->chain_count || a->item_count != b->item_count) return 0;
    u64 *x = (u64*)chains_of(a), *y = (u64*)chains_of(b);
    LOOP for (u32 i = 0; i < a->chain_count; i++)
        if (x[i] != y[i]) return 0;
    x = (u64*)items_of(a);
    y = (u64*)items_of(b);
    LOOP for (u32 i = 0; i < a->item_count * 2; i++)
        if (x[i] != y[i]) return 0;
    return 1;
}

// Stores the joined chains of two clocks in `out`, and returns how many there are.
FN u32 merge_chains(Clock* a, Clock* b, Chain* out) {
    Chain *x = chains_of(a), *y = chains_of(b);
    u32 i = 0, j = 0, n = 0;
    LOOP while (i < a->chain_count || j < b->chain_count) {
        if (j == b->chain_count || (i < a->chain_count && x[i].chain < y[j].chain)) {
            out[n++] = x[i++];
        } else if (i == a->chain_count || y[j].chain < x[i].chain) {
            out[n++] = y[j++];
        } else {
            out[n] = x[i++];
            if (y[j].last_place > out[n].last_place) out[n].last_place = y[j].last_place;
            n++;
            j++;
        }
    }
    return n;
}

// Stores the joined items of two clocks in `c`, whose chains are joined already. Leaves out items of operations that
// these chains cover. If an item of block WHOLE covers an operation, leaves out the other items of the operation.
FN void merge_items(Race* r, Clock* a, Clock* b, Clock* c) {
    c->item_count = 0;
    Item *p = items_of(a), *q = items_of(b), *to = items_of(c);
    u32 op = ~0u, drop = 0, i = 0, j = 0, n = 0;
    LOOP while (i < a->item_count || j < b->item_count) {
        u64 block = i == a->item_count ? q[j].key >> 6 : p[i].key >> 6;
        if (j < b->item_count && q[j].key >> 6 < block) block = q[j].key >> 6;
        u32 i_end = i, j_end = j;
        LOOP while (i_end < a->item_count && p[i_end].key >> 6 == block) i_end++;
        LOOP while (j_end < b->item_count && q[j_end].key >> 6 == block) j_end++;
        if ((u32)(block >> 26) != op) {
            op = (u32)(block >> 26);
            Op* o = &r->ops[op];
            drop = known_place(c, o->chain) >= o->place ? 2 : has_whole(r, a, op) || has_whole(r, b, op);
        }
        if (!drop || (drop == 1 && (block & WHOLE) == WHOLE)) {
            if (j_end == j) {
                LOOP for (; i < i_end; i++) to[n++] = p[i];
            } else if (i_end == i) {
                LOOP for (; j < j_end; j++) to[n++] = q[j];
            } else {
                join_block(p, i, i_end, q, j, j_end, to, &n);
            }
        }
        i = i_end;
        j = j_end;
    }
    c->item_count = n;
}

// The join of two clocks as a new clock, even if it equals one of them.
FAR Ref merge(Race* r, Clock* a, Clock* b) {
    u32 size_class;
    Ref ref = take_piece(r, bytes_of(a->chain_count + b->chain_count, a->item_count + b->item_count), &size_class);
    Clock* c = (Clock*)arena_at(r, ref);
    c->references = 1;
    c->size_class = size_class;
    c->chain_count = merge_chains(a, b, chains_of(c));
    merge_items(r, a, b, c);
    return ref;
}

// The join of two clocks. The latest joins are cached, as many threads often need the same join.
FAR Ref join(Race* r, Ref a, Ref b) {
    if (!b || a == b) return retain(r, a);
    if (!a) return retain(r, b);
    RecentJoin* cached = &r->recent_joins[(a * 31 + b) * 0x9E3779B1u >> 24];
    if (cached->a == a && cached->b == b) return retain(r, cached->result);
    Ref c = merge(r, (Clock*)arena_at(r, a), (Clock*)arena_at(r, b));
    if (same_clock((Clock*)arena_at(r, a), (Clock*)arena_at(r, c))) assign(r, &c, retain(r, a));
    else if (same_clock((Clock*)arena_at(r, b), (Clock*)arena_at(r, c))) assign(r, &c, retain(r, b));
    assign(r, &cached->a, retain(r, a));
    assign(r, &cached->b, retain(r, b));
    assign(r, &cached->result, retain(r, c));
    return c;
}

// Joins the clock in *held with `more`.
FN void learn(Race* r, Ref* held, Ref more) { assign(r, held, join(r, *held, more)); }

// A new clock: `ref` joined with all accesses of a block before the time `all` (none if 0), and with those that `lanes`
// of a warp made before `time` (none if `lanes` is 0).
FAR Ref with_items(Race* r, Ref ref, u32 op, u32 block, u32 all, u32 warp, u32 lanes, u32 time) {
    struct {
        Clock clock;
        Item item[2];
    } own, none;
    own.clock.chain_count = own.clock.item_count = none.clock.chain_count = none.clock.item_count = 0;
    u32 n = 0;
    if (all) add_item(own.item, &n, key_of(op, block, 0), all, 0xFFFFFFFFu);
    if (lanes) add_item(own.item, &n, key_of(op, block, warp + 1), time, lanes);
    own.clock.item_count = n;
    return merge(r, ref ? (Clock*)arena_at(r, ref) : &none.clock, &own.clock);
}

// A new clock: `ref` joined with the operations of a chain up to a place.
FN Ref with_chain(Race* r, Ref ref, u32 chain, u32 place) {
    struct {
        Clock clock;
        Chain chain[2];
    } own, none;
    own.clock.item_count = none.clock.chain_count = none.clock.item_count = 0;
    own.clock.chain_count = 1;
    own.chain[0].chain = chain;
    own.chain[0].last_place = place;
    return merge(r, ref ? (Clock*)arena_at(r, ref) : &none.clock, &own.clock);
}

// For Python ----------------------------------------------------------------------------------------------------------

// Returns the join of two clocks. Takes over the caller's references to both.
API u32 rt_clock_join(Race* r, u32 a, u32 b) {
    Ref c = join(r, a, b);
    release(r, a);
    release(r, b);
    return c;
}

API void rt_clock_retain(Race* r, u32 a) { retain(r, a); }
API void rt_clock_release(Race* r, u32 a) { release(r, a); }

// Returns the clock after the end of an operation: `ref`, what the operation knew, joined with all accesses of the
// operation itself. Takes over the caller's reference to `ref`.
API u32 rt_clock_end(Race* r, u32 ref, u32 op) {
    Op* o = &r->ops[op];
    Ref c;
    if ((ref ? known_place((Clock*)arena_at(r, ref), o->chain) : 0) + 1 == o->place) {
        c = with_chain(r, ref, o->chain, o->place);
    } else {
        r->whole_items++;
        c = with_items(r, ref, op, WHOLE, 1, 0, 0, 0);
    }
    release(r, ref);
    // An item of block WHOLE is not needed if the clock knows all earlier operations in the chain of the item's
    // operation. The item is then replaced by a larger last_place of that chain.
    u32 changed = r->whole_items != 0;
    LOOP while (changed) {
        changed = 0;
        Clock* k = (Clock*)arena_at(r, c);
        LOOP for (u32 i = 0; i < k->item_count && !changed; i++) {
            u64 key = items_of(k)[i].key;
            Op* other = &r->ops[key >> 32];
            if ((key >> 6 & WHOLE) == WHOLE && known_place(k, other->chain) + 1 == other->place) {
                assign(r, &c, with_chain(r, c, other->chain, other->place));
                changed = 1;
            }
        }
    }
    return c;
}
