// SPDX-License-Identifier: Apache-2.0
// Where the partial sums of the nodes lie, for the kernels before and after an exchange of these sums (docs/nodes.md).
// progress.cuh describes what these kernels report to the host.
//
// Partial sums are float32, in packs of as many elements as a pack of the input has. A rank's payload holds the partial
// sums of the part that the rank owns, node by node, `stride` bytes apart. `node_sums` writes the sums of its own node, and
// the exchange writes those of the other nodes. In the order "engine" there is one place, in which the exchange adds all.
#pragma once
#include "collectives/kernel.cuh"
#include "collectives/progress.cuh"

struct NodeCall {
    char* sums;  // address of the partial sums: in node_sums those of the own node, else those of node 0
    Progress* progress;
    i64 stride;
    int nodes;  // number of places: 1 in the order "engine"
    int unused;
};

using SumPack = Pack<float, W>;
constexpr i64 SUM_BYTES = sizeof(SumPack);
constexpr int NODES_AT_ONCE = PACKS > 2 ? 2 : 4;  // packs in flight per thread; registers are needed for other sums

// total = +0.0f + node 0 + node 1 + ... load(pack, address) loads the pack of one node; the pack of node 0 is at `from`.
template <typename Load>
__device__ __forceinline__ void add_nodes(SumPack& total, const NodeCall& call, const char* from, const Load& load) {
    float sum[W];
    clear(sum);
#pragma unroll 1
    for (int first = 0; first < call.nodes; first += NODES_AT_ONCE) {
        SumPack packs[NODES_AT_ONCE];
#pragma unroll
        for (int n = 0; n < NODES_AT_ONCE; ++n) {
            if (first + n < call.nodes) load(packs[n], from + (first + n) * call.stride);
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

// The total of pack `index` of the own part.
__device__ __forceinline__ void sum_nodes(SumPack& total, const NodeCall& call, i64 index) {
    add_nodes(total, call, call.sums + index * SUM_BYTES,
              [](SumPack& pack, const char* from) { load_pack(pack, from); });
}

// Called with the value of Barrier::finish, which is the new epoch in one thread and 0 elsewhere.
__device__ __forceinline__ void exchange_begins(const NodeCall& call, u64 epoch) {
    if (epoch != 0) ptx::store_relaxed_sys(&call.progress->begun, epoch);
}

// Called by all threads with the epoch that the kernel read at its start.
__device__ __forceinline__ void exchange_has_ended(const NodeCall& call, u64 epoch) {
    if (blockIdx.x == 0 && threadIdx.x == 0) ptx::store_relaxed_sys(&call.progress->ended, epoch);
}
