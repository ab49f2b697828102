// SPDX-License-Identifier: Apache-2.0
// The forward pass of FP8 RMSNorm of a tensor so small that one block, or one cluster of blocks, holds it in registers
// (plan `HeldRows`). It reads x once. fp8_rmsnorm_forward.cu is the kernel for larger tensors.
//
// Computes rstd, the scale, qy and qy_t from x, its group scales and w. forward.cuh has the formulas, shapes, dtypes
// and numerics, and `ForwardParams` the layout.
//
// Division. The grid is one block, or one cluster of CLUSTER blocks; the launch is not cooperative. Block b has
// SEGMENTS segments of 512 columns of all rows, from segment b * SEGMENTS on; the last blocks of a cluster may have no
// segment. A warp has BATCH rows of one segment, and each lane 16 columns of these rows. The number of rows is rounded
// up to BLOCK_ROWS; the rows beyond the last one count as 0.
//   Phase 1   For each of its rows a warp computes the sum of squares, and the largest |x * s * w|, over its segment.
//   Exchange  Each warp sends these pairs of a sum and a maximum to all blocks. Every warp then adds the segments of
//             all rows in order, so each warp has the rstd of all rows and the tensor's estimate of the largest |y|.
//             All warps compute the same estimate. If it does not decide the scale, they exchange the exact largest |y|
//             of their rows.
//   Phase 2   Each warp quantises its packs, which are still in registers, and stores them in qy. For qy_t the bytes
//             pass through shared memory, where a column of the block has BLOCK_ROWS consecutive bytes. A store to qy_t
//             takes RUN bytes of a column, and neighbouring threads store neighbouring bytes. With one row qy_t has the
//             same bytes as qy.
//
// Storage. Registers: x, scales and weights, from the first load to the end. Shared memory: the pairs of all rows and
// segments, and the transposed tile. Global memory: only operands and results; the workspace is not used.
//
// Memory ordering. Exchange 0 (`set` 0) carries the sums and the maxima of |x * s * w|, and exchange 1 (`set` 1) the
// exact maxima. Each happens at most once in a launch, so no pair is overwritten. In a cluster the pairs are sent as
// cluster_exchange.cuh describes: a warp's wait on its block's mbarrier makes all pairs of the set visible. In a single
// block a block barrier makes them visible. Sends follow the wait at the cluster's barrier, where every block has
// arrived after it had initialised its mbarriers. A block exits only after it has received the pairs of every warp of
// the cluster in each exchange that takes place, and nothing is sent later, so nothing is sent to a block that has
// exited. The blocks of a cluster run at the same time, so these waits end and need no time-out. Threads read the bytes
// of the transposed tile after a block barrier.
//
// Traffic. Global bytes per element, with one scale per QB columns: 1 + 2 / QB are read (profilers show 1 + 2 / 16,
// since each lane loads the scale of its 16 columns) and 2 are written. Each row adds 4 bytes for rstd. Each warp reads
// its weights once.
//
// PDL. Before the wait for the producer, a block reads only the weights. It triggers right after the wait
// (early_trigger) or after its last store.
#include "coat/forward.cuh"
#include "common/cluster_exchange.cuh"

constexpr int CLUSTER = DRVFUSE_CLUSTER;    // blocks of the grid
constexpr int GROUPS = BLOCK_ROWS / BATCH;  // groups of BATCH rows: the number of warps that share a segment
constexpr int SEGMENTS = WARPS / GROUPS;    // segments of a block
constexpr int SUM_LANES = 32 / BATCH;       // lanes that have the sum of the same row, after sum_lanes()
constexpr int MAX_PAIRS = 128;              // the most pairs in a set: BLOCK_ROWS for each segment of a row
// Bytes from one group of 16 columns to the next in the transposed tile. 16 bytes of padding avoid bank conflicts.
constexpr int PITCH = PACK * BLOCK_ROWS + 16;
static_assert(BATCH == 4 || (BATCH == 1 && BLOCK_ROWS == 1), "rows are transposed four at a time");
static_assert(BLOCK_ROWS <= 32, "a lane for each row");

// The pairs that warps send one another: pairs[set][segment * BLOCK_ROWS + row]. In set 0 a pair is the sum of squares
// of the row over the segment, and the bits of the row's largest |x * s * w| in the segment. In set 1 a pair is the
// row's maximum over the segment, from exact_maxima(), and 0.
using Exchange = ClusterExchange<MAX_PAIRS>;

