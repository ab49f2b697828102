// SPDX-License-Identifier: Apache-2.0
// Parts of fp8_norm_forward_rows.cu: the rows that a block keeps in shared memory, and the tiles of these rows that a
// warp quantises in phase 2.
//
// Division. A tile has BLOCK_ROWS rows, one group of rows of the block, and 32 / ROW_LANES * TC columns (tile.cuh). A
// lane's part of a tile consists of QUADS quads of four rows.
//
// Storage. The x of a tile is either all in shared memory (the tile is near) or not at all (the tile is far), so the
// lanes of a warp do not diverge. Of a far tile, all quads are loaded ahead: when a quad of a tile has been used, the
// same quad of the next tile is loaded to its registers. Of a near tile, only one quad is loaded ahead.
//
// Memory ordering. A warp reads what other warps of its block have stored in shared memory. Block barriers of phase 1,
// and of the exchange of maxima, precede these reads.
#pragma once
#include "coat/forward.cuh"

constexpr bool KNOWN = DRVFUSE_KNOWN;      // the scales, rstd and mean of all rows of the block stay in shared memory
constexpr bool REREADS = DRVFUSE_REREADS;  // less than half of x stays in shared memory
constexpr int QUADS = TR / 4;              // quads of rows in a lane's part of a tile
static_assert(BLOCK_ROWS == TILE_ROWS && BATCH == 4, "a tile has the rows of a group, a batch those of a quad");
static_assert((BLOCK_ROWS & (BLOCK_ROWS - 1)) == 0, "scales_offset() permutes rows by xor");

// The rows of a block, numbered from 0 (`block_row`), and their data in shared memory.
struct Rows {
    const ForwardParams& p;
    int team;      // the index of the block's team: the blocks that share groups of rows
    int teams;     // teams of the grid
    int first;     // the first column of the block
    int width;     // columns of the block
    int count;     // rows of the block, a multiple of BLOCK_ROWS; the last ones may not exist in the tensor
    float* rstd;   // [count], with KNOWN
    float* mean;   // [count], with KNOWN and LAYER
    u8* x;         // [count, p.resident_columns]: the first columns of each row, permuted by x_offset()
    bf16* scales;  // [groups of QB columns, count], with KNOWN, permuted by scales_offset()

    // Returns the index in the tensor of row `block_row` of the block.
    __device__ __forceinline__ i64 global_row(int block_row) const {
        const u32 row_in_groups = u32(team * BLOCK_ROWS) + u32(block_row) % BLOCK_ROWS;
        return u64(u32(block_row) / BLOCK_ROWS) * u32(teams * BLOCK_ROWS) + row_in_groups;
    }
    // Returns the rstd or mean of a row: with KNOWN from `shared`, the block's array, else from `global`, the tensor's
    // array. For a row that does not exist the result is 0, or with KNOWN undefined.
    __device__ __forceinline__ float statistic(const float* shared, const float* global, int block_row) const {
        if constexpr (KNOWN) return shared[block_row];
        const i64 row = global_row(block_row);
        return row < p.rows ? global[row] : 0.0f;
    }
    __device__ __forceinline__ float rstd_of(int block_row) const { return statistic(rstd, p.rstd, block_row); }
    __device__ __forceinline__ float mean_of(int block_row) const {
        return LAYER ? statistic(mean, p.mean, block_row) : 0.0f;
    }
    // The offset in `x` of an element. Lanes that are TR rows apart read the same columns at the same time, so bytes
    // are permuted within 128 bytes, which avoids bank conflicts.
    __device__ __forceinline__ int x_offset(int block_row, int column) const {
        return block_row * p.resident_columns + ((column - first) ^ (u32(block_row) / TR * TILE_COLUMNS % 128));
    }
    // The offset in `scales` of the scales of four rows at a column. Lanes access the scales of different groups of
    // columns of one row at the same time, so rows are permuted, which avoids bank conflicts.
    __device__ __forceinline__ int scales_offset(int block_row, int column) const {
        const int group = u32(column - first) / QB;
        return group * count + (block_row ^ (4 * group & (BLOCK_ROWS - 1)));
    }
};

