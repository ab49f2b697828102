// SPDX-License-Identifier: Apache-2.0
// The data of its many rows that a block of the FP8 norms' forward pass keeps, and a warp's tiles of them in phase 2.
//
// A tile has the rows of a group and 32 / ROW_LANES * TC columns (tile.cuh). All of its x is resident in shared memory,
// or nothing, so the lanes of a warp do not diverge. Loads of all rows of a tile that is not resident are in flight
// when the tile begins; each quad of rows that was used makes room in registers for a quad of the next tile.
#pragma once
#include "coat/forward.cuh"

constexpr bool KNOWN = DRVFUSE_KNOWN;      // scales and rstd of all rows stay in shared memory
constexpr bool REREADS = DRVFUSE_REREADS;  // less than half of x is resident
constexpr int QUADS = TR / 4;
static_assert(BLOCK_ROWS == TILE_ROWS && BATCH == 4, "tiles of a group's rows, batches of its quads");
static_assert((BLOCK_ROWS & (BLOCK_ROWS - 1)) == 0, "known_scales()");

// The rows of a block, counted from 0, and their data in shared memory.
struct Rows {
    const ForwardParams& p;
    int team, teams;
    int first, width, count;  // columns from `first` on
    float* rstd;              // [count]
    float* mean;              // [count], of LayerNorm
    u8* x;                    // [count, p.resident_columns], swizzled
    bf16* scales;             // [groups of QB, count], swizzled

    __device__ __forceinline__ i64 global(int local) const {
        const u32 inside = u32(team * BLOCK_ROWS) + u32(local) % BLOCK_ROWS;
        return u64(u32(local) / BLOCK_ROWS) * u32(teams * BLOCK_ROWS) + inside;
    }
    // A value of a row. For rows that do not exist it is 0, or with KNOWN undefined.
    __device__ __forceinline__ float statistic(const float* known, const float* all, int local) const {
        if constexpr (KNOWN) return known[local];
        const i64 row = global(local);
        return row < p.rows ? all[row] : 0.0f;
    }
    __device__ __forceinline__ float rstd_of(int local) const { return statistic(rstd, p.rstd, local); }
    __device__ __forceinline__ float mean_of(int local) const { return LAYER ? statistic(mean, p.mean, local) : 0.0f; }
    // The place of x in shared memory. Lanes that are TR rows apart read the same columns at the same time, so their
    // places within 128 bytes are permuted to avoid bank conflicts.
    __device__ __forceinline__ int resident_x(int local, int at) const {
        return local * p.resident_columns + ((at - first) ^ (u32(local) / TR * TILE_COLUMNS % 128));
    }
    // The place of the scales of four rows. Lanes of several groups write, and read, those of one row at the same time.
    __device__ __forceinline__ int known_scales(int local, int at) const {
        const int group = u32(at - first) / QB;
        return group * count + (local ^ (4 * group & (BLOCK_ROWS - 1)));
    }
};

__device__ __forceinline__ void keep_batch(const Batch& batch, const Rows& rows, int local, int at) {
    if (at - rows.first < rows.p.resident_columns) {
        u8* x = rows.x + rows.resident_x(local, at);
#pragma unroll
        for (int r = 0; r < BATCH; ++r) {
            *reinterpret_cast<uint4*>(x + r * rows.p.resident_columns) =
                make_uint4(batch.word[r][0], batch.word[r][1], batch.word[r][2], batch.word[r][3]);
        }
    }
    if (KNOWN && (QB == PACK || at % QB == 0)) {
        *reinterpret_cast<uint2*>(rows.scales + rows.known_scales(local, at)) =
            make_uint2(batch.scale[0] | u32(batch.scale[1]) << 16, batch.scale[2] | u32(batch.scale[3]) << 16);
    }
}

