// SPDX-License-Identifier: Apache-2.0
// Reduce-scatter, optional residual addition, norm and optional FP8 quantisation by row, in one kernel per rank: each
// rank normalises the rows that it owns.
//
// Layout. Tensors are [rows, columns], contiguous; rows/parts.cuh says which rank owns which rows. A block works on
// one row at a time and holds it in registers, as in allreduce_rmsnorm_fp8.cu, which also explains DRVFUSE_RAGGED.
//   direct  each rank loads its rows from the peers' inputs.
//   STAGED  inputs that peers cannot read: each rank first copies the rows that the others own, chunk by chunk, to its
//           payload. The payload has two halves, used alternately. A half has ranks * chunk_rows rows, grouped by
//           owner, each in whole packs.
//   LOCAL   the sources lie on this device and are complete before the launch, so there is no barrier (algorithm
//           "naive").
//   NODES   (LOCAL) the sources are the partial sums of all nodes for this rank's rows, as in reduce_scatter.cu. The
//           sums of node 0 begin at `sums`, and rows follow one another without gaps.
//
// Grid. One dimension, at most DRVFUSE_MAX_BLOCKS blocks, the same on every rank; block b processes rows b, b + blocks,
// ... of this rank's part, or of each chunk. Threads: as in allreduce_rmsnorm_fp8.cu.
//
// Numerics. As in allreduce_rmsnorm_fp8.cu. The order in which a row's squares are added depends only on its packs.
//
// Memory ordering. As in reduce_scatter.cu, with rows in place of packs: block b stages what block b of the owner
// reads, and the barrier between blocks of equal index orders the read after the store. No other rank reads a rank's
// residuals. residual_output may be the same array as residual, as a thread stores a pack after it has read it. gamma
// and beta may be read before the wait for the producer (rows/norm.cuh).
//
// Failure. If a barrier gives up, the block skips the rest of the kernel, and outputs are undefined (barrier.cuh).
#include "collectives/nodes/sums.cuh"
#include "collectives/rows/parts.cuh"
#include "sync/barrier.cuh"

struct OwnRowsParams : RowsParams {
    RowParts parts;
};

#if DRVFUSE_NODES
struct Params : OwnRowsParams {
    NodeCall node;
};

// Sets `total` to pack `at` of row `row`, summed over the nodes.
__device__ __forceinline__ void sum_row(SumPack& total, const Params& p, int row, int at) {
    const i64 first = i64(row) * p.columns + at * W;
    if constexpr (RAGGED) {
        add_nodes(total, p.node, p.node.sums + first * i64(sizeof(float)),
                  [&](SumPack& pack, const char* from) { load_elements(pack, from, p.columns - at * W); });
    } else {
        sum_nodes(total, p.node, first / W);
    }
}
#else
using Params = OwnRowsParams;
#endif

__device__ __forceinline__ void own_rows(Rows& rows, const Params& p, Trace& trace) {
    [[maybe_unused]] const int first = p.parts.starts[p.call.rank];
#if !DRVFUSE_LOCAL
    Barrier<RANKS> barrier(p.call, trace);
    if (!barrier.arrive_and_wait(false)) return;
#endif
#if !DRVFUSE_STAGED
#pragma unroll 1
    for (int row = blockIdx.x; row < p.rows; row += gridDim.x) {
#if DRVFUSE_NODES
        whole_row(rows, p, row, [&](SumPack& pack, int, int at) { sum_row(pack, p, row, at); });
#else
        whole_row(rows, p, row, [&](InPack& pack, int source, int at) {
            load_of_row(pack, p.call.sources[source], first + row, at, p);
        });
#endif
    }
#if !DRVFUSE_LOCAL
    if (!FAULT("scatter-start-barrier-only") && !barrier.arrive_and_wait(true)) return;
    barrier.finish();
#endif
#else
    const int chunk = p.chunk_rows;
    const u32 stride = input_stride(p);
    char* const own = payload(p.call.workspaces[p.call.rank]);
    u32 half = 0;
#pragma unroll 1
    for (int done = 0; done < p.parts.most; done += chunk) {
#pragma unroll 1
        for (int step = 1; step < RANKS; ++step) {
            const int owner = (p.call.rank + step) % RANKS;
            const int count = p.parts.in_chunk(owner, done, chunk);
#pragma unroll 1
            for (int j = blockIdx.x; j < count; j += gridDim.x)
                rows.stage(own + half + (owner * chunk + j) * stride, p.parts.starts[owner] + done + j);
        }
        trace.lap(TraceRole::stage);
        if (!barrier.arrive_and_wait(true)) return;
        const int mine = p.parts.in_chunk(p.call.rank, done, chunk);
#pragma unroll 1
        for (int j = blockIdx.x; j < mine; j += gridDim.x) {
            whole_row(rows, p, done + j, [&](InPack& pack, int source, int at) {
                if (source == p.call.rank) {
                    load_of_row(pack, p.call.input, first + done + j, at, p);
                } else {
                    load_pack(pack, payload(p.call.workspaces[source]) + half + (p.call.rank * chunk + j) * stride +
                                        at * sizeof(InPack));
                }
            });
        }
        half = RANKS * chunk * stride - half;
    }
    barrier.finish();
#endif
}

extern "C" __global__ void __launch_bounds__(512, 1)
    reduce_scatter_rmsnorm_fp8_one_stage(const __grid_constant__ Params p DRVFUSE_TRACE_PARAMETER) {
    __shared__ Scratch scratch;
    Trace trace{DRVFUSE_TRACE_ARGUMENT};
    begin(p.call);
    Rows rows(p, scratch, trace);
    follow_producer(trace);
    own_rows(rows, p, trace);
    clear_padding(p);
    end(p.call, trace);
}