// Stores the parts of a batch that stay in shared memory: elements of the first `resident_columns` columns and, with
// KNOWN, the scales. `block_row` is the batch's first row.
__device__ __forceinline__ void store_in_shared(const Batch& batch, const Rows& rows, int block_row, int column) {
    if (column - rows.first < rows.p.resident_columns) {
        u8* x = rows.x + rows.x_offset(block_row, column);
#pragma unroll
        for (int r = 0; r < BATCH; ++r) {
            *reinterpret_cast<uint4*>(x + r * rows.p.resident_columns) =
                make_uint4(batch.word[r][0], batch.word[r][1], batch.word[r][2], batch.word[r][3]);
        }
    }
    if (KNOWN && (QB == PACK || column % QB == 0)) {
        *reinterpret_cast<uint2*>(rows.scales + rows.scales_offset(block_row, column)) =
            make_uint2(batch.scale[0] | u32(batch.scale[1]) << 16, batch.scale[2] | u32(batch.scale[3]) << 16);
    }
}

// Loads a batch that phase 1 has read before: from shared memory if it stays there, else from global memory.
__device__ __forceinline__ void reload_batch(Batch& batch, const Rows& rows, int block_row, int column) {
    if (column >= rows.p.columns || column - rows.first >= rows.p.resident_columns) {
        load_batch(batch, rows.p, rows.global_row(block_row), column);
        return;
    }
    const u8* x = rows.x + rows.x_offset(block_row, column);
#pragma unroll
    for (int r = 0; r < BATCH; ++r) load_bytes<PACK>(batch.word[r], x + r * rows.p.resident_columns, PACK, true);
    u32 pair[2];
    if constexpr (KNOWN) {
        const uint2 four = *reinterpret_cast<const uint2*>(rows.scales + rows.scales_offset(block_row, column));
        pair[0] = four.x, pair[1] = four.y;
    } else {
        load_scales(pair, rows.p, rows.global_row(block_row), column);
    }
#pragma unroll
    for (int r = 0; r < BATCH; ++r) batch.scale[r] = u16(pair[r / 2] >> (16 * (r % 2)));
}

using Quad = u32[4][TC / 4];  // TC columns of four rows; bytes that do not exist are undefined

// The factors of the elements of four rows.
struct Factors {
    u32 scale[2];   // the bf16 bits of the rows' scales, two rows per word
    float rstd[4];  // the rows' rstd
    float mean[4];  // the rows' mean, with LAYER
};

// The integer type of an offset in x: 32 bits suffice in shared memory.
template <bool NEAR>
struct Offset {
    using type = i64;
};
template <>
struct Offset<true> {
    using type = int;
};

// A lane's part of a tile. With NEAR the whole tile is in shared memory, else none of it.
template <bool NEAR>
struct Piece {
    int block_row;                  // the first row, as a row of the block
    int column;                     // the first column, as a column of the tensor
    int columns_left;               // the number of columns from `column` to the tensor's last one; 0 or less: none
    int rows_left;                  // the number of rows of the part that exist; 0 if its columns do not exist
    i64 row;                        // the first row, as a row of the tensor
    int scales;                     // the offset in Rows::scales of the scales of the first four rows
    typename Offset<NEAR>::type x;  // the offset of the next quad to load, in Rows::x or ForwardParams::x

    // Computes the place of this lane's part of `tile`. If tile.down < 0, no tile is left. Then the offsets are those
    // of a tile that exists, so that quads can be loaded without a condition.
    __device__ __forceinline__ Piece(const Rows& rows, const Position& tile) {
        const ForwardParams& p = rows.p;
        const int lane = threadIdx.x % 32;
        block_row = max(tile.down, 0) * TILE_ROWS + lane / (32 / ROW_LANES) * TR;
        column = rows.first + tile.across * TILE_COLUMNS + lane % (32 / ROW_LANES) * TC;
        columns_left = p.columns - column;
        // The block's first column takes the place of a column beyond the tensor, so that the offsets below are valid.
        const int existing = WHOLE || columns_left > 0 ? column : rows.first;
        row = rows.global_row(block_row);
        rows_left = WHOLE ? TR : columns_left > 0 ? int(min(p.rows - row, i64(TR))) : 0;
        scales = rows.scales_offset(block_row, existing);
        x = NEAR ? rows.x_offset(block_row, existing) : row * p.x_stride + column;
    }

