// SPDX-License-Identifier: Apache-2.0
// An optional residual addition, RMSNorm or LayerNorm, and the quantisation of rows, on one device. Each byte is read
// or written once.
//
// Computes, for an input [rows, columns], with g = gamma + weight_offset:
//   x = +0 + input, with RESIDUAL rounded(x + residual), which is residual_output                    [rows, columns]
//   RMSNorm    y = (x * g) * f, where f = 1 / sqrt(mean of x^2 over the row + epsilon)
//   LayerNorm  y = ((x - mean) * g) * f, with BETA + beta, where f is that of x - mean
//   output = codes of y, and scales (quantise.cuh), or y rounded to the input's type                 [rows, columns]
//   normed_output = y rounded to the input's type, with NORMED                                       [rows, columns]
// All operations are fp32 and IEEE, each rounded, in the order of drvfuse/reference/norm.py and quantised.py; the
// order of sums is in reduce.cuh. f is not negative and rounding is monotone, so without beta max|y| of a row is f *
// max|x * g|, and one reduction gives both the sum of squares and the maximum. The maxima of groups are taken of y
// itself: f * max|x * g| would not do, since 0 * f is NaN if f is infinite.
//
// Division. The number of blocks may be any multiple of CLUSTER. A team of threads has one row at a time: LANES lanes
// of a warp if LANES is not 0, otherwise a block of THREADS threads, or the CLUSTER blocks of a cluster, whose threads
// are numbered block by block. Team k of all teams takes rows k, k + teams, ... A pack is 16 bytes of a row of the
// input. Pack i * (threads of the team) + t of a row belongs to thread t of the team, for i < PACKS. Without RAGGED
// tensors are 16-byte aligned and rows consist of whole packs; with RAGGED rows are read and written element by
// element.
//
// Storage. Registers: a team's row, its next row, which is in flight, and with KEEP_GAMMA gamma and beta. Shared
// memory: the sums and maxima of a reduction.
//
// Memory ordering. The threads of a team share only the memory of their reductions (reduce.cuh, team_reduce.cuh,
// cluster_reduce.cuh), and teams exchange no data. residual_output may be the residual: the same thread reads a row's
// residual before it writes residual_output of that row. Each byte of the scales and of their padding is written by
// only one thread.
//
// PDL. Before the wait for the producer, a block reads only gamma and beta, with KEEP_GAMMA. It triggers at its entry
// (early_trigger) or at its end.
//
// Failure. A thread waits only for threads of its own team, so the kernel cannot hang.
#include "norm/rows.cuh"
#include "sync/pdl.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    rmsnorm_fp8(const __grid_constant__ NormParams p DRVFUSE_TRACE_PARAMETER) {
    __shared__ Scratch scratch;
    Trace trace{DRVFUSE_TRACE_ARGUMENT};
    if (p.early_trigger) launch_dependents();
    scratch.init();
    Rows rows(p, scratch, trace);
    Loaded loaded;
    int row = rows.first_row();
    if (FAULT("norm-input-before-pdl-wait")) rows.load(loaded, row);
    wait_for_producer();
    trace.start();
    if (!FAULT("norm-input-before-pdl-wait")) rows.load(loaded, row);
    if constexpr (QUANT == Quant::group) {
        clear_scale_padding<Scale, LAYOUT>(p.scales, p.rows, p.columns / GROUP, blockIdx.x * THREADS + threadIdx.x,
                                           gridDim.x * THREADS);
    }
    // All lanes of a warp stay in the loop until the team of the warp's first lanes has no row left, because
    // normalise() is called by whole warps.
#pragma unroll 1
    for (int first = LANES > 0 ? row - int(threadIdx.x % 32) / IN_WARP : row; first < p.rows; first += rows.step()) {
        float x[PACKS][W];
        rows.begin(x, loaded, row);
        row += rows.step();
        rows.load(loaded, row);
        rows.normalise(x);
    }
    if (!p.early_trigger) launch_dependents();
    trace.exit();
}
