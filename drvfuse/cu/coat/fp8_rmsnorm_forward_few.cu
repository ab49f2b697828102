// SPDX-License-Identifier: Apache-2.0
// The forward pass of FP8 RMSNorm of a tensor so small that one block, or one cluster of blocks, holds it in registers:
// x is read once, and blocks exchange values once, without global memory. fp8_rmsnorm_forward.cu is for more rows.
// forward.cuh has their common parts, and the numerics.
//
// Layout: x [rows, columns] FP8 with a row stride, s_x [rows, ceil(columns / QB)] bf16 with a row stride, w [columns].
// Grid: one block, or one cluster of CLUSTER blocks, in a plain launch. A warp holds BATCH rows of one segment of 512
// columns, each lane 16 columns. A block has SEGMENTS segments of all rows, BLOCK_ROWS of which exist or are 0; blocks
// at the end of the cluster may have none.
//   Phase 1   For each row of a warp: the sum of squares, and the largest |x * s * w|.
//   Exchange  A warp sends these pairs to every block (cluster_exchange.cuh); a single block stores them in its shared
//             memory. Every warp adds the segments of all rows in order, so it has their rstd and the tensor's estimate
//             of the largest |y|. If the estimate does not decide the scale, on which all warps agree, the exact
//             largest |y| are exchanged, in the other set of pairs.
//   Phase 2   The same registers are quantised and stored as qy. For qy_t they pass through shared memory, where the
//             columns of a block are contiguous: a store of qy_t takes RUN bytes of a column, and neighbouring threads
//             store neighbouring bytes. With one row qy_t has the same bytes as qy.
//
// Memory ordering. Turn 0 carries the estimates and turn 1 the exact maxima, each once in a launch, so no place is
// written twice. In a cluster a warp's wait on the block's barrier object makes all pairs visible; in a single block a
// block barrier does. The sends follow the wait at the cluster's barrier, at which every block has arrived after it has
// initialised its barrier objects. A block exits only after it has received the pairs of every warp of the cluster in
// each turn that is used, and nothing is sent later. So nothing is sent to a block that has exited. Blocks of a cluster
// are resident together, so these waits end and need no time-out. Bytes of the tile of qy_t that other warps have
// written are read after a block barrier. The workspace is not used.
//
// Global bytes per element, with one scale per QB columns: 1 + 2 / QB are read (the counters show 1 + 2 / 16, since each
// lane loads the scale of its 16 columns) and 2 are written. Each row's rstd adds 4. Each warp reads the weights once.
//
// PDL. The weights are read before the wait for the producer, everything else after it. A block triggers right after the
// wait (early_trigger) or after its last store.
#include "coat/forward.cuh"
#include "common/cluster_exchange.cuh"

constexpr int CLUSTER = DRVFUSE_CLUSTER;
constexpr int GROUPS = BLOCK_ROWS / BATCH;  // groups of rows, and warps that have the same segment
constexpr int SEGMENTS = WARPS / GROUPS;    // segments of a block
constexpr int ROW_SHARE = 32 / BATCH;       // lanes that have a row's sum
constexpr int MAX_PAIRS = 128;              // padded rows times segments
constexpr int PITCH = PACK * BLOCK_ROWS + 16;
static_assert(BATCH == 4 || (BATCH == 1 && BLOCK_ROWS == 1), "quads of rows are turned");
static_assert(BLOCK_ROWS <= 32, "a lane for each row");

using Exchange = ClusterExchange<MAX_PAIRS>;

// Called by a whole warp. Sends the pair (first, second) of a row to all blocks of the cluster. The ROW_SHARE lanes that
// have the sum of the row divide the blocks among themselves.
__device__ __forceinline__ void tell(Exchange& exchange, u32 turn, int place, u32 first, u32 second) {
    const int share = threadIdx.x % ROW_SHARE;
    if constexpr (CLUSTER > 1) {
#pragma unroll
        for (int block = 0; block < CLUSTER; block += ROW_SHARE) {
            if (block + share < CLUSTER) exchange.send(turn, place, block + share, first, second);
        }
    } else {
        if (share == 0) exchange.pairs[turn][place] = make_uint2(first, second);
    }
}