    // Starts to load quad `q`, and advances `x` to the next quad. Quads must be loaded in order.
    __device__ __forceinline__ void start_load(Quad& word, const Rows& rows, int q) {
        const ForwardParams& p = rows.p;
        if constexpr (NEAR) {
            const u8* from = rows.x + x;
#pragma unroll
            for (int r = 0; r < 4; ++r) load_bytes<TC>(word[r], from + r * p.resident_columns, TC, true);
            x += 4 * p.resident_columns;
        } else {
            const u8* from = p.x + x;
#pragma unroll
            for (int r = 0; r < 4; ++r, from += p.x_stride) {
                if (WHOLE || 4 * q + r < rows_left) load_bytes<TC>(word[r], from, columns_left, ALIGNED);
            }
            x += 4 * p.x_stride;
        }
    }

    // Starts to load the factors of quad `q`.
    __device__ __forceinline__ void start_load(Factors& factors, const Rows& rows, int q) const {
        if constexpr (KNOWN) {
            const float4 rstd = *reinterpret_cast<const float4*>(rows.rstd + block_row + 4 * q);
            const uint2 pair = *reinterpret_cast<const uint2*>(rows.scales + (scales ^ 4 * q));
            factors.rstd[0] = rstd.x, factors.rstd[1] = rstd.y, factors.rstd[2] = rstd.z, factors.rstd[3] = rstd.w;
            factors.scale[0] = pair.x, factors.scale[1] = pair.y;
            if constexpr (LAYER) {
                const float4 mean = *reinterpret_cast<const float4*>(rows.mean + block_row + 4 * q);
                factors.mean[0] = mean.x, factors.mean[1] = mean.y, factors.mean[2] = mean.z, factors.mean[3] = mean.w;
            }
        } else {
            const ForwardParams& p = rows.p;
            const i64 row = rows.global_row(block_row + 4 * q);
            load_scales(factors.scale, p, row, columns_left > 0 ? column : rows.first);
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                factors.rstd[r] = row + r < p.rows ? p.rstd[row + r] : 0.0f;
                if (LAYER) factors.mean[r] = row + r < p.rows ? p.mean[row + r] : 0.0f;
            }
        }
    }
};

// The tiles that a warp quantises, among the tiles of `across` tile columns, which are all near or all far. A tile
// column is all tiles of the block that have the same columns of the tensor.
template <bool NEAR>
struct Tiles {
    static constexpr int AHEAD = NEAR ? 1 : QUADS;  // quads in flight
    const Rows& rows;
    const int first;           // the index of the first tile column
    const int across;          // the number of tile columns
    Position tile;             // the tile to load next; none if tile.down < 0
    Quad quads[AHEAD];         // the quads in flight
    Pack<Weight, TC> weights;  // w of the lane's columns of the next tile
    Pack<Weight, TC> biases;   // b of the lane's columns of the next tile

    // The warp gets tiles `index`, index + WARPS, ... Tiles are numbered along the rows of tiles, from the last row of
    // tiles to the first, since L2 may still hold the data that phase 1 has read last.
    __device__ __forceinline__ Tiles(const Rows& rows, int first, int across, int index)
        : rows(rows), first(first), across(across), tile{first, -1} {
        if (across > 0) tile = {first + index % across, rows.count / TILE_ROWS - 1 - index / across};
    }

    // Starts the first loads of x and of the weights.
    __device__ __forceinline__ void start_first_loads() {
        if (tile.down < 0) return;
        Piece<NEAR> piece(rows, tile);
#pragma unroll
        for (int q = 0; q < AHEAD; ++q) piece.start_load(quads[q], rows, q);
        start_weight_loads(piece.column);
    }

