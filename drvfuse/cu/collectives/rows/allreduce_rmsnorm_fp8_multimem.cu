// SPDX-License-Identifier: Apache-2.0
// All-reduce through multicast memory, optional residual addition, norm and optional FP8 quantisation by row, in one
// kernel per rank: a row's owner loads the sums of all ranks, and stores its results to all ranks.
//
// Layout. Rows, packs and threads as in allreduce_rmsnorm_fp8.cu. Rank k owns a range of rows; the ranges differ by at
// most one row. Without residual the owner normalises and quantises, and stores output and scale of a row to all ranks'
// staging memories, from which each rank copies them. With residual it stores residual_out, and every rank normalises
// every row: the same operations on the same bits.
//   STAGED      the inputs do not lie in multicast memory at an offset that is the same on all ranks, or a row is not a
//               whole number of aligned packs: each rank first copies its input, chunk by chunk, into its staging
//               memory. It stores to that memory's unicast address, the ordinary address on its own device.
// Staging memory: ranks * `chunk_rows` slots of one row each, grouped by owner. Without STAGED there are two such sets
// of ranks * `chunk_rows` slots, used alternately. A slot has whole packs. With STAGED a slot first holds an input row.
// Then it holds the results in the same place, or after the input row if a row of residual_out has more bytes than an
// input row. After these packs lie the scales, if the owner stores any: a word for each scale, up to the next multiple
// of 16 bytes. After the scales lie the packs of the normed row, if its owner stores it.
// A store to all ranks stores a pack of results: 16, 8 or 4 bytes. The threads of a warp store consecutive packs. The
// type of the store instruction is f32, which every target supports.
//
// Grid. One dimension, at most DRVFUSE_MAX_BLOCKS blocks, the same on every rank; block b processes rows b, b + blocks,
// ... of each chunk of each owner. Threads: a multiple of 32 up to 512, at least ceil(packs of a row / DRVFUSE_PACKS).
//
// Numerics. The load adds in an unspecified order, with fp32 arithmetic, and rounds the sum to the type of the inputs.
// x = +0.0f + sum; with a residual, residual_out = x + residual, rounded to the residual's type, replaces x. Everything
// after x is as in allreduce_rmsnorm_fp8.cu. A row is summed once, so all ranks have the same bits.
//
// Memory ordering. As in allreduce_multimem.cu, two_stage without TO_OUTPUTS, with rows in place of packs and blocks in
// place of threads: block b accesses only those bytes of a peer's memory that the peer's block b accesses, or that no
// kernel accesses at the same time, and the barrier covers all threads of a block. Results that overwrite a staged row
// must follow all loads of its sums. So a row's results are stored after the block barrier of the row's reduction
// (reduce.cuh). Rows of heads (rows/form.cuh) are not reduced over the block, so an additional block barrier precedes
// their results. residual_out is stored by the thread that has loaded the sum at the same place. The next chunk's rows
// are staged in slots from which any thread of the block may have copied results, so a block barrier precedes them.
// residual_output may be the same array as residual: a row's owner reads the row's residual before the barrier of the
// chunk's results, and every rank writes residual_output after that barrier, from staging memory. gamma and beta are
// read after the wait for the producer.
//
// Failure. If a barrier gives up, the block skips the rest of the kernel, and outputs are undefined (barrier.cuh).
#include "collectives/rows/gather.cuh"
#include "collectives/shared/multimem_packs.cuh"
#include "common/partition.cuh"
#include "sync/barrier.cuh"

struct RowsMultimemParams : RowsParams {
    MultimemCall multimem;
};

constexpr bool SCALES = SCALED && !RESIDUAL;  // whether the owner of a row stores the row's scales to all ranks

// Whether residual_out lies after the staged row in a slot. If its packs have more bytes than input packs, then in the
// staged row's place it would overwrite packs that other threads have not read yet.
constexpr bool BEHIND = STAGED && RESIDUAL && sizeof(Residual) > sizeof(In);

// The offset of the results in a slot, in bytes.
__device__ __forceinline__ u32 results_offset(const RowsParams& p) { return BEHIND ? input_stride(p) : 0; }

// The number of bytes of a slot before its scales.
__device__ __forceinline__ u32 row_bytes(const RowsParams& p) {
    return RESIDUAL ? results_offset(p) + residual_stride(p) : STAGED ? input_stride(p) : output_stride(p);
}

__device__ __forceinline__ void broadcast_scale(char* to, float scale) {
    const float values[4] = {scale};
    ptx::broadcast_u32(to, Word<Scale>::pack(values));
}

