// SPDX-License-Identifier: Apache-2.0
// The tables of the kernels that move bytes: the source, target and size of the bytes of each pair of ranks. Functions
// that return where a pack lies.
//
// All tables are indexed by distance. Entry d of `sent` describes the bytes from this rank to rank (rank + d) mod
// ranks, entry d of `received` the bytes from rank (rank - d) mod ranks to this rank, and entry 0 of both the bytes
// that stay. The bytes of a pair of ranks are numbered in packs of 16: first those of the rows, then those of the
// scales, if there are any. A pack may begin at any address (common/bytes.cuh). drvfuse/ops/collectives/moves/kernel.py
// reads these definitions.
#pragma once
#include "collectives/moves/arranged_scales.cuh"
#include "sync/workspace.cuh"

constexpr int RANKS = DRVFUSE_RANKS;
constexpr int PEERS = RANKS > 1 ? RANKS - 1 : 1;  // at least 1: an array cannot be empty
constexpr bool ARRANGED = DRVFUSE_ARRANGED;       // the scales have an Arrangement

struct Move {
    // The offsets of the bytes in the sender's input and in the receiver's output, and their number.
    i64 source, target, nbytes;
};

struct Moved {
    char* input;
    char* output;
    // The arrays of peers that a kernel accesses, by distance from 1 on: the senders' inputs (pull) or the receivers'
    // outputs (put).
    char* far[DRVFUSE_MAX_RANKS];
    Move sent[DRVFUSE_MAX_RANKS];
    Move received[DRVFUSE_MAX_RANKS];
};

struct MoveParams {
    Call call;
    Moved rows, scales;
    i64 most;         // the largest number of packs that one rank sends to another
    i64 chunk_packs;  // packs that one rank sends to another in a round, or stages for it at a time
    Arrangement arrangement;
};

__device__ __forceinline__ i64 packs_of(i64 bytes) { return (bytes + 15) / 16; }

// Returns where pack `index` of a sequence lies. The sequence consists of the packs of an array of rows, and then those
// of an array of scales.
__device__ __forceinline__ Spot spot(char* rows, i64 row_bytes, char* scales, i64 scale_bytes, i64 index) {
    const i64 behind = index - packs_of(row_bytes);
    if (behind < 0) return {rows + index * 16, row_bytes - index * 16};
    return {scales + behind * 16, scale_bytes - behind * 16};
}

// Returns where pack `index` of the bytes for the rank at `distance` lies in this rank's input.
__device__ __forceinline__ Spot source_of(const MoveParams& p, int distance, i64 index) {
    const Move &rows = p.rows.sent[distance], &scales = p.scales.sent[distance];
    return spot(p.rows.input + rows.source, rows.nbytes, p.scales.input + scales.source, scales.nbytes, index);
}

// Where this rank stores a pack that it receives. A pack of rows goes to one address, the words of a pack of arranged
// scales to several (arranged_scales.cuh).
struct ArrangedSpot : Spot {
    const MoveParams& p;
    int distance;
    i64 pack;  // the index of the pack among those of the sender's scales; negative for a pack of rows

    __device__ __forceinline__ ArrangedSpot(const MoveParams& params, int from, i64 index)
        : p(params), distance(from), pack(index - packs_of(params.rows.received[from].nbytes)) {
        const Move &rows = p.rows.received[from], &scales = p.scales.received[from];
        address = pack < 0 ? p.rows.output + rows.target + index * 16 : nullptr;
        remaining = pack < 0 ? rows.nbytes - index * 16 : scales.nbytes - pack * 16;
    }
};

__device__ __forceinline__ bool is_whole(const ArrangedSpot& spot) {
    return spot.pack < 0 && is_whole(static_cast<const Spot&>(spot));
}

__device__ __forceinline__ void store_bytes(const ArrangedSpot& to, const u32 (&word)[4]) {
    const bool scales = to.pack >= 0;
    if (scales && to.remaining > 0) store_scales(to.p.scales.output, to.p.arrangement, to.distance, u32(to.pack), word);
    store_bytes(Spot{to.address, scales ? 0 : to.remaining}, word);
}

// Returns where this rank stores pack `index` of the bytes from the rank that is `distance` ranks before it.
__device__ __forceinline__ auto target_of(const MoveParams& p, int distance, i64 index) {
    if constexpr (ARRANGED) {
        return ArrangedSpot(p, distance, index);
    } else {
        const Move &rows = p.rows.received[distance], &scales = p.scales.received[distance];
        return spot(p.rows.output + rows.target, rows.nbytes, p.scales.output + scales.target, scales.nbytes, index);
    }
}

// Returns where pack `index` of the bytes for this rank lies in the sender's input. The sender is `distance` ranks
// before this rank.
__device__ __forceinline__ Spot far_source_of(const MoveParams& p, int distance, i64 index) {
    const Move &rows = p.rows.received[distance], &scales = p.scales.received[distance];
    const auto input = [&](const Moved& of) { return distance > 0 ? of.far[distance] : of.input; };
    return spot(input(p.rows) + rows.source, rows.nbytes, input(p.scales) + scales.source, scales.nbytes, index);
}

// Returns where pack `index` of the bytes for the rank at `distance` goes in the receiver's output.
__device__ __forceinline__ Spot far_target_of(const MoveParams& p, int distance, i64 index) {
    const Move &rows = p.rows.sent[distance], &scales = p.scales.sent[distance];
    const auto output = [&](const Moved& of) { return distance > 0 ? of.far[distance] : of.output; };
    return spot(output(p.rows) + rows.target, rows.nbytes, output(p.scales) + scales.target, scales.nbytes, index);
}
