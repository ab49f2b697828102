// SPDX-License-Identifier: Apache-2.0
// FP8 quantisation of x [rows, columns], bf16 or fp32, with one scale, and with its transpose if wanted.
//
// y = FP8(fp32(x) / fp32(s_y)) with div.full. Without a given scale the grid first finds max|x| (NaN wins) and the scale
// is (max + 1e-10) / fp8_max, each step rounded to x's type; that needs a cooperative launch.
//
// A warp takes tiles of ROW_LANES * TR rows by 32 / ROW_LANES * TC columns: number `first`, `first + step`, ... When it
// searches the maximum, it keeps the last tile in registers, and the tiles before that in its part of shared memory, as
// many as fit. Then it quantises its tiles from the last to the first. So it first reads those again that L2 has loaded
// last.
//
// With a given scale the outputs are stored by st.global.cs, since they are not read again soon. Without a given scale
// x is read again, and ordinary stores were slightly faster on an H200.
//
// Global bytes per element: those of x, once more for tiles that were not kept, and 1 for each output.
#include "coat/tile.cuh"
#include "sync/grid_barrier.cuh"
#include "sync/pdl.cuh"

using X = DRVFUSE_DTYPE;
using Out = DRVFUSE_OUT_DTYPE;
using Scale = DRVFUSE_SCALE_DTYPE;
constexpr int WARPS = DRVFUSE_WARPS;
constexpr int TR = DRVFUSE_TILE_ROWS, TC = 8, ROW_LANES = 32 / TR;
constexpr int RUN = DRVFUSE_RUN;    // bytes of a column that one store of y_t can take
constexpr int KEPT = DRVFUSE_KEPT;  // tiles of each warp that shared memory holds
constexpr bool ALIGNED = DRVFUSE_ALIGNED;
constexpr bool FIND = DRVFUSE_FIND_SCALE;
constexpr bool ROWS_OUT = DRVFUSE_ROWS_OUT;
constexpr bool COLUMNS_OUT = DRVFUSE_COLUMNS_OUT;

constexpr int TILE_ROWS = ROW_LANES * TR, TILE_COLUMNS = 32 / ROW_LANES * TC;

// drvfuse/ops/coat/division.py has the same layout.
struct DivisionParams {
    const X* x;
    Scale* scale;
    u8* y;
    u8* y_t;
    Scratch scratch;
    i64 rows, batch_rows, x_stride;
    int columns, early_trigger;
};

// A lane's part of a tile: TR rows of TC elements; elements that do not exist are 0.
struct Tile {
    static constexpr int VECTORS = TR * TC * sizeof(X) / 16;
    i64 row;
    int at, valid, left;  // its first column, the columns from there on that exist, and the rows
    Pack<X, TC> pack[TR];

    __device__ __forceinline__ void place(const DivisionParams& p, i64 number, int across) {
        const int lane = threadIdx.x % 32;
        row = number / across * TILE_ROWS + lane / (32 / ROW_LANES) * TR;
        at = int(number % across) * TILE_COLUMNS + lane % (32 / ROW_LANES) * TC;
        valid = p.columns - at;
        left = valid > 0 ? int(max(min(p.rows - row, i64(TR)), i64(0))) : 0;
    }

    __device__ __forceinline__ void load(const DivisionParams& p) {
        const X* from = p.x + row * p.x_stride + at;
#pragma unroll
        for (int r = 0; r < TR; ++r, from += p.x_stride) {
            clear(pack[r].word);
            if (r >= left) continue;
            if constexpr (ALIGNED) {
                load_pack(pack[r], from);
            } else {
                load_elements(pack[r], from, valid);
            }
        }
    }

    // The largest magnitude as bits; the bits of a NaN compare above all others.
    __device__ __forceinline__ u32 largest() const {
        u32 most = 0;
#pragma unroll
        for (int r = 0; r < TR; ++r) {
            float v[TC];
            to_float(v, pack[r]);
#pragma unroll
            for (int i = 0; i < TC; ++i) most = max(most, __float_as_uint(fabsf(v[i])));
        }
        return most;
    }

