// SPDX-License-Identifier: Apache-2.0
// Optional residual addition, RMSNorm or LayerNorm, and quantisation of rows, on one device: each byte read and written
// once.
//
// Layout. Tensors are [rows, columns], contiguous. A row is held in registers by a team of threads: by a block, by the
// DRVFUSE_CLUSTER blocks of a cluster, whose threads are numbered block by block, or, where DRVFUSE_LANES is not 0, by
// so many lanes of a warp. Pack i * threads + t of 16 bytes of the input belongs to thread t of the team, i <
// DRVFUSE_PACKS, which is 1 for lanes. Without DRVFUSE_RAGGED tensors are 16-byte aligned and `columns` is a multiple of
// the elements of a pack; with it, rows are read and written element by element. With DRVFUSE_EXACT every thread has
// DRVFUSE_PACKS packs of a row.
//
// Grid. Any number of blocks, a multiple of the cluster. Team k does rows k, k + teams, ...; the next row is in flight
// while a row is worked on. Threads: a multiple of 32 up to MAX_THREADS.
//
// Numerics. x = +0 + input (+ residual, rounded to the residual's type: residual_output); then as
// drvfuse/reference/norms.py and quantised.py have it. IEEE operations, each rounded; the order of sums is in reduce.cuh.
// f is not negative and rounding is monotone, so f * max|x * g| is max|y|, and one reduction gives both, but with beta.
//
// Memory ordering. Teams share no memory but what they reduce with, so there is nothing to order. residual_output may be
// residual: a row's residual is read before residual_output of that row is written, by the same thread. gamma and beta
// are weights, read before the wait for the producer.
//
// Failure. Nothing waits but for the threads of its own team.
#include "common/lane_reduce.cuh"
#include "common/quantise.cuh"
#include "ptx/math.cuh"
#include "sync/pdl.cuh"
#include "trace/trace.cuh"
#if DRVFUSE_CLUSTER > 1
#include "common/cluster_reduce.cuh"
#endif

using In = DRVFUSE_DTYPE;
using Gamma = DRVFUSE_GAMMA_DTYPE;
using Residual = DRVFUSE_RESIDUAL_DTYPE;
using Out = DRVFUSE_OUT_DTYPE;
using Scale = DRVFUSE_SCALES_DTYPE;
constexpr Quant QUANT = Quant(DRVFUSE_QUANT);
constexpr ScaleLayout LAYOUT = ScaleLayout(DRVFUSE_SCALES_LAYOUT);
constexpr int W = 16 / sizeof(In);
constexpr int GROUP = DRVFUSE_GROUP ? DRVFUSE_GROUP : W;  // without groups it is of no use
constexpr int PACKS = DRVFUSE_PACKS;
constexpr int LANES = DRVFUSE_LANES;
constexpr int IN_WARP = LANES > 0 ? LANES : 32;  // lanes of a warp that hold one row
constexpr int CLUSTER = DRVFUSE_CLUSTER;
constexpr bool RAGGED = DRVFUSE_RAGGED;
constexpr bool EXACT = DRVFUSE_EXACT;
constexpr bool RESIDUAL = DRVFUSE_RESIDUAL;
constexpr bool LAYER = DRVFUSE_LAYER;
constexpr bool BETA = DRVFUSE_BETA;
constexpr bool NORMED = DRVFUSE_NORMED;
constexpr bool KEEP_GAMMA = PACKS * W <= 16;  // in registers, for all rows
constexpr int MAX_THREADS = 512;

using InPack = Pack<In, W>;
using OutPack = Pack<Out, W>;
using GammaPack = Pack<Gamma, W>;
using ResidualPack = Pack<Residual, W>;
#if DRVFUSE_LANES
using Scratch = LaneScratch<LANES>;
#elif DRVFUSE_CLUSTER > 1
using Scratch = ClusterScratch<CLUSTER>;
#else
using Scratch = RowScratch;
#endif

