// SPDX-License-Identifier: Apache-2.0
// The common parts of the kernels of the FP8 norms' forward pass: parameters, a batch of rows in the first phase, and
// the scale. forward_meeting.cuh has the exchange of maxima between blocks, forward_layernorm.cuh LayerNorm's first
// phase.
//
// Sum of squares of a row. Its order depends only on the columns: the squares of 16 elements are added in order (they
// are exact) and multiplied by the scale twice; the 32 packs of a segment are added by butterfly, and the segments in
// order. All else is as in COAT: y = (x * s * rstd) * w in fp32, the maximum is that of the unrounded values, y is
// rounded to bf16 before the quotient, and the quotient is a product with the approximate reciprocal, as div.full
// computes it.
//
// The estimate of the maximum. x * s is exact, so rstd * max|x * s * w|, with each step rounded, differs from the row's
// largest |y| by at most 5 * 2^-24, relatively. The scale is a monotone function of the maximum, rounded to bf16. So if
// both ends of that range, widened to 2^-21, give the same scale, it is the scale. Otherwise (for one tensor in some
// thousands), or if a weight, an rstd or the estimate is so large or small, or NaN, that a step may have a larger
// error, all blocks compute every y of their part and exchange the exact maxima. Bounds: with rstd >= 2^-20 no |x * s|
// exceeds 2^20 * sqrt(columns), and no scale of an x that is not 0 exceeds 2^36 * sqrt(columns). With |w| and rstd <=
// 2^20 the errors of underflow are then far below 2^-24 of a maximum of 2^-40.
// NaN. If all y of a row are NaN, as with a NaN rstd, the maximum is a NaN; other NaN elements are ignored.
#pragma once
#include "coat/kernel.cuh"
#include "coat/tile.cuh"
#include "ptx/threads.cuh"
#include "sync/scratch.cuh"

constexpr bool LAYER = DRVFUSE_LAYER;    // LayerNorm
constexpr bool AFFINE = DRVFUSE_AFFINE;  // LayerNorm with w and b
constexpr bool GUESSED = LAYER && AFFINE;
constexpr int WARPS = DRVFUSE_WARPS;
constexpr int BATCH = DRVFUSE_BATCH;
constexpr int BLOCK_ROWS = DRVFUSE_BLOCK_ROWS;
constexpr int TR = DRVFUSE_TILE_ROWS, TC = DRVFUSE_TILE_COLUMNS, ROW_LANES = DRVFUSE_ROW_LANES;
constexpr int RUN = DRVFUSE_RUN;       // bytes of a column that one store of qy_t can take
constexpr bool WHOLE = DRVFUSE_WHOLE;  // ALIGNED, and whole tiles and groups of BLOCK_ROWS

constexpr int THREADS = 32 * WARPS;
constexpr int SEGMENT = 32 * PACK;
constexpr int TILE_ROWS = ROW_LANES * TR, TILE_COLUMNS = 32 / ROW_LANES * TC;
constexpr u32 UNDECIDED = 0xffffffffu;   // greater than the bits of every magnitude
constexpr float WEIGHT_LIMIT = 0x1p20f;  // the largest |w| for which the estimate of the maximum is used

// drvfuse/ops/coat/rmsnorm_forward.py has the same layout.
struct ForwardParams {
    const u8* x;
    const bf16* scales;
    const Weight* weight;
    const Weight* bias;  // LayerNorm only
    u8* qy;
    u8* qy_t;
    u16* scale;
    float* mean;  // LayerNorm only
    float* rstd;
    Scratch scratch;
    i64 rows, batch_rows, x_stride, scale_stride;
    int columns;
    int groups, longer;    // groups of BLOCK_ROWS that each block has; the first `longer` blocks have one more
    int part_columns;      // ManyRows: columns of each of the blocks that share a group of rows
    int resident_columns;  // ManyRows: how many of a block's columns have x in shared memory
    int chunk_rows;        // rows between two block barriers of phase 1
    float epsilon;
    int early_trigger;
};

struct Place {
    int across, down;
};

// Adds each of N values over the lanes, in the order of a butterfly. Lane l gets the sum of value l / (32 / N).
template <int N>
__device__ __forceinline__ float sum_lanes(float (&v)[N]) {
    int mask = 16;
#pragma unroll
    for (int half = N / 2; half > 0; half /= 2, mask /= 2) {
        const bool upper = threadIdx.x & mask;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const float give = upper ? v[i] : v[i + half], keep = upper ? v[i + half] : v[i];
            v[i] = __fadd_rn(keep, __shfl_xor_sync(0xffffffffu, give, mask));
        }
    }
