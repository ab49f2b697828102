// SPDX-License-Identifier: Apache-2.0
// What rmsnorm_fp8 is compiled for, its parameters, and packs of the rows of its tensors.
#pragma once
#include "common/faults.cuh"
#include "common/quantise.cuh"
#include "common/team_reduce.cuh"
#if DRVFUSE_CLUSTER > 1
#include "common/cluster_reduce.cuh"
#endif

using In = DRVFUSE_DTYPE;
using Gamma = DRVFUSE_GAMMA_DTYPE;
using Residual = DRVFUSE_RESIDUAL_DTYPE;
using Out = DRVFUSE_OUT_DTYPE;
using Scale = DRVFUSE_SCALES_DTYPE;
constexpr Quant QUANT = Quant(DRVFUSE_QUANT);
constexpr ScaleLayout LAYOUT = ScaleLayout(DRVFUSE_SCALES_LAYOUT);
constexpr int W = 16 / sizeof(In);
constexpr int GROUP = DRVFUSE_GROUP ? DRVFUSE_GROUP : W;  // W, which is not used, where there are no groups
constexpr int PACKS = DRVFUSE_PACKS;
constexpr int LANES = DRVFUSE_LANES;
constexpr int IN_WARP = LANES > 0 ? LANES : 32;  // lanes of a warp that hold one row
constexpr int CLUSTER = DRVFUSE_CLUSTER;
constexpr bool RAGGED = DRVFUSE_RAGGED;
constexpr bool EXACT = DRVFUSE_EXACT;
constexpr bool RESIDUAL = DRVFUSE_RESIDUAL;
constexpr bool LAYER = DRVFUSE_LAYER;
constexpr bool BETA = DRVFUSE_BETA;
constexpr bool NORMED = DRVFUSE_NORMED;
constexpr int THREADS = DRVFUSE_THREADS;
// maxima are taken of y; otherwise of x * g, together with the sum
constexpr bool MAX_OF_Y = BETA || QUANT == Quant::group;
constexpr int TEAM = LANES > 0 ? LANES : THREADS * CLUSTER;
constexpr int FLOATS = PACKS * W;  // floats of a row in a thread's registers
// Blocks per multiprocessor that leave each thread 64 registers, or 128 where it holds more than 16 floats.
constexpr int RESIDENT = (FLOATS > 16 ? 512 : 1024) / THREADS;

using InPack = Pack<In, W>;
using OutPack = Pack<Out, W>;
using GammaPack = Pack<Gamma, W>;
using ResidualPack = Pack<Residual, W>;
// gamma + weight_offset, and beta, stay in registers for all rows if the registers suffice.
constexpr int KEPT = FLOATS * (BETA ? 3 : 2) + PACKS * (InPack::words + (RESIDUAL ? ResidualPack::words : 0));
constexpr bool KEEP_GAMMA = KEPT <= (FLOATS > 16 ? 96 : 40);
#if DRVFUSE_LANES
using Scratch = LaneScratch<LANES>;
#elif DRVFUSE_CLUSTER > 1
using Scratch = ClusterScratch<CLUSTER>;
#else
using Scratch = BlockScratch<THREADS / 32>;
#endif

struct NormParams {
    const void* input;
    const void* gamma;
    const void* beta;
    const void* residual;
    void* residual_output;
    void* output;
    void* scales;
    void* normed_output;
    int rows;
    int columns;
    float epsilon;
    float weight_offset;
    float given;  // see quantise.cuh
    int early_trigger;
};

// This thread's pack `i` of a row. The thread's first pack of the row begins at element `at` of the tensor, and the row has
// `valid` elements from pack `i` on.
template <typename T>
__device__ __forceinline__ void load_of_row(Pack<T, W>& pack, const void* tensor, i64 at, int i, int valid) {
    const char* address = static_cast<const char*>(tensor) + Bytes<T>::of(at) + Bytes<T>::of(i * TEAM * W);
    if constexpr (RAGGED) {
        load_elements(pack, address, valid);
    } else {
        load_pack(pack, address);
    }
}

template <typename T>
__device__ __forceinline__ void store_of_row(void* tensor, i64 at, int i, int valid, const Pack<T, W>& pack) {
    char* address = static_cast<char*>(tensor) + Bytes<T>::of(at) + Bytes<T>::of(i * TEAM * W);
    if constexpr (RAGGED) {
        store_elements(address, pack, valid);
    } else {
        store_pack(address, pack);
    }
}
