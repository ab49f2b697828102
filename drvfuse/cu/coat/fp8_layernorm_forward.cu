// SPDX-License-Identifier: Apache-2.0
// The forward pass of FP8 LayerNorm in one launch: it reads x and its group scales, and writes qy, its transpose, one
// scale, mean and rstd.
//
// Layout: x [rows, columns] FP8 with a row stride, s_x [rows, ceil(columns / QB)] bf16 with a row stride, w, b [columns].
// Grid: cooperative, blocks of TEAMS teams.
//   Phase 1  A team takes rows team, team + teams, ..., each in registers. It computes mean = sum / N, variance = sum
//            of (x - mean)^2 / N over the columns that exist, rstd, and the row's largest |y|, whose maximum it keeps.
//   Barrier  The blocks exchange their maxima, and every block computes the one scale from the grid's maximum.
//   Phase 2  A warp takes tiles of ROW_LANES * TR rows by 32 / ROW_LANES * TC columns. It reads x again, from the L2
//            cache if x fits there. The first tile's x is loaded before the barrier, and the next tile's before a tile
//            is stored.
//
// Sums over a row: 16 elements in order (for the mean those of x, whose sum is multiplied by the scale), then in the
// order of teams.cuh. y = (x * s - mean) * rstd, with PARAMETERS y * w + b, in fp32. It is not rounded before the
// quotient, which is a product with the approximate reciprocal, as div.full computes it.
// NaN. If all y of a row are NaN, as with a NaN in x, the maximum is a NaN; other NaN elements are ignored.
//
// PDL. The w and b that stay in registers are read before the wait, all else after it. The trigger is right after the
// wait (early_trigger) or after the last store.
#include "coat/kernel.cuh"
#include "coat/teams.cuh"
#include "coat/tile.cuh"
#include "sync/grid_barrier.cuh"

constexpr bool PARAMETERS = DRVFUSE_PARAMETERS;
constexpr int RUN = DRVFUSE_RUN;                                  // bytes of a column that one store of qy_t can take
constexpr bool HOLD = PARAMETERS && PACKS * sizeof(Weight) <= 4;  // w and b stay in registers in phase 1

constexpr int WARPS = TEAM_WARPS * TEAMS;
constexpr int TR = DRVFUSE_TILE_ROWS, TC = 8;  // a thread's part of a tile
constexpr int ROW_LANES = DRVFUSE_ROW_LANES;   // lanes that lie over one another in a tile
constexpr int TILE_ROWS = ROW_LANES * TR, TILE_COLUMNS = 32 / ROW_LANES * TC;

struct LayerNormParams {
    const u8* x;
    const u16* scales;
    const Weight* weight;
    const Weight* bias;
    u8* qy;
    u8* qy_t;
    u16* scale;
    float* mean;
    float* rstd;
    Scratch scratch;
    i64 rows, batch_rows, x_stride, scale_stride;
    int columns;
    float epsilon;
    int early_trigger;
    int unused;
};

using WeightPack = Pack<Weight, PACK>;

__device__ __forceinline__ float normalised(float x, float scale, float mean, float rstd, float w, float b) {
    const float xhat = __fmul_rn(__fsub_rn(__fmul_rn(x, scale), mean), rstd);
    return PARAMETERS ? __fadd_rn(__fmul_rn(xhat, w), b) : xhat;
}

// A thread's part of a tile as loaded from memory; elements that do not exist are 0.
struct Tile {
    i64 row0;
    int at;
    u32 word[TR][TC / 4];
    u32 scale[TR / 2];

    __device__ __forceinline__ void load(const LayerNormParams& p, i64 index) {
        const int lane = threadIdx.x % 32, across = (p.columns + TILE_COLUMNS - 1) / TILE_COLUMNS;
        row0 = index / across * TILE_ROWS + lane / (32 / ROW_LANES) * TR;
        at = int(index % across) * TILE_COLUMNS + lane % (32 / ROW_LANES) * TC;
        const u8* x = p.x + row0 * p.x_stride + at;
        const u16* scales = p.scales + row0 * p.scale_stride + at / QB;
        const i64 left = at < p.columns ? p.rows - row0 : 0;
#pragma unroll
        for (int r = 0; r < TR; ++r, x += p.x_stride, scales += p.scale_stride) {
            clear(word[r]);
            if (r % 2 == 0) scale[r / 2] = 0;
            if (r < left) {
                load_bytes<TC>(word[r], x, p.columns - at, ALIGNED);
                scale[r / 2] |= u32(*scales) << (16 * (r % 2));
            }
        }
    }
};

// The sum over the row of the elements, or with SQUARES of the squares of their differences from `mean`.
template <bool SQUARES>
__device__ __forceinline__ float row_sum(Team& team, TeamScratch& scratch, const Fp8Row& x, float mean, int columns) {
    float sums[PACKS];
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        const float scale = bf16{x.scale[i]};
        const int valid = columns - team.column(i);
        float own = 0.0f;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float v[4];
            Word<X>::unpack(x.word[i][j], v);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                if constexpr (SQUARES) {
                    const float away = __fsub_rn(__fmul_rn(v[k], scale), mean);
                    if (ALIGNED ? valid > 0 : 4 * j + k < valid) own = __fadd_rn(own, __fmul_rn(away, away));
                } else {
                    own = __fadd_rn(own, v[k]);
                }
            }
        }
        sums[i] = SQUARES ? own : __fmul_rn(own, scale);
    }
    return team.sum(scratch, sums);
}

