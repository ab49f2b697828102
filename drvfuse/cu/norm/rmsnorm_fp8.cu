// SPDX-License-Identifier: Apache-2.0
// Optional residual addition, RMSNorm or LayerNorm, and quantisation of rows, on one device: each byte read and written
// once.
//
// Layout. Tensors are [rows, columns], contiguous. A row is held in registers by a team of threads: by a block of
// DRVFUSE_THREADS threads, by the DRVFUSE_CLUSTER blocks of a cluster, whose threads are numbered block by block, or,
// where DRVFUSE_LANES is not 0, by so many lanes of a warp. Pack i * threads + t of 16 bytes of the input belongs to
// thread t of the team, i < DRVFUSE_PACKS. Without DRVFUSE_RAGGED tensors are 16-byte aligned and `columns` is a multiple
// of the elements of a pack; with it, rows are read and written element by element. With DRVFUSE_EXACT every thread has
// DRVFUSE_PACKS packs of a row.
//
// Grid. Any number of blocks, a multiple of the cluster. Team k does rows k, k + teams, ...; the next row is in flight
// while a row is worked on.
//
// Numerics. x = +0 + input (+ residual, rounded to the residual's type: residual_output); then as
// drvfuse/reference/norms.py and quantised.py have it. IEEE operations, each rounded; the order of sums is in reduce.cuh.
// f is not negative and rounding is monotone, so f * max|x * g| is max|y| of a row, and one reduction gives both, but with
// beta. The maxima of groups are found from y: where f is infinite, 0 * f is NaN.
//
// Memory ordering. Teams share no memory but what they reduce with, so there is nothing to order. residual_output may be
// residual: a row's residual is read before residual_output of that row is written, by the same thread. gamma and beta
// are weights, read before the wait for the producer.
//
// Failure. Nothing waits but for the threads of its own team.
#include "common/quantise.cuh"
#include "common/team_reduce.cuh"
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
constexpr int GROUP = DRVFUSE_GROUP ? DRVFUSE_GROUP : W;  // any number where there are no groups
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
constexpr int THREADS = DRVFUSE_THREADS;
constexpr bool MAX_OF_Y = BETA || QUANT == Quant::group;  // or of x * g, which needs no reduction of its own
constexpr int TEAM = LANES > 0 ? LANES : THREADS * CLUSTER;
constexpr int FLOATS = PACKS * W;  // floats of a row in a thread's registers
// Blocks of a multiprocessor, for 64 registers a thread, or 128 where there are more than 16 floats.
constexpr int RESIDENT = (FLOATS > 16 ? 512 : 1024) / THREADS;

using InPack = Pack<In, W>;
using OutPack = Pack<Out, W>;
using GammaPack = Pack<Gamma, W>;
using ResidualPack = Pack<Residual, W>;
// gamma + weight_offset, and beta, stay in registers for all rows where there are some left.
constexpr int KEPT = FLOATS * (BETA ? 3 : 2) + PACKS * (InPack::words + (RESIDUAL ? ResidualPack::words : 0));
constexpr bool KEEP_GAMMA = KEPT <= (FLOATS > 16 ? 96 : 40);
#if DRVFUSE_LANES
using Scratch = LaneScratch<LANES>;
#elif DRVFUSE_CLUSTER > 1
using Scratch = ClusterScratch<CLUSTER>;
#else
using Scratch = BlockScratch<THREADS / 32>;
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

// This thread's pack `i` of a row; its first pack of the row begins at element `at` of the tensor, and from pack `i` on the
// row has `valid` elements.
template <typename T>
__device__ __forceinline__ void load_of_row(Pack<T, W>& pack, const void* tensor, i64 at, int i, int valid) {
    const char* address = static_cast<const char*>(tensor) + Bytes<T>::of(at) + Bytes<T>::of(i * TEAM * W);
    if constexpr (RAGGED) {
        load_elements(pack, address, valid);
    } else {
        load_pack(pack, address);
    }
}

template <typename T>
__device__ __forceinline__ void store_of_row(void* tensor, i64 at, int i, int valid, const Pack<T, W>& pack) {
    char* address = static_cast<char*>(tensor) + Bytes<T>::of(at) + Bytes<T>::of(i * TEAM * W);
    if constexpr (RAGGED) {
        store_elements(address, pack, valid);
    } else {
        store_pack(address, pack);
    }
}

// A thread's packs of a row as loaded from memory.
struct Loaded {
    InPack input[PACKS];
    ResidualPack residual[RESIDUAL ? PACKS : 1];
};