struct NormParams {
    const void* input;
    const void* gamma;
    const void* beta;
    const void* residual;
    void* residual_output;
    void* output;
    void* scales;
    void* normed_output;
    int rows;
    int columns;
    float epsilon;
    float weight_offset;
    float given;  // quantise.cuh
    int early_trigger;
};

// Pack `index` of what begins at element `start` of a tensor; `valid` of its elements exist.
template <typename T>
__device__ __forceinline__ void load_of_row(Pack<T, W>& pack, const void* tensor, i64 start, int index, int valid) {
    const char* address = static_cast<const char*>(tensor) + Bytes<T>::of(start + index * W);
    if constexpr (RAGGED) {
        load_elements(pack, address, valid);
    } else {
        load_pack(pack, address);
    }
}

template <typename T>
__device__ __forceinline__ void store_of_row(void* tensor, i64 start, int index, int valid, const Pack<T, W>& pack) {
    char* address = static_cast<char*>(tensor) + Bytes<T>::of(start + index * W);
    if constexpr (RAGGED) {
        store_elements(address, pack, valid);
    } else {
        store_pack(address, pack);
    }
}

// A thread's packs of a row as they come from memory.
struct Loaded {
    InPack input[PACKS];
    ResidualPack residual[RESIDUAL ? PACKS : 1];
};

// One team's share of a call: the steps that a row goes through.
class Rows {
public:
    __device__ __forceinline__ Rows(const NormParams& p, Scratch& scratch, Trace& trace)
        : p_(p), scratch_(scratch), trace_(trace), packs_((p.columns + W - 1) / W), done_(0) {
        if constexpr (LANES > 0) {
            thread_ = threadIdx.x % IN_WARP;
        } else {
            thread_ = Scratch::block() * blockDim.x + threadIdx.x;
        }
        share_ = (p.columns & (p.columns - 1)) == 0 ? __float_as_uint(__frcp_rn(float(p.columns))) : 0;
        if constexpr (KEEP_GAMMA) {
#pragma unroll
            for (int i = 0; i < PACKS; ++i) {
                if (has(i)) load_of_row(gamma_[i], p.gamma, 0, index(i), valid(i));
                if (BETA && has(i)) load_of_row(beta_[i], p.beta, 0, index(i), valid(i));
            }
        }
    }

    // Which row comes first, and how many rows later the next one.
    static __device__ __forceinline__ int first_row() {
        return LANES > 0 ? (blockIdx.x * blockDim.x + threadIdx.x) / IN_WARP : blockIdx.x / CLUSTER;
    }
    static __device__ __forceinline__ int step() {
        return LANES > 0 ? gridDim.x * blockDim.x / IN_WARP : gridDim.x / CLUSTER;
    }

