// SPDX-License-Identifier: Apache-2.0
// Where a row of push_two_shot and its results lie in the slots of a round. The layout is at the top of
// allreduce_rmsnorm_fp8_push.cu.
#pragma once
#include "collectives/rows/scale_words.cuh"

using Sent = If<RESIDUAL, Residual, Out>;
constexpr u32 RESULT_BYTES = sizeof(Pack<Sent, W>);
constexpr bool SCALES = SCALED && !RESIDUAL;  // whether the owner of a row sends the row's scales

// A row of a round: the distance of its owner, and where it and its results lie in the slots.
struct Place {
    int distance;       // the distance of the row's owner from this rank: (owner - rank) mod ranks
    u32 offset;         // offset of the input row in the slots for distance 1
    u32 stride;         // bytes from the slots for distance d to those for d + 1, for input rows and normed rows
    u32 normed;         // offset of the normed row in the slots for distance 1
    u32 result;         // offset of the row's codes or residual_out in the slots for distance 1
    u32 result_stride;  // bytes from the slots for distance d to those for d + 1, for codes or residual_out
    u32 scale;          // offset of the words with the row's scales in the slots for distance 1
    u32 scale_stride;   // bytes from the slots for distance d to those for d + 1, for words with scales

    // This rank is RANKS - distance ranks after the row's owner, so it receives the owner's words in the slots of
    // distance RANKS - distance. Returns the number of strides from the slots of distance 1 to these slots.
    __device__ __forceinline__ int steps() const { return RANKS - distance - 1; }
};

template <typename Pushing>
__device__ __forceinline__ Place place(const RowsParams& p, const Pushing& push, int row) {
    const u32 owned = p.chunk_rows / RANKS, index = row / RANKS;
    const u32 stride = owned * input_stride(p), row_bytes = packs_of_row(p) * RESULT_BYTES;
    const u32 normed = GREETINGS_BYTES + (RANKS - 1) * stride;
    const u32 results = normed + (GATHERS_NORMED ? (RANKS - 1) * stride : 0);
    const u32 scales = results + (RANKS - 1) * owned * row_bytes;
    return {push.distance(row % RANKS),
            GREETINGS_BYTES + index * input_stride(p),
            stride,
            normed + index * input_stride(p),
            results + index * row_bytes,
            owned * row_bytes,
            scales + index * scale_words(p) * 4,
            owned * scale_words(p) * 4};
}
