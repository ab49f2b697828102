// SPDX-License-Identifier: Apache-2.0
// The forward pass of FP8 LayerNorm in one launch, which reads x twice. layernorm_plan() of
// drvfuse/plans/coat_forward.py chooses this kernel where fp8_norm_forward_rows.cu and fp8_norm_forward_tiles.cu are
// slower.
//
// Computes, for x [rows, columns] in FP8 with bf16 scales s_x [rows, ceil(columns / QB)], where s is the scale of the
// element's group of QB columns:
//   mean = mean of x * s over the row                                            [rows] fp32
//   rstd = 1 / sqrt(mean of (x * s - mean)^2 over the row + epsilon)             [rows] fp32
//   y = (x * s - mean) * rstd, or with PARAMETERS ((x * s - mean) * rstd) * w + b, for w and b [columns]
//   scale = bf16((max|y| + 1e-10) / fp8_max), where the maximum is over the tensor  one bf16
//   qy = FP8(y / scale)                                                          [rows, columns]
//   qy_t = the transpose of each batch of rows of qy:
//     [rows / batch_rows, columns, batch_rows]
// in fp32. The division is a product with the approximate reciprocal of the scale, as div.full computes it. Order of
// sums over a row: the 16 elements of a pack in order, then the order of teams.cuh. For the mean the elements of x are
// added, and the sum of a pack is multiplied by its scale.
// NaN. If all y of a row are NaN, as with a NaN in x, the maximum is NaN. Other NaN elements are ignored.
//
// Division. The launch is cooperative. A block has TEAMS teams (teams.cuh).
//   Phase 1  Team t of all teams of the grid takes rows t, t + teams, ... It computes mean, rstd and the largest |y| of
//            each row, and stores mean and rstd.
//   Barrier  The blocks exchange their largest |y| (grid_barrier.cuh), and every block computes the scale.
//   Phase 2  Each warp takes tiles of ROW_LANES * TR rows by 32 / ROW_LANES * TC columns (tile.cuh), quantises them and
//            stores them in qy and qy_t. It reads x again, from the L2 cache if x fits there.
//
// Storage. Registers: a team's row, and its next row, which is in flight; with HOLD w and b; in phase 2 x and the
// scales of a tile. The first tile's x is loaded before the barrier, and the next tile's x before a tile is stored.
// Shared memory: the sums of the warps of a team, the block's maximum, and mean and rstd of the rows of each warp's
// tile.
//
// Memory ordering. The grid's barrier makes the mean and rstd that other blocks have stored in phase 1 visible to phase
// 2. Warps of a team exchange sums as teams.cuh describes.
//
// PDL. Before the wait for the producer, a block reads only the w and b that stay in registers. It triggers right after
// the wait (early_trigger) or after its last store.
#include "coat/kernel.cuh"
#include "coat/teams.cuh"
#include "coat/tile.cuh"
#include "sync/grid_barrier.cuh"

constexpr bool PARAMETERS = DRVFUSE_PARAMETERS;                   // there are w and b
constexpr int RUN = DRVFUSE_RUN;                                  // bytes of one store to qy_t
constexpr bool HOLD = PARAMETERS && PACKS * sizeof(Weight) <= 4;  // w and b stay in registers in phase 1

constexpr int WARPS = TEAM_WARPS * TEAMS;          // warps of a block
constexpr int TR = DRVFUSE_TILE_ROWS;              // rows of a lane's part of a tile
constexpr int TC = 8;                              // columns of a lane's part of a tile
constexpr int ROW_LANES = DRVFUSE_ROW_LANES;       // lanes that hold different rows of the same columns of a tile
constexpr int TILE_ROWS = ROW_LANES * TR;          // rows of a warp's tile
constexpr int TILE_COLUMNS = 32 / ROW_LANES * TC;  // columns of a warp's tile

// The kernel's parameters. drvfuse/ops/coat/layernorm.py reads this definition. Strides are in elements.
struct LayerNormParams {
    const u8* x;           // [rows, columns], with `x_stride`
    const u16* scales;     // s_x [rows, ceil(columns / QB)], bf16, with `scale_stride`
    const Weight* weight;  // w [columns], with PARAMETERS
    const Weight* bias;    // b [columns], with PARAMETERS
    u8* qy;                // [rows, columns], contiguous
    u8* qy_t;              // [rows / batch_rows, columns, batch_rows], contiguous
    u16* scale;            // the bf16 scale of the whole of qy
    float* mean;           // [rows]
    float* rstd;           // [rows]
    Scratch scratch;       // the workspace of the grid's barrier
    i64 rows;              // rows of x
    i64 batch_rows;        // rows of a batch; each batch is transposed as one matrix
    i64 x_stride;          // distance between two rows of x
    i64 scale_stride;      // distance between two rows of s_x
    int columns;           // columns of x
    float epsilon;         // the number added to the variance
    int early_trigger;     // 1: trigger dependent launches early, 0: after the last store
    int unused;            // padding to a multiple of 8 bytes
};

