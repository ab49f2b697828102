// SPDX-License-Identifier: Apache-2.0
// Reduce-scatter by pushing: each rank sends the parts of its tensor to their owners, in one kernel per rank, without a
// barrier.
//
// Layout. The tensor is flat and contiguous, 16-byte aligned; scatter_parts.cuh has the parts. They are cut into rounds of
// `chunk_packs` packs of every part, and a round into units of one pack of every part per thread of a block: block b does
// units b, b + blocks, ... of every round. A thread sends pack j of each peer's part to that peer, and sums pack j of its
// own part, which it has from its own input and the peers.
// Slots of a round, after the greetings, in packs: [distance - 1][chunk_packs].
//
// What is sent. In a call of one round the packs of each part, and of an empty part one pack of zeros, which nobody uses:
// its owner must hear of every peer in every call (push.cuh). Each of several rounds sends chunk_packs packs to everyone,
// which are zeros beyond the end of the part. That takes no time from the call, as the rank with the largest part
// receives so many.
//
// Grid. One dimension, the same on every rank, no more blocks than the first round of the largest part has units: every
// block joins.
//
// Numerics. +0.0f, then ranks 0..n-1 in fp32, then the epilogue, then one rounding, as in allreduce.cu.
//
// Memory ordering. push.cuh, as by push_one_shot in allreduce_push.cu: in several rounds thread t of block b hears in every
// round from thread t of block b of every peer for each pack that it sends to it, and a call of one round hears from
// every peer at least once. The input is read by its own rank alone, so it is free when the rank's kernel completes. The
// output may be this rank's part of the input, as the thread that writes a pack has read it before, and no other thread
// reads its elements.
//
// Failure. push.cuh; outputs are then undefined.
#include "collectives/push_packs.cuh"
#include "collectives/scatter_parts.cuh"

using Pushing = Push<RANKS, false, false, false>;

struct ScatterPushParams : ScatterParams {
    PushCall push;
};

// How many packs of the part are sent in each round.
__device__ __forceinline__ i64 sent_packs(const ScatterPushParams& p, const Part& part) {
    if (p.push.rounds > 1 && !FAULT("scatter-rounds-of-own-length")) return p.chunk_packs;
    return part.packs() > 0 || FAULT("scatter-empty-part-not-told") ? part.packs() : 1;
}

// One thread's pack of every part, by the owner's distance; number 0 is the own.
struct Unit {
    i64 in_round;
    i64 index;  // of each part, where it has so many
    InPack pack[RANKS];
    bool sent[RANKS];  // whether the round has such a pack of that part
};

__device__ __forceinline__ void load_unit(Unit& unit, const ScatterPushParams& p, int round, i64 number) {
    unit.in_round = number * blockDim.x + threadIdx.x;
    unit.index = round * p.chunk_packs + unit.in_round;
#pragma unroll
    for (int distance = 0; distance < RANKS; ++distance) {
        const Part part(p, (p.call.rank + distance) % RANKS);
        unit.sent[distance] = unit.in_round < sent_packs(p, part);
        unit.pack[distance] = {};
        if (unit.sent[distance] && unit.index < part.packs()) part.load(unit.pack[distance], p.call.input, unit.index);
    }
}

__device__ __forceinline__ void exchange(Unit& unit, const ScatterPushParams& p, Pushing& push,
                                         Trace& trace EPILOGUE_REFERENCE) {
    const u32 offset = GREETINGS_BYTES + u32(unit.in_round) * u32(sizeof(InPack));
    const u32 stride = u32(p.chunk_packs) * u32(sizeof(InPack));
#pragma unroll
    for (int distance = 1; distance < RANKS; ++distance) {
        make_sendable(unit.pack[distance].word);
        if (unit.sent[distance]) push.send(distance, offset + (distance - 1) * stride, unit.pack[distance].word);
    }
    push.join();
    trace.lap(TraceRole::push);
    float sum[W];
    sum_received(sum, push, unit.pack[0], offset, stride, p.call.rank, unit.sent[0]);
    trace.need(sum);
    trace.lap(TraceRole::receive);
    const Part part(p, p.call.rank);
    if (unit.sent[0] && unit.index < part.packs()) part.store(p, unit.index, sum DRVFUSE_EPILOGUE_ARGUMENT);
    trace.lap(TraceRole::store);
}

// Blocks of a multiprocessor that plans count on, of 256 threads or of twice 64.
constexpr int MOST_THREADS = DRVFUSE_MOST_THREADS;
constexpr int LARGE_BLOCKS = RANKS > 4 ? 2 : RANKS > 2 ? 3 : 4;
constexpr int SMALL_BLOCKS = RANKS <= 4 ? 8 : 4;

extern "C" __global__ void __launch_bounds__(MOST_THREADS, MOST_THREADS > 128 ? LARGE_BLOCKS : SMALL_BLOCKS)
    DRVFUSE_KERNEL(const __grid_constant__ ScatterPushParams p DRVFUSE_EPILOGUE_PARAMETER DRVFUSE_TRACE_PARAMETER) {
    Trace trace{DRVFUSE_TRACE_ARGUMENT};
    begin(p.call);
    Pushing push(p.call, p.push);
    follow_producer(trace);
    Unit unit;
    load_unit(unit, p, 0, blockIdx.x);  // before the state is read, since all that follows waits for that
    push.start();
    const i64 packs = p.push.rounds > 1 ? p.chunk_packs : p.most_packs;  // of a round
#pragma unroll 1
    for (int round = 0; round < p.push.rounds; ++round) {
        if (round > 0) push.next_round();
#pragma unroll 1
        for (i64 number = blockIdx.x; number * blockDim.x < packs; number += gridDim.x) {
            if (round > 0 || number != blockIdx.x) load_unit(unit, p, round, number);
            exchange(unit, p, push, trace DRVFUSE_EPILOGUE_ARGUMENT);
        }
    }
    end(p.call, trace);
}