// Called by all threads. Afterwards all pairs that blocks have sent in this turn may be read.
__device__ __forceinline__ void hear(Exchange& exchange, u32 turn) {
    if constexpr (CLUSTER > 1) {
        exchange.wait(turn, 0);
    } else {
        __syncthreads();
    }
}

// Returns the element of `value` for the row whose sum this lane has. Each step halves the number of candidates, since
// an index would place the array in local memory.
__device__ __forceinline__ u32 own_share(const u32 (&value)[BATCH]) {
    u32 left[BATCH];
    int mask = 16;
#pragma unroll
    for (int r = 0; r < BATCH; ++r) left[r] = value[r];
#pragma unroll
    for (int half = BATCH / 2; half > 0; half /= 2, mask /= 2) {
#pragma unroll
        for (int r = 0; r < half; ++r) left[r] = threadIdx.x & mask ? left[r + half] : left[r];
    }
    return left[0];
}

// For each row, over the warp: 1 + the bits of the largest |y|, or 0 if all y are NaN.
__device__ __forceinline__ void exact_maxima(u32 (&most)[BATCH], const Batch& batch, const float (&w)[PACK],
                                             const float (&rstd)[BATCH], int valid) {
#pragma unroll
    for (int r = 0; r < BATCH; ++r) {
        most[r] = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float v[4];
            Word<X>::unpack(batch.word[r][j], v);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float y = fabsf(normalised(v[k], bf16{batch.scale[r]}, rstd[r], w[4 * j + k]));
                if (4 * j + k < valid && y == y) most[r] = max(most[r], __float_as_uint(y) + 1);
            }
        }
        most[r] = ptx::warp_max(most[r]);
    }
}

// Stores the lane's 16 columns of four rows in a tile in which a column has BLOCK_ROWS bytes.
template <int Rows>
__device__ __forceinline__ void keep_turned(u8* to, const u32 (&rows)[Rows][PACK / 4]) {
    if constexpr (Rows == 4) {
        Turned<4, PACK> turned;
        turned.take(0, rows);
#pragma unroll
        for (int c = 0; c < PACK; ++c) *reinterpret_cast<u32*>(to + c * BLOCK_ROWS) = turned.word[c][0];
    }
}

