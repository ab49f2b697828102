// SPDX-License-Identifier: Apache-2.0
// Copies bytes between two arrays that are aligned to 16 bytes: it writes the inputs of a collective, or reads its outputs.
//
// It lets its dependents start at once and waits for its producer, so that a sequence of collectives and copies is a
// chain of dependent launches.
#include "common/pack16.cuh"
#include "sync/pdl.cuh"

extern "C" __global__ void copy(const char* from, char* to, i64 nbytes) {
    launch_dependents();
    wait_for_producer();
    const i64 stride = 16 * i64(gridDim.x) * blockDim.x;
#pragma unroll 1
    for (i64 at = 16 * (i64(blockIdx.x) * blockDim.x + threadIdx.x); at < nbytes; at += stride) {
        if (nbytes - at >= 16) {
            u32 words[4];
            load_words<4>(words, from + at);
            store_words<4>(to + at, words);
        } else {
#pragma unroll 1
            for (i64 i = at; i < nbytes; ++i) to[i] = from[i];
        }
    }
}