    __device__ __forceinline__ void load(Loaded& loaded, int row) const {
        const i64 start = i64(row) * p_.columns;
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            if (row < p_.rows && has(i)) {
                load_of_row(loaded.input[i], p_.input, start, index(i), valid(i));
                if constexpr (RESIDUAL) load_of_row(loaded.residual[i], p_.residual, start, index(i), valid(i));
            }
        }
    }

    // x of a loaded row; what does not exist is 0. Stores residual_output.
    __device__ __forceinline__ void begin(float (&x)[PACKS][W], const Loaded& loaded, int row) {
        row_ = row;
        clear(x);
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            if (!live(i)) continue;
            const InPack source[1] = {loaded.input[i]};
            sum_packs(x[i], source);
            if constexpr (RESIDUAL) {
                float residual[W];
                ResidualPack pack;
                to_float(residual, loaded.residual[i]);
#pragma unroll
                for (int k = 0; k < W; ++k) x[i][k] = __fadd_rn(x[i][k], residual[k]);
                from_float(pack, x[i]);
                to_float(x[i], pack);
                store_of_row(p_.residual_output, start(), index(i), valid(i), pack);
            }
            trace_.need(x[i]);
        }
        trace_.lap(TraceRole::load);
    }

    // The norm of x and its quantisation. By whole warps.
    __device__ __forceinline__ void normalise(float (&x)[PACKS][W]) {
        if constexpr (LAYER) subtract_mean(x);
        float squares[PACKS];
        float largest[PACKS];
        clear(squares);
        clear(largest);
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            if (!live(i)) continue;
            float g[W];
            vector(g, gamma_, p_.gamma, i);
#pragma unroll
            for (int k = 0; k < W; ++k) {
                squares[i] = __fadd_rn(squares[i], __fmul_rn(x[i][k], x[i][k]));
                x[i][k] = __fmul_rn(x[i][k], __fadd_rn(g[k], p_.weight_offset));
                // A ragged row's padding is x = 0, which must not become 0 * infinity.
                if (!BETA && exists(i, k)) largest[i] = ptx::max_nan(largest[i], fabsf(x[i][k]));
            }
        }
        scratch_.expect(done_, PACKS);
        const RowStatistics row = reduce_row(scratch_, done_++, squares, BETA ? 0 : maximum_of(largest));
        const float f = __frcp_rn(__fsqrt_rn(__fadd_rn(mean_of(row.sum_of_squares), p_.epsilon)));
        trace_.need(f);
        trace_.lap(TraceRole::reduce);
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            float b[W];
            if (BETA && live(i)) vector(b, beta_, p_.beta, i);
#pragma unroll
            for (int k = 0; k < W; ++k) {
                x[i][k] = __fmul_rn(x[i][k], f);
                if (BETA && live(i)) {
                    x[i][k] = __fadd_rn(x[i][k], b[k]);
                    if (exists(i, k)) largest[i] = ptx::max_nan(largest[i], fabsf(x[i][k]));
                }
            }
            if constexpr (!BETA) largest[i] = __fmul_rn(largest[i], f);
        }
        if constexpr (QUANT == Quant::row) {
            float of_row = __fmul_rn(row.maximum, f);
            if constexpr (BETA) {
                const float none[1] = {0.0f};
                scratch_.expect(done_, 1);
                of_row = reduce_row(scratch_, done_++, none, maximum_of(largest)).maximum;
            }
            const Quantisation scale = quantisation<Out, Scale>(of_row, p_.given);
            if (thread_ == 0 && row_ < p_.rows) store_scalar(static_cast<Scale*>(p_.scales) + row_, scale.scale);
            store(x, scale.inverse);
        } else {
            store(x, QUANT == Quant::fixed ? finite_inverse(p_.given) : 1.0f, largest);
        }
        trace_.lap(TraceRole::store);
    }

