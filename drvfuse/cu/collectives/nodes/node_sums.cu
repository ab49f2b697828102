// SPDX-License-Identifier: Apache-2.0
// The first step of a call over several nodes: each rank sums its part of a tensor over the ranks of its node.
// nodes/sums.cuh and docs/nodes.md describe the later steps.
//
// Layout. The tensor is `items` items of `item_packs` packs of 16 bytes; rank k of the node owns a range of items
// (partition.cuh). For the all-reduce an item is a pack of the flat tensor, which counts as one row of `columns`
// elements in `row_packs` packs; the last pack may be partial. For the fused op an item is a row. With DRVFUSE_RAGGED
// rows may begin at any element and end in a partial pack; elements after the end count as +0, and take part in the
// exchange. Pack j of a range belongs to thread j mod (blocks * threads) of the grid, on every rank of the node.
//   STAGED   inputs that peers cannot read: each rank first copies its input to its payload, from offset `staging` on.
//            The staging memory has an area for the packs of each owner, as large as the largest range.
//   DRVFUSE_MANY (STAGED)  the items are the packs of several tensors (many.cuh), which no peer reads.
//
// Grid. One dimension, at most DRVFUSE_MAX_BLOCKS blocks, the same on every rank of the node.
//
// Numerics. +0.0f, then the inputs of the ranks of the node, in their order and in fp32. The sum is stored as float32,
// without a further rounding.
//
// Memory ordering. Thread t of block b reads from a peer only data that the peer's thread t of block b wrote, or that
// was complete before the peer's kernel began. So the barrier between blocks of equal index (barrier.cuh) orders the
// reads after those writes.
//   Inputs: the start barrier orders the reads after the peers' earlier kernels. No barrier follows the reads in this
//   kernel. The inputs are free after the barrier of the call's second kernel, at which a rank arrives when this kernel
//   is complete. Until then a rank writes only its own part of its output, and no other rank reads that part of its
//   input; so a call may be in place.
//   Staging: written after the start barrier. A peer arrives at the start barrier when its earlier kernels, and so
//   their reads, are complete. Staging is read after the second barrier.
//   Partial sums: written after the start barrier, as they may lie where peers read results or staging of an earlier
//   call or chunk; then written and read on this device alone, by kernels and the exchange in the order of the
//   stream.
//
// Failure. If a barrier gives up, the block skips the rest of the kernel (barrier.cuh). The block clears its sums, so
// that no kernel reads memory that was never written, and the status that follows the sums tells all nodes that the
// sums are undefined (nodes/sums.cuh). If the start barrier has given up, these stores, and those of the exchange, are made
// although peers have not arrived at it: a peer that still runs an earlier call may then read wrong data, in a call
// whose own barriers have not failed (docs/nodes.md). The host still watches the exchange (progress.cuh). The kernel
// after the exchange gives up at its own barrier.
#include "collectives/nodes/sums.cuh"
#include "collectives/sums/ranges.cuh"
#include "sync/barrier.cuh"
#ifdef DRVFUSE_MANY
#include "collectives/sums/many.cuh"
#endif

struct NodeSumsParams {
    Call call;
    NodeCall node;
    i64 columns;
    i64 row_packs;
    i64 items;
    i64 item_packs;
    i64 staging;
};

#ifdef DRVFUSE_MANY
struct Params : NodeSumsParams {
    ManyCall many;
};
#else
using Params = NodeSumsParams;
#endif

// Loads pack `index` of the tensor.
__device__ __forceinline__ void load_tensor(InPack& pack, const void* tensor, const NodeSumsParams& p, i64 index) {
    const char* from = static_cast<const char*>(tensor) + index * IN_BYTES;
    if constexpr (RAGGED) {
        const i64 row = index / p.row_packs;
        const i64 column = (index - row * p.row_packs) * W;
        from = static_cast<const char*>(tensor) + (row * p.columns + column) * i64(sizeof(In));
        if (reinterpret_cast<u64>(from) % 16 != 0 || p.columns - column < W) {
            load_elements(pack, from, p.columns - column);
            return;
        }
    }
    load_pack(pack, from);
}

// Loads pack `index` of this rank's input.
__device__ __forceinline__ void load_own(InPack& pack, const Params& p, i64 index) {
#ifdef DRVFUSE_MANY
    load_of_many(pack, p.many, index);
#else
    load_tensor(pack, p.call.input, p, index);
#endif
}

// Computes and stores this rank's partial sums. Returns false to all threads of a block that has given up.
__device__ __forceinline__ bool node_sums(const Params& p, Trace& trace) {
    const Partition<i64, RANKS> part(p.items);
    const i64 area = part.largest() * p.item_packs * IN_BYTES;
    const auto begin = [&](int owner) { return part.start(owner) * p.item_packs; };
    const auto count = [&](int owner) { return part.in_chunk(owner, 0, p.items) * p.item_packs; };
    Barrier<RANKS> barrier(p.call, trace);
    if (!FAULT("node-sums-no-start-barrier") && !barrier.arrive_and_wait(false)) return false;
    if constexpr (STAGED) {
        char* const own = payload(p.call.workspaces[p.call.rank]) + p.staging;
#pragma unroll 1
        for (int owner = 0; owner < RANKS; ++owner) {
#pragma unroll 2
            for (i64 j = thread_index(); j < count(owner); j += thread_count()) {
                InPack pack;
                load_own(pack, p, begin(owner) + j);
                store_pack(own + owner * area + j * IN_BYTES, pack);
            }
        }
        trace.lap(TraceRole::stage);
        if (!barrier.arrive_and_wait(!FAULT("node-sums-staging-unpublished"))) return false;
    }
    const i64 first = begin(p.call.rank);
    reduce_range(
        count(p.call.rank), trace,
        [&](InPack& pack, int source, i64 j) {
            if constexpr (STAGED) {
                load_pack(pack, payload(p.call.workspaces[source]) + p.staging + p.call.rank * area + j * IN_BYTES);
            } else {
                load_tensor(pack, p.call.sources[source], p, first + j);
            }
        },
        [&](i64 j, float (&sum)[W]) {
            SumPack pack;
            from_float(pack, sum);
            trace.need(pack);
            trace.lap(TraceRole::reduce);
            store_pack(p.node.sums + j * SUM_BYTES, pack);
            trace.lap(TraceRole::store);
        });
    exchange_begins(p.call, p.node, barrier.finish());
    return true;
}

// Called by all threads of a block that has given up. Clears the partial sums that this block computes, so that no
// kernel reads memory that was never written.
__device__ __forceinline__ void clear_sums(const Params& p) {
    const i64 packs = Partition<i64, RANKS>(p.items).in_chunk(p.call.rank, 0, p.items) * p.item_packs;
#pragma unroll 1
    for (i64 j = thread_index(); j < packs; j += thread_count()) {
        SumPack pack;
        clear(pack.word);
        store_pack(p.node.sums + j * SUM_BYTES, pack);
    }
}

extern "C" __global__ void __launch_bounds__(512, 1)
    node_sums(const __grid_constant__ Params p DRVFUSE_TRACE_PARAMETER) {
    Trace trace{DRVFUSE_TRACE_ARGUMENT};
    begin(p.call);
    follow_producer(trace);
    if (!node_sums(p, trace)) {
        clear_sums(p);
        sums_are_undefined(p.node);
    }
    end(p.call, trace);
}
