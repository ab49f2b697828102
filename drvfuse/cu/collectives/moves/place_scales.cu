// SPDX-License-Identifier: Apache-2.0
// Stores the scales of one rank's rows among the scales of all rows, on one device. The driver has copied them to that
// device before.
//
// Layout. As arranged_scales.cuh says. A launch stores `nbytes` bytes of the rank's scales, in packs of 16, from pack
// `begin` on. They lie at `source`.
// Grid. One dimension, any number of blocks: pack j belongs to thread j mod (blocks * threads).
// Memory ordering. No block reads what this kernel writes; the wait for the producer precedes every read.
// Failure. The kernel waits only for the producer, so it cannot hang.
#include "collectives/moves/arranged_scales.cuh"
#include "sync/pdl.cuh"

struct PlaceScalesParams {
    Arrangement arrangement;
    char* scales;
    char* source;
    i64 begin, nbytes;
    int distance;
    int clears;  // whether the padding after the last row is cleared
};

extern "C" __global__ void __launch_bounds__(256) place_scales(const __grid_constant__ PlaceScalesParams p) {
    wait_for_producer();
    const u32 first = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
    if (p.clears) clear_rows_behind(p.scales, p.arrangement, first, threads);
#pragma unroll 1
    for (i64 j = first; (j - threadIdx.x % 32) * 16 < p.nbytes; j += threads) {
        const Spot from = {p.source + j * 16, p.nbytes - j * 16};
        u32 word[4];
        load_bytes(word, from);
        if (from.remaining > 0) store_scales(p.scales, p.arrangement, p.distance, u32(p.begin + j), word);
    }
    launch_dependents();
}