using WeightPack = Pack<Weight, PACK>;

// Returns y of an element.
__device__ __forceinline__ float normalised(float x, float scale, float mean, float rstd, float w, float b) {
    const float xhat = __fmul_rn(__fsub_rn(__fmul_rn(x, scale), mean), rstd);
    return PARAMETERS ? __fadd_rn(__fmul_rn(xhat, w), b) : xhat;
}

// A lane's part of a tile, as loaded from memory. Elements and scales that do not exist are 0.
struct Tile {
    i64 row0;              // the first row of the lane's part
    int column;            // the first column of the lane's part
    u32 word[TR][TC / 4];  // the FP8 elements of each row
    u32 scale[TR / 2];     // the bf16 bits of the rows' scales, two rows per word

    // Loads this lane's part of tile `index`. Tiles are numbered along the rows.
    __device__ __forceinline__ void load(const LayerNormParams& p, i64 index) {
        const int lane = threadIdx.x % 32, across = (p.columns + TILE_COLUMNS - 1) / TILE_COLUMNS;
        row0 = index / across * TILE_ROWS + lane / (32 / ROW_LANES) * TR;
        column = int(index % across) * TILE_COLUMNS + lane % (32 / ROW_LANES) * TC;
        const u8* x = p.x + row0 * p.x_stride + column;
        const u16* scales = p.scales + row0 * p.scale_stride + column / QB;
        const i64 rows_left = column < p.columns ? p.rows - row0 : 0;
#pragma unroll
        for (int r = 0; r < TR; ++r, x += p.x_stride, scales += p.scale_stride) {
            clear(word[r]);
            if (r % 2 == 0) scale[r / 2] = 0;
            if (r < rows_left) {
                load_bytes<TC>(word[r], x, p.columns - column, ALIGNED);
                scale[r / 2] |= u32(*scales) << (16 * (r % 2));
            }
        }
    }
};

// Returns the sum of x * s over the row, or with SQUARES the sum of (x * s - mean)^2. Called by all threads of a team.
template <bool SQUARES>
__device__ __forceinline__ float row_sum(Team& team, TeamScratch& scratch, const Fp8Row& x, float mean, int columns) {
    float sums[PACKS];
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        const float scale = bf16{x.scale[i]};
        const int valid = columns - team.column(i);
        float sum = 0.0f;
        for_each_value<X>(x.word[i], [&](int k, float v) {
            if constexpr (SQUARES) {
                const float deviation = __fsub_rn(__fmul_rn(v, scale), mean);
                if (ALIGNED ? valid > 0 : k < valid) sum = __fadd_rn(sum, __fmul_rn(deviation, deviation));
            } else {
                sum = __fadd_rn(sum, v);
            }
        });
        sums[i] = SQUARES ? sum : __fmul_rn(sum, scale);
    }
    return team.sum(scratch, sums);
}