private:
    __device__ __forceinline__ int index(int i) const {
        return LANES > 0 ? thread_ : i * int(CLUSTER * blockDim.x) + thread_;
    }
    __device__ __forceinline__ bool has(int i) const { return EXACT || index(i) < packs_; }
    __device__ __forceinline__ bool live(int i) const { return (LANES == 0 || row_ < p_.rows) && has(i); }
    __device__ __forceinline__ int valid(int i) const { return p_.columns - index(i) * W; }
    __device__ __forceinline__ bool exists(int i, int k) const { return !RAGGED || k < valid(i); }
    __device__ __forceinline__ i64 start() const { return i64(row_) * p_.columns; }

    // sum / columns, by a multiplication where that gives the same bits in a fraction of the time.
    __device__ __forceinline__ float mean_of(float sum) const {
        return share_ != 0 ? __fmul_rn(sum, __uint_as_float(share_)) : __fdiv_rn(sum, float(p_.columns));
    }

    static __device__ __forceinline__ u32 maximum_of(const float (&largest)[PACKS]) {
        u32 maximum = 0;
#pragma unroll
        for (int i = 0; i < PACKS; ++i) maximum = max(maximum, __float_as_uint(largest[i]));
        return maximum;
    }

    __device__ __forceinline__ void subtract_mean(float (&x)[PACKS][W]) {
        float sums[PACKS];
        clear(sums);
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
#pragma unroll
            for (int k = 0; k < W; ++k) sums[i] = __fadd_rn(sums[i], x[i][k]);
        }
        scratch_.expect(done_, PACKS);
        const float mean = mean_of(reduce_row(scratch_, done_++, sums, 0).sum_of_squares);
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
#pragma unroll
            for (int k = 0; k < W; ++k) {
                if (live(i) && exists(i, k)) x[i][k] = __fsub_rn(x[i][k], mean);
            }
        }
    }

    // Pack i of this thread's of gamma or beta.
    template <int N>
    __device__ __forceinline__ void vector(float (&v)[W], const GammaPack (&kept)[N], const void* from, int i) const {
        GammaPack pack;
        if constexpr (KEEP_GAMMA) {
            pack = kept[i];
            forget(pack);  // else it would be kept in fp32, in more registers
        } else {
            load_of_row(pack, from, 0, index(i), valid(i));
        }
        to_float(v, pack);
    }

    // y as it is, and its codes: those of groups by the maxima of packs.
    __device__ __forceinline__ void store(float (&y)[PACKS][W], float inverse, const float (&largest)[PACKS] = {}) {
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            if constexpr (QUANT == Quant::group) {
                const float of_group = __uint_as_float(group_max<GROUP, W>(__float_as_uint(largest[i])));
                const Quantisation scale = quantisation<Out, Scale>(of_group, p_.given);
                const int at = index(i) * W;
                if (live(i) && at % GROUP == 0) {
                    const i64 place = scale_index<LAYOUT>(row_, at / GROUP, p_.rows, p_.columns / GROUP);
                    store_scalar(static_cast<Scale*>(p_.scales) + place, scale.scale);
                }
                inverse = scale.inverse;
            }
            if (!live(i)) continue;
            if constexpr (NORMED) {
                InPack normed;
                from_float(normed, y[i]);
                store_of_row(p_.normed_output, start(), index(i), valid(i), normed);
            }
            if constexpr (QUANT != Quant::none) {
#pragma unroll
                for (int k = 0; k < W; ++k) y[i][k] = __fmul_rn(y[i][k], inverse);
            }
            OutPack pack;
            from_float(pack, y[i]);
            store_of_row(p_.output, start(), index(i), valid(i), pack);
        }
    }

    const NormParams& p_;
    Scratch& scratch_;
    Trace& trace_;
    const int packs_;
    int thread_;  // of the team
    int row_;
    u32 share_;  // the bits of 1 / columns where that is exact, else 0
    u32 done_;   // reductions
    GammaPack gamma_[KEEP_GAMMA ? PACKS : 1];
    GammaPack beta_[KEEP_GAMMA && BETA ? PACKS : 1];
};

extern "C" __global__ void __launch_bounds__(MAX_THREADS, PACKS* W <= 16 ? 2 : 1)
    rmsnorm_fp8(const __grid_constant__ NormParams p DRVFUSE_TRACE_PARAMETER) {
    __shared__ Scratch scratch;
    Trace trace{DRVFUSE_TRACE_ARGUMENT};
    if (FAULT("trigger-always-at-entry") || p.early_trigger) launch_dependents();
    scratch.init();
    Rows rows(p, scratch, trace);
    wait_for_producer();
    trace.start();
    Loaded loaded;
    int row = rows.first_row();
    rows.load(loaded, row);
    if constexpr (QUANT == Quant::group) {
        const i64 thread = i64(blockIdx.x) * blockDim.x + threadIdx.x;
        clear_scale_padding<Scale, LAYOUT>(p.scales, p.rows, p.columns / GROUP, thread, i64(gridDim.x) * blockDim.x);
    }
    // Lanes of a warp go on together: all until the first of them has no row.
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
