// SPDX-License-Identifier: Apache-2.0
// Aborts the ranks of a node when one of them learns, after an exchange, that a kernel of another node gave up.
#pragma once
#include "sync/workspace.cuh"

// Writes a report of kind EXCHANGE: node `place` of `places` has given up. If the exchange engine adds the sums of the
// nodes, `places` is 1, and the node is not known. Aborts the ranks of this rank's node. If these ranks are aborted
// already, one of them has reported the reason, and nothing happens.
template <int Ranks>
__device__ __forceinline__ void node_gave_up(const Call& call, int place, int places) {
    char* const own = call.workspaces[call.rank];
    if (ptx::load_relaxed_sys(abort_word(own)) != 0) return;
    give_up<Ranks>(call, [&](Report* report) {
        report->peer = place;
        report->phase = 0;
        report->expected = *epoch_word(own) / EPOCH_UNIT;
        report->seen = places;
        report->kind = 4;
    });
}
