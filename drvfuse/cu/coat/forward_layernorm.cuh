// SPDX-License-Identifier: Apache-2.0
// LayerNorm in the first phase of the FP8 forward pass: sums, variances and the largest |y| of a batch of rows. All
// data is in registers, and threads exchange nothing here. forward.cuh has the formulas.
//
// Estimate of the maximum with w and b. Let a = x * s - mean. While a kernel adds the squares of a, rstd is not known
// yet. So the kernel first computes a guess at rstd, from the sums of x * s and of (x * s)^2, and with it e = |fma(a *
// guess, w, b)| for each element. M is the largest e. The blocks read x once more, to compute the exact maximum, if
//   - the guess and rstd have a relative difference of more than g = 2^-20, or
//   - some |b| exceeds 3 * M, or
//   - the ends of the range from M * (1 - 2^-17) to M * (1 + 2^-17) give different scales.
// Otherwise the scale of M is the scale of the exact maximum. Proof: let u = 2^-24. The error of y = (a * rstd) * w + b
// is the rounding of two products and of the sum. The error of e is the rounding of one product and of the fma. So |y|
// and e differ by at most |a * rstd * w| * (g + 3 * u) + u * (|y| + e). Up to terms far below u, |a * rstd * w| is at
// most e + |b|, which is at most 4 * M. In all, |y| and e differ by less than 4 * M * (g + 5 * u), which is less than
// 2^-17 * M. A product that underflows has an error of at most 2^-149. Multiplied by a |w| of at most 2^20, this error
// is far below u * M for an M of at least 2^-40.
//
// NaN. Where y is NaN, e is NaN too. If all y of a row are NaN, then rstd is NaN because of x, or w or b is NaN in each
// column. In both cases the kernels do not use the estimate.
#pragma once
#include "coat/forward.cuh"

// Returns the sum of x * s over the lane's pack of row r of a batch. Sets `*squares` to the sum of (x * s)^2, unless
// `squares` is null.
__device__ __forceinline__ float pack_sum(const Batch& batch, int r, float* squares = nullptr) {
    float sum = 0.0f, squared = 0.0f;
    // This loop takes the place of for_each_value(), with which NVRTC would order the instructions of
    // fp8_norm_forward_rows.cu in another way.
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

// Returns the guess at the rstd of a row, from its mean and `squares`, the sum of its (x * s)^2.
__device__ __forceinline__ float guess_rstd(const ForwardParams& p, float squares, float mean) {
    const float variance = fmaxf(ptx::divide_full(squares, float(p.columns)) - mean * mean, 0.0f);
    return reciprocal_root(variance + p.epsilon);
}

// Whether the guess is so close to rstd that the estimate of the largest |y|, which was computed with it, may be used.
__device__ __forceinline__ bool is_close(float guess, float rstd) { return fabsf(guess - rstd) <= 0x1p-20f * rstd; }

// Returns the sum of (x * s - mean)^2 over the lane's pack of row r of a batch. Only the first `valid` elements of the
// pack exist and are added. Unless `largest` is null, sets `*largest` to the bits of their largest |x * s - mean|.
__device__ __forceinline__ float pack_variance(const Batch& batch, int r, float mean, int valid,
                                               u32* largest = nullptr) {
    const float scale = bf16{batch.scale[r]};
    float sum = 0.0f;
    u32 magnitude = 0;
    for_each_value<X>(batch.word[r], [&](int i, float v) {
        const float deviation = __fsub_rn(__fmul_rn(v, scale), mean);
        if (ALIGNED ? valid > 0 : i < valid) {
            sum = __fadd_rn(sum, __fmul_rn(deviation, deviation));
            if (largest != nullptr) magnitude = max(magnitude, __float_as_uint(fabsf(deviation)));
        }
    });
    if (largest != nullptr) *largest = magnitude;
    return sum;
}

// Converts elements 4 * j to 4 * j + 3 of a pack to fp32.
__device__ __forceinline__ void unpack_four(float (&v)[4], const Pack<Weight, PACK>& pack, int j) {
    constexpr int words = Pack<Weight, 4>::words;
#pragma unroll
    for (int k = 0; k < words; ++k) Word<Weight>::unpack(pack.word[words * j + k], v + 4 / words * k);
}

// Calls f(r, i, x * s - mean, w, b) for each element i of each row r of a batch. The loop over rows is the inner one,
// so that only four elements of w and four of b at a time are in registers as fp32.
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

// Computes for each row of a batch, over the first `valid` elements of the lane's pack: `squares`, the sum that
// pack_variance() returns, and `largest`, the bits of the largest e, which is |y| with the guess in place of rstd.
__device__ __forceinline__ void estimate_batch(float (&squares)[BATCH], u32 (&largest)[BATCH], const Batch& batch,
                                               const float (&mean)[BATCH], const float (&guess)[BATCH],
                                               const Pack<Weight, PACK>& weight, const Pack<Weight, PACK>& bias,
                                               int valid) {
    float magnitude[BATCH] = {};
    clear(squares);
    for_each_element(batch, mean, weight, bias, [&](int r, int i, float deviation, float w, float b) {
        if (ALIGNED ? valid > 0 : i < valid) {
            squares[r] = __fadd_rn(squares[r], __fmul_rn(deviation, deviation));
            magnitude[r] = fmaxf(magnitude[r], fabsf(__fmaf_rn(__fmul_rn(deviation, guess[r]), w, b)));
        }
    });
#pragma unroll
    for (int r = 0; r < BATCH; ++r) largest[r] = __float_as_uint(magnitude[r]);
}

// For each row r of a batch, sets largest[r] to the bits of the largest |y| of the lane's pack, where y includes w and
// b, or to UNDECIDED if all y of the pack are NaN. Only the first `valid` elements of the pack exist; `valid` is at
// least 1.
__device__ __forceinline__ void largest_of_batch(u32 (&largest)[BATCH], const Batch& batch, const float (&mean)[BATCH],
                                                 const float (&rstd)[BATCH], const Pack<Weight, PACK>& weight,
                                                 const Pack<Weight, PACK>& bias, int valid) {
    float magnitude[BATCH];
#pragma unroll
    // Starts with NaN: fmaxf ignores a NaN if the other operand is a number, so the result is NaN only if all y are.
    for (int r = 0; r < BATCH; ++r) magnitude[r] = __uint_as_float(NAN_BITS);
    for_each_element(batch, mean, weight, bias, [&](int r, int i, float deviation, float w, float b) {
        if (ALIGNED || i < valid) {
            magnitude[r] = fmaxf(magnitude[r], fabsf(layer_normalised(deviation, rstd[r], w, b)));
        }
    });
#pragma unroll
    for (int r = 0; r < BATCH; ++r) {
        largest[r] = magnitude[r] == magnitude[r] ? __float_as_uint(magnitude[r]) : UNDECIDED;
    }
}

// Returns the bits of the largest |y| of a row without w and b, or UNDECIDED if that is NaN. `deviation` has the bits
// of the row's largest |x * s - mean|; multiplied by rstd, this maximum is the largest |y|, since rounding keeps the
// order.
__device__ __forceinline__ u32 largest_by_rstd(u32 deviation, float rstd) {
    const float largest = __fmul_rn(__uint_as_float(deviation), rstd);
    return largest == largest ? __float_as_uint(largest) : UNDECIDED;
}