// Sends the pair (first, second) of a row to all blocks, as pair `index` of set `set`. Called by a whole warp. Each
// lane passes the pair of the row whose sum sum_lanes() has returned to the lane; the SUM_LANES lanes with the same row
// divide the blocks among themselves.
__device__ __forceinline__ void send_pair(Exchange& exchange, u32 set, int index, u32 first, u32 second) {
    const int share = threadIdx.x % SUM_LANES;
    if constexpr (CLUSTER > 1) {
#pragma unroll
        for (int block = 0; block < CLUSTER; block += SUM_LANES) {
            if (block + share < CLUSTER) exchange.send(set, index, block + share, first, second);
        }
    } else {
        if (share == 0) exchange.pairs[set][index] = make_uint2(first, second);
    }
}

// Waits until the pairs that all warps send to set `set` have arrived. Called by all threads.
__device__ __forceinline__ void await_pairs(Exchange& exchange, u32 set) {
    if constexpr (CLUSTER > 1) {
        exchange.wait(set, 0);
    } else {
        __syncthreads();
    }
}

// Returns the element of `values` for the row whose sum sum_lanes() has returned to this lane. The element is found in
// steps that each halve the number of candidates, since a variable index would place the array in local memory.
__device__ __forceinline__ u32 value_of_lane(const u32 (&values)[BATCH]) {
    u32 candidates[BATCH];
    int mask = 16;
#pragma unroll
    for (int r = 0; r < BATCH; ++r) candidates[r] = values[r];
#pragma unroll
    for (int half = BATCH / 2; half > 0; half /= 2, mask /= 2) {
#pragma unroll
        for (int r = 0; r < half; ++r) candidates[r] = threadIdx.x & mask ? candidates[r + half] : candidates[r];
    }
    return candidates[0];
}

// Computes for each row of the warp's batch 1 + the bits of the largest |y| over the warp's segment, or 0 if all of
// these y are NaN. Only the first `valid` elements of a lane's packs exist.
__device__ __forceinline__ void exact_maxima(u32 (&maximum)[BATCH], const Batch& batch, const float (&w)[PACK],
                                             const float (&rstd)[BATCH], int valid) {
#pragma unroll
    for (int r = 0; r < BATCH; ++r) {
        maximum[r] = 0;
        for_each_value<X>(batch.word[r], [&](int i, float v) {
            const float y = fabsf(normalised(v, bf16{batch.scale[r]}, rstd[r], w[i]));
            if (i < valid && y == y) maximum[r] = max(maximum[r], __float_as_uint(y) + 1);
        });
        maximum[r] = ptx::warp_max(maximum[r]);
    }
}

// Transposes the lane's 16 columns of four rows, and stores them at `to` in the transposed tile.
template <int Rows>
__device__ __forceinline__ void store_in_tile(u8* to, const u32 (&rows)[Rows][PACK / 4]) {
    if constexpr (Rows == 4) {
        Turned<4, PACK> turned;
        turned.take(0, rows);
#pragma unroll
        for (int c = 0; c < PACK; ++c) *reinterpret_cast<u32*>(to + c * BLOCK_ROWS) = turned.word[c][0];
    }
}

