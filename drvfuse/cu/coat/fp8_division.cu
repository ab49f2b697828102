// SPDX-License-Identifier: Apache-2.0
// FP8 quantisation of a tensor with one scale.
//
// Computes, for x [rows, columns] in bf16 or fp32:
//   scale = (max|x| + 1e-10) / fp8_max, each step rounded to the type of x, with FIND; otherwise the scale is given
//   y = FP8(fp32(x) / fp32(scale)), by div.full, if ROWS_OUT                        [rows, columns]
//   y_t = the transpose of each batch of rows of y, if COLUMNS_OUT:
//     [rows / batch_rows, columns, batch_rows]
// With FIND, if an element of x is NaN, the maximum and the scale are NaN too.
//
// Division. A warp takes tiles of ROW_LANES * TR rows by 32 / ROW_LANES * TC columns (tile.cuh). Warp i of all warps of
// the grid takes tiles i, i + warps, ... With FIND the launch is cooperative: each warp first reads all of its tiles
// for the maximum, then the blocks exchange their maxima, and each warp quantises its tiles from the last to the first,
// since L2 may still hold those that were read last.
//
// Storage. With FIND a warp keeps in registers the last tile that it has read, and in its part of shared memory up to
// KEPT tiles before that one. It reads all other tiles again.
//
// Memory ordering. Blocks exchange only their maxima (grid_barrier.cuh). A lane reads from shared memory only what it
// has stored itself.
//
// Traffic. Global bytes per element: those of x, once more with FIND for tiles that were not kept, and 1 for each
// output. With a given scale the outputs are stored by st.global.cs, since they are not read again soon. With FIND, x
// is read again, and ordinary stores were slightly faster on an H200.
#include "coat/tile.cuh"
#include "sync/grid_barrier.cuh"
#include "sync/pdl.cuh"

using X = DRVFUSE_DTYPE;                           // the type of x
using Out = DRVFUSE_OUT_DTYPE;                     // the FP8 type of y and y_t
using Scale = DRVFUSE_SCALE_DTYPE;                 // the type of the scale
constexpr int WARPS = DRVFUSE_WARPS;               // warps of a block
constexpr int TR = DRVFUSE_TILE_ROWS;              // rows of a lane's part of a tile
constexpr int TC = 8;                              // columns of a lane's part of a tile
constexpr int ROW_LANES = 32 / TR;                 // lanes that hold different rows of the same columns of a tile
constexpr int RUN = DRVFUSE_RUN;                   // bytes of one store to y_t
constexpr int KEPT = DRVFUSE_KEPT;                 // tiles that each warp keeps in shared memory
constexpr bool ALIGNED = DRVFUSE_ALIGNED;          // every row begins at a multiple of 16 bytes and has whole packs
constexpr bool FIND = DRVFUSE_FIND_SCALE;          // the kernel computes the scale
constexpr bool ROWS_OUT = DRVFUSE_ROWS_OUT;        // y is stored
constexpr bool COLUMNS_OUT = DRVFUSE_COLUMNS_OUT;  // y_t is stored

constexpr int TILE_ROWS = ROW_LANES * TR;          // rows of a warp's tile
constexpr int TILE_COLUMNS = 32 / ROW_LANES * TC;  // columns of a warp's tile

// The kernel's parameters. drvfuse/ops/coat/division.py reads this definition.
struct DivisionParams {
    const X* x;         // [rows, columns], with `x_stride`
    Scale* scale;       // the scale: with FIND a result, else an operand
    u8* y;              // [rows, columns], contiguous, with ROWS_OUT
    u8* y_t;            // [rows / batch_rows, columns, batch_rows], contiguous, with COLUMNS_OUT
    Scratch scratch;    // the workspace of the grid's barrier, with FIND
    i64 rows;           // rows of x
    i64 batch_rows;     // rows of a batch; each batch is transposed as one matrix
    i64 x_stride;       // elements from one row of x to the next
    int columns;        // columns of x
    int early_trigger;  // 1: trigger dependent launches early, 0: after the last store
};

// A lane's part of a tile: TR rows of TC elements. Elements that do not exist are 0.
struct Tile {
    static constexpr int VECTORS = TR * TC * sizeof(X) / 16;  // 16-byte vectors of the part
    i64 row;                                                  // the first row
    int column;                                               // the first column
    int columns_left;      // the number of columns from `column` to the tensor's last one; 0 or less: none
    int rows_left;         // the number of rows of the part that exist; 0 if its columns do not exist
    Pack<X, TC> pack[TR];  // the elements of each row

    // Sets the members for tile `number`, but not the elements. There are `across` tiles in a row of tiles.
    __device__ __forceinline__ void place(const DivisionParams& p, i64 number, int across) {
        const int lane = threadIdx.x % 32;
        row = number / across * TILE_ROWS + lane / (32 / ROW_LANES) * TR;
        column = int(number % across) * TILE_COLUMNS + lane % (32 / ROW_LANES) * TC;
        columns_left = p.columns - column;
        rows_left = columns_left > 0 ? int(max(min(p.rows - row, i64(TR)), i64(0))) : 0;
    }