#pragma unroll
    for (; mask > 0; mask /= 2) v[0] = __fadd_rn(v[0], __shfl_xor_sync(0xffffffffu, v[0], mask));
    return v[0];
}

// Loads a pack, from column `at` on, of an array that has a value for each column.
template <int W>
__device__ __forceinline__ void load_weight_pack(Pack<Weight, W>& pack, const Weight* weight, int columns, int at) {
    if constexpr (ALIGNED) {
        clear(pack.word);
        if (at < columns) load_pack(pack, weight + at);
    } else {
        load_elements(pack, weight + at, columns - at);
    }
}

template <int W>
__device__ __forceinline__ void load_weight_pack(Pack<Weight, W>& pack, const ForwardParams& p, int at) {
    load_weight_pack(pack, p.weight, p.columns, at);
}

// Raises `largest` to the largest magnitude of a pack; a NaN makes it a NaN.
__device__ __forceinline__ void grow_to(float& largest, const Pack<Weight, PACK>& pack) {
    float v[PACK];
    to_float(v, pack);
#pragma unroll
    for (int i = 0; i < PACK; ++i) largest = ptx::max_nan(largest, fabsf(v[i]));
}

// One pack of each of BATCH rows; elements that do not exist are 0.
struct Batch {
    u32 word[BATCH][4];
    u16 scale[BATCH];
};

__device__ __forceinline__ void load_batch(Batch& batch, const ForwardParams& p, i64 row, int at) {
    const u8* x = p.x + row * p.x_stride + at;
    const bf16* scale = p.scales + row * p.scale_stride + at / QB;
    if (ALIGNED && (WHOLE || row + BATCH <= p.rows) && at < p.columns) {
#pragma unroll
        for (int r = 0; r < BATCH; ++r, x += p.x_stride, scale += p.scale_stride) {
            ptx::load_once_v4(batch.word[r], x);
            batch.scale[r] = scale->bits;
        }
        return;
    }
#pragma unroll
    for (int r = 0; r < BATCH; ++r, x += p.x_stride, scale += p.scale_stride) {
        clear(batch.word[r]);
        batch.scale[r] = 0;
        if (!WHOLE && row + r < p.rows && at < p.columns) {
            load_bytes<PACK>(batch.word[r], x, p.columns - at, ALIGNED);
            batch.scale[r] = scale->bits;
        }
    }
}

// Converts `raw` to fp32, and raises `largest` to the largest magnitude; a NaN makes it a NaN.
__device__ __forceinline__ void take_phase1_weights(float (&w)[PACK], float& largest, const Pack<Weight, PACK>& raw) {
    to_float(w, raw);
#pragma unroll
    for (int i = 0; i < PACK; ++i) largest = ptx::max_nan(largest, fabsf(w[i]));
}

// For each row of a batch: the lane's sum of squares, and the bits of its largest |x * s * w|.
__device__ __forceinline__ void reduce_packs(const Batch& batch, const float (&w)[PACK], float (&squares)[BATCH],
                                             u32 (&most)[BATCH]) {
#pragma unroll
    for (int r = 0; r < BATCH; ++r) {
        squares[r] = 0.0f, most[r] = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float v[4];
            u32 product[4];
            Word<X>::unpack(batch.word[r][j], v);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                squares[r] = __fmaf_rn(v[k], v[k], squares[r]);
                product[k] = __float_as_uint(__fmul_rn(fabsf(v[k]), fabsf(w[4 * j + k])));
            }
            most[r] = max(max(most[r], product[0]), product[1]);  // a maximum of three values takes one instruction
            most[r] = max(max(most[r], product[2]), product[3]);
        }
        const float scale = bf16{batch.scale[r]};
        squares[r] = __fmul_rn(__fmul_rn(squares[r], scale), scale);
        most[r] = __float_as_uint(__fmul_rn(__uint_as_float(most[r]), fabsf(scale)));
    }
}

