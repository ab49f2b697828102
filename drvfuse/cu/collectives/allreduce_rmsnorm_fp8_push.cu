// SPDX-License-Identifier: Apache-2.0
// All-reduce, optional residual addition, norm and optional FP8 quantisation by row, by pushing: one kernel per
// rank, without a barrier.
//
// Layout. Tensors are [rows, columns], contiguous. A row is in the registers of a cluster of DRVFUSE_CLUSTER blocks (or
// of one block): pack i * threads + t, 16 bytes of the input, belongs to thread t of the cluster, i < DRVFUSE_PACKS.
// DRVFUSE_RAGGED is as in allreduce_rmsnorm_fp8.cu. Rows are cut into rounds of `chunk_rows`; cluster c does rows c,
// c + clusters, ... of every round.
//   push_one_shot  every rank sends each of its rows to every peer, and does every row.
//   push_two_shot  rank k owns rows k, k + ranks, ... of a round, which the others send to it. Without residual it
//                  normalises and quantises them and sends results and scales; with residual it sends the rounded
//                  residual_out, and every rank normalises every row: the same operations on the same bits. A cluster
//                  sends DEPTH rows ahead of the row that it sums or gathers.
// Slots of a round, after the greetings. A row in them has packs * 16 bytes, and a row of results packs * the bytes of an
// output pack or, with residual, of a pack of residual_out:
//   push_one_shot  [distance - 1][chunk_rows]
//   push_two_shot  [distance - 1][owned rows]; then normed rows, if the owner sends them, results, and the scales of
//                  each row, in words of 4 bytes (scale_words.cuh), likewise
//
// Grid. One dimension, a multiple of the cluster, the same on every rank, no more clusters than the first round has rows:
// every block joins. Threads: a multiple of 32 up to 1024.
//
// Numerics. As in allreduce_rmsnorm_fp8.cu: the tree of a row's sum depends on its packs alone.
//
// Memory ordering. push.cuh. A thread sends, receives and clears packs of the same rows in every round; where a call has
// several rounds, all send equally many rows. The thread that has the first pack of a row, or of the groups or heads
// whose scales are one word, sends and receives the word.
// Inputs and residuals are read by their own rank alone. residual_output may be residual: a thread stores a pack after
// it has read it, and in push_two_shot only the owner of a row reads its residual. gamma and beta may be read before the
// wait for the producer (row_norm.cuh).
//
// Failure. push.cuh; outputs are then undefined. cluster_reduce.cuh says why no block exits while another sends to it.
#include "collectives/norm_rows.cuh"
#include "collectives/push_packs.cuh"
#include "collectives/row_place.cuh"

constexpr int DEPTH = DRVFUSE_DEPTH;
using Pushing = Push<RANKS, true, (DRVFUSE_MOST_THREADS > 256), DRVFUSE_RELAYS>;

// The inherited `chunk_rows` is the number of rows of a round: with push_two_shot a multiple of the number of ranks.
struct FusedPushParams : FusedParams {
    PushCall push;
};

// Whether the tensor has that row. Where a call has several rounds, each sends chunk_rows rows (push.cuh), so the last one
// also sends rows beyond the tensor's end, whose contents are not used.
__device__ __forceinline__ bool inside(const FusedPushParams& p, int row) { return row < p.rows; }

// Loads this thread's packs of row `row` of the own input; without such a row the packs stay unchanged.
__device__ __forceinline__ void load_row(InPack (&own)[PACKS], const FusedPushParams& p, const Rows& rows, int row) {
    if (!inside(p, row)) return;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        if (rows.has(i)) load_of_row(own[i], p.call.input, row, rows.index(i), p);
    }
}

// Calls send(offset in the row, words) for each of the packs.
template <typename Send>
__device__ __forceinline__ void send_row(const InPack (&own)[PACKS], const Rows& rows, const Send& send) {
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        InPack pack = own[i];
        make_sendable(pack.word);
        if (rows.has(i)) send(rows.index(i) * u32(sizeof(InPack)), pack.word);
    }
}

// Sums this thread's packs of a row over the ranks; the row's slots at distance 1 begin at `offset`.
__device__ __forceinline__ void receive_row(float (&x)[PACKS][W], const InPack (&own)[PACKS], const FusedPushParams& p,
                                            const Rows& rows, Pushing& push, u32 offset, u32 stride) {
#pragma unroll
    for (int i = 0; i < PACKS; ++i)
        sum_received(x[i], push, own[i], offset + rows.index(i) * u32(sizeof(InPack)), stride, p.call.rank,
                     rows.has(i));
}

