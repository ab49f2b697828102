// SPDX-License-Identifier: Apache-2.0
// Reduce-scatter by pushing: each rank sends the parts of its tensor to their owners, in one kernel per rank, without a
// barrier.
//
// Layout. The tensor is flat and contiguous, 16-byte aligned; sums/parts.cuh defines the parts. They are cut into
// rounds of `chunk_packs` packs of every part, and a round into units of one pack of every part per thread of a block:
// block b processes units b, b + blocks, ... of every round. For a pack index j of a unit, a thread sends pack j of
// each peer's part to that peer, and sums pack j of its own rank's part over its own input and the packs from the
// peers. In step i a block sends its unit i, and sums its unit i - DEPTH. Slots of a round, in packs: [distance -
// 1][chunk_packs]. They follow the words of greet() (push.cuh).
//
// What is sent. A call of one round sends the packs of each part. For an empty part it sends one pack of zeros, which
// is not used, as the owner must receive words from every peer in every call (push.cuh). Where a call has several
// rounds, each of them sends chunk_packs packs to every peer, with zeros beyond the end of a part. That costs the call
// no time, as the rank with the largest part receives this number of packs anyway.
//
// Grid. One dimension, the same on every rank, and no more blocks than the first round of the largest part has units,
// since a block calls join() when it has sent its first unit.
//
// Numerics. As in allreduce.cu: +0.0f plus the inputs of ranks 0 to n-1 in fp32, then the epilogue, then one rounding.
//
// Memory ordering. As for push_one_shot in allreduce_push.cu. Where a call has several rounds, thread t of block b
// receives in every round, for each pack that it sends to a peer, a pack from thread t of block b of that peer. In a
// call of one round the rank receives at least one pack from every peer. An input is read only by its own rank, so it
// is free when the rank's kernel completes. The output may be this rank's part of the input, as the thread that writes
// a pack has read it before, and no other thread reads its elements.
//
// Failure. As push.cuh says. Outputs are undefined after a failure.
#include "collectives/shared/push_packs.cuh"
#include "collectives/sums/parts.cuh"

constexpr int DEPTH = DRVFUSE_DEPTH;
using Pushing = Push<RANKS, false, false, false>;

struct ScatterPushParams : ScatterParams {
    PushCall push;
};

// The number of packs of the part that each round sends.
__device__ __forceinline__ i64 sent_packs(const ScatterPushParams& p, const Part& part) {
    if (p.push.rounds > 1 && !FAULT("scatter-rounds-of-own-length")) return p.chunk_packs;
    return part.packs() > 0 || FAULT("scatter-empty-part-not-told") ? part.packs() : 1;
}

// One thread's pack of a unit: its index in the round, and its index in each part. A part that is shorter than others
// may have no pack with this index.
struct Place {
    i64 in_round;
    i64 index;
};

__device__ __forceinline__ Place place(const ScatterPushParams& p, int round, i64 unit) {
    const i64 in_round = unit * blockDim.x + threadIdx.x;
    return {in_round, round * p.chunk_packs + in_round};
}

// Whether the round sends this pack of the part, which may lie after the end of the part.
__device__ __forceinline__ bool is_sent(const ScatterPushParams& p, const Part& part, const Place& at) {
    return at.in_round < sent_packs(p, part);
}

__device__ __forceinline__ InPack load_of(const ScatterPushParams& p, const Part& part, const Place& at) {
    InPack pack = {};
    if (is_sent(p, part, at) && at.index < part.packs()) part.load(pack, p.call.input, at.index);
    return pack;
}

// Loads the packs for the peers: packs[d] is a pack of the part of the peer at distance d.
__device__ __forceinline__ void load_peers(InPack (&packs)[RANKS], const ScatterPushParams& p, const Place& at) {
#pragma unroll
    for (int distance = 1; distance < RANKS; ++distance)
        packs[distance] = load_of(p, Part(p, (p.call.rank + distance) % RANKS), at);
}

