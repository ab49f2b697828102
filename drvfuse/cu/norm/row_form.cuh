// SPDX-License-Identifier: Apache-2.0
// The constants that rmsnorm_fp8 is compiled with, its parameters, and loads and stores of packs of a row.
#pragma once
#include "common/faults.cuh"
#include "common/quantise.cuh"
#include "common/team_reduce.cuh"
#if DRVFUSE_CLUSTER > 1
#include "common/cluster_reduce.cuh"
#endif

using In = DRVFUSE_DTYPE;                      // the type of the input
using Gamma = DRVFUSE_GAMMA_DTYPE;             // the type of gamma and beta
using Residual = DRVFUSE_RESIDUAL_DTYPE;       // the type of residual and residual_output
using Out = DRVFUSE_OUT_DTYPE;                 // the type of the output: codes, or the input's type
using Scale = DRVFUSE_SCALES_DTYPE;            // the type of the scales
constexpr Quant QUANT = Quant(DRVFUSE_QUANT);  // the kind of quantisation
constexpr ScaleLayout LAYOUT = ScaleLayout(DRVFUSE_SCALES_LAYOUT);  // the layout of the scales
constexpr int W = 16 / sizeof(In);                                  // elements of a pack: 16 bytes of the input
constexpr int GROUP = DRVFUSE_GROUP ? DRVFUSE_GROUP : W;            // columns per scale; unused without group scales
constexpr int PACKS = DRVFUSE_PACKS;                                // packs of a row that a thread holds
constexpr int LANES = DRVFUSE_LANES;             // lanes of a warp that hold a row; 0: blocks hold rows
constexpr int IN_WARP = LANES > 0 ? LANES : 32;  // lanes of a warp that hold packs of the same row
constexpr int CLUSTER = DRVFUSE_CLUSTER;         // blocks that hold a row together
constexpr bool RAGGED = DRVFUSE_RAGGED;          // rows are accessed element by element
constexpr bool EXACT = DRVFUSE_EXACT;            // every thread has PACKS packs of a row
constexpr bool RESIDUAL = DRVFUSE_RESIDUAL;      // a residual is added
constexpr bool LAYER = DRVFUSE_LAYER;            // the norm is LayerNorm
constexpr bool BETA = DRVFUSE_BETA;              // LayerNorm has beta
constexpr bool NORMED = DRVFUSE_NORMED;          // y before quantisation is stored too
constexpr int THREADS = DRVFUSE_THREADS;         // threads of a block
// Whether the maxima are those of y, in a reduction of their own. Otherwise they are those of x * g, and are reduced
// together with the sum of squares.
constexpr bool MAX_OF_Y = BETA || QUANT == Quant::group;
constexpr int TEAM = LANES > 0 ? LANES : THREADS * CLUSTER;  // threads of a team, which holds a row
constexpr int FLOATS = PACKS * W;                            // floats of a row in a thread's registers
// Blocks per multiprocessor that leave each thread 64 registers, or 128 if the thread holds more than 16 floats.
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

// The kernel's parameters. drvfuse/ops/norm/rmsnorm_fp8.py reads this definition. Tensors are contiguous.
struct NormParams {
    const void* input;      // [rows, columns]
    const void* gamma;      // [columns]
    const void* beta;       // [columns], with BETA
    const void* residual;   // [rows, columns], with RESIDUAL
    void* residual_output;  // [rows, columns], with RESIDUAL
    void* output;           // [rows, columns]
    void* scales;           // the scales in LAYOUT, for Quant::row and Quant::group
    void* normed_output;    // [rows, columns], with NORMED
    int rows;               // rows of the input
    int columns;            // columns of the input
    float epsilon;          // the number added to the mean of squares or, with LAYER, to the variance
    float weight_offset;    // the number added to gamma
    float given;            // the upper bound of the maxima, the static scale, or the tensor scale (quantise.cuh)
    int early_trigger;      // 1: trigger dependent launches at entry, 0: at the end
};

// Loads this thread's pack `i` of a row. The thread's first pack of the row begins at element `at` of the tensor, and
// the row has `valid` elements from the beginning of pack `i` on.
template <typename T>
__device__ __forceinline__ void load_of_row(Pack<T, W>& pack, const void* tensor, i64 at, int i, int valid) {
    const char* address = static_cast<const char*>(tensor) + Bytes<T>::of(at) + Bytes<T>::of(i * TEAM * W);
    if constexpr (RAGGED) {
        load_elements(pack, address, valid);
    } else {
        load_pack(pack, address);
    }
}

// Stores this thread's pack `i` of a row; the arguments are those of load_of_row().
template <typename T>
__device__ __forceinline__ void store_of_row(void* tensor, i64 at, int i, int valid, const Pack<T, W>& pack) {
    char* address = static_cast<char*>(tensor) + Bytes<T>::of(at) + Bytes<T>::of(i * TEAM * W);
    if constexpr (RAGGED) {
        store_elements(address, pack, valid);
    } else {
        store_pack(address, pack);
    }
}
