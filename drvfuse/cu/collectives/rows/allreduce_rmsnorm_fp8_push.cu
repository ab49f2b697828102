// SPDX-License-Identifier: Apache-2.0
// All-reduce, optional residual addition, norm and optional FP8 quantisation by row, by pushing: one kernel per
// rank, without a barrier.
//
// Layout. Tensors are [rows, columns], contiguous. A row is in the registers of a cluster of DRVFUSE_CLUSTER blocks (or
// of one block): pack i * threads + t, 16 bytes of the input, belongs to thread t of the cluster, i < DRVFUSE_PACKS.
// DRVFUSE_RAGGED is as in allreduce_rmsnorm_fp8.cu. Rows are cut into rounds of `chunk_rows`; cluster c processes rows
// c, c + clusters, ... of every round.
//   push_one_shot  every rank sends each of its rows to every peer, and sums and normalises every row.
//   push_two_shot  rank k owns rows k, k + ranks, ... of a round, which the others send to it. Without residual it
//                  normalises and quantises them and sends results and scales. With residual it sends the rounded
//                  residual_out, and every rank normalises every row: the same operations on the same bits. In step i a
//                  cluster sends its row i to the row's owner, and sums its row i - DEPTH or, if another rank owns that
//                  row, gathers its results.
// Slots of a round. They follow the words of greet() (push.cuh). An input row and a normed row take packs * 16 bytes. A
// row of results takes packs * the size of an output pack or, with residual, of a pack of residual_out. "owned rows" is
// the number of rows of a round that a rank owns:
//   push_one_shot  [distance - 1][chunk_rows]
//   push_two_shot  four arrays, one after the other, each [distance - 1][owned rows]: input rows; normed rows, if the
//                  owner sends them; results; the scales of each row, in words of 4 bytes (scale_words.cuh)
//
// Grid. One dimension, a multiple of the cluster, the same on every rank, and no more clusters than the first round has
// rows, since a block calls join() when it has sent its first row. Threads: a multiple of 32 up to 1024.
//
// Numerics. As in allreduce_rmsnorm_fp8.cu. The order in which a row's squares are added depends only on its packs.
//
// Memory ordering. As push.cuh says. A thread sends, receives and clears packs of rows with the same indices in every
// round. If a call has several rounds, each round sends chunk_rows rows. A word of scales is sent and received by the
// thread that has the first pack of the row or, with scales by group or head, of the word's groups or heads.
// Inputs and residuals are read by their own rank alone. residual_output may be the same array as residual: a thread
// stores a pack after it has read it, and in push_two_shot only the owner of a row reads its residual. gamma and beta
// may be read before the wait for the producer (rows/norm.cuh).
//
// Failure. As push.cuh says. Outputs are undefined after a failure. cluster_reduce.cuh says why no block exits while
// another sends to it.
#if DRVFUSE_TWO_SHOT
#include "collectives/rows/two_shot.cuh"
#else
#include "collectives/rows/push.cuh"

// Sends a row to all peers, and sums and normalises it.
__device__ __forceinline__ void one_shot(const RowsPushParams& p, Rows& rows, Pushing& push, Trace& trace, int begin,
                                         int row, const InPack (&own)[PACKS]) {
    const u32 offset = GREETINGS_BYTES + row * input_stride(p);
    const u32 stride = p.chunk_rows * input_stride(p);
    send_row(own, rows,
             [&](u32 at, const u32(&words)[InPack::words]) { send_to_all(push, offset + at, stride, words); });
    push.join();
    if (inside(p, begin + row)) {
        if (RESIDUAL) rows.fetch_residual(begin + row);
        rows.expect();
    }
    trace.lap(TraceRole::push);
    float x[PACKS][W];
    receive_row(x, own, p, rows, push, offset, stride);
    trace.need(x);
    trace.lap(TraceRole::receive);
    if (!inside(p, begin + row)) return;
    if constexpr (RESIDUAL)
        rows.add_residual<true>(x, begin + row, [&](int at, const ResidualPack& pack) {
            store_of_row(p.residual_output, begin + row, at, p, pack);
        });
    rows.normalise_to_output(x, begin + row);
}

#endif

// The minimum number of resident blocks per multiprocessor, on which plans rely.
constexpr int MOST_THREADS = DRVFUSE_MOST_THREADS;
constexpr int BLOCKS = COMPARES && MOST_THREADS <= 128                         ? 5
                       : DRVFUSE_TWO_SHOT && MOST_THREADS == 512 && RANKS <= 4 ? 2
                                                                               : 1;

extern "C" __global__ void __launch_bounds__(MOST_THREADS, BLOCKS) OF_CLUSTER
    DRVFUSE_KERNEL(const __grid_constant__ RowsPushParams p DRVFUSE_TRACE_PARAMETER) {
    __shared__ Scratch scratch;
    Trace trace{DRVFUSE_TRACE_ARGUMENT};
    begin(p.call);
    scratch.init();
    Rows rows(p, scratch, trace);
    const int first = blockIdx.x / CLUSTER;
    // Before the wait for the producer: brings the translation of the address of this thread's first pack into the TLB.
    if (!RAGGED && rows.has(0))
        ptx::prefetch_l2(static_cast<const char*>(p.call.input) +
                         (i64(first) * p.columns + rows.index(0) * W) * i64(sizeof(In)));
    Pushing push(p.call, p.push);
    follow_producer(trace);
    InPack own[PACKS];
    load_row(own, p, rows, first);  // before start(), as later instructions wait for the epoch that start() loads
    clear_padding(p);               // while the row is being loaded
    push.start();
    const int count = p.push.rounds > 1 ? p.chunk_rows : p.rows;  // rows of each round
#pragma unroll 1
    for (int round = 0; round < p.push.rounds; ++round) {
        const int begin = round * p.chunk_rows;
        if (round > 0) {
            push.next_round();
            load_row(own, p, rows, begin + first);
        }
#if DRVFUSE_TWO_SHOT
        two_shot(p, rows, push, trace, begin, count, own);
#else
#pragma unroll 1
        for (int row = first; row < count; row += gridDim.x / CLUSTER) {
            if (row != first) load_row(own, p, rows, begin + row);
            one_shot(p, rows, push, trace, begin, row, own);
        }
#endif
    }
#if DRVFUSE_TWO_SHOT
    if (blockIdx.x == 0 && threadIdx.x < 32) push.greet(p.rows);
#endif
    end(p.call, trace);
}