// Copies the transposed tile to qy_t. The tile holds `width` columns of all rows, from column `first` of the tensor on.
__device__ __forceinline__ void store_tile(const ForwardParams& p, const u8* tile, int first, int width) {
    const int rows = int(p.rows), batch_rows = int(p.batch_rows), runs = rows / RUN;
    for (int i = threadIdx.x; i < width * runs; i += THREADS) {
        const int column = runs == 1 ? i : i / runs, row = (i - column * runs) * RUN;
        const int batch = batch_rows == rows ? 0 : row / batch_rows;
        const u8* run = tile + column / PACK * PITCH + column % PACK * BLOCK_ROWS + row;
        u8* qy_t = p.qy_t + (i64(batch) * p.columns + first + column) * batch_rows + row - batch * batch_rows;
        if constexpr (RUN >= 4) {
            store_words<RUN / 4>(qy_t, reinterpret_cast<const u32*>(run));
        } else {
            *qy_t = *run;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) fp8_rmsnorm_forward_few(const ForwardParams p) {
    __shared__ Exchange exchange;
    __shared__ __align__(16) u8 tile[BLOCK_ROWS > 1 ? SEGMENTS * 32 * PITCH : 16];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = warp % GROUPS * BATCH;         // the first row of the warp
    const int block_segment = warp / GROUPS;       // the index of the warp's segment in the block
    const int first = int(blockIdx.x) * SEGMENTS;  // the first segment of the block
    const int segment = first + block_segment;     // the warp's segment
    const int segments = (p.columns + SEGMENT - 1) / SEGMENT;
    const int column = segment * SEGMENT + lane * PACK;              // the first column of the lane
    const int pair = segment * BLOCK_ROWS + row + lane / SUM_LANES;  // the index in each set of the lane's pair
    const bool has_segment = segment < segments;

    if constexpr (CLUSTER > 1) {
        exchange.init();
        exchange.expect_pairs(0, segments * BLOCK_ROWS);
    }
    Pack<Weight, PACK> raw;
    load_weight_pack(raw, p, column);
    if (!FAULT("fp8-operand-before-pdl-wait")) wait_for_producer();
    if (p.early_trigger) launch_dependents();

    // Phase 1: load x, and compute sums and maxima over the warp's segment.
    Batch batch;
    load_batch(batch, p, row, column);
    float w[PACK], largest_weight = 0.0f;
    widen_weights(w, largest_weight, raw);
    float squares[BATCH];
    u32 largest[BATCH];
    reduce_packs(batch, w, squares, largest);
    const float sum = sum_lanes(squares);
    const bool usual = __all_sync(0xffffffffu, largest_weight <= WEIGHT_LIMIT);
#pragma unroll
    for (int r = 0; r < BATCH; ++r) largest[r] = usual ? ptx::warp_max(largest[r]) : UNDECIDED;
    if (FAULT("fp8-operand-before-pdl-wait")) wait_for_producer();

    // Exchange: send the sums and maxima to all blocks, and compute rstd and the scale.
    if constexpr (CLUSTER > 1) {
        if (!FAULT("no-cluster-barrier")) ptx::cluster_wait();
    }
    if (has_segment) send_pair(exchange, 0, pair, __float_as_uint(sum), value_of_lane(largest));
    await_pairs(exchange, 0);
    u32 maximum = 0;            // the bits of the estimate of the largest |y| of row `lane`, later of the exact one
    float rstd_of_lane = 0.0f;  // rstd of row `lane`
    if (lane < p.rows) {
        float total = 0.0f;
        u32 product = 0;
        for (int s = 0; s < segments; ++s) {
            const uint2 received = exchange.pairs[0][s * BLOCK_ROWS + lane];
            total = __fadd_rn(total, __uint_as_float(received.x));
            product = max(product, received.y);
        }
        rstd_of_lane = finish_row(p, total, product, maximum);
        if (blockIdx.x == 0 && warp == 0) p.rstd[lane] = rstd_of_lane;
    }
    float rstd[BATCH];
#pragma unroll
    for (int r = 0; r < BATCH; ++r) rstd[r] = __shfl_sync(0xffffffffu, rstd_of_lane, row + r);
    u32 scale_bits = scale_from_estimate(ptx::warp_max(maximum));
    if (scale_bits == UNDECIDED) {
        exact_maxima(largest, batch, w, rstd, p.columns - column);
        if constexpr (CLUSTER > 1) exchange.expect_pairs(1, segments * BLOCK_ROWS);
        if (has_segment) send_pair(exchange, 1, pair, value_of_lane(largest), 0);
        await_pairs(exchange, 1);
        maximum = 0;
        if (lane < p.rows) {
            for (int s = 0; s < segments; ++s) maximum = max(maximum, exchange.pairs[1][s * BLOCK_ROWS + lane].x);
            maximum = maximum == 0 ? NAN_BITS : maximum - 1;
        }
        scale_bits = fp8_scale_bits<X>(__uint_as_float(ptx::warp_max(maximum)));
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) *p.scale = u16(scale_bits);
    const float inverse = ptx::reciprocal_approx(bf16{u16(scale_bits)});

    // Phase 2: normalise, quantise and store the packs.
    u32 out[BATCH][4];
    const int columns_left = p.columns - column;
#pragma unroll
    for (int r = 0; r < BATCH; ++r) {
        float v[PACK];
#pragma unroll
        for (int j = 0; j < 4; ++j) Word<X>::unpack(batch.word[r][j], v + 4 * j);
#pragma unroll
        for (int i = 0; i < PACK; ++i) v[i] = rounded_to_bf16(normalised(v[i], bf16{batch.scale[r]}, rstd[r], w[i]));
        quantise<X, PACK>(out[r], v, inverse);
        if (columns_left > 0 && row + r < p.rows)
            store_bytes<PACK>(p.qy + i64(row + r) * p.columns + column, out[r], columns_left, ALIGNED);
    }
    if constexpr (BLOCK_ROWS == 1) {
        if (columns_left > 0) store_bytes<PACK>(p.qy_t + column, out[0], columns_left, ALIGNED && RUN == PACK);
    } else {
        store_in_tile(tile + (block_segment * 32 + lane) * PITCH + row, out);
        __syncthreads();
        const int first_column = first * SEGMENT;
        store_tile(p, tile, first_column, min(SEGMENTS * SEGMENT, p.columns - first_column));
    }
    leave_stream(p);
}
