// SPDX-License-Identifier: Apache-2.0
// What the kernels that move bytes share: which bytes go where, and packs of them.
//
// All tables are by distance. Entry d of `sent` are the bytes from this rank to rank (rank + d) mod ranks, entry d of
// `received` the bytes from rank (rank - d) mod ranks to this rank, and entry 0 of both the bytes that stay. The bytes
// of a pair of ranks are numbered in packs of 16: first those of the rows, then those of the scales, if there are any.
// A pack may begin at any address (common/bytes.cuh). drvfuse/ops/collectives/move_kernels.py has the same layout.
#pragma once
#include "collectives/arranged_scales.cuh"
#include "collectives/place.cuh"
#include "sync/keys.cuh"

constexpr int RANKS = DRVFUSE_RANKS;
constexpr int PEERS = RANKS > 1 ? RANKS - 1 : 1;  // an array cannot be empty
constexpr bool ARRANGED = DRVFUSE_ARRANGED;       // the scales have an Arrangement

struct Move {
    i64 source, target, nbytes;  // offsets in the sender's input and in the receiver's output
};

struct Moved {
    char* input;
    char* output;
    char*
        far[DRVFUSE_MAX_RANKS];  // by distance, if accessed: the senders' inputs (pull) or the receivers' outputs (put)
    Move sent[DRVFUSE_MAX_RANKS];
    Move received[DRVFUSE_MAX_RANKS];
};

struct MoveParams {
    Call call;
    Moved rows, scales;
    i64 most;         // the most packs of a pair of ranks
    i64 chunk_packs;  // packs of each pair that one round sends, or that are staged at a time
    Arrangement arrangement;
};

// For push: `chunk_packs` is a multiple of the block's threads. A unit of work is one pack per thread of a block.
struct MovePushParams : MoveParams {
    PushCall push;
    i64 root;  // root of a broadcast
};

using Pushing = KeyedPush<RANKS>;

// Slots of a round, behind the greetings of other kernels, by distance: packs [distance - 1][chunk_packs], then keys
// [distance - 1][chunk_packs / 32]. This struct has the offsets of a thread's slots at distance 1, and the strides from one
// distance to the next.
struct Slots {
    u32 offset, stride, key_offset, key_stride;

    __device__ __forceinline__ Slots(const MovePushParams& p, u32 in_round)
        : offset(GREETINGS_BYTES + in_round * 16), stride(u32(p.chunk_packs) * 16),
          key_offset(GREETINGS_BYTES + (RANKS - 1) * stride + in_round / 32 * 4), key_stride(stride / 128) {}
};

// Sends the warp's packs that exist, and their key, to the peer at that distance.
__device__ __forceinline__ void send_packs(const Pushing& push, const Slots& slots, int distance, bool exists,
                                           const u32 (&sent)[4], const u32 (&key)[1]) {
    if (exists) push.send(distance, slots.offset + (distance - 1) * slots.stride, sent);
    const bool hears = !FAULT("keys-only-with-bytes") || __any_sync(0xffffffffu, exists);
    if (hears && threadIdx.x % 32 == 0) push.send(distance, slots.key_offset + (distance - 1) * slots.key_stride, key);
}

__device__ __forceinline__ i64 packs_of(i64 bytes) { return (bytes + 15) / 16; }

__device__ __forceinline__ Spot spot(char* rows, i64 row_bytes, char* scales, i64 scale_bytes, i64 index) {
    const i64 behind = index - packs_of(row_bytes);
    if (behind < 0) return {rows + index * 16, row_bytes - index * 16};
    return {scales + behind * 16, scale_bytes - behind * 16};
}

// The pack in this rank's input that it sends to the rank at that distance.
__device__ __forceinline__ Spot source_of(const MoveParams& p, int distance, i64 index) {
    const Move &rows = p.rows.sent[distance], &scales = p.scales.sent[distance];
    return spot(p.rows.input + rows.source, rows.nbytes, p.scales.input + scales.source, scales.nbytes, index);
}

// Where this rank stores a pack that it receives: a spot in its output or, for arranged scales, their numbers.
struct ArrangedSpot : Spot {
    const MoveParams& p;
    int distance;
    i64 pack;  // its number among the sender's scales; negative for a pack of rows

    __device__ __forceinline__ ArrangedSpot(const MoveParams& params, int from, i64 index)
        : p(params), distance(from), pack(index - packs_of(params.rows.received[from].nbytes)) {
        const Move &rows = p.rows.received[from], &scales = p.scales.received[from];
        at = pack < 0 ? p.rows.output + rows.target + index * 16 : nullptr;
        left = pack < 0 ? rows.nbytes - index * 16 : scales.nbytes - pack * 16;
    }
};

__device__ __forceinline__ bool is_whole(const ArrangedSpot& spot) {
    return spot.pack < 0 && is_whole(static_cast<const Spot&>(spot));
}

__device__ __forceinline__ void store_bytes(const ArrangedSpot& to, const u32 (&word)[4]) {
    const bool scales = to.pack >= 0;
    if (scales && to.left > 0) store_scales(to.p.scales.output, to.p.arrangement, to.distance, u32(to.pack), word);
    store_bytes(Spot{to.at, scales ? 0 : to.left}, word);
}

