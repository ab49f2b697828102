// SPDX-License-Identifier: Apache-2.0
// The definitions that say what the fused kernels do to a row, the parameters of these kernels, and their accesses to
// packs of rows in the caller's tensors.
//
//   DRVFUSE_RESIDUAL        a residual is added. The residual and residual_out are of DRVFUSE_RESIDUAL_DTYPE, which is
//                           the input's type or float. In both cases the order in which a row is summed is defined by
//                           the input's packs.
//   DRVFUSE_GAMMA_DTYPE     the type of gamma and beta: the input's or float.
//   DRVFUSE_LAYER           the mean is subtracted before the norm (LayerNorm). With DRVFUSE_BETA beta is added after
//                           the norm.
//   DRVFUSE_NORMED          the normed rows are stored too, in the input's type.
//   DRVFUSE_HEAD            if not 0, a row consists of heads of this number of columns, and each head is normed and
//                           quantised by itself. 1, 2, 4, ... or 32 adjacent lanes hold the packs of a head.
//   DRVFUSE_QUANT, _GROUP, _SCALES_LAYOUT  how rows are quantised (quantise.cuh).
#pragma once
#include "collectives/shared/kernel.cuh"

using Gamma = DRVFUSE_GAMMA_DTYPE;
using Scale = DRVFUSE_SCALES_DTYPE;
using Residual = DRVFUSE_RESIDUAL_DTYPE;
using ResidualPack = Pack<Residual, W>;
constexpr bool RESIDUAL = DRVFUSE_RESIDUAL;
constexpr bool LAYER = DRVFUSE_LAYER;
constexpr bool BETA = DRVFUSE_BETA;
constexpr bool NORMED = DRVFUSE_NORMED;
constexpr bool GATHERS_NORMED = NORMED && !RESIDUAL;  // the other ranks get a normed row from its owner
constexpr Quant QUANT = Quant(DRVFUSE_QUANT);
constexpr ScaleLayout LAYOUT = ScaleLayout(DRVFUSE_SCALES_LAYOUT);
constexpr bool QUANTISE = QUANT != Quant::none;
constexpr int HEAD = DRVFUSE_HEAD;
constexpr int HEAD_LANES = HEAD != 0 ? HEAD / W : 1;
static_assert(HEAD % W == 0 && (HEAD_LANES & (HEAD_LANES - 1)) == 0 && HEAD_LANES <= 32,
              "a head must be 1, 2, 4, ... or 32 packs");
// Columns that share a scale, which is that of a group or of a head; 0 if there are no such scales.
constexpr int GROUP = QUANT == Quant::group ? DRVFUSE_GROUP : QUANT == Quant::row ? HEAD : 0;
constexpr bool GROUPED = GROUP != 0;
constexpr bool FP4 = Bytes<Out>::of(2) == 1;
constexpr bool SCALED = GROUPED || QUANT == Quant::row;  // scales are written
constexpr int LANES = GROUPED ? GROUP / W : 1;           // number of adjacent lanes that hold a group's packs
static_assert(LAYER || !BETA, "beta requires LayerNorm");
static_assert(QUANTISE || !NORMED, "a separate normed output requires quantisation");
static_assert(!GROUPED || !RAGGED, "groups require whole packs");

struct RowsParams {
    Call call;
    const void* gamma;
    const void* residual;
    void* residual_output;
    void* output;
    void* scales;
    int rows;
    int chunk_rows;  // rows of a chunk or round (see each kernel's Layout); unused by one_stage without staging
    int columns;
    float epsilon;
    float weight_offset;
    float given;
#if DRVFUSE_MORE
    const void* beta;
    void* normed_output;
    int all_rows;   // rows of the tensor
    int first_row;  // the index in the tensor of this launch's first row; used for scales by column or in tiles
#endif
};

__device__ __forceinline__ const void* beta_of(const RowsParams& p) {
#if DRVFUSE_MORE
    return p.beta;
#else
    return nullptr;
#endif
}

__device__ __forceinline__ void* normed_output_of(const RowsParams& p) {
#if DRVFUSE_MORE
    return p.normed_output;
#else
    return nullptr;
#endif
}

// The number of scales of a row.
__device__ __forceinline__ int groups_of_row(const RowsParams& p) {
    return GROUPED ? p.columns / (GROUPED ? GROUP : 1) : SCALED;
}

// The number of heads of a row; 1 without heads.
__device__ __forceinline__ int heads_of_row(const RowsParams& p) { return HEAD != 0 ? p.columns / (HEAD + !HEAD) : 1; }

// The address of the scale of group `group` in row `begin` + `row`.
__device__ __forceinline__ Scale* scale_at(const RowsParams& p, int begin, int row, int group) {
    Scale* const scales = static_cast<Scale*>(p.scales);
    if constexpr (!GROUPED) {
        return scales + begin + row;
    } else {
#if DRVFUSE_MORE
        if constexpr (LAYOUT != ScaleLayout::row) {
            const int heads = heads_of_row(p), each = groups_of_row(p) / heads;
            return scales + scale_index<LAYOUT>((p.first_row + begin + row) * heads + group / each, group % each,
                                                p.all_rows * heads, each);
        }
#endif
        return scales + scale_index<ScaleLayout::row>(begin + row, group, 0, groups_of_row(p));
    }
}

// Clears the padding of the scales. Called by all threads of the grid, once in a launch.
__device__ __forceinline__ void clear_padding(const RowsParams& p) {
#if DRVFUSE_MORE
    const int heads = heads_of_row(p);
    clear_scale_padding<Scale, LAYOUT>(p.scales, p.all_rows * heads, groups_of_row(p) / heads,
                                       blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
#endif
}

__device__ __forceinline__ int packs_of_row(const RowsParams& p) { return (p.columns + W - 1) / W; }
__device__ __forceinline__ u32 input_stride(const RowsParams& p) { return packs_of_row(p) * u32(sizeof(InPack)); }
__device__ __forceinline__ u32 residual_stride(const RowsParams& p) {
    return packs_of_row(p) * u32(sizeof(ResidualPack));
}
__device__ __forceinline__ u32 output_stride(const RowsParams& p) {
    return (packs_of_row(p) * u32(sizeof(OutPack)) + 15) / 16 * 16;
}

// Loads pack `index` of row `row` of the caller's tensor.
template <typename T>
__device__ __forceinline__ void load_of_row(Pack<T, W>& pack, const void* tensor, int row, int index,
                                            const RowsParams& p) {
    const char* address = static_cast<const char*>(tensor) + (i64(row) * p.columns + index * W) * sizeof(T);
    if constexpr (RAGGED) {
        load_elements(pack, address, p.columns - index * W);
    } else {
        load_pack(pack, address);
    }
}

template <typename T>
__device__ __forceinline__ void store_of_row(void* tensor, int row, int index, const RowsParams& p,
                                             const Pack<T, W>& pack) {
    char* address = static_cast<char*>(tensor) + Bytes<T>::of(i64(row) * p.columns + index * W);
    if constexpr (RAGGED) {
        store_elements(address, pack, p.columns - index * W);
    } else {
        store_pack(address, pack);
    }
}
