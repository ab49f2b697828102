// SPDX-License-Identifier: Apache-2.0
// All-reduce, optional residual addition, norm and optional FP8 quantisation by row, in one kernel per rank.
//
// Layout. Tensors are [rows, columns], contiguous. A block works on one row at a time and holds it in registers: pack
// i * threads + t (16 bytes of the input) belongs to thread t, i < DRVFUSE_PACKS. Without DRVFUSE_RAGGED tensors are
// 16-byte aligned and `columns` is a multiple of the elements of a pack; with DRVFUSE_RAGGED rows are read and written
// element by element. Rows in the payload are always whole packs.
//   one_stage  every rank sums and normalises every row.
//   two_stage  rank k owns a range of rows; the ranges differ by at most one row. Without residual the owner normalises
//              and quantises, and the others gather its rows and scales. With residual every rank needs the rounded
//              residual_out. So the others gather residual_out, and every rank normalises every row, by the same
//              operations on the same bits.
//   STAGED     inputs that peers cannot read: each rank first copies its input, chunk by chunk, into its payload.
//   LOCAL      the sources lie on this device and are complete before the launch, so there is no barrier (algorithm
//              "naive").
//   NODES      (two_stage, not STAGED) the ranks are those of one node, and the sources are the partial sums of all
//              nodes for this rank's rows (nodes/sums.cuh). There is one chunk, and its results lie in one half of the
//              payload.
// The forms of the norm and of the quantisation are in rows/form.cuh. A row has one scale, or one for each of its
// groups or heads, in their order.
// Payload, in chunks of `chunk_rows`; an input row takes packs * 16 bytes; an output row takes packs * (bytes of an
// output pack), rounded up to 16; the bytes of the scales of a chunk are rounded up to 16:
//   one_stage staged   two halves, used alternately, of `chunk_rows` input rows each
//   two_stage direct   (not STAGED) two halves, used alternately, of the results of `chunk_rows` rows each. Without
//                      residual: output rows, then their scales, then with normed outputs the normed rows. With
//                      residual: rows of residual_out. A normed row takes as many bytes as an input row. A row of
//                      residual_out takes packs * (bytes of a pack of residual_out)
//   two_stage staged   ranks * `chunk_rows` input rows, grouped by owner; then results, as in one half of two_stage
//                      direct
//
// Grid. One dimension, at most DRVFUSE_MAX_BLOCKS blocks, the same on every rank; block b processes rows b, b + blocks,
// ... of each range or chunk. Threads: a multiple of 32 up to 512, at least ceil(packs of a row / DRVFUSE_PACKS).
//
// Numerics. x = +0.0f + the inputs of ranks 0 to n-1 (NODES: the sums of nodes 0 to n-1), in order; with a residual,
// residual_out = x + residual, rounded to the residual's type, replaces x;
// f = 1 / sqrt(sum(x^2) / columns + epsilon); y = (x * (gamma + weight_offset)) * f. IEEE operations, each rounded; the
// order of sum(x^2) is in reduce.cuh. f > 0 and rounding is monotone, so max|y| is f * max|x * g| exactly, with
// g = gamma + weight_offset, and one reduction gives both the sum and the maximum. LAYER: first x is replaced by
// x - sum(x) / columns, which takes a reduction of its own. BETA: beta is added to y, and the maximum of the result
// takes a third reduction. NORMED: y is also rounded to the input's type. If a row has a scale per group, warps compute
// the maximum of each group from y.
//
// Memory ordering. As in allreduce.cu, with rows in place of packs and blocks in place of threads: block b reads from a
// peer only data that the peer's block b wrote, or that was complete before the peer's kernel began, and the barrier
// covers all threads of a block. For the reasons given in allreduce.cu, inputs are free when the kernel completes, and
// halves of the payload are free two chunks later. NODES: as in allreduce.cu. residual_output may be the same array as
// residual: a rank reads the residual of a row (two_stage: only the row's owner does) before residual_out of that row
// is written by the same thread, or by the same block after a barrier. gamma and beta may be read before the wait for
// the producer (rows/norm.cuh).
//
// Failure. If a barrier gives up, the block skips the rest of the kernel, and outputs are undefined (barrier.cuh).
#include "collectives/rows/gather.cuh"
#include "collectives/nodes/sums.cuh"
#include "collectives/rows/whole_row.cuh"
#include "common/partition.cuh"
#include "sync/barrier.cuh"

