// SPDX-License-Identifier: Apache-2.0
// All-reduce by pushing: the sum of one tensor per rank, on every rank, in one kernel per rank, without a barrier.
//
// Layout. The tensor is flat and contiguous, 16-byte aligned, and seen as packs of 16 bytes; with DRVFUSE_RAGGED the last
// pack may be partial, and is sent whole. It is cut into rounds of `chunk_packs` packs, and a round into units of one pack
// per thread of a block: block b does units b, b + blocks, ... of every round. Without DRVFUSE_EXACT the last unit of a
// round may have fewer packs.
//   push_one_shot  every rank sends each of its packs to every peer, and sums what it receives.
//   push_two_shot  rank k owns units k, k + ranks, ... of a round. It receives and sums these, and sends the results to
//                  every peer. A block is DEPTH units ahead in sending of what it sums, and again of what it gathers.
// Slots of a round, after the greetings, in packs:
//   push_one_shot  [distance - 1][chunk_packs]
//   push_two_shot  [distance - 1][owned units][threads], then results [units][threads]
//
// Grid. One dimension, the same on every rank, no more blocks than a round has units.
//
// Numerics. +0.0f, then ranks 0..n-1 in fp32, then the epilogue, then one rounding, as in allreduce.cu.
//
// Memory ordering. push.cuh. A thread sends, receives and clears packs of the same slots in every round, as rounds have
// the same units, but the last. The input is read by its own rank alone, so it is free when the rank's kernel completes;
// output may be input, as the thread that writes a pack has read it before.
//
// Failure. push.cuh; outputs are then undefined.
#include "collectives/allreduce_packs.cuh"
#include "collectives/push_packs.cuh"

constexpr bool EXACT = DRVFUSE_EXACT;
constexpr int DEPTH = DRVFUSE_DEPTH;
using Pushing = Push<RANKS, false>;

// `first` of the base is 0, and `chunk_packs` is of a round: with push_two_shot a multiple of ranks * threads.
struct AllreducePushParams : AllreduceParams {
    PushCall push;
};

// One thread's pack of a unit: which of the round, and of the tensor; `exists` for all threads alike with EXACT.
struct Place {
    u32 in_round;
    i64 index;
    bool exists;
};

__device__ __forceinline__ Place place(const AllreducePushParams& p, int round, u32 unit) {
    const u32 in_round = unit * blockDim.x + threadIdx.x;
    const i64 index = round * p.chunk_packs + in_round;
    return {in_round, index, EXACT || (in_round < p.chunk_packs && index * W < p.count)};
}

__device__ __forceinline__ InPack input_at(const AllreducePushParams& p, const Place& at) {
    InPack pack = {};
    if (at.exists) load_input(pack, p.call.input, at.index, p.count);
    return pack;
}

// How many units of the round there are in all.
__device__ __forceinline__ u32 units_of_round(const AllreducePushParams& p, int round) {
    const i64 left = (p.count + W - 1) / W - round * p.chunk_packs;
    const u32 packs = u32(left < p.chunk_packs ? left : p.chunk_packs);
    return (packs + blockDim.x - 1) / blockDim.x;
}

#if !DRVFUSE_TWO_SHOT

__device__ __forceinline__ void one_shot(const AllreducePushParams& p, Pushing& push, Trace& trace, int round,
                                         u32 unit EPILOGUE_REFERENCE) {
    const Place at = place(p, round, unit);
    const InPack own = input_at(p, at);
    const u32 offset = GREETINGS_BYTES + at.in_round * u32(sizeof(InPack));
    const u32 stride = u32(p.chunk_packs) * u32(sizeof(InPack));
    InPack sent = own;
    make_sendable(sent.word);
    if (at.exists) send_to_all(push, offset, stride, sent.word);
    push.join();
    trace.lap(TraceRole::push);
    float sum[W];
    sum_received(sum, push, own, offset, stride, p.call.rank, at.exists);
    trace.need(sum);
    trace.lap(TraceRole::wait);
    if (at.exists) store_output(p.output, at.index, p.count, finish_pack(p, at.index, sum DRVFUSE_EPILOGUE_ARGUMENT));
    trace.lap(TraceRole::store);
}

#else

// A unit of the two-shot form: its owner's distance, and where its packs lie in the slots.
struct Unit {
    Place at;
    int distance;
    u32 offset;   // of this thread's pack among the units of that owner, at distance 1
    u32 stride;   // from one distance to the next
    u32 results;  // of this thread's result
};

