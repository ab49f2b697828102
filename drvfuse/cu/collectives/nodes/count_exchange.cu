// SPDX-License-Identifier: Apache-2.0
// Adds one to Progress::sending (progress.cuh), which no other kernel writes, before an exchange of bytes. This kernel
// has one thread and is launched without PDL, so all earlier work of the stream is complete.
#include "collectives/nodes/progress.cuh"

struct CountParams {
    u64* word;
};

extern "C" __global__ void count_exchange(const __grid_constant__ CountParams p) {
    ptx::store_relaxed_sys(p.word, ptx::load_relaxed_sys(p.word) + 1);
}
