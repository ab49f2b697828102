// SPDX-License-Identifier: Apache-2.0
// The slots in the ranks' workspaces for packs of bytes and their keys, for the kernels that push bytes.
#pragma once
#include "collectives/moves/copies.cuh"
#include "sync/keys.cuh"

// `chunk_packs` is the number of packs of a round, a multiple of the block's threads: each thread of a block sends one
// pack of a unit.
struct MovePushParams : MoveParams {
    PushCall push;
    i64 root;     // root of a broadcast
    u64 offsets;  // bitwise "or" of all sizes, and of all offsets in this rank's input and output
};

// Whether all packs that this rank loads from its input and stores to its output are whole and aligned.
__device__ __forceinline__ bool all_are_whole(const MovePushParams& p) {
    const Moved &rows = p.rows, &scales = p.scales;
    const char* const arrays[] = {rows.input, rows.output, scales.input, scales.output};
    u64 bits = p.offsets;
    for (const char* array : arrays) bits |= reinterpret_cast<u64>(array);
    return !ARRANGED && bits % 16 == 0;
}

using Pushing = KeyedPush<RANKS>;

// The slots of a round. The first GREETINGS_BYTES of a half are not used, as these kernels do not call greet(). Then
// come the packs, [distance - 1][chunk_packs], and the keys, [distance - 1][chunk_packs / 32]. `offset` and
// `key_offset` are the offsets of this thread's pack and key for distance 1. `stride` and `key_stride` are the numbers
// of bytes from the pack and the key for distance d to the pack and the key for d + 1.
struct Slots {
    u32 offset, stride, key_offset, key_stride;

    __device__ __forceinline__ Slots(const MovePushParams& p, u32 in_round)
        : offset(GREETINGS_BYTES + in_round * 16), stride(u32(p.chunk_packs) * 16),
          key_offset(GREETINGS_BYTES + (RANKS - 1) * stride + in_round / 32 * 4), key_stride(stride / 128) {}
};

// Sends those of the warp's packs that exist, and their key, to the peer at `distance`.
__device__ __forceinline__ void send_packs(const Pushing& push, const Slots& slots, int distance, bool exists,
                                           const u32 (&sent)[4], const u32 (&key)[1]) {
    if (exists) push.send(distance, slots.offset + (distance - 1) * slots.stride, sent);
    const bool sends_key = !FAULT("keys-only-with-bytes") || __any_sync(0xffffffffu, exists);
    if (sends_key && threadIdx.x % 32 == 0)
        push.send(distance, slots.key_offset + (distance - 1) * slots.key_stride, key);
}
