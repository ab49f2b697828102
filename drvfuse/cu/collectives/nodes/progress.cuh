// SPDX-License-Identifier: Apache-2.0
// How the host learns that an exchange between nodes takes too long.
//
// An exchange may wait without end, and no kernel of drvfuse runs meanwhile. So each rank has words in pinned host
// memory, which the kernels before and after each exchange write, also in replays of a graph. The words form two pairs.
// While the first word of a pair is greater than the second, the rank is in an exchange.
//   begun, ended       for exchanges of partial sums: the last block of `node_sums` stores the new epoch to
//                      `begun`, and the kernel after the exchange stores the same epoch, which it reads, to `ended`.
//                      If `node_sums` gives up, the epoch does not change, but the exchange still takes place: then
//                      `node_sums` stores 0 to `ended` and the time to `begun`. If the rank is aborted, the kernel
//                      after the exchange stores the largest number to `ended`.
//   sending, received  for all other exchanges, if the engine's waits are not bounded: `count_exchange` adds one to
//                      `sending` before the exchange, and `exchange_ended` adds one to `received` after it.
// Each word is written by one rank only, in the order of its stream.
#pragma once
#include "common/prelude.cuh"
#include "ptx/ordered.cuh"

struct Progress {
    u64 begun;
    u64 ended;
    u64 sending;
    u64 received;
};
