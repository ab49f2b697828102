// SPDX-License-Identifier: Apache-2.0
// The forward pass of the FP8 norms: the parts that its kernels share, and the numerics. forward_meeting.cuh has the
// exchange of maxima between blocks, forward_layernorm.cuh the first phase of LayerNorm.
//
// Computes, for x [rows, columns] in FP8 with bf16 scales s_x [rows, ceil(columns / QB)], where s is the scale of the
// element's group of QB columns:
//   RMSNorm    rstd = 1 / sqrt(mean of (x * s)^2 over the row + epsilon)                      [rows] fp32
//              y = (x * s * rstd) * w
//   LayerNorm  mean = mean of x * s over the row                                              [rows] fp32
//              rstd = 1 / sqrt(mean of (x * s - mean)^2 over the row + epsilon)               [rows] fp32
//              y = (x * s - mean) * rstd, or with w and b ((x * s - mean) * rstd) * w + b
//   both       scale = bf16((max|y| + 1e-10) / fp8_max), where the maximum is over the tensor  one bf16
//              qy = FP8(y / scale), RMSNorm's y being rounded to bf16 before the division     [rows, columns]
//              qy_t = qy with the rows and columns of each batch of batch_rows rows exchanged
//                                                              [rows / batch_rows, columns, batch_rows]
// Every operation is in fp32 and rounded, in the order in which COAT's own kernels compute. The division is a product
// with the approximate reciprocal of the scale, as div.full computes it.
//
// Order of the sum of squares of RMSNorm. The order depends only on the number of columns. A row consists of segments
// of 512 columns, and a segment of 32 packs of 16 columns. The squares of the 16 elements of a pack, which are exact,
// are added in order, and their sum is multiplied by the scale twice. The 32 packs of a segment are added by butterfly,
// and the segments in order.
//
// Estimate of the maximum. The scale depends on the largest |y|, but while x is read for the first time, rstd and so y
// are not known yet. So the kernels first compute rstd * max|x * s * w| of each row. Since x * s is exact, this
// estimate, with each step rounded, has a relative difference of at most 5 * 2^-24 from the row's largest |y|. The
// scale is a monotone function of the maximum, rounded to bf16. So if the products of the estimate with 1 - 2^-21 and
// with 1 + 2^-21 give the same scale, then this is the tensor's scale. Otherwise, for one tensor in some thousands, all
// blocks compute every y of their part and exchange the exact maxima. The blocks compute the exact maxima also if a
// weight, an rstd or the estimate is NaN, or is so large or so small that the error of a step may exceed its rounding.
// Bounds: with rstd >= 2^-20 no |x * s| exceeds 2^20 * sqrt(columns), and no scale of an x that is not 0 exceeds 2^36 *
// sqrt(columns). With |w| and rstd <= 2^20 the errors of underflow are then far below 2^-24 of a maximum of 2^-40.
//
// NaN. If all y of a row are NaN, as with a NaN rstd, the maximum is NaN. Other NaN elements are ignored.
//
// To find the largest magnitude, the kernels compare the bits of fp32 values as unsigned integers, whose order is that
// of the magnitudes.
#pragma once
#include "coat/kernel.cuh"
#include "coat/tile.cuh"
#include "ptx/threads.cuh"
#include "sync/scratch.cuh"

constexpr bool LAYER = DRVFUSE_LAYER;           // the norm is LayerNorm
constexpr bool AFFINE = DRVFUSE_AFFINE;         // LayerNorm has w and b
constexpr bool GUESSED = LAYER && AFFINE;       // rstd is guessed to estimate the largest |y| (forward_layernorm.cuh)
constexpr int WARPS = DRVFUSE_WARPS;            // warps of a block
constexpr int BATCH = DRVFUSE_BATCH;            // rows that a warp reduces at the same time
constexpr int BLOCK_ROWS = DRVFUSE_BLOCK_ROWS;  // rows of a group; blocks take whole groups of rows
constexpr int TR = DRVFUSE_TILE_ROWS;           // rows of a lane's part of a tile (tile.cuh)
constexpr int TC = DRVFUSE_TILE_COLUMNS;        // columns of a lane's part of a tile
constexpr int ROW_LANES = DRVFUSE_ROW_LANES;    // lanes that hold different rows of the same columns of a tile
constexpr int RUN = DRVFUSE_RUN;                // bytes of one store to qy_t
constexpr bool WHOLE = DRVFUSE_WHOLE;           // ALIGNED, and all tiles and all groups of rows are complete