// One team's share of a call: the steps that a row goes through.
class Rows {
public:
    __device__ __forceinline__ Rows(const NormParams& p, Scratch& scratch, Trace& trace)
        : p_(p), scratch_(scratch), trace_(trace), packs_((p.columns + W - 1) / W), done_(0) {
        thread_ = LANES > 0 ? threadIdx.x % IN_WARP : Scratch::block() * THREADS + threadIdx.x;
        share_ = (p.columns & (p.columns - 1)) == 0 ? __float_as_uint(__frcp_rn(float(p.columns))) : 0;
#pragma unroll
        for (int i = 0; KEEP_GAMMA && i < PACKS; ++i) {
            if (has(i)) load_gamma(gamma_[i], i);
            if (BETA && has(i)) load_vector(beta_[i], p.beta, i);
        }
    }

    // The first row of this team, and the distance to its next row.
    static __device__ __forceinline__ int first_row() {
        return LANES > 0 ? (blockIdx.x * THREADS + threadIdx.x) / IN_WARP : blockIdx.x / CLUSTER;
    }
    static __device__ __forceinline__ int step() {
        return LANES > 0 ? gridDim.x * (THREADS / IN_WARP) : gridDim.x / CLUSTER;
    }

    __device__ __forceinline__ void load(Loaded& loaded, int row) const {
        const i64 from = at(row);
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            if (row < p_.rows && has(i)) {
                load_of_row(loaded.input[i], p_.input, from, i, valid(i));
                if constexpr (RESIDUAL) load_of_row(loaded.residual[i], p_.residual, from, i, valid(i));
            }
        }
    }

    // x of a loaded row; elements beyond its end are 0. Stores residual_output.
    __device__ __forceinline__ void begin(float (&x)[PACKS][W], const Loaded& loaded, int row) {
        row_ = row;
        clear(x);
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            if (!live(i)) continue;
            InPack source;
#pragma unroll
            for (int j = 0; j < InPack::words; ++j) source.word[j] = Word<In>::plus_zero(loaded.input[i].word[j]);
            to_float(x[i], source);
            if constexpr (RESIDUAL) {
                float residual[W];
                ResidualPack pack;
                to_float(residual, loaded.residual[i]);
#pragma unroll
                for (int k = 0; k < W; ++k) x[i][k] = __fadd_rn(x[i][k], residual[k]);
                from_float(pack, x[i]);
                to_float(x[i], pack);
                store_of_row(p_.residual_output, at(row), i, valid(i), pack);
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
            gamma(g, i);
#pragma unroll
            for (int k = 0; k < W; ++k) {
                squares[i] = __fadd_rn(squares[i], __fmul_rn(x[i][k], x[i][k]));
                x[i][k] = __fmul_rn(x[i][k], g[k]);
                // A ragged row's padding is x = 0, which must not become 0 * infinity.
                if (!MAX_OF_Y && exists(i, k)) largest[i] = ptx::max_nan(largest[i], fabsf(x[i][k]));
            }
        }
        scratch_.expect(done_, PACKS);
        const RowStatistics row = reduce_row(scratch_, done_++, squares, MAX_OF_Y ? 0 : maximum_of(largest));
        const float f = __frcp_rn(__fsqrt_rn(__fadd_rn(mean_of(row.sum_of_squares), p_.epsilon)));
        trace_.need(f);
        trace_.lap(TraceRole::reduce);
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            float b[W];
            if (BETA && live(i)) beta(b, i);
#pragma unroll
            for (int k = 0; k < W; ++k) {
                x[i][k] = __fmul_rn(x[i][k], f);
                if (BETA && live(i)) x[i][k] = __fadd_rn(x[i][k], b[k]);
                if (MAX_OF_Y && live(i) && exists(i, k)) largest[i] = ptx::max_nan(largest[i], fabsf(x[i][k]));
            }
        }
        float inverse[PACKS];
        if constexpr (QUANT == Quant::group) {
            scale_groups<Out>(inverse, largest);
        } else if constexpr (QUANT == Quant::row) {
            fill(inverse, scale_row<Out>(row.maximum, f, largest));
        } else {
            fill(inverse, finite_inverse(p_.given));
        }
        store(x, inverse);
        trace_.lap(TraceRole::store);
    }

