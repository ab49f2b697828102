// SPDX-License-Identifier: Apache-2.0
// Where the complete sums of cu/gemv/gemv_partial_norm.cu go.
#pragma once
#include "gemv/params.cuh"
#include "sync/grid_words.cuh"

// The sum of the block's row `r` and row `m` of act: published if the row is normed, else stored. With the last normed one
// come zeros to the end of its pack of four.
__device__ __forceinline__ void put_sum(const GemvParams& p, const Rows& rows, int r, int m, float sum, u32 tag) {
    const int row = rows[r];
    if constexpr (SCALES == Scales::tensor) sum = __fmul_rn(sum, *p.scales);
    if constexpr (SCALES == Scales::row) sum = __fmul_rn(sum, p.scales[row]);
    if (r < rows.normed) {
        u64* word = p.words + i64(m) * p.padded + row;
        const u32 bits = Word<float>::pack(&sum);
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
        store_scalar(p.unnormed + i64(m) * p.n_unnormed + (row - p.n_normed), sum);
    }
}
