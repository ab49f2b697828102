// SPDX-License-Identifier: Apache-2.0
// The rows of push_two_shot in the fused all-reduce: a row's owner sums and normalises it, and the others gather the
// results. allreduce_rmsnorm_fp8_push.cu describes the layout and the memory ordering.
#pragma once
#include "collectives/rows/push.cuh"
#include "collectives/rows/slots.cuh"

constexpr int DEPTH = DRVFUSE_DEPTH;

// Sends this thread's packs of an input row to the row's owner.
__device__ __forceinline__ void send_input(const InPack (&own)[PACKS], const Rows& rows, const Pushing& push,
                                           const Place& at) {
    send_row(own, rows, [&](u32 in_row, const u32(&words)[InPack::words]) {
        push.send(at.distance, at.offset + (at.distance - 1) * at.stride + in_row, words);
    });
}

// Sums, normalises and sends a row that this rank owns.
__device__ __forceinline__ void reduce(const RowsPushParams& p, Rows& rows, Pushing& push, Trace& trace, int begin,
                                       int row, const InPack (&own)[PACKS], const Place& at) {
    const bool exists = inside(p, begin + row);
    if (RESIDUAL && exists) rows.fetch_residual(begin + row);
    if (!RESIDUAL || exists) rows.expect();
    float x[PACKS][W];
    receive_row(x, own, p, rows, push, at.offset, at.stride);
    push.relay();
    trace.need(x);
    trace.lap(TraceRole::receive);
    if constexpr (RESIDUAL) {
        rows.add_residual<true>(x, begin + row, [&](int index, const ResidualPack& pack) {
            send_to_all(push, at.result + index * RESULT_BYTES, at.result_stride, pack.word);
            if (exists) store_of_row(p.residual_output, begin + row, index, p, pack);
        });
        if (exists) rows.normalise_to_output(x, begin + row);
    } else {
        ScaleWord scales = {};
        rows.normalise(
            x,
            [&](int index, const OutPack& pack) {
                OutPack sent = pack;
                if constexpr (KEYED) sent.word[0] ^= scales.key;
                send_to_all(push, at.result + index * RESULT_BYTES, at.result_stride, sent.word);
                if (exists) store_of_row(p.output, begin + row, index, p, pack);
            },
            [&](int group, float scale) {
                const u32 word[1] = {BYTE_SCALES ? scales.word : __float_as_uint(scale)};
                if (group % PER_WORD == 0) send_to_all(push, at.scale + group / PER_WORD * 4, at.scale_stride, word);
                if (exists) store_scalar(scale_at(p, begin, row, group), scale);
            },
            [&](int index, const InPack& pack) {
                send_to_all(push, at.normed + index * u32(sizeof(InPack)), at.stride, pack.word);
                if (exists) store_of_row(normed_output_of(p), begin + row, index, p, pack);
            },
            [&](bool has, const OutPack& pack, float scale) {
                if constexpr (BYTE_SCALES) scales = scale_word(has, pack, scale);
            });
    }
}

// Receives the normed row `row`, which another rank owns, and stores it.
__device__ __forceinline__ void gather_normed(const RowsPushParams& p, const Rows& rows, Pushing& push, int row,
                                              int owner, const Place& at) {
    const u32 from = at.normed + at.steps() * at.stride;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        u32 words[1][InPack::words];
        push.receive(words, GATHER, from + rows.index(i) * u32(sizeof(InPack)), 0, rows.has(i), owner);
        InPack pack;
#pragma unroll
        for (int k = 0; k < InPack::words; ++k) pack.word[k] = words[0][k];
        if (rows.has(i) && inside(p, row)) store_of_row(normed_output_of(p), row, rows.index(i), p, pack);
    }
}

