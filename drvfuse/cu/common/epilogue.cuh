// SPDX-License-Identifier: Apache-2.0
// The element-wise epilogue: a function of an fp32 sum, applied before it is normalised or rounded to the output's
// type.
//
// With DRVFUSE_EPILOGUE defined, the text before the kernel has defined
//     struct EpilogueParams { ... };                                    the kernel's second parameter, by value
//     __device__ float epilogue(float x, i64 i, i64 row, i64 col, int rank, const EpilogueParams& params);
// where i is the element's index in the flat tensor, row = i / columns and col = i % columns. A kernel has
//     extern "C" __global__ void kernel(const __grid_constant__ Params p DRVFUSE_EPILOGUE_PARAMETER) {
//         const Epilogue apply{DRVFUSE_EPILOGUE_ARGUMENT};
// and calls apply(x, i, row, col, rank), which is x without an epilogue.
#pragma once
#include "common/prelude.cuh"

#ifdef DRVFUSE_EPILOGUE
#define DRVFUSE_EPILOGUE_PARAMETER , const __grid_constant__ EpilogueParams epilogue_params
#define DRVFUSE_EPILOGUE_ARGUMENT epilogue_params

struct Epilogue {
    const EpilogueParams& params;

    __device__ __forceinline__ float operator()(float x, i64 i, i64 row, i64 col, int rank) const {
        return epilogue(x, i, row, col, rank, params);
    }
};
#else
#define DRVFUSE_EPILOGUE_PARAMETER
#define DRVFUSE_EPILOGUE_ARGUMENT

struct Epilogue {
    __device__ __forceinline__ float operator()(float x, i64, i64, i64, int) const { return x; }
};
#endif
