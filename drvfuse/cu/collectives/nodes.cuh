// SPDX-License-Identifier: Apache-2.0
// What the two kernels of a call over several nodes share (docs/nodes.md): where the partial sums of the nodes lie, and
// how the host learns that an exchange takes too long.
//
// Partial sums are float32, in packs of as many elements as a pack of the input has. Those of the part that a rank owns
// lie in its payload, node by node, `stride` bytes apart. `node_sums` writes those of its own node, the exchange the
// others. In the order "engine" there is one place, which the exchange adds up.
//
// Progress. An exchange may wait for ever, and no kernel of ours runs meanwhile. So the last block of `node_sums` stores
// the epoch that it leaves to `progress->begun`, in pinned host memory, and the kernel behind the exchange stores the one
// that it finds, the same, to `progress->ended`. While `begun` is ahead the rank is in an exchange, in replays of a graph
// too.
#pragma once
#include "collectives/kernel.cuh"

struct Progress {
    u64 begun;
    u64 ended;
};

struct NodeCall {
    char* sums;  // node_sums: of the own node; else of node 0
    Progress* progress;
    i64 stride;
    int nodes;  // places: 1 in the order "engine"
    int unused;
};

using SumPack = Pack<float, W>;
constexpr i64 SUM_BYTES = sizeof(SumPack);
constexpr int NODES_AT_ONCE = PACKS > 2 ? 2 : 4;  // packs in flight, beside those whose sums are in registers

// total = +0.0f + node 0 + node 1 + ... of pack `index` of the own part.
__device__ __forceinline__ void sum_nodes(SumPack& total, const NodeCall& call, i64 index) {
    const char* from = call.sums + index * SUM_BYTES;
    float sum[W];
    clear(sum);
#pragma unroll 1
    for (int first = 0; first < call.nodes; first += NODES_AT_ONCE) {
        SumPack packs[NODES_AT_ONCE];
#pragma unroll
        for (int n = 0; n < NODES_AT_ONCE; ++n) {
            if (first + n < call.nodes) load_pack(packs[n], from + (first + n) * call.stride);
        }
#pragma unroll
        for (int n = 0; n < NODES_AT_ONCE; ++n) {
            if (first + n < call.nodes) {
                float v[W];
                to_float(v, packs[n]);
#pragma unroll
                for (int i = 0; i < W; ++i) sum[i] = __fadd_rn(sum[i], v[i]);
            }
        }
    }
    from_float(total, sum);
}

// By the thread to which Barrier::finish has returned the new epoch.
__device__ __forceinline__ void exchange_begins(const NodeCall& call, u64 epoch) {
    if (epoch != 0) ptx::store_relaxed_sys(&call.progress->begun, epoch);
}

// By all threads, with the epoch that the kernel has found.
__device__ __forceinline__ void exchange_has_ended(const NodeCall& call, u64 epoch) {
    if (blockIdx.x == 0 && threadIdx.x == 0) ptx::store_relaxed_sys(&call.progress->ended, epoch);
}