// The scales of four rows at a column; 0 for rows that do not exist.
__device__ __forceinline__ void load_scales(u32 (&pair)[2], const ForwardParams& p, i64 row, int at) {
    const bf16* scale = p.scales + row * p.scale_stride + at / QB;
    u16 one[4];
#pragma unroll
    for (int r = 0; r < 4; ++r, scale += p.scale_stride) one[r] = row + r < p.rows ? scale->bits : 0;
    pair[0] = one[0] | u32(one[1]) << 16, pair[1] = one[2] | u32(one[3]) << 16;
}

__device__ __forceinline__ float normalised(float x, float scale, float rstd, float weight) {
    return __fmul_rn(__fmul_rn(__fmul_rn(x, scale), rstd), weight);
}

// LayerNorm's y, from x * s - mean.
__device__ __forceinline__ float layer_normalised(float away, float rstd, float w, float b) {
    const float xhat = __fmul_rn(away, rstd);
    return AFFINE ? __fadd_rn(__fmul_rn(xhat, w), b) : xhat;
}

__device__ __forceinline__ float layer_normalised(float x, float scale, float mean, float rstd, float w, float b) {
    return layer_normalised(__fsub_rn(__fmul_rn(x, scale), mean), rstd, w, b);
}

// The value that is quantised. RMSNorm's y is rounded to bf16 first.
__device__ __forceinline__ float quotient(float x, float scale, float mean, float rstd, float w, float b) {
    if constexpr (LAYER) return layer_normalised(x, scale, mean, rstd, w, b);
    return rounded_to_bf16(normalised(x, scale, rstd, w));
}

// The bits of the scale if all maxima within the error of `estimate` give the same scale, else UNDECIDED.
__device__ __forceinline__ u32 decided_scale(u32 estimate) {
    constexpr float FAR = GUESSED ? 0x1p-17f : 0x1p-21f;
    const float most = __uint_as_float(estimate);
    if (!(most >= 0x1p-40f && most <= 0x1p100f)) return UNDECIDED;
    const u32 low = fp8_scale_bits<X>(__fmul_rn(most, 1.0f - FAR));
    const u32 high = fp8_scale_bits<X>(__fmul_rn(most, 1.0f + FAR));
    return low == high ? low : UNDECIDED;
}

// The bits of the scale for an exact maximum, or UNDECIDED.
__device__ __forceinline__ u32 settled_scale(u32 maximum) {
    return maximum == UNDECIDED ? UNDECIDED : fp8_scale_bits<X>(__uint_as_float(maximum));
}

// Whether `best` may be used as an estimate. No w may be so large that underflow matters, and with a guess at rstd no b
// may be so large that the error of the guess matters.
__device__ __forceinline__ bool may_estimate(u32 best, float largest_weight, float largest_bias) {
    return largest_weight <= WEIGHT_LIMIT && (!GUESSED || largest_bias <= 3.0f * __uint_as_float(best));
}

// Returns 1 / root of the mean of squares, and raises `best` to the bits of the row's estimate of the largest |y|.
__device__ __forceinline__ float finish_row(const ForwardParams& p, float total, u32 most, u32& best) {
    const float rstd = reciprocal_root(__fadd_rn(ptx::divide_full(total, float(p.columns)), p.epsilon));
    const bool usual = rstd >= 0x1p-20f && rstd <= 0x1p20f;
    best = max(best, usual ? __float_as_uint(__fmul_rn(__uint_as_float(most), rstd)) : UNDECIDED);
    return rstd;
}

// The bits of the largest |y| of a row, computed by a whole warp; NAN_BITS if all y are NaN.
__device__ __forceinline__ u32 exact_row_maximum(const ForwardParams& p, i64 row, float mean, float rstd) {
    float best = 0.0f;
    bool number = false;
    for (int at = threadIdx.x % 32; at < p.columns; at += 32) {
        const float value = X{p.x[row * p.x_stride + at]}, scale = p.scales[row * p.scale_stride + at / QB];
        const float w = !LAYER || AFFINE ? float(p.weight[at]) : 0.0f;
        float y = normalised(value, scale, rstd, w);
        if constexpr (LAYER) y = layer_normalised(value, scale, mean, rstd, w, AFFINE ? float(p.bias[at]) : 0.0f);
        y = fabsf(y);
        number |= y == y;
        best = fmaxf(best, y);
    }
    number = __any_sync(0xffffffffu, number);
    return number ? ptx::warp_max(__float_as_uint(best)) : NAN_BITS;
}
