// SPDX-License-Identifier: Apache-2.0
// The forward pass of FP8 RMSNorm of few rows (plan `FewRows`), which reads x twice. It serves tensors that are too
// large for one cluster (fp8_rmsnorm_forward_few.cu) and have too few rows for fp8_norm_forward_rows.cu.
//
// Computes rstd, the scale, qy and qy_t from x, its group scales and w. forward.cuh has the formulas, shapes, dtypes
// and numerics, and `ForwardParams` the layout.
//
// Division. The launch is cooperative, with at most one block per multiprocessor. Both phases divide the whole tensor
// among all blocks, in different ways.
//   Phase 1   A group is BLOCK_ROWS consecutive rows. Block b takes groups b, b + gridDim.x, ..., in chunks of
//             `chunk_rows` rows. A warp of the block takes BATCH rows of one segment of 512 columns, and each lane 16
//             columns of these rows. The warp computes each row's sum of squares and largest |x * s * w| over the
//             segment. Threads of the block then combine the segments of each row: this gives the rows' rstd, and the
//             block's estimate of the largest |y|.
//   Exchange  The blocks exchange their estimates, and every block computes the scale (forward_meeting.cuh).
//   Phase 2   Warp i of all warps of the grid takes tiles i, i + warps, ..., quantises them, and stores them in qy and
//             qy_t. Tiles and lanes: tile.cuh.
//
// Storage. Registers: a warp's batch of phase 1 and the next batch, which is in flight; x, scales and weights of the
// warp's next tile, the first of which is loaded during phase 1. Shared memory: the sums and maxima of a chunk of rows
// by segment, and the rstd of each warp's tile; in a grid of one block the rstd of all rows.
//
// Memory ordering. Warps of a block exchange sums through shared memory, with block barriers before and after the
// reduction of a chunk. The rstd of a tile's rows may have been computed by other blocks. So the block that computes
// the rstd of a row publishes it as a word of grid_words.cuh, and a warp polls the words of its tile's rows: those of
// its first tile in the wait for the maxima, those of later tiles before these are quantised. A word carries its own
// readiness.
//
// Traffic. Global bytes per element, with one scale per QB columns: 1 + 2 / QB are read twice (profilers show 1 + 2 /
// 16, since each lane loads the scale of its 16 columns), and 2 are written. Each row adds 4 bytes for rstd. In phase 1
// a warp reads weights each time that it begins another segment. In phase 2 the weights of a tile are read ROW_LANES
// times, once by each of the lanes that have the same columns.
//
// PDL. Before the wait for the producer, a warp reads only its first weights of each phase. A block triggers right
// after the wait (early_trigger) or after its last store.
#include "coat/forward_meeting.cuh"

// TC columns of four consecutive rows, and the rows' scales. Elements and scales of rows that do not exist are 0.
struct Quad {
    u32 word[4][TC / 4];  // the FP8 elements of each row
    u32 scale[2];         // the bf16 bits of the rows' scales, two rows per word
};