__device__ __forceinline__ u32 offset_of(const Place& at) {
    return GREETINGS_BYTES + u32(at.in_round) * u32(sizeof(InPack));
}
__device__ __forceinline__ u32 stride_of(const ScatterPushParams& p) {
    return u32(p.chunk_packs) * u32(sizeof(InPack));
}

__device__ __forceinline__ void send_peers(InPack (&packs)[RANKS], const ScatterPushParams& p, const Pushing& push,
                                           const Place& at) {
#pragma unroll
    for (int distance = 1; distance < RANKS; ++distance) {
        make_sendable(packs[distance].word);
        if (is_sent(p, Part(p, (p.call.rank + distance) % RANKS), at))
            push.send(distance, offset_of(at) + (distance - 1) * stride_of(p), packs[distance].word);
    }
}

__device__ __forceinline__ void reduce(const ScatterPushParams& p, Pushing& push, Trace& trace, const Place& at,
                                       const InPack& own, const Epilogue& apply) {
    const Part part(p, p.call.rank);
    float sum[W];
    sum_received(sum, push, own, offset_of(at), stride_of(p), p.call.rank, is_sent(p, part, at));
    trace.need(sum);
    trace.lap(TraceRole::receive);
    if (is_sent(p, part, at) && at.index < part.packs()) part.store(p, at.index, sum, apply);
    trace.lap(TraceRole::store);
}

// The minimum number of resident blocks per multiprocessor, on which plans rely: LARGE_BLOCKS for blocks of 256
// threads, SMALL_BLOCKS for blocks of up to 128.
constexpr int MOST_THREADS = DRVFUSE_MOST_THREADS;
constexpr int LARGE_BLOCKS = RANKS > 4 ? 2 : RANKS > 2 ? 3 : 4;
constexpr int SMALL_BLOCKS = RANKS > 4 ? 4 : RANKS > 2 ? 6 : 8;

extern "C" __global__ void __launch_bounds__(MOST_THREADS, MOST_THREADS > 128 ? LARGE_BLOCKS : SMALL_BLOCKS)
    DRVFUSE_KERNEL(const __grid_constant__ ScatterPushParams p DRVFUSE_EPILOGUE_PARAMETER DRVFUSE_TRACE_PARAMETER) {
    Trace trace{DRVFUSE_TRACE_ARGUMENT};
    const Epilogue apply{DRVFUSE_EPILOGUE_ARGUMENT};
    begin(p.call);
#pragma unroll
    for (int rank = 0; rank < RANKS; ++rank)
        Part(p, rank).prefetch(p.call.input, i64(blockIdx.x) * blockDim.x + threadIdx.x);
    Pushing push(p.call, p.push);
    follow_producer(trace);
    const Part own_part(p, p.call.rank);
    const Place first = place(p, 0, blockIdx.x);
    InPack own = {}, packs[RANKS];
    load_peers(packs, p, first);  // before start(), as later instructions wait for the epoch that start() loads
    if (DEPTH == 0) own = load_of(p, own_part, first);
    push.start();
    // units per round
    const i64 units = ((p.push.rounds > 1 ? p.chunk_packs : p.most_packs) + blockDim.x - 1) / blockDim.x;
    const i64 behind = i64(DEPTH) * gridDim.x;
#pragma unroll 1
    for (int round = 0; round < p.push.rounds; ++round) {
        if (round > 0) push.next_round();
#pragma unroll 1
        for (i64 unit = blockIdx.x; unit < units + behind; unit += gridDim.x) {
            const Place now = place(p, round, unit);
            if (unit < units) {
                if (round > 0 || unit != blockIdx.x) {
                    load_peers(packs, p, now);
                    if (DEPTH == 0) own = load_of(p, own_part, now);
                }
                send_peers(packs, p, push, now);
            }
            push.join();
            trace.lap(TraceRole::push);
            if (unit < behind) continue;
            const Place due = DEPTH == 0 ? now : place(p, round, unit - behind);
            if (DEPTH > 0) own = load_of(p, own_part, due);
            reduce(p, push, trace, due, own, apply);
        }
    }
    end(p.call, trace);
}
