// SPDX-License-Identifier: Apache-2.0
// LayerNorm in the first phase of the FP8 forward: sums, variances and the largest |y| of a batch of rows.
//
// The estimate of the maximum, with w and b. While the squares of a = x * s - mean are added up, rstd is not known yet.
// So a guess at it is computed from the sums of x * s and of its square, and with it e = |fma(a * guess, w, b)|. M is
// the largest e. The blocks read x once more if the guess differs from rstd by more than g = 2^-20, relatively, if some
// |b| exceeds 3 * M, or if the range from M * (1 - 2^-17) to M * (1 + 2^-17) has two scales. Otherwise the scale of M
// is the scale of the exact maximum, for this reason. Let u = 2^-24. The error of y = (a * rstd) * w + b is the
// rounding of two products and of the sum; the error of e is the rounding of one product and of the fma. So |y| and e
// differ by at most |a * rstd * w| * (g + 3 * u) + u * (|y| + e). Here |a * rstd * w| is at most e + |b|, so at most 4
// * M, up to terms far below u. In all that is less than 4 * M * (g + 5 * u), which is less than 2^-17 * M. A product
// that underflows has an error of at most 2^-149; multiplied by a |w| of at most 2^20 this is far below u for an M of
// at least 2^-40. Where y is a NaN, e is a NaN too. If all y of a row are NaN, either rstd is a NaN because of x, or
// all w or all b are NaN; the estimate is not used then.
#pragma once
#include "coat/forward.cuh"

// The sum of x * s over row r of a batch; unless `squares` is null, it receives the sum of their squares.
__device__ __forceinline__ float pack_sum(const Batch& batch, int r, float* squares = nullptr) {
    float sum = 0.0f, squared = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float v[4];
        Word<X>::unpack(batch.word[r][j], v);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            sum = __fadd_rn(sum, v[k]);
            if (squares != nullptr) squared = __fmaf_rn(v[k], v[k], squared);
        }
    }
    const float scale = bf16{batch.scale[r]};
    if (squares != nullptr) *squares = squared * scale * scale;
    return __fmul_rn(sum, scale);
}

// The guess at rstd: an approximation of 1 / root of the variance, from the sum of squares of a row.
__device__ __forceinline__ float guess_rstd(const ForwardParams& p, float squares, float mean) {
    const float variance = fmaxf(ptx::divide_full(squares, float(p.columns)) - mean * mean, 0.0f);
    return reciprocal_root(variance + p.epsilon);
}

// Whether the guess is close enough to rstd for an estimate of the maximum.
__device__ __forceinline__ bool near_enough(float guess, float rstd) { return fabsf(guess - rstd) <= 0x1p-20f * rstd; }

// The sum of (x * s - mean)^2 over the first `valid` columns of row r of a batch, which are those that exist. Unless
// `largest` is null, it receives the bits of the largest |x * s - mean|.
__device__ __forceinline__ float pack_variance(const Batch& batch, int r, float mean, int valid,
                                               u32* largest = nullptr) {
    const float scale = bf16{batch.scale[r]};
    float sum = 0.0f;
    u32 most = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float v[4];
        Word<X>::unpack(batch.word[r][j], v);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const float away = __fsub_rn(__fmul_rn(v[k], scale), mean);
            if (ALIGNED ? valid > 0 : 4 * j + k < valid) {
                sum = __fadd_rn(sum, __fmul_rn(away, away));
                if (largest != nullptr) most = max(most, __float_as_uint(fabsf(away)));
            }
        }
    }
    if (largest != nullptr) *largest = most;
    return sum;
}

// Elements 4 * j to 4 * j + 3 of a pack.
__device__ __forceinline__ void unpack_four(float (&v)[4], const Pack<Weight, PACK>& pack, int j) {
    constexpr int words = Pack<Weight, 4>::words;
#pragma unroll
    for (int k = 0; k < words; ++k) Word<Weight>::unpack(pack.word[words * j + k], v + 4 / words * k);
}

// Calls f(r, i, x * s - mean, w, b) for each element i of each row r of a batch.
template <class F>
__device__ __forceinline__ void for_each_element(const Batch& batch, const float (&mean)[BATCH],
                                                 const Pack<Weight, PACK>& weight, const Pack<Weight, PACK>& bias,
                                                 F f) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float w[4], b[4];
        unpack_four(w, weight, j), unpack_four(b, bias, j);
#pragma unroll
        for (int r = 0; r < BATCH; ++r) {
            const float scale = bf16{batch.scale[r]};
            float v[4];
            Word<X>::unpack(batch.word[r][j], v);
#pragma unroll
            for (int k = 0; k < 4; ++k) f(r, 4 * j + k, __fsub_rn(__fmul_rn(v[k], scale), mean[r]), w[k], b[k]);
        }
    }
}

// For each row of a batch: the sum that pack_variance returns, and the bits of the largest |y| with a guess at rstd.
__device__ __forceinline__ void estimate_batch(float (&squares)[BATCH], u32 (&largest)[BATCH], const Batch& batch,
                                               const float (&mean)[BATCH], const float (&guess)[BATCH],
                                               const Pack<Weight, PACK>& weight, const Pack<Weight, PACK>& bias,
                                               int valid) {
    float most[BATCH] = {};
    clear(squares);
    for_each_element(batch, mean, weight, bias, [&](int r, int i, float away, float w, float b) {
        if (ALIGNED ? valid > 0 : i < valid) {
            squares[r] = __fadd_rn(squares[r], __fmul_rn(away, away));
            most[r] = fmaxf(most[r], fabsf(__fmaf_rn(__fmul_rn(away, guess[r]), w, b)));
        }
    });
#pragma unroll
    for (int r = 0; r < BATCH; ++r) largest[r] = __float_as_uint(most[r]);
}

// For each row of a batch: the bits of the largest |y| with w and b over the first `valid` columns of the pack, of
// which at least one exists; UNDECIDED if every y is a NaN.
__device__ __forceinline__ void largest_of_batch(u32 (&largest)[BATCH], const Batch& batch, const float (&mean)[BATCH],
                                                 const float (&rstd)[BATCH], const Pack<Weight, PACK>& weight,
                                                 const Pack<Weight, PACK>& bias, int valid) {
    float most[BATCH];
#pragma unroll
    // fmaxf ignores a NaN if the other operand is a number
    for (int r = 0; r < BATCH; ++r) most[r] = __uint_as_float(NAN_BITS);
    for_each_element(batch, mean, weight, bias, [&](int r, int i, float away, float w, float b) {
        if (ALIGNED || i < valid) most[r] = fmaxf(most[r], fabsf(layer_normalised(away, rstd[r], w, b)));
    });
#pragma unroll
    for (int r = 0; r < BATCH; ++r) largest[r] = most[r] == most[r] ? __float_as_uint(most[r]) : UNDECIDED;
}

// The largest |y| of a row without w and b: that of the element with the largest |x * s - mean|, whose bits are `away`,
// since rounding keeps the order. UNDECIDED if that is a NaN.
__device__ __forceinline__ u32 largest_by_rstd(u32 away, float rstd) {
    const float most = __fmul_rn(__uint_as_float(away), rstd);
    return most == most ? __float_as_uint(most) : UNDECIDED;
}