#if !DRVFUSE_TWO_STAGE

__device__ __forceinline__ void one_stage(Rows& rows, const RowsParams& p, Trace& trace) {
#if !DRVFUSE_STAGED
#if !DRVFUSE_LOCAL
    Barrier<RANKS> barrier(p.call, trace);
    if (!barrier.arrive_and_wait(false)) return;
#endif
#pragma unroll 1
    for (int row = blockIdx.x; row < p.rows; row += gridDim.x) {
        whole_row(rows, p, row,
                  [&](InPack& pack, int source, int at) { load_of_row(pack, p.call.sources[source], row, at, p); });
    }
#if !DRVFUSE_LOCAL
    if (!barrier.arrive_and_wait(true)) return;
    barrier.finish();
#endif
#else
    const u32 stride = input_stride(p);
    char* const own = payload(p.call.workspaces[p.call.rank]);
    u32 half = 0;
    Barrier<RANKS> barrier(p.call, trace);
    if (!barrier.arrive_and_wait(false)) return;
#pragma unroll 1
    for (int begin = 0; begin < p.rows; begin += p.chunk_rows) {
        const int count = p.rows - begin < p.chunk_rows ? p.rows - begin : p.chunk_rows;
#pragma unroll 1
        for (int j = blockIdx.x; j < count; j += gridDim.x) rows.stage(own + half + j * stride, begin + j);
        trace.lap(TraceRole::stage);
        if (!barrier.arrive_and_wait(true)) return;
#pragma unroll 1
        for (int j = blockIdx.x; j < count; j += gridDim.x) {
            whole_row(rows, p, begin + j, [&](InPack& pack, int source, int at) {
                load_pack(pack, payload(p.call.workspaces[source]) + half + j * stride + at * sizeof(InPack));
            });
        }
        half = p.chunk_rows * stride - half;
    }
    barrier.finish();
#endif
}

extern "C" __global__ void __launch_bounds__(512, 1)
    allreduce_rmsnorm_fp8_one_stage(const __grid_constant__ RowsParams p DRVFUSE_TRACE_PARAMETER) {
    __shared__ Scratch scratch;
    Trace trace{DRVFUSE_TRACE_ARGUMENT};
    begin(p.call);
    Rows rows(p, scratch, trace);
    follow_producer(trace);
    one_stage(rows, p, trace);
    clear_padding(p);
    end(p.call, trace);
}

#else

#if DRVFUSE_NODES
struct Params : RowsParams {
    NodeCall node;
};
#else
using Params = RowsParams;
#endif

