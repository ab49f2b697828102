// SPDX-License-Identifier: Apache-2.0
// Reduce-scatter: each rank gets its part of the sum of one tensor per rank, in one kernel per rank.
//
// Layout. The tensor is flat and contiguous, 16-byte aligned; sums/parts.cuh defines the parts. Pack j of a part
// belongs to thread j mod (blocks * threads) of the grid, on every rank.
//   direct  each rank loads its part from the peers' inputs.
//   STAGED  inputs that peers cannot read: each rank first copies the parts that the others own, chunk by chunk, to its
//           payload. The payload has two halves, used alternately, of ranks * chunk_packs packs each, grouped by owner.
//   LOCAL   the sources lie on this device and are complete before the launch, so there is no barrier (algorithm
//           "naive").
//   NODES   (LOCAL) the sources are the partial sums of all nodes for this rank's part (nodes/sums.cuh). Reduce-scatters
//           inside the nodes have written them as float32, in packs like those of the tensor, and exchanges have sent
//           them here. There is one part, and `call.rank` is the rank's index in the group, for the epilogue.
//
// Grid. One dimension, at most DRVFUSE_MAX_BLOCKS blocks, the same grid, parts and chunk on every rank.
//
// Numerics. As in allreduce.cu: +0.0f plus the inputs of ranks 0 to n-1 in fp32, then the epilogue, then one rounding.
//
// Memory ordering. As for one_stage in allreduce.cu, except that a thread sums packs of its rank's part instead of
// packs of the whole tensor. The barriers are those of one_stage, and the reads lie between the same two of them.
//   Inputs: the start barrier orders the reads after the peers' earlier kernels. Direct: peers have read this rank's
//   input before they arrive at the end barrier, and this rank waits for them at that barrier; so its input is free
//   when its kernel completes. Staged: no other rank reads the input.
//   Payload halves: thread t of block b stages what thread t of block b of the owner reads, and the barrier between
//   blocks of equal index orders the read after the store. A half is written again two chunks later, after the barrier
//   of the chunk in between. The peers' blocks arrive at that barrier after they have read the half.
//   In place (the output is this rank's part of its input): no other rank reads that part, and the last thread that
//   reads an element of it is the thread that writes it.
//
// Failure. If a barrier gives up, the block skips the rest of the kernel, and outputs are undefined (barrier.cuh).
#include "collectives/nodes/sums.cuh"
#include "collectives/sums/parts.cuh"
#include "sync/barrier.cuh"

#if DRVFUSE_NODES
struct Params : ScatterParams {
    NodeCall node;
};
#else
using Params = ScatterParams;
#endif

// Sums `count` packs of this rank's part from pack `done` on; load(pack, source, j) reads one of them from a rank.
template <typename Load>
__device__ __forceinline__ void sum_part(const ScatterParams& p, const Part& part, i64 done, i64 count, Trace& trace,
                                         const Load& load, const Epilogue& apply) {
    reduce_range(count, trace, load, [&](i64 j, float (&sum)[W]) {
        trace.need(sum);
        trace.lap(TraceRole::reduce);
        part.store(p, done + j, sum, apply);
        trace.lap(TraceRole::store);
    });
}

__device__ __forceinline__ void reduce_scatter(const Params& p, Trace& trace, const Epilogue& apply) {
    const Part part(p, NODES ? 0 : p.call.rank);
#if !DRVFUSE_LOCAL
    Barrier<RANKS> barrier(p.call, trace);
    if (!barrier.arrive_and_wait(false)) return;
#endif
#if DRVFUSE_NODES
    sum_part(
        p, part, 0, part.packs(), trace,
        [&](SumPack& pack, int, i64 j) {
            add_nodes(pack, p.node, p.node.sums + j * SUM_BYTES,
                      [&](SumPack& of_node, const char* from) { part.read(of_node, from, j); });
        },
        apply);
#elif !DRVFUSE_STAGED
    sum_part(
        p, part, 0, part.packs(), trace,
        [&](InPack& pack, int source, i64 j) { part.load(pack, p.call.sources[source], j); }, apply);
#if !DRVFUSE_LOCAL
    if (!FAULT("scatter-start-barrier-only") && !barrier.arrive_and_wait(true)) return;
    barrier.finish();
#endif
#else
    const i64 chunk = p.chunk_packs;
    char* const own = payload(p.call.workspaces[p.call.rank]);
    i64 half = 0;
#pragma unroll 1
    for (i64 done = 0; done < p.most_packs; done += chunk) {
#pragma unroll 1
        for (int step = 1; step < RANKS; ++step) {
            const int owner = (p.call.rank + step) % RANKS;
            const Part theirs(p, owner);
#pragma unroll 2
            for (i64 j = thread_index(); j < theirs.in_chunk(done, chunk); j += thread_count()) {
                InPack pack;
                theirs.load(pack, p.call.input, done + j);
                store_pack(own + half + (owner * chunk + j) * IN_BYTES, pack);
            }
        }
        trace.lap(TraceRole::stage);
        if (!FAULT("scatter-staging-unpublished") && !barrier.arrive_and_wait(true)) return;
        sum_part(
            p, part, done, part.in_chunk(done, chunk), trace,
            [&](InPack& pack, int source, i64 j) {
                if (source == p.call.rank) {
                    part.load(pack, p.call.input, done + j);
                } else {
                    load_pack(pack, payload(p.call.workspaces[source]) + half + (p.call.rank * chunk + j) * IN_BYTES);
                }
            },
            apply);
        half = RANKS * chunk * IN_BYTES - half;
    }
    barrier.finish();
#endif
}

extern "C" __global__ void __launch_bounds__(512, 1)
    reduce_scatter_one_stage(const __grid_constant__ Params p DRVFUSE_EPILOGUE_PARAMETER DRVFUSE_TRACE_PARAMETER) {
    Trace trace{DRVFUSE_TRACE_ARGUMENT};
    const Epilogue apply{DRVFUSE_EPILOGUE_ARGUMENT};
    begin(p.call);
    follow_producer(trace);
    reduce_scatter(p, trace, apply);
    end(p.call, trace);
}