#if !DRVFUSE_TWO_SHOT

__device__ __forceinline__ void one_shot(const FusedPushParams& p, Rows& rows, Pushing& push, Trace& trace, int begin,
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

#else

__device__ __forceinline__ void send_input(const InPack (&own)[PACKS], const Rows& rows, const Pushing& push,
                                           const Place& at) {
    send_row(own, rows, [&](u32 in_row, const u32(&words)[InPack::words]) {
        push.send(at.distance, at.offset + (at.distance - 1) * at.stride + in_row, words);
    });
}

// Sums, normalises and sends a row that this rank owns.
__device__ __forceinline__ void reduce(const FusedPushParams& p, Rows& rows, Pushing& push, Trace& trace, int begin,
                                       int row, const InPack (&own)[PACKS], const Place& at) {
    const bool exists = inside(p, begin + row);
    if (RESIDUAL && exists) rows.fetch_residual(begin + row);
    if (!RESIDUAL || exists) rows.expect();
    float x[PACKS][W];
    receive_row(x, own, p, rows, push, at.offset, at.stride);
    push.relay();
    trace.need(x);
    trace.lap(TraceRole::receive);
    if constexpr (RESIDUAL) {
        rows.add_residual<true>(x, begin + row, [&](int index, const ResidualPack& pack) {
            send_to_all(push, at.result + index * RESULT_BYTES, at.result_stride, pack.word);
            if (exists) store_of_row(p.residual_output, begin + row, index, p, pack);
        });
        if (exists) rows.normalise_to_output(x, begin + row);
    } else {
        ScaleWord scales = {};
        rows.normalise(
            x,
            [&](int index, const OutPack& pack) {
                OutPack sent = pack;
                if constexpr (KEYED) sent.word[0] ^= scales.key;
                send_to_all(push, at.result + index * RESULT_BYTES, at.result_stride, sent.word);
                if (exists) store_of_row(p.output, begin + row, index, p, pack);
            },
            [&](int group, float scale) {
                const u32 word[1] = {BYTE_SCALES ? scales.word : __float_as_uint(scale)};
                if (group % PER_WORD == 0) send_to_all(push, at.scale + group / PER_WORD * 4, at.scale_stride, word);
                if (exists) store_scalar(scale_at(p, begin, row, group), scale);
            },
            [&](int index, const InPack& pack) {
                send_to_all(push, at.normed + index * u32(sizeof(InPack)), at.stride, pack.word);
                if (exists) store_of_row(normed_output_of(p), begin + row, index, p, pack);
            },
            [&](bool has, const OutPack& pack, float scale) {
                if constexpr (BYTE_SCALES) scales = scale_word(has, pack, scale);
            });
    }
}

// Receives the normed row `row`, which another rank owns, and stores it.
__device__ __forceinline__ void gather_normed(const FusedPushParams& p, const Rows& rows, Pushing& push, int row,
                                              int owner, const Place& at) {
    const u32 from = at.normed + at.steps() * at.stride;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        u32 words[1][InPack::words];
        push.receive(words, GATHER, from + rows.index(i) * u32(sizeof(InPack)), 0, rows.has(i), owner);
        InPack pack;
#pragma unroll
        for (int k = 0; k < InPack::words; ++k) pack.word[k] = words[0][k];
        if (rows.has(i) && inside(p, row)) store_of_row(normed_output_of(p), row, rows.index(i), p, pack);
    }
}

// Receives pack i of the codes of row `row`, which another rank owns, and the scale of its group, and stores the scale.
template <int N>
__device__ __forceinline__ void receive_group(const FusedPushParams& p, const Rows& rows, Pushing& push, int row,
                                              int owner, const Place& at, u32 result, int i, u32 (&words)[N]) {
    const int group = rows.index(i) / LANES;
    const bool scaled = rows.has(i) && rows.index(i) % LANES == 0;
    u32 scale[1];
    push.receive_with(words, result + rows.index(i) * RESULT_BYTES, rows.has(i), scale,
                      at.scale + at.steps() * at.scale_stride + group / PER_WORD * 4,
                      PER_WORD > 1 ? rows.has(i) && rows.index(i) % WORD_LANES == 0 : scaled, owner);
    if constexpr (BYTE_SCALES) {
        const u32 word = __shfl_sync(0xffffffffu, scale[0], threadIdx.x % 32 / WORD_LANES * WORD_LANES);
        if constexpr (KEYED) words[0] ^= key_of_word(word);
        if (scaled && inside(p, row)) ptx::store_u8(scale_at(p, 0, row, group), scale_of_word(word));
    } else if (scaled && inside(p, row)) {
        store_scalar(scale_at(p, 0, row, group), __uint_as_float(scale[0]));
    }
}

