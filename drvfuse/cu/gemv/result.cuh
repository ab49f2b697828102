// SPDX-License-Identifier: Apache-2.0
// The last steps of cu/gemv/gemv_partial_norm.cu for a complete sum: apply scales, bias and epilogue, and publish or
// store it.
#pragma once
#include "common/epilogue.cuh"
#include "gemv/params.cuh"
#include "sync/grid_words.cuh"

class Results {
public:
    __device__ __forceinline__ Results(const GemvParams& params, const Rows& rows_of_block,
                                       const Epilogue& epilogue_of_call)
        : p(params), rows(rows_of_block), apply(epilogue_of_call) {}

    // Computes y from `sum`, the dot product of the block's row `r` and act's row `m`. Publishes y if row `r` is
    // normed, else stores it. After the last normed row, also publishes zeros to the end of the last pack of four.
    __device__ __forceinline__ void put(int r, int m, float sum, u32 tag) const {
        const int row = rows[r];
        const float y = value(row, m, sum);
        if (r < rows.normed) {
            u64* word = p.words + i64(m) * p.padded + row;
            const u32 bits = Word<float>::pack(&y);
            if constexpr (FAULT("gemv-flag-before-value")) {
                u32* halves = reinterpret_cast<u32*>(word);
                ptx::store_relaxed_gpu(halves + 1, tag);
                ptx::store_relaxed_gpu(halves, bits);
            } else {
                leave_word(word, tag, bits);
            }
            if (!NORM_ALIGNED && row == p.n_normed - 1) {
                for (int pad = row + 1; pad < p.padded; ++pad) leave_word(++word, tag, 0);
            }
        } else {
            store_scalar(p.unnormed + i64(m) * p.n_unnormed + (row - p.n_normed), y);
        }
    }

private:
    // Returns y[m, row], from the sum of its products.
    __device__ __forceinline__ float value(int row, int m, float sum) const {
        if constexpr (SCALES == Scales::tensor) sum = __fmul_rn(sum, *p.scales);
        if constexpr (SCALES == Scales::row) sum = __fmul_rn(sum, p.scales[row]);
        if constexpr (ACT_SCALES == Scales::row) sum = __fmul_rn(sum, p.act_scales[m * p.act_scale_step]);
        if constexpr (BIASED) sum = __fadd_rn(sum, float(p.bias[row]));
        return apply(sum, i64(m) * (p.n_normed + p.n_unnormed) + row, m, row, 0);
    }

    const GemvParams& p;
    const Rows& rows;
    const Epilogue apply;
};