__device__ __forceinline__ void two_stage(Rows& rows, const Params& p, Trace& trace) {
    const int chunk = p.chunk_rows;
    const u32 in_stride = input_stride(p);
    const u32 out_stride = RESIDUAL ? residual_stride(p) : output_stride(p);
    const u32 scales_offset = chunk * out_stride;
    const int groups = groups_of_row(p);
    const u32 normed_offset =
        scales_offset + (RESIDUAL || !SCALED ? 0 : (chunk * groups * u32(sizeof(Scale)) + 15) / 16 * 16);
    const u32 half_bytes = normed_offset + (GATHERS_NORMED ? chunk * in_stride : 0);
    const Partition<int, RANKS> part(p.rows);
    char* const own = payload(p.call.workspaces[p.call.rank]);
    u32 results = STAGED ? RANKS * chunk * in_stride : 0;
    Barrier<RANKS> barrier(p.call, trace);
#if DRVFUSE_NODES
    exchange_has_ended(p.node, barrier.epoch(), barrier.aborted());
    const u32 first = first_status(p.node);
#else
    if (!barrier.arrive_and_wait(false)) return;
#endif
#pragma unroll 1
    for (int done = 0; done < part.largest(); done += chunk) {
        if constexpr (STAGED) {
#pragma unroll 1
            for (int owner = 0; owner < RANKS; ++owner) {
                const int count = part.in_chunk(owner, done, chunk);
#pragma unroll 1
                for (int j = blockIdx.x; j < count; j += gridDim.x)
                    rows.stage(own + (owner * chunk + j) * in_stride, part.start(owner) + done + j);
            }
            trace.lap(TraceRole::stage);
            if (!barrier.arrive_and_wait(true)) return;
        }
        const int begin = part.start(p.call.rank) + done;
        const int mine = part.in_chunk(p.call.rank, done, chunk);
#pragma unroll 1
        for (int j = blockIdx.x; j < mine; j += gridDim.x) {
            const auto load = [&](SourcePack& pack, int source, int at) {
#if DRVFUSE_NODES
                sum_nodes(pack, p.node, i64(j) * packs_of_row(p) + at);
#else
                if constexpr (STAGED) {
                    load_pack(pack, payload(p.call.workspaces[source]) + (p.call.rank * chunk + j) * in_stride +
                                        at * sizeof(InPack));
                } else {
                    load_of_row(pack, p.call.sources[source], begin + j, at, p);
                }
#endif
            };
            if constexpr (RESIDUAL) {
                rows.sum_with_residual(begin + j, load, [&](int at, const ResidualPack& pack) {
                    store_pack(own + results + j * out_stride + at * sizeof(ResidualPack), pack);
                });
            } else {
                float x[PACKS][W];
                rows.sum(x, load);
                rows.normalise(
                    x,
                    [&](int at, const OutPack& pack) {
                        store_words<OutPack::words>(own + results + j * out_stride + at * sizeof(OutPack), pack.word);
                        store_of_row(p.output, begin + j, at, p, pack);
                    },
                    [&](int group, float scale) {
                        store_scalar(reinterpret_cast<Scale*>(own + results + scales_offset) + j * groups + group,
                                     scale);
                        store_scalar(scale_at(p, begin, j, group), scale);
                    },
                    [&](int at, const InPack& pack) {
                        store_pack(own + results + normed_offset + j * in_stride + at * sizeof(InPack), pack);
                        store_of_row(normed_output_of(p), begin + j, at, p, pack);
                    });
            }
        }
        if (!FAULT("gathered-before-barrier") && !barrier.arrive_and_wait(true)) return;
        const int most = part.in_chunk(0, done, chunk);
#pragma unroll 1
        for (int j = blockIdx.x; j < most; j += gridDim.x) {
            const auto row = [&](int owner) -> int {
                return j < part.in_chunk(owner, done, chunk) ? part.start(owner) + done + j : -1;
            };
            if constexpr (RESIDUAL) {
#pragma unroll 1
                for (int step = 0; step < RANKS; ++step) {
                    const int owner = (p.call.rank + step) % RANKS;
                    if (row(owner) < 0) continue;
                    float x[PACKS][W];
                    rows.take_residual(x, payload(p.call.workspaces[owner]) + results + j * out_stride, row(owner));
                    rows.normalise_to_output(x, row(owner));
                }
            } else {
                gather_rows<Out, 1>(
                    p, p.output,
                    [&](int owner) { return payload(p.call.workspaces[owner]) + results + j * out_stride; }, row);
                if constexpr (GATHERS_NORMED) {
                    const u32 normed = results + normed_offset + j * in_stride;
                    gather_rows<In, 1>(
                        p, normed_output_of(p), [&](int owner) { return payload(p.call.workspaces[owner]) + normed; },
                        row);
                }
                const auto scales = [&](int owner) {
                    return payload(p.call.workspaces[owner]) + results + scales_offset +
                           j * groups * int(sizeof(Scale));
                };
                if constexpr (GROUPED) gather_groups<1>(p, sizeof(Scale), scales, row);
                const int owner = threadIdx.x;
                if (!GROUPED && SCALED && owner < RANKS && owner != p.call.rank && row(owner) >= 0) {
                    const char* scales = payload(p.call.workspaces[owner]) + results + scales_offset;
                    copy_scalar(static_cast<Scale*>(p.scales) + row(owner), reinterpret_cast<const Scale*>(scales) + j);
                }
            }
        }
        if constexpr (!RESIDUAL) trace.lap(TraceRole::gather);
        if (!STAGED) results = half_bytes - results;
    }
#if DRVFUSE_NODES
    check_statuses<RANKS>(p.call, p.node, first);
#endif
    barrier.finish();
}

extern "C" __global__ void __launch_bounds__(512, 1)
    allreduce_rmsnorm_fp8_two_stage(const __grid_constant__ Params p DRVFUSE_TRACE_PARAMETER) {
    __shared__ Scratch scratch;
    Trace trace{DRVFUSE_TRACE_ARGUMENT};
    begin(p.call);
    Rows rows(p, scratch, trace);
    follow_producer(trace);
    two_stage(rows, p, trace);
    clear_padding(p);
    end(p.call, trace);
}

#endif
