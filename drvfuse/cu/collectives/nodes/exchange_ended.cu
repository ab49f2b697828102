// SPDX-License-Identifier: Apache-2.0
// The kernel that follows an exchange of bytes between nodes: it checks the abort words that the exchange has
// brought.
//
// Layout. After the bytes that a rank sends to its peer of another node, the exchange carries the rank's abort word,
// to nodes_word(n) of the peer's workspace, where n is the rank's node. A word to which no exchange has written since
// the last reset is 0.
// Grid. One block of 32 threads; thread t checks nodes t, t + 32, ... The kernel is launched without PDL.
// Why no failure is missed. A kernel gives up in one of two ways (workspace.cuh): it calls give_up(), which sets the
// rank's abort word unless another thread of the rank does so; or it has read that the abort word is set. So when a
// kernel that has given up is complete, the abort word of its rank is set, and the next exchange on the stream
// carries the word. If a peer sets the word while the exchange reads it, the kernels before the exchange have not
// given up and the bytes are right, so either value may arrive.
// Memory ordering. The exchange is complete when this kernel begins, in the order of the stream, and later kernels of
// the stream read the abort word that this one sets.
// Failure. The kernel waits for nothing, so it cannot hang.
#include "collectives/nodes/failure.cuh"

constexpr int RANKS = DRVFUSE_RANKS;

struct ExchangeEndedParams {
    Call call;
    u64* received;  // Progress::received of this rank (progress.cuh), null if exchanges are not counted
    i64 nodes;
};

extern "C" __global__ void __launch_bounds__(32) exchange_ended(const __grid_constant__ ExchangeEndedParams p) {
    const u64* const words = nodes_word(p.call.workspaces[p.call.rank], 0);
    for (int node = threadIdx.x; node < p.nodes; node += 32) {
        if (words[node] != 0 && !FAULT("node-words-not-read")) node_gave_up<RANKS>(p.call, node, p.nodes);
    }
    if (threadIdx.x == 0 && p.received != nullptr)
        ptx::store_relaxed_sys(p.received, ptx::load_relaxed_sys(p.received) + 1);
}