constexpr int THREADS = 32 * WARPS;                // threads of a block
constexpr int SEGMENT = 32 * PACK;                 // columns that a warp reads at once: one pack per lane
constexpr int TILE_ROWS = ROW_LANES * TR;          // rows of a warp's tile
constexpr int TILE_COLUMNS = 32 / ROW_LANES * TC;  // columns of a warp's tile
// Stands for an estimate or a scale that could not be determined. It exceeds the bits of every magnitude, so every
// maximum that it enters is UNDECIDED too.
constexpr u32 UNDECIDED = 0xffffffffu;
constexpr float WEIGHT_LIMIT = 0x1p20f;  // the largest |w| for which the estimate of the largest |y| is used

// The kernel's parameters. drvfuse/ops/coat/rmsnorm_forward.py reads this definition. Strides are in elements.
struct ForwardParams {
    const u8* x;           // [rows, columns], with `x_stride`
    const bf16* scales;    // s_x [rows, ceil(columns / QB)], with `scale_stride`
    const Weight* weight;  // w [columns]
    const Weight* bias;    // b [columns], for LayerNorm only
    u8* qy;                // [rows, columns], contiguous
    u8* qy_t;              // [rows / batch_rows, columns, batch_rows], contiguous
    u16* scale;            // the bf16 scale of the whole of qy
    float* mean;           // [rows], for LayerNorm only
    float* rstd;           // [rows]
    Scratch scratch;       // the workspace through which blocks exchange values
    i64 rows;              // rows of x
    i64 batch_rows;        // rows of a batch; each batch is transposed as one matrix
    i64 x_stride;          // distance between two rows of x
    i64 scale_stride;      // distance between two rows of s_x
    int columns;           // columns of x
    int groups;            // groups of BLOCK_ROWS rows that each block or team takes
    int longer;            // the first `longer` blocks or teams take one group more
    int part_columns;      // fp8_norm_forward_rows.cu: columns of each of the blocks that share a group of rows
    int resident_columns;  // fp8_norm_forward_rows.cu: a block's first columns, whose x stays in shared memory
    int chunk_rows;        // rows that phase 1 reduces between two block barriers
    float epsilon;         // the number added to the mean of squares or, with LAYER, to the variance
    int early_trigger;     // 1: trigger dependent launches early, 0: after the last store
};

// A position in a grid of tiles (phase 2) or of batches (phase 1).
struct Position {
    int across;  // phase 2: the index of the tile in its row of tiles; phase 1: the index of the batch's segment
    int down;    // phase 2: the index of the tile's row of tiles; phase 1: the batch's first row
};

// Adds each of N values over the lanes, in the order of a butterfly. Lane l returns the sum of value l / (32 / N).
template <int N>
__device__ __forceinline__ float sum_lanes(float (&v)[N]) {
    int mask = 16;
#pragma unroll
    for (int half = N / 2; half > 0; half /= 2, mask /= 2) {
        const bool upper = threadIdx.x & mask;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const float given = upper ? v[i] : v[i + half], kept = upper ? v[i + half] : v[i];
            v[i] = __fadd_rn(kept, __shfl_xor_sync(0xffffffffu, given, mask));
        }
    }
#pragma unroll
    for (; mask > 0; mask /= 2) v[0] = __fadd_rn(v[0], __shfl_xor_sync(0xffffffffu, v[0], mask));
    return v[0];
}

// Loads W values from column `column` on, of an array with one value per column. Values beyond the last column are 0.
template <int W>
__device__ __forceinline__ void load_weight_pack(Pack<Weight, W>& pack, const Weight* weight, int columns, int column) {
    if constexpr (ALIGNED) {
        clear(pack.word);
        if (column < columns) load_pack(pack, weight + column);
    } else {
        load_elements(pack, weight + column, columns - column);
    }
}