// Loads a batch again: from shared memory where it is kept, else from global memory.
__device__ __forceinline__ void fetch_batch(Batch& batch, const Rows& rows, int local, int at) {
    if (at >= rows.p.columns || at - rows.first >= rows.p.resident_columns) {
        load_batch(batch, rows.p, rows.global(local), at);
        return;
    }
    const u8* x = rows.x + rows.resident_x(local, at);
#pragma unroll
    for (int r = 0; r < BATCH; ++r) load_bytes<PACK>(batch.word[r], x + r * rows.p.resident_columns, PACK, true);
    u32 pair[2];
    if constexpr (KNOWN) {
        const uint2 four = *reinterpret_cast<const uint2*>(rows.scales + rows.known_scales(local, at));
        pair[0] = four.x, pair[1] = four.y;
    } else {
        load_scales(pair, rows.p, rows.global(local), at);
    }
#pragma unroll
    for (int r = 0; r < BATCH; ++r) batch.scale[r] = u16(pair[r / 2] >> (16 * (r % 2)));
}

using Quad = u32[4][TC / 4];  // TC columns of four rows; bytes that do not exist are undefined

struct Factors {
    u32 scale[2];
    float rstd[4], mean[4];
};

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
    int local, at, valid;           // first row in the block, first column, and the number of columns from there on
    int left;                       // rows that exist; 0 if its columns do not
    i64 row;                        // the first of these rows in the tensor
    int known;                      // offset of the scales of its first four rows
    typename Offset<NEAR>::type x;  // offset of the next quad to load, in Rows::x or ForwardParams::x

    // After the last tile it points to a tile that may be read, so that loads of quads need no condition.
    __device__ __forceinline__ Piece(const Rows& rows, const Place& tile) {
        const ForwardParams& p = rows.p;
        const int lane = threadIdx.x % 32;
        local = max(tile.down, 0) * TILE_ROWS + lane / (32 / ROW_LANES) * TR;
        at = rows.first + tile.across * TILE_COLUMNS + lane % (32 / ROW_LANES) * TC;
        valid = p.columns - at;
        const int from = WHOLE || valid > 0 ? at : rows.first;  // a column that exists
        row = rows.global(local);
        left = WHOLE ? TR : valid > 0 ? int(min(p.rows - row, i64(TR))) : 0;
        known = rows.known_scales(local, from);
        x = NEAR ? rows.resident_x(local, from) : row * p.x_stride + at;
    }

    __device__ __forceinline__ void ask(Quad& word, const Rows& rows, int q) {
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
                if (WHOLE || 4 * q + r < left) load_bytes<TC>(word[r], from, valid, ALIGNED);
            }
            x += 4 * p.x_stride;
        }
    }

    __device__ __forceinline__ void ask(Factors& factors, const Rows& rows, int q) const {
        if constexpr (KNOWN) {
            const float4 rstd = *reinterpret_cast<const float4*>(rows.rstd + local + 4 * q);
            const uint2 pair = *reinterpret_cast<const uint2*>(rows.scales + (known ^ 4 * q));
            factors.rstd[0] = rstd.x, factors.rstd[1] = rstd.y, factors.rstd[2] = rstd.z, factors.rstd[3] = rstd.w;
            factors.scale[0] = pair.x, factors.scale[1] = pair.y;
            if constexpr (LAYER) {
                const float4 mean = *reinterpret_cast<const float4*>(rows.mean + local + 4 * q);
                factors.mean[0] = mean.x, factors.mean[1] = mean.y, factors.mean[2] = mean.z, factors.mean[3] = mean.w;
            }
        } else {
            const ForwardParams& p = rows.p;
            const i64 row = rows.global(local + 4 * q);
            load_scales(factors.scale, p, row, valid > 0 ? at : rows.first);
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                factors.rstd[r] = row + r < p.rows ? p.rstd[row + r] : 0.0f;
                if (LAYER) factors.mean[r] = row + r < p.rows ? p.mean[row + r] : 0.0f;
            }
        }
    }
};

// A warp's tiles in `strips` strips, all resident or none: the quads in flight, and the loop over the tiles.
template <bool NEAR>
struct Tiles {
    static constexpr int AHEAD = NEAR ? 1 : QUADS;  // quads in flight
    const Rows& rows;
    const int first, strips;
    Place tile;  // the tile to load next
    Quad quads[AHEAD];
    Pack<Weight, TC> weights, biases;

    // The tiles begin with the last rows, since L2 may still hold the data that was read last.
    __device__ __forceinline__ Tiles(const Rows& rows, int first, int strips, int index)
        : rows(rows), first(first), strips(strips), tile{first, -1} {
        if (strips > 0) tile = {first + index % strips, rows.count / TILE_ROWS - 1 - index / strips};
    }