    // Loads the elements from global memory.
    __device__ __forceinline__ void load(const DivisionParams& p) {
        const X* from = p.x + row * p.x_stride + column;
#pragma unroll
        for (int r = 0; r < TR; ++r, from += p.x_stride) {
            clear(pack[r].word);
            if (r >= rows_left) continue;
            if constexpr (ALIGNED) {
                load_pack(pack[r], from);
            } else {
                load_elements(pack[r], from, columns_left);
            }
        }
    }

    // Returns the bits of the largest magnitude. The bits of NaN exceed those of all numbers.
    __device__ __forceinline__ u32 largest() const {
        u32 magnitude = 0;
#pragma unroll
        for (int r = 0; r < TR; ++r) {
            float v[TC];
            to_float(v, pack[r]);
#pragma unroll
            for (int i = 0; i < TC; ++i) magnitude = max(magnitude, __float_as_uint(fabsf(v[i])));
        }
        return magnitude;
    }

    // Stores the elements in this lane's part of `buffer`, which has room for the warp's tile in shared memory.
    __device__ __forceinline__ void store_in_shared(uint4* buffer) const {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const u32* word = pack[i / (VECTORS / TR)].word + i % (VECTORS / TR) * 4;
            buffer[32 * i + threadIdx.x % 32] = make_uint4(word[0], word[1], word[2], word[3]);
        }
    }

    // Loads the elements that store_in_shared() has stored in `buffer`.
    __device__ __forceinline__ void load_from_shared(const uint4* buffer) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            u32* word = pack[i / (VECTORS / TR)].word + i % (VECTORS / TR) * 4;
            const uint4 v = buffer[32 * i + threadIdx.x % 32];
            word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
        }
    }

    // Divides the elements by the scale, and stores them in y and y_t.
    __device__ __forceinline__ void quantise(const DivisionParams& p, float scale) {
        Turned<TR, TC> turned;
        u8* y = p.y + row * p.columns + column;
#pragma unroll
        for (int q = 0; q < TR / 4; ++q) {
            u32 out[4][TC / 4];
#pragma unroll
            for (int r = 0; r < 4; ++r, y += p.columns) {
                float v[TC];
                to_float(v, pack[4 * q + r]);
#pragma unroll
                for (int i = 0; i < TC; ++i) v[i] = ptx::divide_full(v[i], scale);
#pragma unroll
                for (int j = 0; j < TC / 4; ++j) out[r][j] = Word<Out>::pack(v + 4 * j);
                if (ROWS_OUT && 4 * q + r < rows_left) store_bytes<TC, !FIND>(y, out[r], columns_left, ALIGNED);
            }
            if constexpr (COLUMNS_OUT) turned.take(q, out);
        }
        if (COLUMNS_OUT && rows_left > 0) {
            store_turned<RUN, ALIGNED, false, !FIND>(p.y_t, turned, row, p.rows, p.batch_rows, p.columns, column);
        }
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS, 512 / (32 * WARPS)) fp8_division(const DivisionParams p) {
    extern __shared__ uint4 kept[];
    __shared__ u32 shared_maximum;  // the bits of the largest |x| of the block, then of the grid
    const int across = (p.columns + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const i64 tiles = (p.rows + TILE_ROWS - 1) / TILE_ROWS * across;
    const i64 first = i64(threadIdx.x / 32) * gridDim.x + blockIdx.x, step = i64(WARPS) * gridDim.x;
    uint4* const buffers = kept + threadIdx.x / 32 * (KEPT * 32 * Tile::VECTORS);  // KEPT tiles of the warp
    const i64 last = first < tiles ? first + (tiles - 1 - first) / step * step : first - step;

    enter_stream(p);
    Tile tile;
    float scale;
    if constexpr (FIND) {
        ScratchUse use(p.scratch, gridDim.x > 1);
        if (threadIdx.x == 0) shared_maximum = 0;
        __syncthreads();
        u32 largest = 0;
        for (i64 number = first; number <= last; number += step) {
            tile.place(p, number, across);
            tile.load(p);
            largest = max(largest, tile.largest());
            const i64 distance = last - number;  // `step` times the number of the warp's later tiles
            if (KEPT > 0 && distance > 0 && distance <= KEPT * step) {
                tile.store_in_shared(buffers + (distance / step - 1) * (32 * Tile::VECTORS));
            }
        }
        largest = ptx::warp_max(largest);
        if (threadIdx.x % 32 == 0) atomicMax(&shared_maximum, largest);
        if (!grid_maximum(p.scratch, use, &shared_maximum)) return;
        const float maximum = __uint_as_float(shared_maximum);
        const float floored = rounded<X>(__fadd_rn(maximum, 1e-10f));
        scale = rounded<X>(__fdiv_rn(floored, Finite<Out>::max));
        if (blockIdx.x == 0 && threadIdx.x == 0) store_scalar(p.scale, scale);
    } else {
        scale = *p.scale;
    }
    for (i64 number = last; number >= first; number -= step) {
        if (!FIND || number < last) {
            tile.place(p, number, across);
            const i64 distance = last - number;
            if (KEPT > 0 && distance <= KEPT * step) {
                tile.load_from_shared(buffers + (distance / step - 1) * (32 * Tile::VECTORS));
            } else {
                tile.load(p);
            }
        }
        tile.quantise(p, scale);
    }
    leave_stream(p);
}
