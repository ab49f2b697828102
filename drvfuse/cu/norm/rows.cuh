// SPDX-License-Identifier: Apache-2.0
// The work of rmsnorm_fp8 on a row: load, residual, norm, quantisation, store.
#pragma once
#include "common/norm.cuh"
#include "norm/row_form.cuh"
#include "ptx/math.cuh"
#include "trace/trace.cuh"

// A thread's packs of a row as loaded from memory.
struct Loaded {
    InPack input[PACKS];
    ResidualPack residual[RESIDUAL ? PACKS : 1];
};

// A thread's state over all rows of a launch, and the steps of a row, which all threads of a team call together.
class Rows {
public:
    __device__ __forceinline__ Rows(const NormParams& p, Scratch& scratch, Trace& trace)
        : p_(p), scratch_(scratch), trace_(trace), packs_((p.columns + W - 1) / W),
          thread_(LANES > 0 ? threadIdx.x % IN_WARP : Scratch::block() * THREADS + threadIdx.x), mean_(p.columns),
          done_(0) {
#pragma unroll
        for (int i = 0; KEEP_GAMMA && i < PACKS; ++i) {
            if (has(i)) load_gamma(gamma_[i], i);
            if (BETA && has(i)) load_vector(beta_[i], p.beta, i);
        }
    }

    // The first row of this team.
    static __device__ __forceinline__ int first_row() {
        return LANES > 0 ? (blockIdx.x * THREADS + threadIdx.x) / IN_WARP : blockIdx.x / CLUSTER;
    }
    // The distance from a row of this team to its next row.
    static __device__ __forceinline__ int step() {
        return LANES > 0 ? gridDim.x * (THREADS / IN_WARP) : gridDim.x / CLUSTER;
    }

    // Starts to load a row, if it exists.
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

    // Computes x of a loaded row and stores residual_output. Elements of x beyond the row's end are 0.
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

