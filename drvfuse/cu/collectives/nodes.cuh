// SPDX-License-Identifier: Apache-2.0
// Where the partial sums of the nodes lie, for the kernels before and after an exchange of these sums (docs/nodes.md).
// progress.cuh describes what these kernels report to the host.
//
// Partial sums are float32, in packs of as many elements as a pack of the input has. A rank's payload holds the partial
// sums of the part that the rank owns, node by node, `stride` bytes apart. `node_sums` writes the sums of its own
// node, and the exchange writes those of the other nodes. In the order "engine" there is one place, in which the
// exchange adds all.
//
// Status. The last 16 bytes of a place are float32 numbers too and take part in the exchange: the status of the sums
// that precede them, and zeros. The status is 0.0f if the sums are defined. It is 1.0f if a block of `node_sums` gave
// up, or if the abort word was set when the last block ended: a peer that gave up may have overwritten the input that
// this rank was reading. In the order "engine" the exchange adds the statuses: the sum is the number of nodes that
// failed, as small integers are exact in float32. `check_statuses` reads the statuses after the exchange. If one is
// not 0, `check_statuses` reports a failed exchange (kind EXCHANGE) and aborts the ranks of its own node.
//   No launch writes both values. One thread of the last block that reaches Barrier::finish writes the status, and no
//   block is the last one if a block has given up, since a block that has given up does not call Barrier::finish.
//   Several blocks that have given up write 1.0f, by relaxed stores.
//   The stores are complete before the exchange, and the exchange before the loads, in the order of the stream.
#pragma once
#include "collectives/kernel.cuh"
#include "collectives/node_failure.cuh"
#include "collectives/progress.cuh"

struct NodeCall {
    char* sums;  // address of the partial sums: in node_sums those of this rank's node, else those of node 0
    Progress* progress;
    i64 stride;  // bytes of a place, status included
    int nodes;   // number of places: 1 in the order "engine"
    int unused;
};

using SumPack = Pack<float, W>;
constexpr i64 SUM_BYTES = sizeof(SumPack);
constexpr int NODES_AT_ONCE = PACKS > 2 ? 2 : 4;  // packs in flight per thread; registers are needed for other sums

// total = +0.0f + node 0 + node 1 + ... load(pack, address) loads the pack of one node; the pack of node 0 is at
// `from`.
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

// The total of pack `index` of this rank's part.
__device__ __forceinline__ void sum_nodes(SumPack& total, const NodeCall& call, i64 index) {
    add_nodes(total, call, call.sums + index * SUM_BYTES,
              [](SumPack& pack, const char* from) { load_pack(pack, from); });
}

constexpr int STATUS_BYTES = 16;

// Writes the status after the sums at `call.sums`. Called by one thread, or by several with the same value.
__device__ __forceinline__ void store_status(const NodeCall& call, float status) {
    char* const at = call.sums + call.stride - STATUS_BYTES;
    ptx::store_relaxed_sys(reinterpret_cast<u64*>(at), u64(__float_as_uint(status)));
    ptx::store_relaxed_sys(reinterpret_cast<u64*>(at + 8), u64(0));
}

// Writes the status of this rank's sums, and tells the host that an exchange begins. Called by all threads; `epoch`
// is the result of Barrier::finish, which is the new epoch in one thread and 0 elsewhere.
__device__ __forceinline__ void exchange_begins(const Call& call, const NodeCall& node, u64 epoch) {
    if (epoch == 0) return;
    const bool aborted = ptx::load_relaxed_sys(abort_word(call.workspaces[call.rank])) != 0;
    store_status(node, aborted ? 1.0f : 0.0f);
    ptx::store_relaxed_sys(&node.progress->begun, epoch);
}

// Writes the status "undefined", and the words for the host (progress.cuh). Called by all threads of a block that has
// given up.
__device__ __forceinline__ void sums_are_undefined(const NodeCall& call) {
    if (threadIdx.x != 0) return;
    if (!FAULT("node-status-not-written")) store_status(call, 1.0f);
    ptx::store_relaxed_sys(&call.progress->ended, u64(0));
    ptx::store_relaxed_sys(&call.progress->begun, ptx::nanoseconds());
}

// Tells the host that the exchange has ended. Called by all threads: `epoch` is the epoch that the kernel read at its
// start, and `aborted` says whether the rank was aborted then.
__device__ __forceinline__ void exchange_has_ended(const NodeCall& call, u64 epoch, bool aborted) {
    if (blockIdx.x == 0 && threadIdx.x == 0) ptx::store_relaxed_sys(&call.progress->ended, aborted ? ~u64(0) : epoch);
}

// The bits of the status of place `place`. 0: the sums are defined.
__device__ __forceinline__ u32 status_of(const NodeCall& call, int place) {
    return ptx::load_u32(call.sums + (place + 1) * call.stride - STATUS_BYTES);
}

// The first warp of block 0 checks the statuses, lane t those of places t, t + 32, ... This function returns the
// status of place t. It is called at the start of a kernel, and the kernel uses the result only at its end, so that
// nothing waits for the load.
__device__ __forceinline__ u32 first_status(const NodeCall& call) {
    return blockIdx.x == 0 && threadIdx.x < 32 && threadIdx.x < call.nodes ? status_of(call, threadIdx.x) : 0;
}

// Reports statuses that are not 0. Called by all threads before Barrier::finish. A report has the epoch at the start
// of the kernel: __syncwarp orders the read of the epoch before Barrier::finish in thread 0, and with it before the
// write of the new epoch.
template <int Ranks>
__device__ __forceinline__ void check_statuses(const Call& call, const NodeCall& node, u32 first) {
    if (blockIdx.x != 0 || threadIdx.x >= 32 || FAULT("node-status-not-read")) return;
#pragma unroll 1
    for (int place = threadIdx.x; place < node.nodes; place += 32) {
        const u32 status = place == threadIdx.x ? first : status_of(node, place);
        if (status != 0) node_gave_up<Ranks>(call, place, node.nodes);
    }
    __syncwarp();
}