// Receives and stores the results of a row that another rank owns; with residual it normalises the row.
__device__ __forceinline__ void gather(const FusedPushParams& p, Rows& rows, Pushing& push, Trace& trace, int begin,
                                       int row, const Place& at) {
    const int owner = row % RANKS;
    const u32 result = at.result + at.steps() * at.result_stride;
    const bool scaled = SCALES && rows.index(0) == 0;
    constexpr int WORDS = RESULT_BYTES / 4;
    if (RESIDUAL && inside(p, begin + row)) rows.expect();
    u32 words[PACKS][WORDS], scale[1];
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        if constexpr (GROUPED && !RESIDUAL) {
            receive_group(p, rows, push, begin + row, owner, at, result, i, words[i]);
        } else {
            push.receive_with(words[i], result + rows.index(i) * RESULT_BYTES, rows.has(i), scale,
                              at.scale + at.steps() * at.scale_stride, scaled && i == 0, owner);
        }
    }
    if constexpr (GATHERS_NORMED) gather_normed(p, rows, push, begin + row, owner, at);
    if (!inside(p, begin + row)) return;
    if constexpr (RESIDUAL) {
        float x[PACKS][W];
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            ResidualPack pack;
#pragma unroll
            for (int k = 0; k < ResidualPack::words; ++k) pack.word[k] = words[i][k % WORDS];
            if (rows.has(i)) store_of_row(p.residual_output, begin + row, rows.index(i), p, pack);
            to_float(x[i], pack);
        }
        trace.need(x);
        trace.lap(TraceRole::gather);
        rows.normalise_to_output(x, begin + row);
    } else {
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            OutPack pack;
#pragma unroll
            for (int k = 0; k < OutPack::words; ++k) pack.word[k] = words[i][k % WORDS];
            if (rows.has(i)) store_of_row(p.output, begin + row, rows.index(i), p, pack);
        }
        if (!GROUPED && scaled) store_scalar(static_cast<Scale*>(p.scales) + begin + row, __uint_as_float(scale[0]));
        trace.lap(TraceRole::gather);
    }
}

// `own` are this thread's packs of the cluster's first row of the round, which the caller has loaded.
__device__ __forceinline__ void two_shot(const FusedPushParams& p, Rows& rows, Pushing& push, Trace& trace, int begin,
                                         int count, InPack (&own)[PACKS]) {
    const int first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
#pragma unroll 1
    for (int row = first; row < count + DEPTH * step; row += step) {
        const Place now = place(p, push, row);
        if (row != first && row < count && (DEPTH == 0 || now.distance != 0)) load_row(own, p, rows, begin + row);
        if (row < count && now.distance != 0) send_input(own, rows, push, now);
        push.join();
        trace.lap(TraceRole::push);
        const int due = row - DEPTH * step;
        if (due < 0) continue;
        const Place at = DEPTH == 0 ? now : place(p, push, due);
        if (at.distance == 0) {
            if (DEPTH > 0) load_row(own, p, rows, begin + due);
            reduce(p, rows, push, trace, begin, due, own, at);
        } else {
            gather(p, rows, push, trace, begin, due, at);
        }
    }
}

#endif

// The least blocks per multiprocessor that plans rely on.
constexpr int MOST_THREADS = DRVFUSE_MOST_THREADS;
constexpr int BLOCKS = COMPARES && MOST_THREADS <= 128                         ? 5
                       : DRVFUSE_TWO_SHOT && MOST_THREADS == 512 && RANKS <= 4 ? 2
                                                                               : 1;

extern "C" __global__ void __launch_bounds__(MOST_THREADS, BLOCKS) OF_CLUSTER
    DRVFUSE_KERNEL(const __grid_constant__ FusedPushParams p DRVFUSE_TRACE_PARAMETER) {
    __shared__ Scratch scratch;
    Trace trace{DRVFUSE_TRACE_ARGUMENT};
    begin(p.call);
    scratch.init();
    Rows rows(p, scratch, trace);
    const int first = blockIdx.x / CLUSTER;
    if (!RAGGED && rows.has(0))  // warms the address translation
        ptx::prefetch_l2(static_cast<const char*>(p.call.input) +
                         (i64(first) * p.columns + rows.index(0) * W) * i64(sizeof(In)));
    Pushing push(p.call, p.push);
    follow_producer(trace);
    InPack own[PACKS];
    load_row(own, p, rows, first);  // before start(): later instructions wait for the state that it loads
    clear_padding(p);               // while the row is loaded
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