// Loads the quad of rows from `row` on, at `column`.
__device__ __forceinline__ void load_quad(Quad& quad, const ForwardParams& p, i64 row, int column) {
    const u8* x = p.x + row * p.x_stride + column;
    if (row + 4 <= p.rows) {
#pragma unroll
        for (int r = 0; r < 4; ++r, x += p.x_stride) load_bytes<TC>(quad.word[r], x, p.columns - column, ALIGNED);
    } else {
#pragma unroll
        for (int r = 0; r < 4; ++r, x += p.x_stride) {
            clear(quad.word[r]);
            if (row + r < p.rows) load_bytes<TC>(quad.word[r], x, p.columns - column, ALIGNED);
        }
    }
    load_scales(quad.scale, p, row, column);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) fp8_rmsnorm_forward(const ForwardParams p) {
    extern __shared__ __align__(16) u8 dynamic[];
    __shared__ Meetings meetings;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int segments = (p.columns + SEGMENT - 1) / SEGMENT;
    // Shared memory, in this order: rstd of the rows of each warp's tile [WARPS][TILE_ROWS]; for each segment and row
    // of a chunk the sum of squares [segments][chunk_rows]; for each of these the bits of the largest |x * s * w|
    // [segments][chunk_rows]; in a grid of a single block rstd of all rows.
    float* tile_rstds = reinterpret_cast<float*>(dynamic) + warp * TILE_ROWS;
    float* sums = reinterpret_cast<float*>(dynamic) + WARPS * TILE_ROWS;
    u32* products = reinterpret_cast<u32*>(sums + segments * p.chunk_rows);
    float* all_rstds = sums + 2 * segments * p.chunk_rows;
    // The block's rows are numbered from 0 to block_rows - 1; global_row() returns the row of the tensor.
    const int block_rows = (p.groups + (int(blockIdx.x) < p.longer)) * BLOCK_ROWS;
    const auto global_row = [&](int block_row) {
        return (i64(u32(block_row) / BLOCK_ROWS) * gridDim.x + blockIdx.x) * BLOCK_ROWS + u32(block_row) % BLOCK_ROWS;
    };
    GridWords* words = reinterpret_cast<GridWords*>(p.scratch.state);

    const int tiles_across = (p.columns + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const int tiles_down = (int(p.rows) + TILE_ROWS - 1) / TILE_ROWS;
    const int first_tile = int(blockIdx.x) * WARPS + warp;
    Position tile{first_tile % tiles_across, first_tile / tiles_across};  // the tile to load next
    const auto lane_row = [&] { return tile.down * TILE_ROWS + lane / (32 / ROW_LANES) * TR; };
    const auto lane_column = [&] { return tile.across * TILE_COLUMNS + lane % (32 / ROW_LANES) * TC; };
    Quad quads[TR / 4];        // this lane's part of the tile
    Pack<Weight, TC> weights;  // the weights of this lane's columns of the tile
    const auto load_tile_quad = [&](int q) {
        const int column = lane_column();
        load_quad(quads[q], p, lane_row() + 4 * q, column < p.columns ? column : 0);
    };
    const auto load_first_tile = [&] {
        if (tile.down >= tiles_down) return;
#pragma unroll
        for (int q = 0; q < TR / 4; ++q) load_tile_quad(q);
    };

    Pack<Weight, PACK> raw;  // the weights of this lane's columns in phase 1
    if (warp / segments * BATCH < block_rows) load_weight_pack(raw, p, warp % segments * SEGMENT + lane * PACK);
    if (tile.down < tiles_down) load_weight_pack(weights, p, lane_column());
    if (!FAULT("fp8-operand-before-pdl-wait")) wait_for_producer();
    if (p.early_trigger) launch_dependents();
    ScratchUse use(p.scratch, gridDim.x > 1);

    // Phase 1: compute the rstd of the rows, and the estimate of the largest |y|.
    u32 estimate = 0;  // the largest |y| (an estimate, as bits) of the rows whose rstd this thread has computed
    float largest_weight = 0.0f;  // the largest |w| that this thread has used
    float w[PACK];                // the weights of segment `weight_segment`
    int weight_segment = -1;      // -1: no weights were used yet
    const Position step{WARPS % segments, WARPS / segments * BATCH};
    // A block without rows runs the loop once too, to load its first tile and to begin `meetings`.
    for (int first = 0; first == 0 || first < block_rows; first += p.chunk_rows) {
        const int end = min(first + p.chunk_rows, block_rows);
        Position position{warp % segments, first + warp / segments * BATCH}, next_position;
        Batch batch, next_batch;
        if (position.down < end) {
            load_batch(batch, p, global_row(position.down), position.across * SEGMENT + lane * PACK);
        }
        if (first == 0) load_first_tile();
        for (; position.down < end; position = next_position, batch = next_batch) {
            next_position = {position.across + step.across, position.down + step.down};
            if (next_position.across >= segments) next_position.across -= segments, next_position.down += BATCH;
            if (next_position.down < end) {
                load_batch(next_batch, p, global_row(next_position.down), next_position.across * SEGMENT + lane * PACK);
            }
            const int column = position.across * SEGMENT + lane * PACK;
            if (position.across != weight_segment) {
                if (weight_segment >= 0) load_weight_pack(raw, p, column);
                weight_segment = position.across;
                widen_weights(w, largest_weight, raw);
            }
            float squares[BATCH];
            u32 largest[BATCH];
            reduce_packs(batch, w, squares, largest);
            const float sum = sum_lanes(squares);
#pragma unroll
            for (int r = 0; r < BATCH; ++r) largest[r] = ptx::warp_max(largest[r]);
            const int index = position.across * p.chunk_rows + position.down - first;
            if (lane % (32 / BATCH) == 0) sums[index + lane / (32 / BATCH)] = sum;
            if (lane == 0) {
#pragma unroll
                for (int r = 0; r < BATCH; ++r) products[index + r] = largest[r];
            }
        }
        if (first == 0 && threadIdx.x == 0) meetings.begin(use);
        __syncthreads();
        for (int block_row = first + threadIdx.x; block_row < end; block_row += THREADS) {
            const i64 row = global_row(block_row);
            if (row < p.rows) {
                float squares = 0.0f;
                u32 product = 0;
                for (int s = 0; s < segments; ++s) {
                    squares = __fadd_rn(squares, sums[s * p.chunk_rows + block_row - first]);
                    product = max(product, products[s * p.chunk_rows + block_row - first]);
                }
                const float rstd = finish_row(p, squares, product, estimate);
                p.rstd[row] = rstd;
                if (gridDim.x > 1) {
                    leave_word(words->rows + row, meetings.epoch, __float_as_uint(rstd));
                } else {
                    all_rstds[row] = rstd;
                }
            }
        }
        if (end < block_rows) __syncthreads();
    }
    estimate = ptx::warp_max(largest_weight <= WEIGHT_LIMIT ? estimate : UNDECIDED);
    if (lane == 0) atomicMax(&meetings.estimate.of_block, estimate);

    // The rstd of a tile's rows, which other blocks may have computed: lane l waits for the rstd of rows l, l + 32, ...
    // of the tile.
    constexpr int LANE_ROWS = (TILE_ROWS + 31) / 32;
    Awaited awaited[1 + LANE_ROWS] = {};
    const auto name_awaited_rows = [&] {
#pragma unroll
        for (int i = 0; i < LANE_ROWS; ++i) {
            const int r = lane + 32 * i, row = tile.down * TILE_ROWS + r;
            const bool wanted = r < TILE_ROWS && row < p.rows && tile.down < tiles_down && gridDim.x > 1;
            awaited[1 + i] = {wanted ? words->rows + row : nullptr, u32(row / BLOCK_ROWS) % gridDim.x, 0};
        }
    };
    const auto share_tile_rstds = [&] {
#pragma unroll
        for (int i = 0; i < LANE_ROWS; ++i) {
            const int r = lane + 32 * i, row = tile.down * TILE_ROWS + r;
            const bool is_own = row < p.rows && gridDim.x == 1;
            if (r < TILE_ROWS) tile_rstds[r] = is_own ? all_rstds[row] : __uint_as_float(awaited[1 + i].value);
        }
        __syncwarp();
    };
    if (FAULT("fp8-operand-before-pdl-wait")) wait_for_producer();
    publish_maximum(words, 0, meetings.estimate, meetings.epoch);
    name_awaited_rows();
    if (!await_maximum(words, 0, meetings.estimate, meetings.epoch, use, p.scratch, false, awaited)) return;
    share_tile_rstds();
    u32 scale_bits = scale_from_estimate(meetings.estimate.of_grid);
    if (scale_bits == UNDECIDED) {
        for (int block_row = warp; block_row < block_rows && global_row(block_row) < p.rows; block_row += WARPS) {
            const i64 row = global_row(block_row);
            const u32 largest = exact_row_maximum(p, row, 0.0f, p.rstd[row]);
            if (lane == 0) atomicMax(&meetings.exact.of_block, largest);
        }
        publish_maximum(words, 1, meetings.exact, meetings.epoch);
        Awaited awaited_maximum[1];
        if (!await_maximum(words, 1, meetings.exact, meetings.epoch, use, p.scratch, false, awaited_maximum)) return;
        scale_bits = fp8_scale_bits<X>(__uint_as_float(meetings.exact.of_grid));
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) *p.scale = u16(scale_bits);
    const float inverse = ptx::reciprocal_approx(bf16{u16(scale_bits)});

    // Phase 2: normalise, quantise and store the tiles.
    while (tile.down < tiles_down) {
        const int column = lane_column(), row = lane_row(), columns_left = p.columns - column;
        const int rows_left = columns_left > 0 ? int(min(p.rows - row, i64(TR))) : 0;
        tile.across += WARPS * int(gridDim.x);
        while (tile.across >= tiles_across) tile.across -= tiles_across, ++tile.down;
        const bool more = tile.down < tiles_down;
        float w[TC];
        to_float(w, weights);
        if (more) load_weight_pack(weights, p, lane_column());
        Turned<TR, TC> turned;
        u8* qy = p.qy + i64(row) * p.columns + column;
#pragma unroll
        for (int q = 0; q < TR / 4; ++q) {
            float rstd[4];
            *reinterpret_cast<float4*>(rstd) = *reinterpret_cast<const float4*>(tile_rstds + (row + 4 * q) % TILE_ROWS);
            u32 out[4][TC / 4];
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const float scale = scale_of_row(quads[q].scale, r);
                float v[TC];
#pragma unroll
                for (int j = 0; j < TC / 4; ++j) Word<X>::unpack(quads[q].word[r][j], v + 4 * j);
#pragma unroll
                for (int i = 0; i < TC; ++i) v[i] = rounded_to_bf16(normalised(v[i], scale, rstd[r], w[i]));
                quantise<X, TC>(out[r], v, inverse);
            }
            // The next tile is loaded before this tile's stores, since the compiler moves no load across them.
            if (more) load_tile_quad(q);
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                if (4 * q + r < rows_left) {
                    store_bytes<TC>(qy + u64(u32(4 * q + r)) * u32(p.columns), out[r], columns_left, ALIGNED);
                }
            }
            turned.take(q, out);
        }
        store_turned<RUN, ALIGNED>(p.qy_t, turned, row, p.rows, p.batch_rows, p.columns, column);
        if (more) {
            Patience patience(p.scratch);
            bool given_up = false;
            name_awaited_rows();
            awaited[0] = {};
            await_words(awaited, meetings.epoch, patience, given_up);
            __syncwarp();
            share_tile_rstds();
        }
    }
    if (gridDim.x > 1) use.finish(meetings.epoch, meetings.users);
    leave_stream(p);
}
