// SPDX-License-Identifier: Apache-2.0
// Broadcast over three ranks or more, by pushing to ranks that pass the bytes on, so that no link carries the array
// twice.
//
// Layout. As moves/tables.cuh says, for the rows of a broadcast. Rounds, units and slots are those of move_push.cu. Unit u of
// a round has a relay, the rank at distance 1 + u mod (ranks - 1) from the root. The root sends the unit to that relay
// alone. The relay stores the unit and sends it to all ranks except the root.
//
// Grid. One dimension, the same on every rank. Blocks without units copy the root's input to its output.
//
// Memory ordering. As keys.cuh and push.cuh say. In every unit a warp sends a key to each peer and receives one from
// each, as keys.cuh demands. A relay sends its keys to ranks other than the root together with the packs, after it has
// received the keys of all peers for the same unit. There is no cycle of waits: the root waits for keys that are sent
// without data, a relay waits for the root and for such keys, and the others wait for the relay. A relay computes its
// own key from the words that it sends.
//
// Failure. As push.cuh says. A wait for a relay is reported as kind GATHER, since the relay may itself wait for the
// root. Outputs are then undefined.
#include "collectives/moves/slots.cuh"

// Describes a unit for one thread: the index of the thread's pack, the rank that relays the unit, and the pack's slots.
struct Unit {
    i64 index;
    int relay;  // distance of the relay from the root
    Slots slots;
};

__device__ __forceinline__ Unit unit_at(const MovePushParams& p, int round, u32 unit) {
    const u32 in_round = unit * blockDim.x + threadIdx.x;
    return {round * p.chunk_packs + in_round, int(1 + unit % (RANKS - 1)), Slots(p, in_round)};
}

__device__ __forceinline__ void send_to(const Pushing& push, const Slots& slots, int distance, bool exists,
                                        const u32 (&word)[4]) {
    u32 sent[4], key[1] = {key_of(word, exists)};
#pragma unroll
    for (int i = 0; i < 4; ++i) sent[i] = word[i] ^ key[0];
    send_packs(push, slots, distance, exists, sent, key);
}

__device__ __forceinline__ void move_unit(const MovePushParams& p, Pushing& push, Trace& trace, const Unit& unit,
                                          int behind_root) {
    const bool root = behind_root == 0, relays = behind_root == unit.relay;
    u32 own[1][4] = {};
    bool exists = false;
    if (root) {
        const Spot from = source_of(p, 1, unit.index);
        exists = from.remaining > 0;
        load_packs(own, all_are_whole(p), [&](int) { return from; });
    }
#pragma unroll
    for (int distance = 1; distance < RANKS; ++distance) {
        // At this point a relay sends a key without bytes, to the root only. The relay sends to the other ranks later,
        // when it has received the bytes for them.
        if (!relays || distance == RANKS - behind_root)
            send_to(push, unit.slots, distance, exists && distance == unit.relay, own[0]);
    }
    trace.lap(TraceRole::push);
    push.join();
    const Spot to = target_of(p, behind_root, unit.index);
    const int source =
        relays ? behind_root : (behind_root - unit.relay + RANKS) % RANKS;  // distance from the sender to this rank
    u32 words[PEERS][4], keys[PEERS][1];
    bool wanted[PEERS];
#pragma unroll
    for (int k = 0; k < PEERS; ++k) wanted[k] = !root && to.remaining > 0 && k + 1 == source;
    push.receive(words, wanted, unit.slots.offset, unit.slots.stride, keys, unit.slots.key_offset,
                 unit.slots.key_stride, root || relays ? PUSH : GATHER);
    trace.need(keys);
    trace.lap(TraceRole::receive);
#pragma unroll
    for (int k = 0; k < PEERS; ++k) {
        if (k + 1 == source) {
#pragma unroll
            for (int i = 0; i < 4; ++i) own[0][i] = words[k][i] ^ keys[k][0];
        }
    }
    if (relays) {
#pragma unroll
        for (int distance = 1; distance < RANKS; ++distance) {
            if (distance != RANKS - behind_root) send_to(push, unit.slots, distance, to.remaining > 0, own[0]);
        }
    }
    if (!root) store_packs(all_are_whole(p), [&](int) { return to; }, own);
    trace.lap(TraceRole::store);
}

extern "C" __global__ void __launch_bounds__(256)
    move_relay(const __grid_constant__ MovePushParams p DRVFUSE_TRACE_PARAMETER) {
    Trace trace{DRVFUSE_TRACE_ARGUMENT};
    begin(p.call);
    Pushing push(p.call, p.push);
    follow_producer(trace);
    push.start();
    const int behind_root = (p.call.rank - int(p.root) + RANKS) % RANKS;
#pragma unroll 1
    for (int round = 0; round < p.push.rounds; ++round) {
        if (round > 0) push.next_round();
#pragma unroll 1
        for (u32 unit = blockIdx.x; unit * blockDim.x < p.chunk_packs; unit += gridDim.x)
            move_unit(p, push, trace, unit_at(p, round, unit), behind_root);
    }
    push.join();
    copy_own<2, 1>(p, whole_grid(), trace);
    end(p.call, trace);
}