private:
    __device__ __forceinline__ int index(int i) const { return i * TEAM + thread_; }
    __device__ __forceinline__ bool has(int i) const { return EXACT || index(i) < packs_; }
    __device__ __forceinline__ bool live(int i) const { return (LANES == 0 || row_ < p_.rows) && has(i); }
    __device__ __forceinline__ int valid(int i) const { return p_.columns - index(i) * W; }
    __device__ __forceinline__ bool exists(int i, int k) const { return !RAGGED || k < valid(i); }
    // This thread's first element of a row.
    __device__ __forceinline__ i64 at(int row) const { return i64(row) * p_.columns + thread_ * W; }

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

    __device__ __forceinline__ void load_vector(float (&v)[W], const void* from, int i) const {
        GammaPack pack;
        load_of_row(pack, from, thread_ * W, i, valid(i));
        to_float(v, pack);
    }

    __device__ __forceinline__ void load_gamma(float (&g)[W], int i) const {
        load_vector(g, p_.gamma, i);
#pragma unroll
        for (int k = 0; k < W; ++k) g[k] = __fadd_rn(g[k], p_.weight_offset);
    }

    // gamma + weight_offset, and beta, for this thread's pack i.
    __device__ __forceinline__ void gamma(float (&g)[W], int i) const {
        if constexpr (KEEP_GAMMA) {
            copy(g, gamma_[i]);
        } else {
            load_gamma(g, i);
        }
    }

    __device__ __forceinline__ void beta(float (&b)[W], int i) const {
        if constexpr (KEEP_GAMMA) {
            copy(b, beta_[i]);
        } else {
            load_vector(b, p_.beta, i);
        }
    }

    static __device__ __forceinline__ void copy(float (&to)[W], const float (&from)[W]) {
#pragma unroll
        for (int k = 0; k < W; ++k) to[k] = from[k];
    }

    // Stores the scale of the row, and returns its inverse.
    template <typename Q>
    __device__ __forceinline__ float scale_row(float maximum, float f, const float (&largest)[PACKS]) {
        float of_row = __fmul_rn(maximum, f);
        if constexpr (BETA) {
            float none[PACKS];
            clear(none);
            scratch_.expect(done_, PACKS);
            of_row = reduce_row(scratch_, done_++, none, maximum_of(largest)).maximum;
        }
        const Quantisation scale = quantisation<Q, Scale>(of_row, p_.given);
        if (thread_ == 0 && row_ < p_.rows) store_scalar(static_cast<Scale*>(p_.scales) + row_, scale.scale);
        return scale.inverse;
    }

    static __device__ __forceinline__ void fill(float (&to)[PACKS], float value) {
#pragma unroll
        for (int i = 0; i < PACKS; ++i) to[i] = value;
    }

    // Stores the scales of the groups that this thread's packs lie in, and gives the inverse for each pack. A group is
    // in_group adjacent threads, and turns packs of each of them; its threads share the work on the groups that they have.
    template <typename Q>
    __device__ __forceinline__ void scale_groups(float (&inverse)[PACKS], const float (&largest)[PACKS]) {
        constexpr int in_group = GROUP / W < TEAM ? GROUP / W : TEAM, turns = GROUP / W / in_group;
        constexpr int groups = PACKS / turns, sharing = in_group < groups ? in_group : groups;
        const int place = thread_ % in_group;
#pragma unroll
        for (int first = 0; first < groups; first += sharing) {
            float own = 0.0f;
#pragma unroll
            for (int j = 0; j < sharing; ++j) {
                u32 maximum = 0;
#pragma unroll
                for (int i = 0; i < turns; ++i)
                    maximum = max(maximum, __float_as_uint(largest[(first + j) * turns + i]));
                maximum = group_max<in_group, 1>(maximum);
                own = place % sharing == j ? __uint_as_float(maximum) : own;
            }
            const Quantisation scale = quantisation<Q, Scale>(own, p_.given);
            const int column = ((first + place % sharing) * turns * TEAM + thread_ - place) * W;
            if (place < sharing && row_ < p_.rows && column < p_.columns) {
                const i64 at = scale_index<LAYOUT>(row_, column / GROUP, p_.rows, p_.columns / GROUP);
                store_scalar(static_cast<Scale*>(p_.scales) + at, scale.scale);
            }
#pragma unroll
            for (int j = 0; j < sharing; ++j) {
                const float of_group = __shfl_sync(0xffffffffu, scale.inverse, threadIdx.x % 32 - place + j);
#pragma unroll
                for (int i = 0; i < turns; ++i) inverse[(first + j) * turns + i] = of_group;
            }
        }
    }

    // y as it is, and its codes.
    __device__ __forceinline__ void store(float (&y)[PACKS][W], const float (&inverse)[PACKS]) {
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            if (!live(i)) continue;
            if constexpr (NORMED) {
                InPack normed;
                from_float(normed, y[i]);
                store_of_row(p_.normed_output, at(row_), i, valid(i), normed);
            }
            if constexpr (QUANT != Quant::none) {
#pragma unroll
                for (int k = 0; k < W; ++k) y[i][k] = __fmul_rn(y[i][k], inverse[i]);
            }
            OutPack pack;
            from_float(pack, y[i]);
            store_of_row(p_.output, at(row_), i, valid(i), pack);
        }
    }

    const NormParams& p_;
    Scratch& scratch_;
    Trace& trace_;
    const int packs_;
    int thread_;  // number in the team
    int row_;
    u32 share_;  // the bits of 1 / columns where that is exact, else 0
    u32 done_;   // reductions made so far
    float gamma_[KEEP_GAMMA ? PACKS : 1][W];
    float beta_[KEEP_GAMMA && BETA ? PACKS : 1][W];
};

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
    // Lanes of a warp stay together: all go on until the first of them has no row.
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
