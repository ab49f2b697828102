// SPDX-License-Identifier: Apache-2.0
// The rows that the ranks own in a reduce-scatter with norm: rank r owns rows starts[r] to starts[r + 1] of the inputs.
//
// `rows` of the call's parameters is the number of rows that this rank owns. Outputs, scales and residuals have only
// these rows: row j of an output belongs to row starts[rank] + j of the inputs.
#pragma once
#include "collectives/rows/whole_row.cuh"

struct RowParts {
    int starts[DRVFUSE_MAX_RANKS + 1];
    int most;  // the largest number of rows of a rank

    __device__ __forceinline__ int rows(int rank) const { return starts[rank + 1] - starts[rank]; }

    // The number of rows of a rank in the chunk that begins `done` rows into its part.
    __device__ __forceinline__ int in_chunk(int rank, int done, int chunk) const {
        const int left = rows(rank) - done;
        return left < 0 ? 0 : left < chunk ? left : chunk;
    }
};
