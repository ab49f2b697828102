// SPDX-License-Identifier: Apache-2.0
// All-reduce through multicast memory, in one kernel per rank. One load from a multicast address returns the sum of
// what all ranks have at that address, and one store writes to the memory of all ranks.
//
// Layout. The tensor is flat and contiguous, 16-byte aligned, and seen as packs of 16 bytes; with DRVFUSE_RAGGED the
// last pack may be partial. Pack j of a range belongs to thread j mod (blocks * threads) of the grid, on every rank.
//   one_stage   every rank loads the sum of every pack.
//   two_stage   rank k owns a range of packs (partition.cuh). It loads the sums of these, and stores the results to all
//               ranks.
//   STAGED      the inputs do not lie in multicast memory at an offset that is the same on all ranks: each rank first
//               copies its input, chunk by chunk, into its staging memory. It stores to that memory's unicast address,
//               the ordinary address on its own device. A partial last pack is filled up with zeros.
//   TO_OUTPUTS  (two_stage, not STAGED) the outputs lie in multicast memory at an offset that is the same on all ranks,
//               and results are stored to the outputs, in one chunk. Otherwise results are stored to the staging
//               memories, and each rank copies them to its output.
// Staging memory, in chunks of `chunk_packs` packs (one_stage: of the tensor; two_stage: of every rank's range):
//   one_stage STAGED   two halves, used alternately, of `chunk_packs` packs of inputs each
//   two_stage STAGED   ranks * `chunk_packs` packs, grouped by owner: inputs, and then results in the same places
//   two_stage          two halves, used alternately, of ranks * `chunk_packs` packs of results each, grouped by owner;
//                      with TO_OUTPUTS no staging memory is used
//
// Grid. One dimension, at most DRVFUSE_MAX_BLOCKS blocks. The grid, the number of elements and `chunk_packs` are the
// same on every rank.
//
// Numerics. A load sums a pack in an unspecified order, with fp32 arithmetic, and rounds the sum to the type of the
// inputs. The kernel adds +0.0f to the sum, applies the epilogue, and rounds once more, which without an epilogue
// changes only NaNs. In two_stage each element is summed once, so all ranks have the same bits; in one_stage the bits
// of two ranks may differ.
//
// Memory ordering. Thread t of block b accesses only those bytes of a peer's memory that the peer's thread t of block b
// accesses, or that no kernel accesses at the same time. So the barrier between blocks of equal index (barrier.cuh)
// orders all these accesses. The same memory is accessed by its unicast address (copies to and from staging memory, and
// the previous and the next kernel) and by a multicast address (sums, stores to all ranks). Between two accesses by
// different addresses that must be ordered lies a barrier, and the barrier's fence.proxy.alias orders them:
//   Inputs: written by earlier kernels of their ranks, which precede these ranks' arrival at the start barrier. The
//   start barrier needs the fence too. At the end of a kernel its writes become visible by other addresses only to
//   kernels that begin later. But this kernel may be resident already when the earlier kernel writes (on another
//   device, or under programmatic dependent launch).
//   Inputs are free when the rank's kernel completes: peers have loaded from them before they arrive at the end barrier
//   (one_stage) or at the barrier of the last chunk (two_stage), and this rank waits for them at that barrier. STAGED:
//   no other rank reads the inputs.
//   Staged inputs: stores to a rank's own staging memory, barrier, loads by the multicast address.
//   Results in staging memory: stores by the multicast address, barrier, loads from a rank's own staging memory.
//   STAGED: results overwrite the inputs of the same pack, by the same multicast address, in the thread that has loaded
//   the sum of the pack.
//   Results in outputs (TO_OUTPUTS): stores by the multicast address, after the start barrier and so after all
//   accesses of earlier kernels, and before the barrier of results. So a rank's output is complete when its kernel
//   completes.
//   Staging memory that is written again, in one_stage and in two_stage without STAGED: a half is written again two
//   chunks later, after the barrier of the chunk in between. Every rank arrives at that barrier after it has read the
//   half. In two_stage with STAGED the staged inputs of the next chunk overwrite the memory after the barrier of this
//   chunk's results. Peers arrive at that barrier after their loads and stores of the memory. Results that this rank
//   copies to its output were loaded, by the same unicast address, by the thread that overwrites them. The next chunk's
//   results overwrite the memory after the barrier of that chunk's staged inputs.
//   Across calls: a rank arrives at the start barrier after its previous call is complete, so staging memory is free
//   after that barrier.
//   In place (output = input), two_stage and STAGED calls are correct: an element is stored by the thread that has
//   loaded its sum, or after a barrier that follows all loads of the element. one_stage without STAGED cannot be in
//   place, as peers may still load the input.
//
// Failure. If a barrier gives up, the block skips the rest of the kernel, and outputs are undefined (barrier.cuh).
#include "collectives/shared/multimem_packs.cuh"
#include "collectives/sums/ranges.cuh"
#include "sync/barrier.cuh"

constexpr bool TO_OUTPUTS = DRVFUSE_TO_OUTPUTS;
using AliasBarrier = Barrier<RANKS, true>;

struct AllreduceMultimemParams : AllreduceParams {
    MultimemCall multimem;
};

// Sets `pack` to the sum, over all ranks, of the packs with index `index` of the inputs.
__device__ __forceinline__ void reduce_input(InPack& pack, const AllreduceMultimemParams& p, i64 index) {
    const char* from = p.multimem.inputs + index * IN_BYTES;
    if (RAGGED && p.count - index * W < W) {
        reduce_elements(pack, from, p.count - index * W);
    } else {
        reduce_pack(pack, from);
    }
}

