// SPDX-License-Identifier: Apache-2.0
// Per-tensor FP8 quantisation of x [rows, columns] of bf16 or fp32, with its transpose where asked.
//
// y = FP8(fp32(x) / fp32(s_y)) with div.full. Without a given scale the grid first finds max|x| (NaN wins) and the scale
// is (max + 1e-10) / fp8_max, each step rounded to x's type; that needs a cooperative launch and reads x twice.
// A warp takes tiles of ROW_LANES * TR rows by 32 / ROW_LANES * TC columns.
#include "coat/tile.cuh"
#include "sync/grid_barrier.cuh"
#include "sync/pdl.cuh"

using X = DRVFUSE_DTYPE;
using Out = DRVFUSE_OUT_DTYPE;
using Scale = DRVFUSE_SCALE_DTYPE;
constexpr int WARPS = DRVFUSE_WARPS;
constexpr int TR = 16, TC = 8, ROW_LANES = 2;
constexpr int RUN = DRVFUSE_RUN;
constexpr bool ALIGNED = DRVFUSE_ALIGNED;
constexpr bool FIND = DRVFUSE_FIND_SCALE;
constexpr bool ROWS_OUT = DRVFUSE_ROWS_OUT;
constexpr bool COLUMNS_OUT = DRVFUSE_COLUMNS_OUT;

constexpr int TILE_ROWS = ROW_LANES * TR, TILE_COLUMNS = 32 / ROW_LANES * TC;

struct DivisionParams {
    const X* x;
    Scale* scale;
    u8* y;
    u8* y_t;
    Scratch scratch;
    i64 rows, batch_rows, x_stride;
    int columns, early_trigger;
};

extern "C" __global__ void __launch_bounds__(32 * WARPS) fp8_division(const DivisionParams p) {
    __shared__ u32 found;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int tiles_across = (p.columns + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const i64 tiles = (p.rows + TILE_ROWS - 1) / TILE_ROWS * tiles_across;
    const int row_lane = lane / (32 / ROW_LANES), column_lane = lane % (32 / ROW_LANES);
    const i64 first = i64(warp) * gridDim.x + blockIdx.x, step = i64(WARPS) * gridDim.x;

    enter_stream(p);
    float scale;
    if constexpr (FIND) {
        ScratchUse use(p.scratch, gridDim.x > 1);
        if (threadIdx.x == 0) found = 0;
        __syncthreads();
        u32 most = 0;
        for (i64 tile = first; tile < tiles; tile += step) {
            const i64 row0 = tile / tiles_across * TILE_ROWS + row_lane * TR;
            const int at = int(tile % tiles_across) * TILE_COLUMNS + column_lane * TC;
            for (i64 row = row0; row < row0 + TR && row < p.rows; ++row) {
                float v[TC];
                if (at < p.columns) {
                    load_weights<X, TC>(v, p.x + row * p.x_stride + at, p.columns - at, ALIGNED);
#pragma unroll
                    for (int i = 0; i < TC; ++i) most = max(most, __float_as_uint(fabsf(v[i])));
                }
            }
        }
        atomicMax(&found, most);
        if (!grid_maximum(p.scratch, use, &found)) return;
        const float maximum = __uint_as_float(found);
        const float floored = rounded<X>(__fadd_rn(maximum, 1e-10f));
        scale = rounded<X>(__fdiv_rn(floored, Finite<Out>::max));
        if (blockIdx.x == 0 && threadIdx.x == 0) store_scalar(p.scale, scale);
    } else {
        scale = *p.scale;
    }
    for (i64 tile = first; tile < tiles; tile += step) {
        const i64 row0 = tile / tiles_across * TILE_ROWS + row_lane * TR;
        const int at = int(tile % tiles_across) * TILE_COLUMNS + column_lane * TC;
        if (at >= p.columns || row0 >= p.rows) continue;
        const int valid = p.columns - at;
        Turned<TR, TC> turned;
#pragma unroll
        for (int q = 0; q < TR / 4; ++q) {
            u32 out[4][TC / 4];
            float v[4][TC];
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const i64 row = row0 + 4 * q + r;
                clear(v[r]);
                if (row < p.rows) load_weights<X, TC>(v[r], p.x + row * p.x_stride + at, valid, ALIGNED);
            }
#pragma unroll
            for (int r = 0; r < 4; ++r) {
#pragma unroll
                for (int i = 0; i < TC; ++i) v[r][i] = ptx::divide_full(v[r][i], scale);
#pragma unroll
                for (int j = 0; j < TC / 4; ++j) out[r][j] = Word<Out>::pack(v[r] + 4 * j);
                const i64 row = row0 + 4 * q + r;
                if (ROWS_OUT && row < p.rows) store_bytes<TC>(p.y + row * p.columns + at, out[r], valid, ALIGNED);
            }
            if constexpr (COLUMNS_OUT) turned.take(q, out);
        }
        if constexpr (COLUMNS_OUT) {
            store_turned<RUN, ALIGNED>(p.y_t, turned, row0, p.rows, p.batch_rows, p.columns, at);
        }
    }
    leave_stream(p);
}
