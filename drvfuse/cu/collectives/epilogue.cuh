// SPDX-License-Identifier: Apache-2.0
// The element-wise epilogue: a function of the fp32 sum, applied before the one rounding to the output's type.
//
// With DRVFUSE_EPILOGUE defined, the text in front of the kernel has defined
//     struct EpilogueParams { ... };                                    the kernel's second parameter, by value
//     __device__ float epilogue(float x, i64 i, i64 row, i64 col, int rank, const EpilogueParams& params);
// where i is the element's index in the flat tensor, row = i / columns and col = i % columns.
#pragma once
#include "common/prelude.cuh"

#ifdef DRVFUSE_EPILOGUE
#define DRVFUSE_EPILOGUE_PARAMETER , const __grid_constant__ EpilogueParams epilogue_params
#define DRVFUSE_EPILOGUE_ARGUMENT , epilogue_params
#else
#define DRVFUSE_EPILOGUE_PARAMETER
#define DRVFUSE_EPILOGUE_ARGUMENT
#endif

#ifdef DRVFUSE_EPILOGUE
// The elements first, first + 1, ... of the tensor. On those outside [begin, end) the epilogue is not run: it may index
// arrays by i, row or col.
template <int W>
__device__ __forceinline__ void apply_epilogue(float (&v)[W], i64 first, i64 begin, i64 end, i64 columns, int rank,
                                               const EpilogueParams& params) {
    i64 row = first / columns;
    i64 col = first - row * columns;
#pragma unroll
    for (int i = 0; i < W; ++i) {
        if (!DRVFUSE_RAGGED || (first + i >= begin && first + i < end))
            v[i] = epilogue(v[i], first + i, row, col, rank, params);
        if (++col == columns) {
            col = 0;
            ++row;
        }
    }
}
#else
template <int W>
__device__ __forceinline__ void apply_epilogue(float (&)[W], i64, i64, i64, i64, int) {}
#endif