    // Normalises and quantises x and stores the results. Called by whole warps.
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
                // Elements beyond the row's end are skipped: their x is 0, and 0 * infinity would be a NaN.
                if (!MAX_OF_Y && exists(i, k)) largest[i] = ptx::max_nan(largest[i], fabsf(x[i][k]));
            }
        }
        scratch_.expect(done_, PACKS);
        const RowStatistics row = reduce_row(scratch_, done_++, squares, MAX_OF_Y ? 0 : maximum_of(largest));
        const float f = inverse_root(mean_.of(row.sum_of_squares, p_.columns), p_.epsilon);
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
    // The index in the row of this thread's pack i.
    __device__ __forceinline__ int index(int i) const { return i * TEAM + thread_; }
    // Whether rows have this thread's pack i.
    __device__ __forceinline__ bool has(int i) const { return EXACT || index(i) < packs_; }
    // Whether the current row exists and has this thread's pack i.
    __device__ __forceinline__ bool live(int i) const { return (LANES == 0 || row_ < p_.rows) && has(i); }
    // The number of elements of a row from the beginning of this thread's pack i on.
    __device__ __forceinline__ int valid(int i) const { return p_.columns - index(i) * W; }
    // Whether element k of this thread's pack i exists.
    __device__ __forceinline__ bool exists(int i, int k) const { return !RAGGED || k < valid(i); }
    // The index in the tensor of this thread's first element of a row.
    __device__ __forceinline__ i64 at(int row) const { return i64(row) * p_.columns + thread_ * W; }

    // Returns the bits of this thread's maximum, where largest[i] is the maximum of its pack i.
    static __device__ __forceinline__ u32 maximum_of(const float (&largest)[PACKS]) {
        u32 maximum = 0;
#pragma unroll
        for (int i = 0; i < PACKS; ++i) maximum = max(maximum, __float_as_uint(largest[i]));
        return maximum;
    }

    // Subtracts the row's mean from the elements that exist.
    __device__ __forceinline__ void subtract_mean(float (&x)[PACKS][W]) {
        float sums[PACKS];
        clear(sums);
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
#pragma unroll
            for (int k = 0; k < W; ++k) sums[i] = __fadd_rn(sums[i], x[i][k]);
        }
        scratch_.expect(done_, PACKS);
        const float mean = mean_.of(reduce_row(scratch_, done_++, sums, 0).sum_of_squares, p_.columns);
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
#pragma unroll
            for (int k = 0; k < W; ++k) {
                if (live(i) && exists(i, k)) x[i][k] = __fsub_rn(x[i][k], mean);
            }
        }
    }

    // Loads this thread's pack i of gamma or beta as fp32.
    __device__ __forceinline__ void load_vector(float (&v)[W], const void* from, int i) const {
        GammaPack pack;
        load_of_row(pack, from, thread_ * W, i, valid(i));
        to_float(v, pack);
    }

    // Loads gamma + weight_offset for this thread's pack i.
    __device__ __forceinline__ void load_gamma(float (&g)[W], int i) const {
        load_vector(g, p_.gamma, i);
#pragma unroll
        for (int k = 0; k < W; ++k) g[k] = __fadd_rn(g[k], p_.weight_offset);
    }

    // Sets `g` to gamma + weight_offset for this thread's pack i, from registers or memory.
    __device__ __forceinline__ void gamma(float (&g)[W], int i) const {
        if constexpr (KEEP_GAMMA) {
            copy(g, gamma_[i]);
        } else {
            load_gamma(g, i);
        }
    }

    // Sets `b` to beta for this thread's pack i, from registers or memory.
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

    // Stores the scale of the row, and returns the factor by which y is multiplied to give the codes. `maximum` is the
    // row's largest |x * g|, f the factor of the norm, and `largest` has the largest |y| of each of this thread's
    // packs, which is used only with BETA.
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

    // Stores the scales of the groups of this thread's packs, and sets inverse[i] to the factor by which y of pack i is
    // multiplied to give the codes. A group consists of `own_packs` packs of each of `in_group` adjacent threads. These
    // threads divide their groups among themselves, and each computes the scales of its share.
    template <typename Q>
    __device__ __forceinline__ void scale_groups(float (&inverse)[PACKS], const float (&largest)[PACKS]) {
        constexpr int in_group = GROUP / W < TEAM ? GROUP / W : TEAM, own_packs = GROUP / W / in_group;
        constexpr int groups = PACKS / own_packs, sharing = in_group < groups ? in_group : groups;
        const int place = thread_ % in_group;
#pragma unroll
        for (int first = 0; first < groups; first += sharing) {
            float own = 0.0f;
#pragma unroll
            for (int j = 0; j < sharing; ++j) {
                u32 maximum = 0;
#pragma unroll
                for (int i = 0; i < own_packs; ++i)
                    maximum = max(maximum, __float_as_uint(largest[(first + j) * own_packs + i]));
                maximum = group_max<in_group, 1>(maximum);
                own = place % sharing == j ? __uint_as_float(maximum) : own;
            }
            const Quantisation scale = quantisation<Q, Scale>(own, p_.given);
            const int column = ((first + place % sharing) * own_packs * TEAM + thread_ - place) * W;
            if (place < sharing && row_ < p_.rows && column < p_.columns) {
                const i64 at = scale_index<LAYOUT>(row_, column / GROUP, p_.rows, p_.columns / GROUP);
                store_scalar(static_cast<Scale*>(p_.scales) + at, scale.scale);
            }
#pragma unroll
            for (int j = 0; j < sharing; ++j) {
                const float of_group = __shfl_sync(0xffffffffu, scale.inverse, threadIdx.x % 32 - place + j);
#pragma unroll
                for (int i = 0; i < own_packs; ++i) inverse[(first + j) * own_packs + i] = of_group;
            }
        }
    }

    // Stores the codes of y and, with NORMED, y itself.
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
                multiply(y[i], inverse[i]);
            }
            OutPack pack;
            from_float(pack, y[i]);
            store_of_row(p_.output, at(row_), i, valid(i), pack);
        }
    }

    const NormParams& p_;
    Scratch& scratch_;  // the shared memory of the team's reductions
    Trace& trace_;
    const int packs_;  // packs of a row
    int thread_;       // the index of this thread in the team
    int row_;          // the current row, which may not exist
    Mean mean_;
    u32 done_;                                       // the number of reductions of this launch so far
    float gamma_[KEEP_GAMMA ? PACKS : 1][W];         // gamma + weight_offset of this thread's packs
    float beta_[KEEP_GAMMA && BETA ? PACKS : 1][W];  // beta of this thread's packs
};