    // A store to the lane's part of a slot in shared memory, and a load from it.
    __device__ __forceinline__ void keep(uint4* slot) const {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const u32* word = pack[i / (VECTORS / TR)].word + i % (VECTORS / TR) * 4;
            slot[32 * i + threadIdx.x % 32] = make_uint4(word[0], word[1], word[2], word[3]);
        }
    }
    __device__ __forceinline__ void take(const uint4* slot) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            u32* word = pack[i / (VECTORS / TR)].word + i % (VECTORS / TR) * 4;
            const uint4 v = slot[32 * i + threadIdx.x % 32];
            word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
        }
    }

    __device__ __forceinline__ void quantise(const DivisionParams& p, float scale) {
        Turned<TR, TC> turned;
        u8* to = p.y + row * p.columns + at;
#pragma unroll
        for (int q = 0; q < TR / 4; ++q) {
            u32 out[4][TC / 4];
#pragma unroll
            for (int r = 0; r < 4; ++r, to += p.columns) {
                float v[TC];
                to_float(v, pack[4 * q + r]);
#pragma unroll
                for (int i = 0; i < TC; ++i) v[i] = ptx::divide_full(v[i], scale);
#pragma unroll
                for (int j = 0; j < TC / 4; ++j) out[r][j] = Word<Out>::pack(v + 4 * j);
                if (ROWS_OUT && 4 * q + r < left) store_bytes<TC, !FIND>(to, out[r], valid, ALIGNED);
            }
            if constexpr (COLUMNS_OUT) turned.take(q, out);
        }
        if (COLUMNS_OUT && left > 0) {
            store_turned<RUN, ALIGNED, false, !FIND>(p.y_t, turned, row, p.rows, p.batch_rows, p.columns, at);
        }
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS, 512 / (32 * WARPS)) fp8_division(const DivisionParams p) {
    extern __shared__ uint4 kept[];
    __shared__ u32 found;
    const int across = (p.columns + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const i64 tiles = (p.rows + TILE_ROWS - 1) / TILE_ROWS * across;
    const i64 first = i64(threadIdx.x / 32) * gridDim.x + blockIdx.x, step = i64(WARPS) * gridDim.x;
    uint4* const own = kept + threadIdx.x / 32 * (KEPT * 32 * Tile::VECTORS);
    const i64 last = first < tiles ? first + (tiles - 1 - first) / step * step : first - step;

    enter_stream(p);
    Tile tile;
    float scale;
    if constexpr (FIND) {
        ScratchUse use(p.scratch, gridDim.x > 1);
        if (threadIdx.x == 0) found = 0;
        __syncthreads();
        u32 most = 0;
        for (i64 number = first; number <= last; number += step) {
            tile.place(p, number, across);
            tile.load(p);
            most = max(most, tile.largest());
            const i64 behind = last - number;  // `step` for each of the tiles that come later
            if (KEPT > 0 && behind > 0 && behind <= KEPT * step) {
                tile.keep(own + (behind / step - 1) * (32 * Tile::VECTORS));
            }
        }
        most = ptx::warp_max(most);
        if (threadIdx.x % 32 == 0) atomicMax(&found, most);
        if (!grid_maximum(p.scratch, use, &found)) return;
        const float maximum = __uint_as_float(found);
        const float floored = rounded<X>(__fadd_rn(maximum, 1e-10f));
        scale = rounded<X>(__fdiv_rn(floored, Finite<Out>::max));
        if (blockIdx.x == 0 && threadIdx.x == 0) store_scalar(p.scale, scale);
    } else {
        scale = *p.scale;
    }
    for (i64 number = last; number >= first; number -= step) {
        if (!FIND || number < last) {
            tile.place(p, number, across);
            const i64 behind = last - number;
            if (KEPT > 0 && behind <= KEPT * step) {
                tile.take(own + (behind / step - 1) * (32 * Tile::VECTORS));
            } else {
                tile.load(p);
            }
        }
        tile.quantise(p, scale);
    }
    leave_stream(p);
}
