// SPDX-License-Identifier: Apache-2.0
// Optional residual addition, RMSNorm or LayerNorm, and quantisation of rows, on one device. Each byte is read or written
// once.
//
// Layout. Tensors are [rows, columns], contiguous. A team of threads holds a row in registers. A team is a block of
// DRVFUSE_THREADS threads, or the DRVFUSE_CLUSTER blocks of a cluster, whose threads are numbered block by block, or, where
// DRVFUSE_LANES is not 0, DRVFUSE_LANES lanes of a warp. Pack i * threads + t, 16 bytes of the input, belongs to thread t
// of the team, i < DRVFUSE_PACKS. Without DRVFUSE_RAGGED tensors are 16-byte aligned and `columns` is a multiple
// of the elements of a pack; with it, rows are read and written element by element. With DRVFUSE_EXACT every thread has
// DRVFUSE_PACKS packs of a row.
//
// Grid. Any number of blocks, a multiple of the cluster. Team k does rows k, k + teams, ... It loads the next row while it
// works on a row.
//
// Numerics. x = +0 + input (+ residual, rounded to the residual's type: residual_output). The operations on x are those
// of drvfuse/reference/norms.py and quantised.py, in IEEE arithmetic, each rounded; the order of sums is in reduce.cuh.
// f is not negative and rounding is monotone, so f * max|x * g| is max|y| of a row, and without beta one reduction
// gives both the sum and the maximum. The maxima of groups are found from y itself, since 0 * f is NaN where f is
// infinite.
//
// Memory ordering. Teams share only the memory of their reductions (reduce.cuh), so nothing else must be ordered.
// residual_output may be residual: the same thread reads a row's residual before it writes residual_output of that row.
// gamma and beta are weights; with KEEP_GAMMA they are read before the wait for the producer, otherwise after it. The padding
// of scales and the scales are different bytes, each written by one thread.
//
// Failure. A thread waits for the threads of its own team alone, so the kernel cannot hang.
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
    // The lanes of a warp stay together until the team of its first lanes has no row left.
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
