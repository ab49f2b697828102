// SPDX-License-Identifier: Apache-2.0
// How the host learns that an exchange between nodes takes too long.
//
// An exchange may wait for ever, and no kernel of ours runs meanwhile. So each rank has words in pinned host memory, which
// kernels before and behind each exchange write, in replays of a graph too. While the first word of a pair is ahead of the
// second the rank is in an exchange.
//   begun, ended       exchanges of partial sums between kernels that know of them: the last block of `node_sums` stores
//                      the epoch that it leaves to `begun`, and the kernel behind the exchange stores the epoch that it
//                      finds, the same, to `ended`.
//   sending, received  all other exchanges, of engines whose waits are not bounded: `count_exchange` (count_exchange.cu)
//                      adds one to each, in front of the exchange and behind it.
// Each word is written by one rank, in the order of its stream.
#pragma once
#include "common/prelude.cuh"
#include "ptx/ordered.cuh"

struct Progress {
    u64 begun;
    u64 ended;
    u64 sending;
    u64 received;
};