__device__ __forceinline__ void two_stage(Rows& rows, const RowsMultimemParams& p, Trace& trace) {
    const int chunk = p.chunk_rows;
    const u32 scale_offset = row_bytes(p);
    const u32 normed_offset = scale_offset + (SCALES ? (4 * groups_of_row(p) + 15) / 16 * 16 : 0);
    const u32 stride = normed_offset + (GATHERS_NORMED ? input_stride(p) : 0);
    const Partition<int, RANKS> part(p.rows);
    u32 half = 0;
    Barrier<RANKS, true> barrier(p.call, trace);
    if (!barrier.arrive_and_wait(false)) return;
#pragma unroll 1
    for (int done = 0; done < part.largest(); done += chunk) {
        char* const own = p.multimem.staging + half;
        if constexpr (STAGED) {
#pragma unroll 1
            for (int owner = 0; owner < RANKS; ++owner) {
                const int count = part.in_chunk(owner, done, chunk);
#pragma unroll 1
                for (int j = blockIdx.x; j < count; j += gridDim.x)
                    rows.stage(own + (owner * chunk + j) * stride, part.start(owner) + done + j);
            }
            trace.lap(TraceRole::stage);
            if (!FAULT("multimem-no-barrier") && !barrier.arrive_and_wait(true)) return;
        }
        const int begin = part.start(p.call.rank) + done;
        const int mine = part.in_chunk(p.call.rank, done, chunk);
#pragma unroll 1
        for (int j = blockIdx.x; j < mine; j += gridDim.x) {
            char* const slot = p.multimem.all_staging + half + (p.call.rank * chunk + j) * stride;
            const char* const from = STAGED ? slot : p.multimem.inputs + i64(begin + j) * p.columns * i64(sizeof(In));
            const auto load = [&](InPack& pack, int, int at) { reduce_pack(pack, from + at * sizeof(InPack)); };
            if constexpr (RESIDUAL) {
                rows.sum_with_residual(begin + j, load, [&](int at, const ResidualPack& pack) {
                    broadcast_pack(slot + results_offset(p) + at * sizeof(ResidualPack), pack);
                });
            } else {
                float x[PACKS][W];
                rows.sum(x, load);
                // All warps must have loaded their packs of the slot before results overwrite them.
                if constexpr (STAGED && HEAD != 0) __syncthreads();
                rows.normalise(
                    x, [&](int at, const OutPack& pack) { broadcast_pack(slot + at * sizeof(OutPack), pack); },
                    [&](int group, float scale) { broadcast_scale(slot + scale_offset + 4 * group, scale); },
                    [&](int at, const InPack& pack) {
                        broadcast_pack(slot + normed_offset + at * sizeof(InPack), pack);
                    });
            }
        }
        if (!barrier.arrive_and_wait(true)) return;
        const int most = part.in_chunk(0, done, chunk);
#pragma unroll 1
        for (int j = blockIdx.x; j < most; j += gridDim.x) {
            const auto row = [&](int owner) -> int {
                return j < part.in_chunk(owner, done, chunk) ? part.start(owner) + done + j : -1;
            };
            const auto slot = [&](int owner) -> const char* { return own + (owner * chunk + j) * stride; };
            if constexpr (RESIDUAL) {
#pragma unroll 1
                for (int owner = 0; owner < RANKS; ++owner) {
                    if (row(owner) < 0) continue;
                    float x[PACKS][W];
                    rows.take_residual(x, slot(owner) + results_offset(p), row(owner));
                    rows.normalise_to_output(x, row(owner));
                }
            } else {
                gather_rows<Out, 0>(p, p.output, slot, row);
                if constexpr (GATHERS_NORMED)
                    gather_rows<In, 0>(
                        p, normed_output_of(p), [&](int owner) { return slot(owner) + normed_offset; }, row);
                if constexpr (GROUPED)
                    gather_groups<0>(p, 4, [&](int owner) { return slot(owner) + scale_offset; }, row);
                const int owner = threadIdx.x;
                if (!GROUPED && SCALED && owner < RANKS && row(owner) >= 0)
                    copy_scalar(static_cast<Scale*>(p.scales) + row(owner),
                                reinterpret_cast<const Scale*>(slot(owner) + scale_offset));
            }
        }
        if constexpr (!RESIDUAL) trace.lap(TraceRole::gather);
        if constexpr (STAGED) {
            if (!FAULT("multimem-slots-reused"))
                __syncthreads();  // other threads may still copy from slots that the next chunk is staged in
        } else {
            half = RANKS * chunk * stride - half;
        }
    }
    barrier.finish();
}

extern "C" __global__ void __launch_bounds__(512, 1)
    DRVFUSE_KERNEL(const __grid_constant__ RowsMultimemParams p DRVFUSE_TRACE_PARAMETER) {
    __shared__ Scratch scratch;
    Trace trace{DRVFUSE_TRACE_ARGUMENT};
    begin(p.call);
    Rows rows(p, scratch, trace);
    follow_producer(trace);
    two_stage(rows, p, trace);
    clear_padding(p);
    end(p.call, trace);
}