    // Starts to load w and b from `column` on.
    __device__ __forceinline__ void start_weight_loads(int column) {
        const ForwardParams& p = rows.p;
        if (!LAYER || AFFINE) load_weight_pack(weights, p, column);
        if (LAYER && AFFINE) load_weight_pack(biases, p.bias, p.columns, column);
    }

    // Quantises all tiles of this warp, and stores them in qy and qy_t. `inverse` is the reciprocal of the scale. With
    // REREADS all threads of the block call it together, since it contains block barriers.
    __device__ __forceinline__ void quantise_all(float inverse) {
        const ForwardParams& p = rows.p;
        Piece<NEAR> piece(rows, tile);
        piece.x += 4 * AHEAD * (NEAR ? p.resident_columns : p.x_stride);
        Factors factors;
        if (tile.down >= 0) piece.start_load(factors, rows, 0);
        // With REREADS, block barriers keep the warps in step: a tensor of 67 million elements took 5 % less time with
        // them on an H200. A tensor of half that size, most of which stays in shared memory, took 5 % more time with
        // them.
        const int rounds = REREADS && across > 0 ? (rows.count / TILE_ROWS * across + WARPS - 1) / WARPS : 0;
        for (int round = 0; REREADS ? round < rounds : tile.down >= 0; ++round) {
            if constexpr (REREADS) {
                if (round > 0) __syncthreads();
                if (tile.down < 0) continue;
            }
            const int column = piece.column, columns_left = piece.columns_left;
            const int rows_left = WHOLE ? TR : piece.rows_left;
            const i64 row = piece.row;
            for (tile.across += WARPS; tile.across >= first + across; tile.across -= across) --tile.down;
            const bool more = tile.down >= 0;
            Piece<NEAR> next_piece(rows, tile);
            float weight[TC], bias[TC];
            if constexpr (!LAYER) {
                to_float(weight, weights);
                if (more) start_weight_loads(next_piece.column);
            }
            Turned<TR, TC> turned;
            u8* qy = p.qy + row * p.columns + column;
#pragma unroll
            for (int q = 0; q < QUADS; ++q) {
                Quad& word = quads[q % AHEAD];
                u32 out[4][TC / 4];
                if constexpr (LAYER && AFFINE) {  // converted for each quad, as fp32 w and b would not fit in registers
                    forget(weights), forget(biases);
                    to_float(weight, weights), to_float(bias, biases);
                    if (q + 1 == QUADS && more) start_weight_loads(next_piece.column);
                }
#pragma unroll
                for (int r = 0; r < 4; ++r) {
                    const float scale = scale_of_row(factors.scale, r);
                    float v[TC];
#pragma unroll
                    for (int j = 0; j < TC / 4; ++j) Word<X>::unpack(word[r][j], v + 4 * j);
#pragma unroll
                    for (int i = 0; i < TC; ++i) {
                        v[i] = dividend(v[i], scale, factors.mean[r], factors.rstd[r], weight[i], bias[i]);
                    }
                    quantise<X, TC>(out[r], v, inverse);
                }
                // The next quad is loaded before this quad's stores, since the compiler moves no load across them.
                if (q + 1 < QUADS) {
                    piece.start_load(factors, rows, q + 1);
                } else {
                    next_piece.start_load(factors, rows, 0);
                }
                if (q + AHEAD < QUADS) {
                    piece.start_load(word, rows, q + AHEAD);
                } else if (NEAR || more) {
                    next_piece.start_load(word, rows, q + AHEAD - QUADS);
                }
#pragma unroll
                for (int r = 0; r < 4; ++r, qy += u32(p.columns)) {
                    if (4 * q + r < rows_left) store_bytes<TC, !REREADS>(qy, out[r], columns_left, ALIGNED);
                }
                turned.take(q, out);
            }
            store_turned<RUN, ALIGNED, WHOLE, !REREADS>(p.qy_t, turned, row, p.rows, p.batch_rows, p.columns, column);
            piece = next_piece;
        }
    }
};
