// SPDX-License-Identifier: Apache-2.0
// Vector clocks: which accesses a thread or an operation knows, that is, which accesses happened before it.
//
// Identity of an access. Every launch, copy and fill is an operation with a number (`op`). It has a place in a chain,
// which is a stream or a branch of a graph: the first operation of a chain has place 1. A thread of a launch is
// identified by operation, block, warp and lane.
//
// Time. Each thread has a time: a counter that begins at 1 and grows with each release and each barrier. An access
// carries the time of its thread. So all accesses that a thread makes at one time are known together or not at all.
// After a barrier of the whole block, all threads of the block have the same time.
//
// Contents. A GPU has too many threads for a clock with one number per thread, so a clock is sparse. It has two parts:
//
//     chains   pairs (chain, last_place): all operations of the chain up to that place are known as a whole.
//     items    what is known of other operations. An item names an operation, a block, and a part of the block (sub):
//              sub 0         all accesses of the block before `time`;
//              sub 1 + warp  the accesses of `lanes` of that warp before `time`;
//              block WHOLE   all accesses of the operation, but not the operations before it in its chain.
//
// Example. Stream 3 has run two kernels; the present kernel is operation 7. After the first __syncthreads of block 5,
// which sets the time of its threads to 2, they know { chains: (3, 2); items: (op 7, block 5, sub 0, time 2) }: both
// earlier kernels as a whole, and every access that a thread of block 5 made at time 1. (The clock of a thread omits
// this item, as RaceBlock::barrier_time stands for it.)
//
// Invariant: a clock is never changed after it is made, so threads with the same knowledge share one clock. Whoever
// stores a Ref to a clock owns one of its references. Ref 0 is the clock that knows nothing.
#pragma once

#include "arena.cuh"

struct Chain {
    u32 chain;
    u32 last_place;  // the operations of the chain up to this place are known
};

struct Item {
    u64 key;    // key_of(operation, block, sub)
    u32 time;   // accesses before this time are known
    u32 lanes;  // mask of the lanes to which the item applies; all bits for sub 0
};

// Invariants: the chains are sorted by chain number. The items are sorted by key, then by descending time. No lane has
// two items with the same key. No item concerns an operation that a chain covers. An item for a warp has a later time
// than the item for the whole block (sub 0).
struct Clock {
    u32 references;  // the number of stored Refs to this clock
    u32 size_class;  // the size class of its piece of the arena
    u32 chain_count, item_count;
    // The chains follow in memory. The items come after them, from the next multiple of 16 bytes on.
};

const u32 WHOLE = 0x3FFFFFF;  // block index in the key of an item that covers all blocks of an operation

FN u64 key_of(u32 op, u32 block, u32 sub) { return (u64)op << 32 | (u64)block << 6 | sub; }
FN Chain* chains_of(Clock* c) { return (Chain*)(c + 1); }
FN Item* items_of(Clock* c) { return (Item*)((u8*)(c + 1) + ((c->chain_count * 8 + 15) & ~15u)); }
FN u32 bytes_of(u32 chains, u32 items) { return 16 + ((chains * 8 + 15) & ~15u) + items * 16; }

// References ----------------------------------------------------------------------------------------------------------

// Counts one more reference to a clock, and returns it.
FN Ref retain(Race* r, Ref ref) {
    if (ref) ((Clock*)arena_at(r, ref))->references++;
    return ref;
}

// Gives up a reference. The last one frees the clock, and removes it from the cache Race::known_ops.
FN void release(Race* r, Ref ref) {
    if (!ref) return;
    Clock* c = (Clock*)arena_at(r, ref);
    if (--c->references) return;
    LOOP for (u32 i = 0; i < KNOWN_OPS; i++)
        if (r->known_ops[i].clock == ref) r->known_ops[i].clock = 0;
    give_piece(r, ref, c->size_class);
}

// Stores a reference in *held and releases the reference that was there. Takes over the caller's reference to `ref`.
FN void assign(Race* r, Ref* held, Ref ref) {
    release(r, *held);
    *held = ref;
}

// Look-ups ------------------------------------------------------------------------------------------------------------

// Returns the place up to which a clock knows the operations of a chain (a stream or a branch of a graph); 0 for none.
FN u32 known_place(Clock* c, u32 chain) {
    Chain* list = chains_of(c);
    u32 low = 0, high = c->chain_count;
    LOOP while (low < high) {
        u32 mid = (low + high) / 2;
        if (list[mid].chain < chain) low = mid + 1;
        else high = mid;
    }
    return low < c->chain_count && list[low].chain == chain ? list[low].last_place : 0;
}

// The index of the first item whose key is at least `key`.
FN u32 first_item_at(Clock* c, u64 key) {
    Item* list = items_of(c);
    u32 low = 0, high = c->item_count;
    LOOP while (low < high) {
        u32 mid = (low + high) / 2;
        if (list[mid].key < key) low = mid + 1;
        else high = mid;
    }
    return low;
}

// Whether a clock has an item of block WHOLE for an operation, which covers all accesses of the operation.
FN u32 has_whole(Race* r, Clock* c, u32 op) {
    if (!r->whole_items) return 0;
    u32 i = first_item_at(c, key_of(op, WHOLE, 0));
    return i < c->item_count && items_of(c)[i].key == key_of(op, WHOLE, 0);
}

// Whether a clock knows all accesses of an operation.
FN u32 knows_op(Race* r, Clock* c, u32 op) {
    Op* o = &r->ops[op];
    return known_place(c, o->chain) >= o->place || has_whole(r, c, op);
}

enum { KNOWS_NONE, KNOWS_ALL, KNOWS_OTHERS };

// Returns KNOWS_ALL if a clock knows all accesses that these lanes of a warp made at `time`. Otherwise returns
// KNOWS_OTHERS if the clock knows other accesses of the same block, by lanes of this warp or of warps with lower
// numbers, else KNOWS_NONE.
FAR u32 knowledge(Race* r, Ref ref, u32 op, u32 block, u32 warp, u32 lanes, u32 time) {
    if (!ref) return KNOWS_NONE;
    KnownOp* cached = &r->known_ops[op % KNOWN_OPS];
    if (cached->clock == ref && cached->op == op) return KNOWS_ALL;
    Clock* c = (Clock*)arena_at(r, ref);
    if (knows_op(r, c, op)) {
        cached->clock = ref;
        cached->op = op;
        return KNOWS_ALL;
    }
    Item* list = items_of(c);
    u32 i = first_item_at(c, key_of(op, block, 0)), result = KNOWS_NONE;
    LOOP for (; i < c->item_count && list[i].key <= key_of(op, block, warp + 1); i++) {
        result = KNOWS_OTHERS;
        if (list[i].time <= time) continue;
        if ((list[i].key & 63) == 0) return KNOWS_ALL;
        if ((list[i].key & 63) == warp + 1) lanes &= ~list[i].lanes;
        if (!lanes) return KNOWS_ALL;
    }
    return result;
}

// Whether a clock knows the accesses that these lanes of a warp made at `time`.
FN u32 knows(Race* r, Ref ref, u32 op, u32 block, u32 warp, u32 lanes, u32 time) {
    return knowledge(r, ref, op, block, warp, lanes, time) == KNOWS_ALL;
}
