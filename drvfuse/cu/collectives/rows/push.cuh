// SPDX-License-Identifier: Apache-2.0
// The parameters of the fused all-reduce by push, and the steps that push_one_shot and push_two_shot share: they load a
// row, send it, and sum it over the ranks.
#pragma once
#include "collectives/rows/steps.cuh"
#include "collectives/shared/push_packs.cuh"

using Pushing = Push<RANKS, true, (DRVFUSE_MOST_THREADS > 256), DRVFUSE_RELAYS>;

// The inherited `chunk_rows` is the number of rows of a round: with push_two_shot a multiple of the number of ranks.
struct RowsPushParams : RowsParams {
    PushCall push;
};

// Whether the tensor has row `row`. Where a call has several rounds, each sends chunk_rows rows (push.cuh), so the
// last one also sends rows beyond the tensor's end, whose contents are not used.
__device__ __forceinline__ bool inside(const RowsPushParams& p, int row) { return row < p.rows; }

// Loads this thread's packs of row `row` of this rank's input. If the tensor has no such row, the packs stay
// unchanged.
__device__ __forceinline__ void load_row(InPack (&own)[PACKS], const RowsPushParams& p, const Rows& rows, int row) {
    if (!inside(p, row)) return;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        if (rows.has(i)) load_of_row(own[i], p.call.input, row, rows.index(i), p);
    }
}

// Calls send(offset, words) for each of this thread's packs; `offset` is the offset of the pack in the row, in bytes.
template <typename Send>
__device__ __forceinline__ void send_row(const InPack (&own)[PACKS], const Rows& rows, const Send& send) {
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        InPack pack = own[i];
        make_sendable(pack.word);
        if (rows.has(i)) send(rows.index(i) * u32(sizeof(InPack)), pack.word);
    }
}

// Sums this thread's packs of a row over the ranks. In this rank's slots the row for distance d begins at offset + (d -
// 1) * stride.
__device__ __forceinline__ void receive_row(float (&x)[PACKS][W], const InPack (&own)[PACKS], const RowsPushParams& p,
                                            const Rows& rows, Pushing& push, u32 offset, u32 stride) {
#pragma unroll
    for (int i = 0; i < PACKS; ++i)
        sum_received(x[i], push, own[i], offset + rows.index(i) * u32(sizeof(InPack)), stride, p.call.rank,
                     rows.has(i));
}