// Loads W weights from column `column` on.
template <int W>
__device__ __forceinline__ void load_weight_pack(Pack<Weight, W>& pack, const ForwardParams& p, int column) {
    load_weight_pack(pack, p.weight, p.columns, column);
}

// Converts a pack of w or b to fp32, and raises `largest` to its largest magnitude; a NaN makes `largest` a NaN.
__device__ __forceinline__ void widen_weights(float (&w)[PACK], float& largest, const Pack<Weight, PACK>& pack) {
    to_float(w, pack);
#pragma unroll
    for (int i = 0; i < PACK; ++i) largest = ptx::max_nan(largest, fabsf(w[i]));
}

// A lane's packs of BATCH consecutive rows at one column. Elements and scales that do not exist are 0.
struct Batch {
    u32 word[BATCH][4];  // the 16 FP8 elements of each row's pack
    u16 scale[BATCH];    // the bf16 bits of the scale of each row's pack
};

// Loads the packs at `column` of the rows from `row` on.
__device__ __forceinline__ void load_batch(Batch& batch, const ForwardParams& p, i64 row, int column) {
    const u8* x = p.x + row * p.x_stride + column;
    const bf16* scale = p.scales + row * p.scale_stride + column / QB;
    if (ALIGNED && (WHOLE || row + BATCH <= p.rows) && column < p.columns) {
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
        if (!WHOLE && row + r < p.rows && column < p.columns) {
            load_bytes<PACK>(batch.word[r], x, p.columns - column, ALIGNED);
            batch.scale[r] = scale->bits;
        }
    }
}

// Computes for each row of a batch, over the lane's pack: `squares`, the sum of (x * s)^2, and `largest`, the bits of
// the largest |x * s * w|.
__device__ __forceinline__ void reduce_packs(const Batch& batch, const float (&w)[PACK], float (&squares)[BATCH],
                                             u32 (&largest)[BATCH]) {
#pragma unroll
    for (int r = 0; r < BATCH; ++r) {
        squares[r] = 0.0f, largest[r] = 0;
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
            // The compiler makes one instruction, a maximum of three values, of each nested pair of calls of max().
            largest[r] = max(max(largest[r], product[0]), product[1]);
            largest[r] = max(max(largest[r], product[2]), product[3]);
        }
        const float scale = bf16{batch.scale[r]};
        squares[r] = __fmul_rn(__fmul_rn(squares[r], scale), scale);
        largest[r] = __float_as_uint(__fmul_rn(__uint_as_float(largest[r]), fabsf(scale)));
    }
}

// Loads the scales at `column` of four rows from `row` on: pair[i] holds the bf16 bits of rows 2 * i and 2 * i + 1.
// Rows that do not exist have the scale 0.
__device__ __forceinline__ void load_scales(u32 (&pair)[2], const ForwardParams& p, i64 row, int column) {
    const bf16* scale = p.scales + row * p.scale_stride + column / QB;
    u16 bits[4];
#pragma unroll
    for (int r = 0; r < 4; ++r, scale += p.scale_stride) bits[r] = row + r < p.rows ? scale->bits : 0;
    pair[0] = bits[0] | u32(bits[1]) << 16, pair[1] = bits[2] | u32(bits[3]) << 16;
}

// The scale of row `r` of the four rows whose scales load_scales() has loaded.
__device__ __forceinline__ float scale_of_row(const u32 (&pair)[2], int r) {
    const u32 bits = pair[r / 2];
    return __uint_as_float(r % 2 ? bits & 0xffff0000u : bits << 16);
}

// Returns y of an element for RMSNorm.
__device__ __forceinline__ float normalised(float x, float scale, float rstd, float weight) {
    return __fmul_rn(__fmul_rn(__fmul_rn(x, scale), rstd), weight);
}

// Returns y of an element for LayerNorm, where `deviation` is x * s - mean.
__device__ __forceinline__ float layer_normalised(float deviation, float rstd, float w, float b) {
    const float xhat = __fmul_rn(deviation, rstd);
    return AFFINE ? __fadd_rn(__fmul_rn(xhat, w), b) : xhat;
}