    __device__ __forceinline__ void ask_for_first() {
        if (tile.down < 0) return;
        Piece<NEAR> piece(rows, tile);
#pragma unroll
        for (int q = 0; q < AHEAD; ++q) piece.ask(quads[q], rows, q);
        ask_for_weights(piece.at);
    }

    __device__ __forceinline__ void ask_for_weights(int at) {
        const ForwardParams& p = rows.p;
        if (!LAYER || AFFINE) load_weight_pack(weights, p, at);
        if (LAYER && AFFINE) load_weight_pack(biases, p.bias, p.columns, at);
    }

    __device__ __forceinline__ void quantise_all(float inverse) {
        const ForwardParams& p = rows.p;
        Piece<NEAR> piece(rows, tile);
        piece.x += 4 * AHEAD * (NEAR ? p.resident_columns : p.x_stride);
        Factors factors;
        if (tile.down >= 0) piece.ask(factors, rows, 0);
        // If x is read again, barriers keep the warps in step. On an H200 67 million elements take 5 % less time so.
        // Half as many elements, most of which are in shared memory, take 5 % more.
        const int rounds = REREADS && strips > 0 ? (rows.count / TILE_ROWS * strips + WARPS - 1) / WARPS : 0;
        for (int round = 0; REREADS ? round < rounds : tile.down >= 0; ++round) {
            if constexpr (REREADS) {
                if (round > 0) __syncthreads();
                if (tile.down < 0) continue;
            }
            const int at = piece.at, valid = piece.valid;
            const int left = WHOLE ? TR : piece.left;
            const i64 row = piece.row;
            for (tile.across += WARPS; tile.across >= first + strips; tile.across -= strips) --tile.down;
            const bool more = tile.down >= 0;
            Piece<NEAR> after(rows, tile);
            float weight[TC], bias[TC];
            if constexpr (!LAYER) {
                to_float(weight, weights);
                if (more) ask_for_weights(after.at);
            }
            Turned<TR, TC> turned;
            u8* to = p.qy + row * p.columns + at;
#pragma unroll
            for (int q = 0; q < QUADS; ++q) {
                Quad& word = quads[q % AHEAD];
                u32 out[4][TC / 4];
                if constexpr (LAYER && AFFINE) {  // there are no registers to keep both as fp32 during all quads
                    forget(weights), forget(biases);
                    to_float(weight, weights), to_float(bias, biases);
                    if (q + 1 == QUADS && more) ask_for_weights(after.at);
                }
#pragma unroll
                for (int r = 0; r < 4; ++r) {
                    const u32 pair = factors.scale[r / 2];
                    const float scale = __uint_as_float(r % 2 ? pair & 0xffff0000u : pair << 16);
                    float v[TC];
#pragma unroll
                    for (int j = 0; j < TC / 4; ++j) Word<X>::unpack(word[r][j], v + 4 * j);
#pragma unroll
                    for (int i = 0; i < TC; ++i) {
                        v[i] = quotient(v[i], scale, factors.mean[r], factors.rstd[r], weight[i], bias[i]);
                    }
                    quantise<X, TC>(out[r], v, inverse);
                }
                // The next quad is loaded before this quad's stores, since the compiler moves no load across them.
                if (q + 1 < QUADS) {
                    piece.ask(factors, rows, q + 1);
                } else {
                    after.ask(factors, rows, 0);
                }
                if (q + AHEAD < QUADS) {
                    piece.ask(word, rows, q + AHEAD);
                } else if (NEAR || more) {
                    after.ask(word, rows, q + AHEAD - QUADS);
                }
#pragma unroll
                for (int r = 0; r < 4; ++r, to += u32(p.columns)) {
                    if (4 * q + r < left) store_bytes<TC, !REREADS>(to, out[r], valid, ALIGNED);
                }
                turned.take(q, out);
            }
            store_turned<RUN, ALIGNED, WHOLE, !REREADS>(p.qy_t, turned, row, p.rows, p.batch_rows, p.columns, at);
            piece = after;
        }
    }
};