__device__ __forceinline__ Unit unit_at(const AllreducePushParams& p, const Pushing& push, int round, u32 unit) {
    const u32 stride = u32(p.chunk_packs) / RANKS * u32(sizeof(InPack));
    Unit found = {place(p, round, unit), push.distance(unit % RANKS), 0, stride, 0};
    found.offset = GREETINGS_BYTES + (unit / RANKS * blockDim.x + threadIdx.x) * u32(sizeof(InPack));
    found.results = GREETINGS_BYTES + (RANKS - 1) * stride + found.at.in_round * u32(sizeof(OutPack));
    return found;
}

__device__ __forceinline__ void send_input(const AllreducePushParams& p, const Pushing& push, const Unit& unit) {
    if (unit.distance == 0) return;
    InPack pack = input_at(p, unit.at);
    make_sendable(pack.word);
    if (unit.at.exists) push.send(unit.distance, unit.offset + (unit.distance - 1) * unit.stride, pack.word);
}

__device__ __forceinline__ void reduce(const AllreducePushParams& p, Pushing& push,
                                       const Unit& unit EPILOGUE_REFERENCE) {
    if (unit.distance != 0) return;
    const InPack own = input_at(p, unit.at);
    float sum[W];
    sum_received(sum, push, own, unit.offset, unit.stride, p.call.rank, unit.at.exists);
    if (!unit.at.exists) return;
    const OutPack pack = finish_pack(p, unit.at.index, sum DRVFUSE_EPILOGUE_ARGUMENT);
    send_to_all(push, unit.results, 0, pack.word);
    store_output(p.output, unit.at.index, p.count, pack);
}

__device__ __forceinline__ void gather(const AllreducePushParams& p, Pushing& push, const Unit& unit) {
    if (unit.distance == 0) return;
    u32 words[1][OutPack::words];
    push.receive(words, GATHER, unit.results, 0, unit.at.exists, (p.call.rank + unit.distance) % RANKS);
    OutPack pack;
#pragma unroll
    for (int i = 0; i < OutPack::words; ++i) pack.word[i] = words[0][i];
    if (unit.at.exists) store_output(p.output, unit.at.index, p.count, pack);
}

__device__ __forceinline__ void two_shot(const AllreducePushParams& p, Pushing& push, Trace& trace,
                                         int round EPILOGUE_REFERENCE) {
    const u32 units = units_of_round(p, round);
    const u32 step = gridDim.x;
#pragma unroll 1
    for (u32 unit = blockIdx.x; unit < units + 2 * DEPTH * step; unit += step) {
        if (unit < units) send_input(p, push, unit_at(p, push, round, unit));
        push.join();
        trace.lap(TraceRole::push);
        // A unit that is not there yet has a number below zero, which is beyond `units` as it is unsigned.
        if (unit - DEPTH * step < units)
            reduce(p, push, unit_at(p, push, round, unit - DEPTH * step) DRVFUSE_EPILOGUE_ARGUMENT);
        trace.lap(TraceRole::reduce);
        if (unit - 2 * DEPTH * step < units) gather(p, push, unit_at(p, push, round, unit - 2 * DEPTH * step));
        trace.lap(TraceRole::gather);
    }
}

#endif

extern "C" __global__ void __launch_bounds__(512, 1)
    DRVFUSE_KERNEL(const __grid_constant__ AllreducePushParams p DRVFUSE_EPILOGUE_PARAMETER DRVFUSE_TRACE_PARAMETER) {
    Trace trace{DRVFUSE_TRACE_ARGUMENT};
    begin(p.call);
    if (place(p, 0, blockIdx.x).exists)  // warms the address translation
        ptx::prefetch_l2(static_cast<const char*>(p.call.input) + place(p, 0, blockIdx.x).index * sizeof(InPack));
    follow_producer(trace);
    Pushing push(p.call, p.push);
#pragma unroll 1
    for (int round = 0; round < p.push.rounds; ++round) {
        if (round > 0) push.next_round();
#if DRVFUSE_TWO_SHOT
        two_shot(p, push, trace, round DRVFUSE_EPILOGUE_ARGUMENT);
#else
        const u32 units = units_of_round(p, round);
#pragma unroll 1
        for (u32 unit = blockIdx.x; unit < units; unit += gridDim.x)
            one_shot(p, push, trace, round, unit DRVFUSE_EPILOGUE_ARGUMENT);
#endif
    }
    push.join();
#if DRVFUSE_TWO_SHOT
    if (blockIdx.x == 0 && threadIdx.x < 32) push.greet(units_of_round(p, 0));
#endif
    end(p.call, trace);
}
