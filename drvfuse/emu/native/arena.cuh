// SPDX-License-Identifier: Apache-2.0
// The memory of the race detector: an arena of pieces, from which clocks, entries and locations are allocated.
//
// Python reserves the arena once per machine (Race::arena, Race::arena_bytes). A Ref is the offset of a piece in the
// arena, in units of 32 bytes; Ref 0 means no piece. The size of a piece is 32 << size_class bytes. A piece that is
// given back goes into the free list of its class (Race::free_pieces); its first word is then the Ref of the next free
// piece. The arena never shrinks. When fewer than RESERVE bytes are left, the detector stops for good
// (Race::exhausted), and Python reports it.
#pragma once

#include "common.cuh"

// The detector stops when fewer bytes than this are left in the arena. The access that reaches the limit is still
// recorded: no single access needs as many bytes.
const u64 RESERVE = 64 << 20;

FN void* arena_at(Race* r, Ref ref) { return (void*)(r->arena + (u64)ref * 32); }

// A piece of at least `bytes` bytes, whose class is stored in *size_class.
FAR Ref take_piece(Race* r, u32 bytes, u32* size_class) {
    u32 k = 0;
    LOOP while ((32ull << k) < bytes) k++;
    *size_class = k;
    Ref ref = r->free_pieces[k];
    if (ref) {
        r->free_pieces[k] = *(Ref*)arena_at(r, ref);
    } else {
        ref = (Ref)(r->arena_top / 32);
        r->arena_top += 32ull << k;
        if (r->arena_top + RESERVE > r->arena_bytes) r->exhausted = 1;
    }
    return ref;
}

// Gives back a piece of the arena.
FN void give_piece(Race* r, Ref ref, u32 size_class) {
    *(Ref*)arena_at(r, ref) = r->free_pieces[size_class];
    r->free_pieces[size_class] = ref;
}
