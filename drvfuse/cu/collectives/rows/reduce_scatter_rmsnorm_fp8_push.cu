// SPDX-License-Identifier: Apache-2.0
// Reduce-scatter, optional residual addition, norm and optional FP8 quantisation by row, by pushing: one kernel per
// rank, without a barrier.
//
// Layout. Tensors are [rows, columns], contiguous; rows/parts.cuh says which rank owns which rows. A row is in the
// registers of a cluster of DRVFUSE_CLUSTER blocks (or of one block), as in allreduce_rmsnorm_fp8_push.cu. Every part
// is cut into rounds of `chunk_rows` rows. Cluster c processes rows c, c + clusters, ... of every round. For row r it
// sends row r of each peer's part to that peer, and sums and normalises row r of its own rank's part. Slots of a round,
// in rows of whole packs: [distance - 1][chunk_rows]. They follow the words of greet() (push.cuh).
//
// What is sent. As in reduce_scatter_push.cu, with rows in place of packs: for an empty part one row of zeros is
// sent, and where a call has several rounds, each sends chunk_rows rows to every peer.
//
// Grid. One dimension, a multiple of the cluster, the same on every rank, and no more clusters than the first round of
// the largest part has rows, since a block calls join() when it has sent its first rows. Threads: a multiple of 32 up
// to 1024.
//
// Numerics. As in allreduce_rmsnorm_fp8.cu. The order in which a row's squares are added depends only on its packs.
//
// Memory ordering. As in reduce_scatter_push.cu: a thread sends, receives and clears packs of the same rows in every
// round. Inputs and residuals are read by their own rank alone. residual_output may be the same array as residual: a
// thread stores a pack after it has read it. gamma and beta may be read before the wait for the producer
// (rows/norm.cuh).
//
// Failure. As push.cuh says. Outputs are undefined after a failure. cluster_reduce.cuh says why no block exits while
// another sends to it.
#include "collectives/shared/push_packs.cuh"
#include "collectives/rows/parts.cuh"

using Pushing = Push<RANKS, true, (DRVFUSE_MOST_THREADS > 256), false>;

// The number of rows, each for a different peer, whose packs a thread loads before it sends the first of them.
constexpr int AT_ONCE = RANKS <= 2 || PACKS >= 8 ? 1 : PACKS * (RANKS - 1) <= 8 ? RANKS - 1 : 8 / PACKS;

struct OwnRowsPushParams : RowsParams {
    RowParts parts;
    PushCall push;
};

// The number of rows that each round sends to a rank.
__device__ __forceinline__ int sent_rows(const OwnRowsPushParams& p, int rank) {
    if (p.push.rounds > 1 && !FAULT("scatter-rounds-of-own-length")) return p.chunk_rows;
    const int rows = p.parts.rows(rank);
    return rows > 0 || FAULT("scatter-empty-part-not-told") ? rows : 1;
}

// The work of one block in a call. For each row index it exchanges the row with this index of every part.
class Exchange {
public:
    __device__ __forceinline__ Exchange(const OwnRowsPushParams& p, Rows& rows, Pushing& push, Trace& trace)
        : p_(p), rows_(rows), push_(push), trace_(trace) {}

    // Brings the address translations of the first rows of all parts into the TLB. Called before anything is read.
    __device__ __forceinline__ void prefetch(int row) const {
#pragma unroll
        for (int rank = 0; rank < RANKS; ++rank) {
            if (RAGGED || !rows_.has(0) || row >= p_.parts.rows(rank)) continue;
            const i64 at = i64(p_.parts.starts[rank] + row) * p_.columns + rows_.index(0) * W;
            ptx::prefetch_l2(static_cast<const char*>(p_.call.input) + at * i64(sizeof(In)));
        }
    }

    // Called before run() with the same arguments: loads this rank's own row and the rows that are sent first.
    __device__ __forceinline__ void load(int begin, int row) {
        load_row(own_, 0, begin, row);
        load_peers(1, begin, row);
    }