// Stores columns `first` to first + width - 1 of all rows from the tile to qy_t.
__device__ __forceinline__ void store_tile(const ForwardParams& p, const u8* tile, int first, int width) {
    const int rows = int(p.rows), batch_rows = int(p.batch_rows), runs = rows / RUN;
    for (int i = threadIdx.x; i < width * runs; i += THREADS) {
        const int column = runs == 1 ? i : i / runs, row = (i - column * runs) * RUN;
        const int batch = batch_rows == rows ? 0 : row / batch_rows;
        const u8* from = tile + column / PACK * PITCH + column % PACK * BLOCK_ROWS + row;
        u8* to = p.qy_t + (i64(batch) * p.columns + first + column) * batch_rows + row - batch * batch_rows;
        if constexpr (RUN >= 4) {
            store_words<RUN / 4>(to, reinterpret_cast<const u32*>(from));
        } else {
            *to = *from;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) fp8_rmsnorm_forward_few(const ForwardParams p) {
    __shared__ Exchange exchange;
    __shared__ __align__(16) u8 tile[BLOCK_ROWS > 1 ? SEGMENTS * 32 * PITCH : 16];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = warp % GROUPS * BATCH, inside = warp / GROUPS;  // the segment within the block
    const int first = int(blockIdx.x) * SEGMENTS, segment = first + inside;
    const int segments = (p.columns + SEGMENT - 1) / SEGMENT;
    const int at = segment * SEGMENT + lane * PACK, place = segment * BLOCK_ROWS + row + lane / ROW_SHARE;
    const bool takes_part = segment < segments;

    if constexpr (CLUSTER > 1) {
        exchange.init();
        exchange.expect_pairs(0, segments * BLOCK_ROWS);
    }
    Pack<Weight, PACK> raw;
    load_weight_pack(raw, p, at);
    if (!FAULT("fp8-operand-before-pdl-wait")) wait_for_producer();
    if (p.early_trigger) launch_dependents();

    // Phase 1.
    Batch batch;
    load_batch(batch, p, row, at);
    float w[PACK], largest = 0.0f;
    take_phase1_weights(w, largest, raw);
    float squares[BATCH];
    u32 most[BATCH];
    reduce_packs(batch, w, squares, most);
    const float sum = sum_lanes(squares);
    const bool usual = __all_sync(0xffffffffu, largest <= WEIGHT_LIMIT);
#pragma unroll
    for (int r = 0; r < BATCH; ++r) most[r] = usual ? ptx::warp_max(most[r]) : UNDECIDED;
    if (FAULT("fp8-operand-before-pdl-wait")) wait_for_producer();

    // Exchange.
    if constexpr (CLUSTER > 1) {
        if (!FAULT("no-cluster-barrier")) ptx::cluster_wait();
    }
    if (takes_part) tell(exchange, 0, place, __float_as_uint(sum), own_share(most));
    hear(exchange, 0);
    u32 best = 0;
    float all_rstd = 0.0f;  // rstd of row `lane`
    if (lane < p.rows) {
        float total = 0.0f;
        u32 product = 0;
        for (int s = 0; s < segments; ++s) {
            const uint2 found = exchange.pairs[0][s * BLOCK_ROWS + lane];
            total = __fadd_rn(total, __uint_as_float(found.x));
            product = max(product, found.y);
        }
        all_rstd = finish_row(p, total, product, best);
        if (blockIdx.x == 0 && warp == 0) p.rstd[lane] = all_rstd;
    }
    float rstd[BATCH];
#pragma unroll
    for (int r = 0; r < BATCH; ++r) rstd[r] = __shfl_sync(0xffffffffu, all_rstd, row + r);
    u32 scale_bits = decided_scale(ptx::warp_max(best));
    if (scale_bits == UNDECIDED) {
        exact_maxima(most, batch, w, rstd, p.columns - at);
        if constexpr (CLUSTER > 1) exchange.expect_pairs(1, segments * BLOCK_ROWS);
        if (takes_part) tell(exchange, 1, place, own_share(most), 0);
        hear(exchange, 1);
        best = 0;
        if (lane < p.rows) {
            for (int s = 0; s < segments; ++s) best = max(best, exchange.pairs[1][s * BLOCK_ROWS + lane].x);
            best = best == 0 ? NAN_BITS : best - 1;
        }
        scale_bits = fp8_scale_bits<X>(__uint_as_float(ptx::warp_max(best)));
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) *p.scale = u16(scale_bits);
    const float inverse = ptx::reciprocal_approx(bf16{u16(scale_bits)});

    // Phase 2.
    u32 out[BATCH][4];
    const int valid = p.columns - at;
#pragma unroll
    for (int r = 0; r < BATCH; ++r) {
        float v[PACK];
#pragma unroll
        for (int j = 0; j < 4; ++j) Word<X>::unpack(batch.word[r][j], v + 4 * j);
#pragma unroll
        for (int i = 0; i < PACK; ++i) v[i] = rounded_to_bf16(normalised(v[i], bf16{batch.scale[r]}, rstd[r], w[i]));
        quantise<X, PACK>(out[r], v, inverse);
        if (valid > 0 && row + r < p.rows)
            store_bytes<PACK>(p.qy + i64(row + r) * p.columns + at, out[r], valid, ALIGNED);
    }
    if constexpr (BLOCK_ROWS == 1) {
        if (valid > 0) store_bytes<PACK>(p.qy_t + at, out[0], valid, ALIGNED && RUN == PACK);
    } else {
        keep_turned(tile + (inside * 32 + lane) * PITCH + row, out);
        __syncthreads();
        const int first_column = first * SEGMENT;
        store_tile(p, tile, first_column, min(SEGMENTS * SEGMENT, p.columns - first_column));
    }
    leave_stream(p);
}
