// SPDX-License-Identifier: Apache-2.0
// All-reduce by pushing: the sum of one tensor per rank, on every rank, in one kernel per rank, without a barrier.
//
// Layout. The tensor is flat and contiguous, 16-byte aligned, and seen as packs of 16 bytes; with DRVFUSE_RAGGED the
// last pack may be partial, and is sent whole. It is cut into rounds of `chunk_packs` packs, and a round into units of
// one pack per thread of a block: block b processes units b, b + blocks, ... of every round. Without DRVFUSE_EXACT the
// last unit of a round may have fewer packs than the block has threads.
//   push_one_shot  every rank sends each of its packs to every peer, and sums what it receives.
//   push_two_shot  rank k owns units k, k + ranks, ... of a round. It receives and sums these, and sends the results to
//                  every peer. In step i a block sends its unit i, sums its unit i - DEPTH and gathers the results of
//                  its unit i - 2 * DEPTH.
// DRVFUSE_MANY: the packs are those of several tensors (many.cuh).
// Slots of a round, in packs. They follow the words of greet() (push.cuh):
//   push_one_shot  [distance - 1][chunk_packs]
//   push_two_shot  [distance - 1][owned units][threads] for inputs, then an equally large array for results
//
// Grid. One dimension, the same on every rank, and no more blocks than the first round has units, since a block calls
// join() when it has sent its first unit.
//
// Numerics. As in allreduce.cu: +0.0f plus the inputs of ranks 0 to n-1 in fp32, then the epilogue, then one rounding.
//
// Memory ordering. As push.cuh says. A thread sends, receives and clears packs of the same slots in every round: where
// a call has several rounds, each sends chunk_packs packs, and the last one sends zeros beyond the end of the tensor.
// An input is read only by its own rank, so it is free when the rank's kernel completes. The output may be the input,
// as the thread that writes a pack has read it before.
//
// Failure. As push.cuh says. Outputs are undefined after a failure.
#include "collectives/sums/packs.cuh"
#include "collectives/shared/push_packs.cuh"
#ifdef DRVFUSE_MANY
#include "collectives/sums/many.cuh"
constexpr bool MANY = true;
#else
constexpr bool MANY = false;
#endif

constexpr bool EXACT = DRVFUSE_EXACT;
constexpr int DEPTH = DRVFUSE_DEPTH;
using Pushing = Push<RANKS, false, false, DRVFUSE_RELAYS>;

// In the inherited parameters `first` is 0, and `chunk_packs` is the number of packs of a round: with push_two_shot a
// multiple of ranks * threads.
struct AllreducePushParams : AllreduceParams {
    PushCall push;
};

#ifdef DRVFUSE_MANY
struct Params : AllreducePushParams {
    ManyCall many;
};
#else
using Params = AllreducePushParams;
#endif

// Loads pack `index` of this rank's input.
__device__ __forceinline__ void load_own(InPack& pack, const Params& p, i64 index) {
#ifdef DRVFUSE_MANY
    load_of_many(pack, p.many, index);
#else
    load_input(pack, p.call.input, index, p.count);
#endif
}

__device__ __forceinline__ void store_result(const Params& p, i64 index, const OutPack& pack) {
#ifdef DRVFUSE_MANY
    store_of_many(p.many, index, pack);
#else
    store_output(p.output, index, p.count, pack);
#endif
}

// One thread's pack of a unit: its index in the round and in the tensor. With EXACT every thread has a pack.
struct Place {
    u32 in_round;
    i64 index;
    bool exists;  // the round has this pack, so it is sent and received
    bool inside;  // the tensor has this pack: the last of several rounds also sends packs beyond its end (push.cuh)
};

// The number of packs that each round sends.
__device__ __forceinline__ u32 packs_of_round(const AllreducePushParams& p) {
    return p.push.rounds > 1 ? u32(p.chunk_packs) : u32((p.count + W - 1) / W);
}

__device__ __forceinline__ Place place(const AllreducePushParams& p, int round, u32 unit) {
    const u32 in_round = unit * blockDim.x + threadIdx.x;
    const i64 index = round * p.chunk_packs + in_round;
    return {in_round, index, EXACT || in_round < packs_of_round(p), EXACT || (index * W < p.count)};
}

__device__ __forceinline__ InPack input_at(const Params& p, const Place& at) {
    InPack pack = {};
    if (at.exists && at.inside) load_own(pack, p, at.index);
    return pack;
}

#if !DRVFUSE_TWO_SHOT

__device__ __forceinline__ void one_shot(const Params& p, Pushing& push, Trace& trace, const Place& at,
                                         const InPack& own, const Epilogue& apply) {
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
    trace.lap(TraceRole::receive);
    if (at.exists && at.inside) store_result(p, at.index, finish_pack(p, at.index, sum, apply));
    trace.lap(TraceRole::store);
}

#else

// A unit of push_two_shot, whose packs one rank owns: the owner's distance, and where this thread's pack lies in the
// slots.
struct Unit {
    Place at;
    int distance;  // the distance of the owner from this rank
    u32 offset;    // offset of this thread's pack in the slots at distance 1
    u32 stride;    // bytes from the slots at distance d to those at distance d + 1
    u32 results;   // bytes from the slot of an input to the slot of its result
};

__device__ __forceinline__ Unit unit_at(const AllreducePushParams& p, const Pushing& push, int round, u32 unit) {
    const u32 stride = u32(p.chunk_packs) / RANKS * u32(sizeof(InPack));
    const u32 offset = GREETINGS_BYTES + (unit / RANKS * blockDim.x + threadIdx.x) * u32(sizeof(InPack));
    return {place(p, round, unit), push.distance(unit % RANKS), offset, stride, (RANKS - 1) * stride};
}