// Returns y of an element for LayerNorm.
__device__ __forceinline__ float layer_normalised(float x, float scale, float mean, float rstd, float w, float b) {
    return layer_normalised(__fsub_rn(__fmul_rn(x, scale), mean), rstd, w, b);
}

// The value that is divided by the scale: LayerNorm's y, or RMSNorm's y rounded to bf16.
__device__ __forceinline__ float dividend(float x, float scale, float mean, float rstd, float w, float b) {
    if constexpr (LAYER) return layer_normalised(x, scale, mean, rstd, w, b);
    return rounded_to_bf16(normalised(x, scale, rstd, w));
}

// Returns the bits of the scale if all maxima within the error of the estimate give the same scale, else UNDECIDED.
// `estimate` has the bits of the estimate of the tensor's largest |y|.
__device__ __forceinline__ u32 scale_from_estimate(u32 estimate) {
    constexpr float ERROR = GUESSED ? 0x1p-17f : 0x1p-21f;
    const float maximum = __uint_as_float(estimate);
    if (!(maximum >= 0x1p-40f && maximum <= 0x1p100f)) return UNDECIDED;
    const u32 low = fp8_scale_bits<X>(__fmul_rn(maximum, 1.0f - ERROR));
    const u32 high = fp8_scale_bits<X>(__fmul_rn(maximum, 1.0f + ERROR));
    return low == high ? low : UNDECIDED;
}

// Returns the bits of the scale, where `maximum` has the bits of the tensor's exact largest |y|. Returns UNDECIDED if
// `maximum` is UNDECIDED.
__device__ __forceinline__ u32 scale_from_exact(u32 maximum) {
    return maximum == UNDECIDED ? UNDECIDED : fp8_scale_bits<X>(__uint_as_float(maximum));
}

// Whether the error of `estimate`, the bits of an estimate of the largest |y|, is as small as scale_from_estimate()
// assumes. It may be larger if some |w| is so large that errors of underflow matter or, with a guess at rstd, if some
// |b| is so large that the error of the guess matters.
__device__ __forceinline__ bool is_reliable(u32 estimate, float largest_weight, float largest_bias) {
    return largest_weight <= WEIGHT_LIMIT && (!GUESSED || largest_bias <= 3.0f * __uint_as_float(estimate));
}

// Returns the rstd of a row of RMSNorm from its sum of squares. Raises `estimate` to the bits of rstd * max|x * s * w|,
// where `product` has the bits of that maximum, or to UNDECIDED if rstd is NaN or outside 2^-20 to 2^20.
__device__ __forceinline__ float finish_row(const ForwardParams& p, float squares, u32 product, u32& estimate) {
    const float rstd = reciprocal_root(__fadd_rn(ptx::divide_full(squares, float(p.columns)), p.epsilon));
    const bool usual = rstd >= 0x1p-20f && rstd <= 0x1p20f;
    estimate = max(estimate, usual ? __float_as_uint(__fmul_rn(__uint_as_float(product), rstd)) : UNDECIDED);
    return rstd;
}

// Returns the bits of the largest |y| of a row, or NAN_BITS if all y are NaN. Called by a whole warp, whose lanes
// divide the columns among themselves.
__device__ __forceinline__ u32 exact_row_maximum(const ForwardParams& p, i64 row, float mean, float rstd) {
    float largest = 0.0f;
    bool has_number = false;
    for (int column = threadIdx.x % 32; column < p.columns; column += 32) {
        const float value = X{p.x[row * p.x_stride + column]}, scale = p.scales[row * p.scale_stride + column / QB];
        const float w = !LAYER || AFFINE ? float(p.weight[column]) : 0.0f;
        float y = normalised(value, scale, rstd, w);
        if constexpr (LAYER) y = layer_normalised(value, scale, mean, rstd, w, AFFINE ? float(p.bias[column]) : 0.0f);
        y = fabsf(y);
        has_number |= y == y;
        largest = fmaxf(largest, y);
    }
    has_number = __any_sync(0xffffffffu, has_number);
    return has_number ? ptx::warp_max(__float_as_uint(largest)) : NAN_BITS;
}