// Where this rank stores a pack that it receives.
__device__ __forceinline__ auto target_of(const MoveParams& p, int distance, i64 index) {
    if constexpr (ARRANGED) {
        return ArrangedSpot(p, distance, index);
    } else {
        const Move &rows = p.rows.received[distance], &scales = p.scales.received[distance];
        return spot(p.rows.output + rows.target, rows.nbytes, p.scales.output + scales.target, scales.nbytes, index);
    }
}

// The pack in the input of the rank from which this one receives.
__device__ __forceinline__ Spot far_source_of(const MoveParams& p, int distance, i64 index) {
    const Move &rows = p.rows.received[distance], &scales = p.scales.received[distance];
    return spot(p.rows.far[distance] + rows.source, rows.nbytes, p.scales.far[distance] + scales.source, scales.nbytes,
                index);
}

// The pack in the output of the rank to which this one sends.
__device__ __forceinline__ Spot far_target_of(const MoveParams& p, int distance, i64 index) {
    const Move &rows = p.rows.sent[distance], &scales = p.scales.sent[distance];
    return spot(p.rows.far[distance] + rows.target, rows.nbytes, p.scales.far[distance] + scales.target, scales.nbytes,
                index);
}

// A team of `count` threads; pack j belongs to its thread j mod `count`. `number` is this thread's, or -1 if it is in
// another team.
struct Team {
    i64 number, count;
};

__device__ __forceinline__ Team whole_grid() {
    return {i64(blockIdx.x) * blockDim.x + threadIdx.x, i64(gridDim.x) * blockDim.x};
}

// Copies the team's packs of [0, count) from from(j) to to(j), unless from(j) has no bytes. B packs per thread are
// loaded at once where all of the warp's are whole and aligned. Called by whole warps.
template <int B, typename From, typename To>
__device__ __forceinline__ void copy_packs(const Team& team, i64 count, Trace& trace, const From& from, const To& to) {
    if (team.number < 0) return;
    const i64 stride = team.count, lane = threadIdx.x % 32;
#pragma unroll 1
    for (i64 j = team.number; j - lane < count; j += B * stride) {
        u32 words[B][4];
        bool exists[B], whole = true;
#pragma unroll
        for (int b = 0; b < B; ++b) {
            const Spot source = from(j + b * stride);
            const auto target = to(j + b * stride);
            exists[b] = j + b * stride < count && source.left > 0;
            whole &= !exists[b] || (is_whole(source) && is_whole(target));
        }
        if (!__all_sync(0xffffffffu, whole)) {
#pragma unroll 1
            for (i64 k = j; k - lane < count && k < j + B * stride; k += stride) {
                Spot source = from(k);
                auto target = to(k);
                if (k >= count) source.left = 0;
                if (source.left <= 0) target.left = 0;
                load_bytes(words[0], source);
                store_bytes(target, words[0]);
            }
            trace.lap(TraceRole::load);
            trace.lap(TraceRole::store);
            continue;
        }
#pragma unroll
        for (int b = 0; b < B; ++b) {
            if (exists[b]) ptx::load_v4(words[b], from(j + b * stride).at);
        }
        trace.need(words);
        trace.lap(TraceRole::load);
#pragma unroll
        for (int b = 0; b < B; ++b) {
            if (exists[b]) ptx::store_v4(to(j + b * stride).at, words[b]);
        }
        trace.lap(TraceRole::store);
    }
}

// The number of packs that stay on this rank; 0 if they are in their place already.
__device__ __forceinline__ i64 own_packs(const MoveParams& p) {
    const Moved &rows = p.rows, &scales = p.scales;
    const auto away = [](const Moved& of) { return of.input + of.sent[0].source != of.output + of.received[0].target; };
    const bool moves = away(rows) || (scales.sent[0].nbytes > 0 && (ARRANGED || away(scales)));
    return moves ? packs_of(rows.sent[0].nbytes) + packs_of(scales.sent[0].nbytes) : 0;
}

// The place of pack j of the packs that stay; it has no bytes if the pack is already where it belongs.
__device__ __forceinline__ Spot own_source_of(const MoveParams& p, i64 j) {
    Spot source = source_of(p, 0, j);
    if (source.at == target_of(p, 0, j).at) source.left = 0;
    return source;
}

// Clears the padding of arranged scales. Each rank does so in its own output, and no other rank writes that padding.
__device__ __forceinline__ void clear_padding(const MoveParams& p) {
    const Team team = whole_grid();
    if constexpr (ARRANGED) clear_rows_behind(p.scales.output, p.arrangement, u32(team.number), u32(team.count));
}

// Copies the packs that stay on this rank, from pack `first` on.
template <int B>
__device__ __forceinline__ void copy_own(const MoveParams& p, const Team& team, Trace& trace, i64 first = 0) {
    copy_packs<B>(
        team, own_packs(p) - first, trace, [&](i64 j) { return own_source_of(p, first + j); },
        [&](i64 j) { return target_of(p, 0, first + j); });
}