__device__ __forceinline__ void send_input(const Pushing& push, const Unit& unit, InPack own) {
    make_sendable(own.word);
    if (unit.at.exists) push.send(unit.distance, unit.offset + (unit.distance - 1) * unit.stride, own.word);
}

__device__ __forceinline__ void reduce(const Params& p, Pushing& push, const Unit& unit, const InPack& own,
                                       const Epilogue& apply) {
    float sum[W];
    sum_received(sum, push, own, unit.offset, unit.stride, p.call.rank, unit.at.exists);
    push.relay();
    if (!unit.at.exists) return;
    OutPack pack = {};
    if (unit.at.inside) pack = finish_pack(p, unit.at.index, sum, apply);
    send_to_all(push, unit.results + unit.offset, unit.stride, pack.word);
    if (unit.at.inside) store_result(p, unit.at.index, pack);
}

__device__ __forceinline__ void gather(const Params& p, Pushing& push, const Unit& unit) {
    // This rank is RANKS - distance ranks after the owner, so the owner's words lie in the slots of distance RANKS -
    // distance.
    const u32 offset = unit.results + unit.offset + (RANKS - unit.distance - 1) * unit.stride;
    u32 words[1][OutPack::words];
    push.receive(words, GATHER, offset, 0, unit.at.exists, (p.call.rank + unit.distance) % RANKS);
    OutPack pack;
#pragma unroll
    for (int i = 0; i < OutPack::words; ++i) pack.word[i] = words[0][i];
    if (unit.at.exists && unit.at.inside) store_result(p, unit.at.index, pack);
}

// Does the work of a block in one round. `own` is this thread's pack of the block's first unit of the round, which the
// caller has loaded.
__device__ __forceinline__ void two_shot(const Params& p, Pushing& push, Trace& trace, int round, InPack own,
                                         const Epilogue& apply) {
    const u32 units = (packs_of_round(p) + blockDim.x - 1) / blockDim.x;
    const u32 behind = DEPTH * gridDim.x;
#pragma unroll 1
    for (u32 unit = blockIdx.x; unit < units + 2 * behind; unit += gridDim.x) {
        const Unit now = unit_at(p, push, round, unit);
        if (unit != blockIdx.x && unit < units && (DEPTH == 0 || now.distance != 0)) own = input_at(p, now.at);
        if (unit < units && now.distance != 0) send_input(push, now, own);
        push.join();
        trace.lap(TraceRole::push);
        // As long as no unit is due, unit - behind is negative. As an unsigned number it then exceeds `units`.
        const Unit due = DEPTH == 0 ? now : unit_at(p, push, round, unit - behind);
        if (unit - behind < units && due.distance == 0)
            reduce(p, push, due, DEPTH == 0 ? own : input_at(p, due.at), apply);
        trace.lap(TraceRole::reduce);
        const Unit last = DEPTH == 0 ? now : unit_at(p, push, round, unit - 2 * behind);
        if (unit - 2 * behind < units && last.distance != 0) gather(p, push, last);
        trace.lap(TraceRole::gather);
    }
}

#endif

// The minimum number of resident blocks per multiprocessor, on which plans rely: LARGE_BLOCKS for blocks of 256
// threads, SMALL_BLOCKS for blocks of up to 128. Kernels that do not compare calls are compiled with LARGE_BLOCKS. With
// that bound the compiler uses so few registers that SMALL_BLOCKS blocks of 128 threads can be resident too.
constexpr int MOST_THREADS = COMPARES ? DRVFUSE_MOST_THREADS : 256;
constexpr int LARGE_BLOCKS = RANKS > 4 ? 2 : (RANKS > 2 ? 3 : 4) + (COMPARES && !DRVFUSE_TWO_SHOT);
constexpr int SMALL_BLOCKS = RANKS <= 4 ? 8 : DRVFUSE_TWO_SHOT ? 5 : 6;

extern "C" __global__ void __launch_bounds__(MOST_THREADS, MOST_THREADS > 128 ? LARGE_BLOCKS : SMALL_BLOCKS)
    DRVFUSE_KERNEL(const __grid_constant__ Params p DRVFUSE_EPILOGUE_PARAMETER DRVFUSE_TRACE_PARAMETER) {
    Trace trace{DRVFUSE_TRACE_ARGUMENT};
    const Epilogue apply{DRVFUSE_EPILOGUE_ARGUMENT};
    begin(p.call);
    const Place first = place(p, 0, blockIdx.x);
    // Before the wait for the producer: brings the translation of the address of this thread's first pack into the TLB.
    if (!MANY && first.exists && first.inside)
        ptx::prefetch_l2(static_cast<const char*>(p.call.input) + first.index * IN_BYTES);
    Pushing push(p.call, p.push);
    follow_producer(trace);
    InPack own = input_at(p, first);  // before start(), as later instructions wait for the epoch that start() loads
    push.start();
#pragma unroll 1
    for (int round = 0; round < p.push.rounds; ++round) {
        if (round > 0) {
            push.next_round();
            own = input_at(p, place(p, round, blockIdx.x));
        }
#if DRVFUSE_TWO_SHOT
        two_shot(p, push, trace, round, own, apply);
#else
        const u32 packs = packs_of_round(p);
#pragma unroll 1
        for (u32 unit = blockIdx.x; unit * blockDim.x < packs; unit += gridDim.x) {
            const Place at = place(p, round, unit);
            if (unit != blockIdx.x) own = input_at(p, at);
            one_shot(p, push, trace, at, own, apply);
        }
#endif
    }
#if DRVFUSE_TWO_SHOT
    if (blockIdx.x == 0 && threadIdx.x < 32) push.greet((packs_of_round(p) + blockDim.x - 1) / blockDim.x);
#endif
    end(p.call, trace);
}