    // Exchanges, sums and normalises one row of each part: row `row` of a round whose first row is row `begin` of the
    // part.
    __device__ __forceinline__ void run(int begin, int row) {
        const u32 offset = GREETINGS_BYTES + row * input_stride(p_);
        const u32 stride = p_.chunk_rows * input_stride(p_);
        send_peers(1, row, offset, stride);
#pragma unroll
        for (int first = 1 + AT_ONCE; first < RANKS; first += AT_ONCE) {
            load_peers(first, begin, row);
            send_peers(first, row, offset, stride);
        }
        push_.join();
        const bool received = row < sent_rows(p_, p_.call.rank);
        const bool exists = received && begin + row < p_.rows;
        if (exists) {
            if (RESIDUAL) rows_.fetch_residual(begin + row);
            rows_.expect();
        }
        trace_.lap(TraceRole::push);
        float x[PACKS][W];
#pragma unroll
        for (int i = 0; i < PACKS; ++i)
            sum_received(x[i], push_, own_[i], offset + rows_.index(i) * u32(sizeof(InPack)), stride, p_.call.rank,
                         received && rows_.has(i));
        trace_.need(x);
        trace_.lap(TraceRole::receive);
        if (!exists) return;
        if constexpr (RESIDUAL)
            rows_.add_residual<true>(x, begin + row, [&](int at, const ResidualPack& pack) {
                store_of_row(p_.residual_output, begin + row, at, p_, pack);
            });
        rows_.normalise_to_output(x, begin + row);
    }

private:
    // Loads this thread's packs of row `begin` + `row` of the part that the rank at `distance` owns. If the part has no
    // such row, the packs become zeros.
    __device__ __forceinline__ void load_row(InPack (&packs)[PACKS], int distance, int begin, int row) const {
        const int rank = (p_.call.rank + distance) % RANKS;
        const bool exists = row < sent_rows(p_, rank) && begin + row < p_.parts.rows(rank);
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            packs[i] = {};
            if (exists && rows_.has(i))
                load_of_row(packs[i], p_.call.input, p_.parts.starts[rank] + begin + row, rows_.index(i), p_);
        }
    }

    __device__ __forceinline__ void load_peers(int first, int begin, int row) {
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            if (first + k < RANKS) load_row(peers_[k], first + k, begin, row);
        }
    }

    __device__ __forceinline__ void send_peers(int first, int row, u32 offset, u32 stride) {
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            const int distance = first + k;
            if (distance >= RANKS || row >= sent_rows(p_, (p_.call.rank + distance) % RANKS)) continue;
#pragma unroll
            for (int i = 0; i < PACKS; ++i) {
                make_sendable(peers_[k][i].word);
                if (rows_.has(i))
                    push_.send(distance, offset + (distance - 1) * stride + rows_.index(i) * u32(sizeof(InPack)),
                               peers_[k][i].word);
            }
        }
    }

    const OwnRowsPushParams& p_;
    Rows& rows_;
    Pushing& push_;
    Trace& trace_;
    InPack own_[PACKS];
    InPack peers_[AT_ONCE][PACKS];
};

// The minimum number of resident blocks per multiprocessor, on which plans rely.
constexpr int MOST_THREADS = DRVFUSE_MOST_THREADS;
constexpr int BLOCKS = COMPARES && MOST_THREADS <= 128 ? 5 : 1;

extern "C" __global__ void __launch_bounds__(MOST_THREADS, BLOCKS) OF_CLUSTER
    DRVFUSE_KERNEL(const __grid_constant__ OwnRowsPushParams p DRVFUSE_TRACE_PARAMETER) {
    __shared__ Scratch scratch;
    Trace trace{DRVFUSE_TRACE_ARGUMENT};
    begin(p.call);
    scratch.init();
    Rows rows(p, scratch, trace);
    Pushing push(p.call, p.push);
    Exchange exchange(p, rows, push, trace);
    const int first = blockIdx.x / CLUSTER;
    exchange.prefetch(first);
    follow_producer(trace);
    exchange.load(0, first);  // before start(), as later instructions wait for the epoch that start() loads
    clear_padding(p);         // while the rows are being loaded
    push.start();
    const int count = p.push.rounds > 1 ? p.chunk_rows : p.parts.most;  // rows of each round
#pragma unroll 1
    for (int round = 0; round < p.push.rounds; ++round) {
        const int begin = round * p.chunk_rows;
        if (round > 0) push.next_round();
#pragma unroll 1
        for (int row = first; row < count; row += gridDim.x / CLUSTER) {
            if (round > 0 || row != first) exchange.load(begin, row);
            exchange.run(begin, row);
        }
    }
    end(p.call, trace);
}
