// SPDX-License-Identifier: Apache-2.0
// All-gather, broadcast and all-to-all by pushing: each rank sends bytes to other ranks, in one kernel per rank,
// without a barrier.
//
// Layout. As moves/tables.cuh says. The packs of a pair of ranks are cut into rounds of `chunk_packs`, a multiple of the
// block's threads, and a round into units of one pack per thread: block b processes units b, b + blocks, ... of every
// round, for all peers at once. A pair with fewer packs than others sends keys and no packs in its last units. With
// each unit a thread also copies one pack of the bytes that stay on its rank; if more packs stay than are sent to a
// peer, it copies the remaining ones at the end.
// DRVFUSE_SAME: a rank's bytes are the same for all peers and for its own output (all-gather, broadcast), so they are
// loaded once.
//
// Grid. One dimension, the same on every rank. Blocks without units copy bytes that stay and add their share to the
// epoch (push.cuh).
//
// Memory ordering. As keys.cuh and push.cuh say. An input is read only by its own rank, so it is free when the rank's
// kernel completes. In place: in an all-gather the input is the rank's own part of the output, so its bytes stay where
// they are. In a broadcast the root writes no output. In an all-to-all the rows from a rank replace the rows for that
// rank, and the thread that writes a pack has loaded the pack that it replaces.
//
// Failure. As push.cuh says. Outputs are undefined after a failure.
#include "collectives/moves/slots.cuh"

constexpr bool SAME = DRVFUSE_SAME;
constexpr int SOURCES = SAME ? 1 : PEERS + 1;

// The packs of a unit that a thread sends or keeps. With SAME there is one pack for all ranks. Otherwise there is one
// for each peer, and then the pack that stays on this rank. A pack that does not exist is not sent.
struct Packs {
    u32 word[SOURCES][4];
    bool exists[SOURCES];
    int own_bytes;  // bytes of the pack that stays on this rank; 0 if none must be copied
};

__device__ __forceinline__ void load_unit(Packs& packs, const MovePushParams& p, i64 index) {
    const auto source = [&](int k) { return source_of(p, (k + 1) % RANKS, index); };
#pragma unroll
    for (int k = 0; k < SOURCES; ++k) packs.exists[k] = source(k).remaining > 0;
    load_packs(packs.word, all_are_whole(p), source);
    const Spot own = source_of(p, 0, index);
    packs.own_bytes = own.address == target_of(p, 0, index).address ? 0 : bytes_of(own);
}

__device__ __forceinline__ void send_unit(const Packs& packs, const Pushing& push, const Slots& slots) {
    u32 sent[4], key[1];
#pragma unroll
    for (int distance = 1; distance < RANKS; ++distance) {
        const int k = SAME ? 0 : distance - 1;
        if (!SAME || distance == 1) {
            key[0] = key_of(packs.word[k], packs.exists[k]);
#pragma unroll
            for (int i = 0; i < 4; ++i) sent[i] = packs.word[k][i] ^ key[0];
        }
        send_packs(push, slots, distance, packs.exists[k], sent, key);
    }
}

// Stores this thread's pack of the bytes that stay on this rank.
__device__ __forceinline__ void store_own(const Packs& packs, const MovePushParams& p, i64 index) {
    u32 own[1][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) own[0][i] = packs.word[SOURCES - 1][i];
    const auto target = [&](int) {
        auto spot = target_of(p, 0, index);
        spot.remaining = packs.own_bytes;
        return spot;
    };
    store_packs(all_are_whole(p), target, own);
}

__device__ __forceinline__ void receive_unit(const MovePushParams& p, Pushing& push, Trace& trace, i64 index,
                                             const Slots& slots) {
    u32 words[PEERS][4], keys[PEERS][1];
    bool wanted[PEERS];
#pragma unroll
    for (int k = 0; k < PEERS; ++k) wanted[k] = target_of(p, k + 1, index).remaining > 0;
    push.receive(words, wanted, slots.offset, slots.stride, keys, slots.key_offset, slots.key_stride);
    trace.need(keys);
    trace.lap(TraceRole::receive);
#pragma unroll
    for (int k = 0; k < PEERS; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) words[k][i] ^= keys[k][0];
    }
    store_packs(all_are_whole(p), [&](int k) { return target_of(p, k + 1, index); }, words);
    trace.lap(TraceRole::store);
}

extern "C" __global__ void __launch_bounds__(256, RANKS > 4   ? 1
                                                  : RANKS > 2 ? 2
                                                              : 4)
    move_push(const __grid_constant__ MovePushParams p DRVFUSE_TRACE_PARAMETER) {
    Trace trace{DRVFUSE_TRACE_ARGUMENT};
    begin(p.call);
    const i64 first_index = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    const Spot first_source = source_of(p, RANKS > 1, first_index);
    // Before the wait for the producer: brings the translation of the address of this thread's first pack into the TLB.
    if (first_source.remaining > 0) ptx::prefetch_l2(first_source.address);
    Pushing push(p.call, p.push);
    follow_producer(trace);
    Packs packs;
    // The packs are loaded before start(), because instructions after start() wait for the epoch that it loads.
    if (RANKS > 1 && first_index < p.chunk_packs) load_unit(packs, p, first_index);
    clear_padding(p);  // while the packs are being loaded
    push.start();
    bool first = true;
#pragma unroll 1
    for (int round = 0; round < p.push.rounds; ++round) {
        if (round > 0) push.next_round();
#pragma unroll 1
        for (u32 unit = blockIdx.x; RANKS > 1 && unit * blockDim.x < p.chunk_packs; unit += gridDim.x) {
            const u32 in_round = unit * blockDim.x + threadIdx.x;
            const i64 index = round * p.chunk_packs + in_round;
            const Slots slots(p, in_round);
            if (!first) load_unit(packs, p, index);
            send_unit(packs, push, slots);
            trace.lap(TraceRole::push);
            push.join();
            store_own(packs, p, index);
            first = false;
            receive_unit(p, push, trace, index, slots);
        }
    }
    push.join();
    copy_own<2, RANKS == 1 ? 2 : 1>(p, whole_grid(), trace, RANKS > 1 ? p.push.rounds * p.chunk_packs : 0);
    end(p.call, trace);
}