// Receives pack i of the codes of row `row`, which another rank owns, and the scale of the pack's group. Returns the
// pack in `words`, and stores the scale.
template <int N>
__device__ __forceinline__ void receive_group(const RowsPushParams& p, const Rows& rows, Pushing& push, int row,
                                              int owner, const Place& at, u32 result, int i, u32 (&words)[N]) {
    const int group = rows.index(i) / LANES;
    const bool scaled = rows.has(i) && rows.index(i) % LANES == 0;
    u32 scale[1];
    push.receive_with(words, result + rows.index(i) * RESULT_BYTES, rows.has(i), scale,
                      at.scale + at.steps() * at.scale_stride + group / PER_WORD * 4,
                      PER_WORD > 1 ? rows.has(i) && rows.index(i) % WORD_LANES == 0 : scaled, owner);
    if constexpr (BYTE_SCALES) {
        const u32 word = __shfl_sync(0xffffffffu, scale[0], threadIdx.x % 32 / WORD_LANES * WORD_LANES);
        if constexpr (KEYED) words[0] ^= key_of_word(word);
        if (scaled && inside(p, row)) ptx::store_u8(scale_at(p, 0, row, group), scale_of_word(word));
    } else if (scaled && inside(p, row)) {
        store_scalar(scale_at(p, 0, row, group), __uint_as_float(scale[0]));
    }
}

// Receives and stores the results of a row that another rank owns; with residual it normalises the row.
__device__ __forceinline__ void gather(const RowsPushParams& p, Rows& rows, Pushing& push, Trace& trace, int begin,
                                       int row, const Place& at) {
    const int owner = row % RANKS;
    const u32 result = at.result + at.steps() * at.result_stride;
    const bool scaled = SCALES && rows.index(0) == 0;
    constexpr int WORDS = RESULT_BYTES / 4;
    if (RESIDUAL && inside(p, begin + row)) rows.expect();
    u32 words[PACKS][WORDS], scale[1];
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        if constexpr (GROUPED && !RESIDUAL) {
            receive_group(p, rows, push, begin + row, owner, at, result, i, words[i]);
        } else {
            push.receive_with(words[i], result + rows.index(i) * RESULT_BYTES, rows.has(i), scale,
                              at.scale + at.steps() * at.scale_stride, scaled && i == 0, owner);
        }
    }
    if constexpr (GATHERS_NORMED) gather_normed(p, rows, push, begin + row, owner, at);
    if (!inside(p, begin + row)) return;
    if constexpr (RESIDUAL) {
        float x[PACKS][W];
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            ResidualPack pack;
#pragma unroll
            for (int k = 0; k < ResidualPack::words; ++k) pack.word[k] = words[i][k % WORDS];
            if (rows.has(i)) store_of_row(p.residual_output, begin + row, rows.index(i), p, pack);
            to_float(x[i], pack);
        }
        trace.need(x);
        trace.lap(TraceRole::gather);
        rows.normalise_to_output(x, begin + row);
    } else {
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            OutPack pack;
#pragma unroll
            for (int k = 0; k < OutPack::words; ++k) pack.word[k] = words[i][k % WORDS];
            if (rows.has(i)) store_of_row(p.output, begin + row, rows.index(i), p, pack);
        }
        if (!GROUPED && scaled) store_scalar(static_cast<Scale*>(p.scales) + begin + row, __uint_as_float(scale[0]));
        trace.lap(TraceRole::gather);
    }
}

// Does the work of a cluster in one round. `own` are this thread's packs of the cluster's first row of the round, which
// the caller has loaded.
__device__ __forceinline__ void two_shot(const RowsPushParams& p, Rows& rows, Pushing& push, Trace& trace, int begin,
                                         int count, InPack (&own)[PACKS]) {
    const int first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
#pragma unroll 1
    for (int row = first; row < count + DEPTH * step; row += step) {
        const Place now = place(p, push, row);
        if (row != first && row < count && (DEPTH == 0 || now.distance != 0)) load_row(own, p, rows, begin + row);
        if (row < count && now.distance != 0) send_input(own, rows, push, now);
        push.join();
        trace.lap(TraceRole::push);
        const int due = row - DEPTH * step;
        if (due < 0) continue;
        const Place at = DEPTH == 0 ? now : place(p, push, due);
        if (at.distance == 0) {
            if (DEPTH > 0) load_row(own, p, rows, begin + due);
            reduce(p, rows, push, trace, begin, due, own, at);
        } else {
            gather(p, rows, push, trace, begin, due, at);
        }
    }
}