extern "C" __global__ void __launch_bounds__(THREADS) fp8_layernorm_forward(const LayerNormParams p) {
    __shared__ TeamScratch scratch;
    __shared__ u32 found;                                               // the largest |y| of the block, as bits
    __shared__ float means[WARPS][TILE_ROWS], rstds[WARPS][TILE_ROWS];  // mean and rstd of the rows of each warp's tile
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
    if (threadIdx.x == 0) found = 0;
    enter_stream(p);
    ScratchUse use(p.scratch, gridDim.x > 1);
    __syncthreads();

    // Phase 1.
    const i64 step = i64(gridDim.x) * TEAMS;
    auto load = [&](Fp8Row& x, i64 row) {
        const i64 existing = row < p.rows ? row : 0;
        x.load<QB, ALIGNED>(team, p.x + existing * p.x_stride, p.scales + existing * p.scale_stride,
                            row < p.rows ? p.columns : 0);
    };
    i64 row = i64(blockIdx.x) * TEAMS + team.index;
    Fp8Row loaded;
    load(loaded, row);
    u32 most = 0;
    for (; row < p.rows; row += step) {
        Fp8Row x = loaded;
        load(loaded, row + step);
        const float mean = ptx::divide_full(row_sum<false>(team, scratch, x, 0.0f, p.columns), count);
        const float variance = ptx::divide_full(row_sum<true>(team, scratch, x, mean, p.columns), count);
        const float rstd = reciprocal_root(__fadd_rn(variance, p.epsilon));
        if (team.member == 0 && team.lane == 0) p.mean[row] = mean, p.rstd[row] = rstd;
        float best = __uint_as_float(NAN_BITS);  // fmaxf ignores a NaN if the other operand is a number
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            const int at = team.column(i), valid = p.columns - at;
            const float scale = bf16{x.scale[i]};
            float w[PACK], b[PACK];
            if constexpr (PARAMETERS) {
                WeightPack &own_weight = weight[HOLD ? i : 0], &own_bias = bias[HOLD ? i : 0];
                if constexpr (!HOLD) {
                    load_columns<ALIGNED>(own_weight, p.weight, at, p.columns);
                    load_columns<ALIGNED>(own_bias, p.bias, at, p.columns);
                }
                forget(own_weight), forget(own_bias);
                to_float(w, own_weight), to_float(b, own_bias);
            }
            if constexpr (PACKS > 1) x.forget(i);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float v[4];
                Word<X>::unpack(x.word[i][j], v);
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const int at = 4 * j + k;
                    const float y = fabsf(normalised(v[k], scale, mean, rstd, w[at], b[at]));
                    if (ALIGNED ? valid > 0 : at < valid) best = fmaxf(best, y);
                }
            }
        }
        const bool number = best == best;
        if (!team.any(number)) most = NAN_BITS;
        if (number) most = max(most, __float_as_uint(best));
    }
    atomicMax(&found, most);
    const i64 tiles = (p.rows + TILE_ROWS - 1) / TILE_ROWS * ((p.columns + TILE_COLUMNS - 1) / TILE_COLUMNS);
    i64 index = i64(threadIdx.x / 32) * gridDim.x + blockIdx.x;
    Tile tile;
    if (index < tiles) tile.load(p, index);

    if (!grid_maximum(p.scratch, use, &found)) return;
    const u32 maximum = found;
    const u16 scale_bits = fp8_scale_bits<X>(__uint_as_float(maximum));
    if (blockIdx.x == 0 && threadIdx.x == 0) *p.scale = scale_bits;
    const float inverse = ptx::reciprocal_approx(bf16{scale_bits});

    // Phase 2.
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (; index < tiles; index += i64(WARPS) * gridDim.x) {
        const i64 row0 = tile.row0;
        const int at = tile.at, valid = p.columns - at;
        __syncwarp();
        for (int r = lane; r < TILE_ROWS; r += 32) {
            const i64 row = row0 - lane / (32 / ROW_LANES) * TR + r;
            means[warp][r] = row < p.rows ? p.mean[row] : 0.0f;
            rstds[warp][r] = row < p.rows ? p.rstd[row] : 0.0f;
        }
        __syncwarp();
        float w[TC], b[TC];
        if constexpr (PARAMETERS) {
            load_weights<Weight, TC>(w, p.weight + at, valid, ALIGNED && valid > 0);
            load_weights<Weight, TC>(b, p.bias + at, valid, ALIGNED && valid > 0);
        }
        Turned<TR, TC> turned;
        u32 out[TR / 4][4][TC / 4];
#pragma unroll
        for (int r = 0; r < TR; ++r) {
            const float scale = bf16{u16(tile.scale[r / 2] >> (16 * (r % 2)))};
            const int of_warp = lane / (32 / ROW_LANES) * TR + r;
            const float mean = means[warp][of_warp], rstd = rstds[warp][of_warp];
            float v[TC];
#pragma unroll
            for (int j = 0; j < TC / 4; ++j) Word<X>::unpack(tile.word[r][j], v + 4 * j);
#pragma unroll
            for (int k = 0; k < TC; ++k) v[k] = normalised(v[k], scale, mean, rstd, w[k], b[k]);
            quantise<X, TC>(out[r / 4][r % 4], v, inverse);
        }
        const i64 next = index + i64(WARPS) * gridDim.x;
        if (next < tiles) tile.load(p, next);
        u8* to = p.qy + row0 * p.columns + at;
#pragma unroll
        for (int r = 0; r < TR; ++r, to += p.columns) {
            if (row0 + r < p.rows && valid > 0) store_bytes<TC>(to, out[r / 4][r % 4], valid, ALIGNED);
        }
#pragma unroll
        for (int q = 0; q < TR / 4; ++q) turned.take(q, out[q]);
        store_turned<RUN, ALIGNED>(p.qy_t, turned, row0, p.rows, p.batch_rows, p.columns, at);
    }
    leave_stream(p);
}
