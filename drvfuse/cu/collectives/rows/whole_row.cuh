// SPDX-License-Identifier: Apache-2.0
// All steps by which a block of the fused kernels processes a row, from the sources to the outputs.
#pragma once
#include "collectives/rows/steps.cuh"

// Computes row `row` of the outputs; load(pack, source, index) reads a pack of the row from a source.
template <typename Load>
__device__ __forceinline__ void whole_row(Rows& rows, const RowsParams& p, int row, const Load& load) {
    float x[PACKS][W];
    rows.sum(x, load);
    if constexpr (RESIDUAL)
        rows.add_residual(x, row,
                          [&](int at, const ResidualPack& pack) { store_of_row(p.residual_output, row, at, p, pack); });
    rows.normalise_to_output(x, row);
}