extern "C" __global__ void __launch_bounds__(THREADS) fp8_layernorm_forward(const LayerNormParams p) {
    __shared__ TeamScratch scratch;
    __shared__ u32 shared_maximum;             // the bits of the largest |y| of the block, then of the grid
    __shared__ float means[WARPS][TILE_ROWS];  // the mean of the rows of each warp's tile
    __shared__ float rstds[WARPS][TILE_ROWS];  // the rstd of the rows of each warp's tile
    Team team;
    const float count = float(p.columns);

    WeightPack weight[HOLD ? PACKS : 1], bias[HOLD ? PACKS : 1];
    if constexpr (HOLD) {
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            load_columns<ALIGNED>(weight[i], p.weight, team.column(i), p.columns);
            load_columns<ALIGNED>(bias[i], p.bias, team.column(i), p.columns);
        }
    }
    if (threadIdx.x == 0) shared_maximum = 0;
    enter_stream(p);
    ScratchUse use(p.scratch, gridDim.x > 1);
    __syncthreads();

    // Phase 1: compute mean, rstd and the largest |y| of each row.
    const i64 step = i64(gridDim.x) * TEAMS;
    auto load = [&](Fp8Row& x, i64 row) {
        const i64 existing = row < p.rows ? row : 0;
        x.load<QB, ALIGNED>(team, p.x + existing * p.x_stride, p.scales + existing * p.scale_stride,
                            row < p.rows ? p.columns : 0);
    };
    i64 row = i64(blockIdx.x) * TEAMS + team.index;
    Fp8Row next_x;
    load(next_x, row);
    u32 largest = 0;  // the bits of the largest |y| of this thread's elements so far, or NAN_BITS
    for (; row < p.rows; row += step) {
        Fp8Row x = next_x;
        load(next_x, row + step);
        const float mean = ptx::divide_full(row_sum<false>(team, scratch, x, 0.0f, p.columns), count);
        const float variance = ptx::divide_full(row_sum<true>(team, scratch, x, mean, p.columns), count);
        const float rstd = reciprocal_root(__fadd_rn(variance, p.epsilon));
        if (team.member == 0 && team.lane == 0) p.mean[row] = mean, p.rstd[row] = rstd;
        // Starts with NaN: fmaxf ignores a NaN if the other operand is a number, so the maximum is NaN only if all y
        // are.
        float row_largest = __uint_as_float(NAN_BITS);
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            const int column = team.column(i), valid = p.columns - column;
            const float scale = bf16{x.scale[i]};
            float w[PACK], b[PACK];
            if constexpr (PARAMETERS) {
                WeightPack &weight_pack = weight[HOLD ? i : 0], &bias_pack = bias[HOLD ? i : 0];
                if constexpr (!HOLD) {
                    load_columns<ALIGNED>(weight_pack, p.weight, column, p.columns);
                    load_columns<ALIGNED>(bias_pack, p.bias, column, p.columns);
                }
                forget(weight_pack), forget(bias_pack);
                to_float(w, weight_pack), to_float(b, bias_pack);
            }
            if constexpr (PACKS > 1) x.forget(i);
            for_each_value<X>(x.word[i], [&](int k, float v) {
                const float y = fabsf(normalised(v, scale, mean, rstd, w[k], b[k]));
                if (ALIGNED ? valid > 0 : k < valid) row_largest = fmaxf(row_largest, y);
            });
        }
        const bool has_number = row_largest == row_largest;
        if (!team.any(has_number)) largest = NAN_BITS;
        if (has_number) largest = max(largest, __float_as_uint(row_largest));
    }
    atomicMax(&shared_maximum, largest);
    const i64 tiles = (p.rows + TILE_ROWS - 1) / TILE_ROWS * ((p.columns + TILE_COLUMNS - 1) / TILE_COLUMNS);
    i64 index = i64(threadIdx.x / 32) * gridDim.x + blockIdx.x;
    Tile tile;
    if (index < tiles) tile.load(p, index);

    if (!grid_maximum(p.scratch, use, &shared_maximum)) return;
    const u32 maximum = shared_maximum;
    const u16 scale_bits = fp8_scale_bits<X>(__uint_as_float(maximum));
    if (blockIdx.x == 0 && threadIdx.x == 0) *p.scale = scale_bits;
    const float inverse = ptx::reciprocal_approx(bf16{scale_bits});

    // Phase 2: normalise, quantise and store the tiles.
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (; index < tiles; index += i64(WARPS) * gridDim.x) {
        const i64 row0 = tile.row0;
        const int column = tile.column, columns_left = p.columns - column;
        __syncwarp();
        for (int r = lane; r < TILE_ROWS; r += 32) {
            const i64 row = row0 - lane / (32 / ROW_LANES) * TR + r;
            means[warp][r] = row < p.rows ? p.mean[row] : 0.0f;
            rstds[warp][r] = row < p.rows ? p.rstd[row] : 0.0f;
        }
        __syncwarp();
        float w[TC], b[TC];
        if constexpr (PARAMETERS) {
            load_weights<Weight, TC>(w, p.weight + column, columns_left, ALIGNED && columns_left > 0);
            load_weights<Weight, TC>(b, p.bias + column, columns_left, ALIGNED && columns_left > 0);
        }
        Turned<TR, TC> turned;
        u32 out[TR / 4][4][TC / 4];
#pragma unroll
        for (int r = 0; r < TR; ++r) {
            const float scale = bf16{u16(tile.scale[r / 2] >> (16 * (r % 2)))};
            const int tile_row = lane / (32 / ROW_LANES) * TR + r;
            const float mean = means[warp][tile_row], rstd = rstds[warp][tile_row];
            float v[TC];
#pragma unroll
            for (int j = 0; j < TC / 4; ++j) Word<X>::unpack(tile.word[r][j], v + 4 * j);
#pragma unroll
            for (int k = 0; k < TC; ++k) v[k] = normalised(v[k], scale, mean, rstd, w[k], b[k]);
            quantise<X, TC>(out[r / 4][r % 4], v, inverse);
        }
        const i64 next = index + i64(WARPS) * gridDim.x;
        if (next < tiles) tile.load(p, next);
        u8* qy = p.qy + row0 * p.columns + column;
#pragma unroll
        for (int r = 0; r < TR; ++r, qy += p.columns) {
            if (row0 + r < p.rows && columns_left > 0) store_bytes<TC>(qy, out[r / 4][r % 4], columns_left, ALIGNED);
        }
#pragma unroll
        for (int q = 0; q < TR / 4; ++q) turned.take(q, out[q]);
        store_turned<RUN, ALIGNED>(p.qy_t, turned, row0, p.rows, p.batch_rows, p.columns, column);
    }
    leave_stream(p);
}
