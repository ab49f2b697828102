// SPDX-License-Identifier: Apache-2.0
// A row of the fused kernels from the sources to the outputs, by one block.
#pragma once
#include "collectives/norm_rows.cuh"

// Row `row` of the outputs: load(pack, source, index) reads a pack of it.
template <typename Load>
__device__ __forceinline__ void whole_row(Rows& rows, const FusedParams& p, int row, const Load& load) {
    float x[PACKS][W];
    rows.sum(x, load);
    if constexpr (RESIDUAL)
        rows.add_residual(x, row,
                          [&](int at, const ResidualPack& pack) { store_of_row(p.residual_output, row, at, p, pack); });
    rows.normalise_to_output(x, row);
}
