// SPDX-License-Identifier: Apache-2.0
// Three loops of fp8_norm_forward_rows.cu: over a warp's batches (a batch is BATCH rows of a segment of 512 columns),
// over the rows of a chunk, whose sums are added, and over all rows of the block, for LayerNorm's exact maximum. In
// these loops threads exchange nothing; the caller's block barriers order the accesses to the sums in shared memory.
#pragma once
#include "coat/forward_layernorm.cuh"
#include "coat/forward_tiles.cuh"

// The loop of a warp over its batches of a chunk of rows, in an order in which the segment seldom changes. One batch is
// processed while the next one is loaded. The batches do not alternate between two sets of registers: with two sets,
// one scoreboard would count all loads of an iteration, and a wait for one load would be a wait for all of them.
struct BatchLoop {
    Position position;  // the position of `batch`
    int left;           // the number of batches that are not processed yet, from `position` on
    Batch batch;        // the next batch to process, whose loads are in flight

    // Starts to load the first batch. The chunk has rows `first` to end - 1 of the block, and `segments` segments.
    // load(batch, position) starts to load the batch at `position`.
    template <typename Load>
    __device__ __forceinline__ void begin(int first, int end, int segments, Load load) {
        const int warp = threadIdx.x / 32;
        const int quads = (end - first) / BATCH, begin = quads * segments * warp / WARPS;
        position = {begin / quads, first + begin % quads * BATCH};
        left = quads * segments * (warp + 1) / WARPS - begin;
        if (left > 0) load(batch, position);
    }

    // Calls process(batch, position) for each batch, in order.
    template <typename Load, typename Process>
    __device__ __forceinline__ void run(int first, int end, Load load, Process process) {
#pragma unroll 1
        while (left > 0) {
            const Position loaded_position = position;
            const Batch loaded = batch;
            if ((position.down += BATCH) == end) position.down = first, ++position.across;
            if (--left > 0) load(batch, position);
            process(loaded, loaded_position);
        }
    }
};

// Calls finish(block_row, row, total) for each row of a chunk: `block_row` is the row's index in the block, `row` its
// index in the tensor, and `total` the sum of the row's segments. The threads of the block divide the rows among
// themselves.
template <typename Finish>
__device__ __forceinline__ void add_segments(const Rows& rows, const float* sums, int first, int end, Finish finish) {
    const ForwardParams& p = rows.p;
    for (int block_row = first + threadIdx.x; block_row < end; block_row += THREADS) {
        const i64 row = rows.global_row(block_row);
        float total = 0.0f;
        if (row < p.rows) {
            for (int column = 0, s = 0; column < p.columns; column += SEGMENT, ++s) {
                total = __fadd_rn(total, sums[s * p.chunk_rows + block_row - first]);
            }
        }
        finish(block_row, row, total);
    }
}

// Returns the bits of the largest |y| in this warp's part of the block's rows, for LayerNorm with w and b. Returns
// UNDECIDED if there is a pack all of whose y are NaN. Reads x from global memory.
__device__ __forceinline__ u32 largest_of_rows(const Rows& rows, int segments) {
    const ForwardParams& p = rows.p;
    u32 maximum = 0;
#pragma unroll 1
    for (int row = threadIdx.x / 32 * BATCH, column = rows.first + int(threadIdx.x) % 32 * PACK; row < rows.count;) {
        Batch batch;
        load_batch(batch, p, rows.global_row(row), column);
        Pack<Weight, PACK> weight, bias;
        load_weight_pack(weight, p, column);
        load_weight_pack(bias, p.bias, p.columns, column);
        float mean[BATCH], rstd[BATCH];
#pragma unroll
        for (int r = 0; r < BATCH; ++r) mean[r] = rows.mean_of(row + r), rstd[r] = rows.rstd_of(row + r);
        u32 largest[BATCH];
        largest_of_batch(largest, batch, mean, rstd, weight, bias, p.columns - column);
#pragma unroll
        for (int r = 0; r < BATCH; ++r) {
            const bool exists = WHOLE || rows.global_row(row + r) < p.rows;
            if (exists && (WHOLE || column < p.columns)) maximum = max(maximum, largest[r]);
        }
        if ((column += SEGMENT) >= segments * SEGMENT) column -= segments * SEGMENT, row += WARPS * BATCH;
    }
    return ptx::warp_max(maximum);
}
