// SPDX-License-Identifier: Apache-2.0
// Sends packs of 16 bytes by the push protocol (sync/push.cuh), and sums received packs in the order of the ranks.
#pragma once
#include "collectives/shared/kernel.cuh"
#include "sync/push.cuh"

constexpr int PEERS = RANKS > 1 ? RANKS - 1 : 1;  // at least 1: an array cannot be empty

// Sends a pack to every peer. In the slots of the peer at distance d it goes to offset + (d - 1) * stride.
template <typename Push, int N>
__device__ __forceinline__ void send_to_all(const Push& push, u32 offset, u32 stride, const u32 (&word)[N]) {
#pragma unroll
    for (int distance = 1; distance < RANKS; ++distance) push.send(distance, offset + (distance - 1) * stride, word);
}

// Reorders the packs. Before the call packs[k] is the pack of rank (rank + k) mod RANKS, after it that of rank k. After
// unrolling all indices are constants, so the array stays in registers.
template <typename P>
__device__ __forceinline__ void into_rank_order(P (&packs)[RANKS], int rank) {
#pragma unroll
    for (int step = 1; step < RANKS; step *= 2) {
        if (rank & step) {
            P moved[RANKS];
#pragma unroll
            for (int k = 0; k < RANKS; ++k) moved[(k + step) % RANKS] = packs[k];
#pragma unroll
            for (int k = 0; k < RANKS; ++k) packs[k] = moved[k];
        }
    }
}

// Receives the peers' packs, and sums them and this rank's pack `own` in fp32, in the order of the ranks.
template <typename Push>
__device__ __forceinline__ void sum_received(float (&sum)[W], Push& push, const InPack& own, u32 offset, u32 stride,
                                             int rank, bool wanted) {
    InPack packs[RANKS];
    packs[0] = own;
    if constexpr (RANKS > 1) {
        u32 words[PEERS][InPack::words];
        push.receive(words, PUSH, offset, stride, wanted);
#pragma unroll
        for (int distance = 1; distance < RANKS; ++distance) {
#pragma unroll
            for (int i = 0; i < InPack::words; ++i) packs[RANKS - distance].word[i] = words[distance - 1][i];
        }
        if (!FAULT("order-of-distance")) into_rank_order(packs, rank);
    }
    sum_packs(sum, packs);
}
