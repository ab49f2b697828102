// SPDX-License-Identifier: Apache-2.0
// All-reduce: the sum of one tensor per rank, on every rank, in one kernel per rank.
//
// Layout. The tensor is flat and contiguous, 16-byte aligned, and seen as packs of 16 bytes; with DRVFUSE_RAGGED the
// last pack may be partial. Pack j of a range belongs to thread j mod (blocks * threads) of the grid, on every rank.
//   one_stage  every rank sums every pack.
//   two_stage  rank k owns a range of packs (partition.cuh). Chunk by chunk it sums its own packs, stores the results
//              in its payload and its output, and gathers the results of the other ranks from their payloads.
//   STAGED     inputs that peers cannot read: each rank first copies its input, chunk by chunk, into its payload. Calls
//              without STAGED are called direct below.
//   LOCAL      the sources lie on this device and are complete before the launch, so there is no barrier (algorithm
//              "naive").
//   NODES      (two_stage, not STAGED) the ranks are those of one node, and the sources are the partial sums of all
//              nodes for this rank's part (nodes/sums.cuh). There is one chunk, and its results lie in one half of the
//              payload.
//   DRVFUSE_MANY (NODES) the packs are those of several tensors (many.cuh).
// Payload. A chunk is `chunk_packs` packs:
//   one_stage staged   two halves, used alternately, of one chunk of input packs each
//   two_stage direct   two halves, used alternately, of one chunk of output packs each
//   two_stage staged   a chunk of input packs for each owner, then one chunk of output packs
//
// Grid. One dimension, at most DRVFUSE_MAX_BLOCKS blocks. The grid, the number of elements and `chunk_packs` are the
// same on every rank.
//
// Numerics. The sum begins with +0.0f and adds the inputs of ranks 0 to n-1 (NODES: the partial sums of nodes 0 to
// n-1), in this order and in fp32. Then the epilogue is applied, and the result is rounded once. This does not depend
// on the algorithm.
//
// Memory ordering. Thread t of block b reads from a peer only data that the peer's thread t of block b wrote, or that
// was complete before the peer's kernel began. So the barrier between blocks of equal index (barrier.cuh) orders the
// reads after those writes.
//   Inputs: the start barrier orders the reads after the peers' earlier kernels. Direct: peers have read this rank's
//   input before they arrive at the end barrier (one_stage) or at the barrier of the last chunk (two_stage), and this
//   rank waits for them at that barrier; so its input is free when its kernel completes. Staged: no other rank reads
//   the input.
//   Payload halves: a block writes to a half again two chunks later. Before that it passes the barrier of the chunk in
//   between. The peers' blocks arrive at that barrier after they have read the half. two_stage staged has two barriers
//   per chunk. The input packs are overwritten after the second one, when all ranks have summed. The output packs are
//   overwritten after the first barrier of the next chunk, when all ranks have gathered.
//   Across calls: a rank arrives at the start barrier after its previous call is complete, so payloads are free after
//   that barrier.
//   NODES: the previous kernel of the call, `node_sums`, has passed a start barrier, at which the peers have completed
//   all earlier calls and chunks, so results may be written. Until the one barrier of this kernel the peers read from
//   this rank only what their `node_sums` kernels read: inputs, or staging, which no result overlaps. At that barrier
//   these kernels are complete too, so the inputs are free. A rank reads sums only in the memory of its own device.
//   In place (output = input), two_stage, staged calls and local calls are correct: an element is last read as input by
//   the thread that writes it, or before a barrier that this thread has passed. one_stage direct cannot be in place, as
//   peers may still read the input.
//
// Failure. If a barrier gives up, the block skips the rest of the kernel, and outputs are undefined (barrier.cuh).
#include "collectives/nodes/sums.cuh"
#include "collectives/sums/ranges.cuh"
#include "sync/barrier.cuh"
#ifdef DRVFUSE_MANY
#include "collectives/sums/many.cuh"
#endif

#if !DRVFUSE_TWO_STAGE

__device__ __forceinline__ void one_stage(const AllreduceParams& p, Trace& trace, const Epilogue& apply) {
    const i64 packs = (p.count + W - 1) / W;
#if !DRVFUSE_STAGED
#if !DRVFUSE_LOCAL
    Barrier<RANKS> barrier(p.call, trace);
    if (!FAULT("no-start-barrier") && !barrier.arrive_and_wait(false)) return;
#endif
    reduce_range(
        packs, trace, [&](InPack& pack, int source, i64 j) { load_input(pack, p.call.sources[source], j, p.count); },
        [&](i64 j, float (&sum)[W]) {
            const OutPack pack = finish_pack(p, j, sum, apply);
            trace.need(pack);
            trace.lap(TraceRole::reduce);
            store_output(p.output, j, p.count, pack);
            trace.lap(TraceRole::store);
        });
#if !DRVFUSE_LOCAL
    if (!FAULT("start-barrier-only") && !barrier.arrive_and_wait(true)) return;
    barrier.finish();
#endif
#else
    Barrier<RANKS> barrier(p.call, trace);
    if (!barrier.arrive_and_wait(false)) return;
    i64 half = 0;
#pragma unroll 1
    for (i64 begin = 0; begin < packs; begin += p.chunk_packs) {
        const i64 count = packs - begin < p.chunk_packs ? packs - begin : p.chunk_packs;
        stage_input(p, payload(p.call.workspaces[p.call.rank]) + half, begin, count);
        trace.lap(TraceRole::stage);
        if (!barrier.arrive_and_wait(true)) return;
        reduce_range(
            count, trace,
            [&](InPack& pack, int source, i64 j) {
                load_pack(pack, payload(p.call.workspaces[source]) + half + j * IN_BYTES);
            },
            [&](i64 j, float (&sum)[W]) {
                const OutPack pack = finish_pack(p, begin + j, sum, apply);
                trace.need(pack);
                trace.lap(TraceRole::reduce);
                store_output(p.output, begin + j, p.count, pack);
                trace.lap(TraceRole::store);
            });
        half = p.chunk_packs * IN_BYTES - half;
    }
    barrier.finish();
#endif
}

