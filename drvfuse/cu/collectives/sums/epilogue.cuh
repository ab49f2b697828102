// SPDX-License-Identifier: Apache-2.0
// The element-wise epilogue of a collective, on packs of the tensor.
#pragma once
#include "common/epilogue.cuh"

// Applies the epilogue to the elements first, first + 1, ... of the tensor. Elements outside [begin, end) are left out,
// since the epilogue may index arrays by i, row or col.
template <int W>
__device__ __forceinline__ void apply_epilogue(float (&v)[W], i64 first, i64 begin, i64 end, i64 columns, int rank,
                                               const Epilogue& apply) {
    i64 row = first / columns;
    i64 col = first - row * columns;
#pragma unroll
    for (int i = 0; i < W; ++i) {
        if (!DRVFUSE_RAGGED || (first + i >= begin && first + i < end)) v[i] = apply(v[i], first + i, row, col, rank);
        if (++col == columns) {
            col = 0;
            ++row;
        }
    }
}