#if !DRVFUSE_TWO_STAGE

__device__ __forceinline__ void one_stage(const AllreduceMultimemParams& p, Trace& trace, const Epilogue& apply) {
    const i64 packs = (p.count + W - 1) / W;
    const i64 chunk = STAGED ? p.chunk_packs : packs;
    i64 half = 0;
    AliasBarrier barrier(p.call, trace);
    if (!barrier.arrive_and_wait(false)) return;
#pragma unroll 1
    for (i64 begin = 0; begin < packs; begin += chunk) {
        const i64 count = packs - begin < chunk ? packs - begin : chunk;
        if constexpr (STAGED) {
            stage_input(p, p.multimem.staging + half, begin, count);
            trace.lap(TraceRole::stage);
            if (!FAULT("multimem-no-barrier") && !barrier.arrive_and_wait(true)) return;
        }
        reduce_range(
            count, trace,
            [&](InPack& pack, int, i64 j) {
                if constexpr (STAGED) {
                    reduce_pack(pack, p.multimem.all_staging + half + j * IN_BYTES);
                } else {
                    reduce_input(pack, p, begin + j);
                }
            },
            [&](i64 j, float (&sum)[W]) {
                const OutPack pack = finish_pack(p, begin + j, sum, apply);
                trace.need(pack);
                trace.lap(TraceRole::reduce);
                store_output(p.output, begin + j, p.count, pack);
                trace.lap(TraceRole::store);
            });
        half = chunk * IN_BYTES - half;
    }
    if (!STAGED && !barrier.arrive_and_wait(true)) return;
    barrier.finish();
}

#else

// Stores the result of pack `index` to the outputs of all ranks.
__device__ __forceinline__ void broadcast_output(const AllreduceMultimemParams& p, i64 index, const OutPack& pack) {
    char* to = p.multimem.outputs + index * OUT_BYTES;
    if (RAGGED && p.count - index * W < W) {
        broadcast_elements(to, pack, p.count - index * W);
    } else {
        broadcast_pack(to, pack);
    }
}

// Copies `count` packs at `from`, in this rank's staging memory, to the output, where the first becomes pack `first`.
// Each thread copies its share.
__device__ __forceinline__ void take_results(const AllreduceMultimemParams& p, const char* from, i64 first, i64 count) {
#pragma unroll 2
    for (i64 j = thread_index(); j < count; j += thread_count()) {
        OutPack pack;
        load_pack(pack, from + j * OUT_BYTES);
        store_output(p.output, first + j, p.count, pack);
    }
}

__device__ __forceinline__ void two_stage(const AllreduceMultimemParams& p, Trace& trace, const Epilogue& apply) {
    static_assert(IN_BYTES == OUT_BYTES, "results must be as large as inputs, whose places they take");
    const i64 chunk = p.chunk_packs;
    const i64 area = chunk * IN_BYTES;  // bytes of an owner's area
    const Packs part((p.count + W - 1) / W);
    i64 half = 0;
    AliasBarrier barrier(p.call, trace);
    if (!barrier.arrive_and_wait(false)) return;
#pragma unroll 1
    for (i64 done = 0; done < part.largest(); done += chunk) {
        if constexpr (STAGED) {
#pragma unroll 1
            for (int owner = 0; owner < RANKS; ++owner)
                stage_input(p, p.multimem.staging + owner * area, part.start(owner) + done,
                            part.in_chunk(owner, done, chunk));
            trace.lap(TraceRole::stage);
            if (!FAULT("multimem-no-barrier") && !barrier.arrive_and_wait(true)) return;
        }
        const i64 begin = part.start(p.call.rank) + done;
        char* const mine = p.multimem.all_staging + half + p.call.rank * area;
        reduce_range(
            part.in_chunk(p.call.rank, done, chunk), trace,
            [&](InPack& pack, int, i64 j) {
                if constexpr (STAGED) {
                    reduce_pack(pack, mine + j * IN_BYTES);
                } else {
                    reduce_input(pack, p, begin + j);
                }
            },
            [&](i64 j, float (&sum)[W]) {
                const OutPack pack = finish_pack(p, begin + j, sum, apply);
                trace.need(pack);
                trace.lap(TraceRole::reduce);
                if constexpr (TO_OUTPUTS) {
                    broadcast_output(p, begin + j, pack);
                } else {
                    broadcast_pack(mine + j * OUT_BYTES, pack);
                }
                trace.lap(TraceRole::store);
            });
        if (!barrier.arrive_and_wait(true)) return;
        if constexpr (!TO_OUTPUTS) {
#pragma unroll 1
            for (int owner = 0; owner < RANKS; ++owner)
                take_results(p, p.multimem.staging + half + owner * area, part.start(owner) + done,
                             part.in_chunk(owner, done, chunk));
            trace.lap(TraceRole::gather);
        }
        if constexpr (!STAGED) half = RANKS * area - half;
    }
    barrier.finish();
}

#endif

extern "C" __global__ void __launch_bounds__(512, 1) DRVFUSE_KERNEL(
    const __grid_constant__ AllreduceMultimemParams p DRVFUSE_EPILOGUE_PARAMETER DRVFUSE_TRACE_PARAMETER) {
    Trace trace{DRVFUSE_TRACE_ARGUMENT};
    const Epilogue apply{DRVFUSE_EPILOGUE_ARGUMENT};
    begin(p.call);
    follow_producer(trace);
#if DRVFUSE_TWO_STAGE
    two_stage(p, trace, apply);
#else
    one_stage(p, trace, apply);
#endif
    end(p.call, trace);
}