extern "C" __global__ void __launch_bounds__(512, 1)
    allreduce_one_stage(const __grid_constant__ AllreduceParams p DRVFUSE_EPILOGUE_PARAMETER DRVFUSE_TRACE_PARAMETER) {
    Trace trace{DRVFUSE_TRACE_ARGUMENT};
    const Epilogue apply{DRVFUSE_EPILOGUE_ARGUMENT};
    begin(p.call);
    follow_producer(trace);
    one_stage(p, trace, apply);
    end(p.call, trace);
}

#else

#if DRVFUSE_NODES
struct Params : AllreduceParams {
    NodeCall node;
#ifdef DRVFUSE_MANY
    ManyCall many;
#endif
};
#else
using Params = AllreduceParams;
#endif

__device__ __forceinline__ void store_result(const Params& p, i64 index, const OutPack& pack) {
#ifdef DRVFUSE_MANY
    store_of_many(p.many, index, pack);
#else
    store_output(p.output, index, p.count, pack);
#endif
}

// Copies the other ranks' results of a chunk to the output. The results begin at offset `results` of every payload.
// Each rank begins with the results of the rank after it, so that not all ranks read from the same rank at a time.
__device__ __forceinline__ void gather(const Params& p, const Packs& part, i64 results, i64 done) {
    const i64 common = part.in_chunk(RANKS - 1, done, p.chunk_packs);
#pragma unroll 1
    for (i64 j = thread_index(); j < part.in_chunk(0, done, p.chunk_packs); j += thread_count()) {
        OutPack packs[RANKS];
#pragma unroll
        for (int step = 1; step < RANKS; ++step) {
            const int owner = (p.call.rank + step) % RANKS;
            if (j < common || owner < part.extra)
                load_pack(packs[step], payload(p.call.workspaces[owner]) + results + j * OUT_BYTES);
        }
#pragma unroll
        for (int step = 1; step < RANKS; ++step) {
            const int owner = (p.call.rank + step) % RANKS;
            if (j < common || owner < part.extra) store_result(p, part.start(owner) + done + j, packs[step]);
        }
    }
}

__device__ __forceinline__ void two_stage(const Params& p, Trace& trace, const Epilogue& apply) {
    const i64 chunk = p.chunk_packs;
    const Packs part((p.count + W - 1) / W);
    char* const own = payload(p.call.workspaces[p.call.rank]);
    i64 results = STAGED ? RANKS * chunk * IN_BYTES : 0;
    Barrier<RANKS> barrier(p.call, trace);
#if DRVFUSE_NODES
    exchange_has_ended(p.node, barrier.epoch(), barrier.aborted());
    const u32 first = first_status(p.node);
#else
    if (!barrier.arrive_and_wait(false)) return;
#endif
#pragma unroll 1
    for (i64 done = 0; done < part.largest(); done += chunk) {
        if constexpr (STAGED) {
#pragma unroll 1
            for (int owner = 0; owner < RANKS; ++owner)
                stage_input(p, own + owner * chunk * IN_BYTES, part.start(owner) + done,
                            part.in_chunk(owner, done, chunk));
            trace.lap(TraceRole::stage);
            if (!barrier.arrive_and_wait(true)) return;
        }
        const i64 begin = part.start(p.call.rank) + done;
        if (FAULT("flag-before-data") && !barrier.arrive_and_wait(true)) return;
        reduce_range(
            part.in_chunk(p.call.rank, done, chunk), trace,
            [&](SourcePack& pack, int source, i64 j) {
#if DRVFUSE_NODES
                sum_nodes(pack, p.node, j);
#else
                if constexpr (STAGED) {
                    load_pack(pack, payload(p.call.workspaces[source]) + (p.call.rank * chunk + j) * IN_BYTES);
                } else {
                    load_input(pack, p.call.sources[source], begin + j, p.count);
                }
#endif
            },
            [&](i64 j, float (&sum)[W]) {
                const OutPack pack = finish_pack(p, begin + j, sum, apply);
                trace.need(pack);
                trace.lap(TraceRole::reduce);
                store_pack(own + results + j * OUT_BYTES, pack);
                store_result(p, begin + j, pack);
                trace.lap(TraceRole::store);
            });
        const bool unordered = FAULT("flag-before-data") || (NODES && FAULT("node-results-before-barrier"));
        if (!unordered && !barrier.arrive_and_wait(true)) return;
        gather(p, part, results, done);
        trace.lap(TraceRole::gather);
        if (!STAGED && !FAULT("payload-not-doubled")) results = chunk * OUT_BYTES - results;
    }
#if DRVFUSE_NODES
    check_statuses<RANKS>(p.call, p.node, first);
#endif
    barrier.finish();
}

extern "C" __global__ void __launch_bounds__(512, 1)
    allreduce_two_stage(const __grid_constant__ Params p DRVFUSE_EPILOGUE_PARAMETER DRVFUSE_TRACE_PARAMETER) {
    Trace trace{DRVFUSE_TRACE_ARGUMENT};
    const Epilogue apply{DRVFUSE_EPILOGUE_ARGUMENT};
    begin(p.call);
    follow_producer(trace);
    two_stage(p, trace, apply);
    end(p.call, trace);
}

#endif
