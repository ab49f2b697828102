// SPDX-License-Identifier: Apache-2.0
// Partial sums of the nodes and their status, for the kernels before and after an exchange of the sums (docs/nodes.md).
// progress.cuh describes what these kernels report to the host.
//
// Partial sums are float32, in packs of as many elements as a pack of the input has. A rank's payload holds partial
// sums of the part that the rank owns. The payload has one place for each node, and the places are `stride` bytes
// apart. `node_sums` writes the sums of its own node, and the exchange writes those of the other nodes. With
// node_order="engine" there is only one place: the exchange adds the sums of all nodes there.
//
// Status. The last 16 bytes of a place are float32 numbers too and take part in the exchange: the status of the sums
// that precede them, and zeros. The status is 0.0f if the sums are defined. It is 1.0f if a block of `node_sums` gave
// up, or if the abort word was set when the last block ended: a peer that gave up may have overwritten the input that
// this rank was reading. With node_order="engine" the exchange adds the statuses: the sum is the number of nodes that
// failed, as small integers are exact in float32. `check_statuses` reads the statuses after the exchange. If one is not
// 0, `check_statuses` reports a failed exchange (kind EXCHANGE) and aborts the ranks of its own node.
//   No launch writes both 0.0f and 1.0f. One thread of the last block that reaches Barrier::finish writes the status,
//   and if a block has given up, no block counts as the last one, since a block that has given up does not call
//   Barrier::finish. Several blocks that have given up write 1.0f, by relaxed stores.
//   The stores are complete before the exchange, and the exchange before the loads, in the order of the stream.
#pragma once
#include "collectives/shared/kernel.cuh"
#include "collectives/nodes/failure.cuh"
#include "collectives/nodes/progress.cuh"

struct NodeCall {
    char* sums;  // the partial sums: in node_sums those of this rank's node, in later kernels those of node 0
    Progress* progress;
    i64 stride;  // bytes from the sums of one node to those of the next, status included
    int nodes;   // number of nodes; 1 if the exchange has added the sums of all nodes
    int unused;
};

using SumPack = Pack<float, W>;
constexpr i64 SUM_BYTES = sizeof(SumPack);
// The number of nodes whose packs a thread loads at once: fewer if the sums of PACKS packs take many registers.
constexpr int NODES_AT_ONCE = PACKS > 2 ? 2 : 4;

// Sets `total` to +0.0f + node 0 + node 1 + ... load(pack, address) loads the pack of one node; the pack of node 0 lies
// at `from`.
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

// Sets `total` to the sum over the nodes of pack `index` of this rank's part.
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

// Returns the bits of the status that follows the sums of node `place`. 0: the sums are defined.
__device__ __forceinline__ u32 status_of(const NodeCall& call, int place) {
    return ptx::load_u32(call.sums + (place + 1) * call.stride - STATUS_BYTES);
}

// Returns to lane t of the first warp of block 0 the status of node t, for check_statuses(). Called at the start of a
// kernel, long before check_statuses(), so that nothing waits for the load.
__device__ __forceinline__ u32 first_status(const NodeCall& call) {
    return blockIdx.x == 0 && threadIdx.x < 32 && threadIdx.x < call.nodes ? status_of(call, threadIdx.x) : 0;
}

// Reports statuses that are not 0. In the first warp of block 0 lane t checks nodes t, t + 32, ...; `first` is the
// result of first_status(). Called by all threads before Barrier::finish. The __syncwarp makes all lanes read the epoch
// for their reports before thread 0 calls Barrier::finish, which may write the new epoch.
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
