// SPDX-License-Identifier: Apache-2.0
// The norm and the quantisation of a row that is in the registers of a block or a cluster (rows/packs.cuh). Numerics
// and the meaning of the definitions are at the top of the kernels' files.
#pragma once
#include "collectives/rows/packs.cuh"
#include "common/norm.cuh"

// Whether a thread keeps its packs of gamma and beta in registers. If so, it reads them before the wait for the
// producer, since no kernel writes weights. Otherwise it reads them once for each row. two_stage processes many rows,
// and needs the registers for other packs.
constexpr bool KEEP_GAMMA = !DRVFUSE_TWO_STAGE && PACKS <= 2;

// The default for the argument `meet` of normalise(): does nothing.
struct NoMeeting {
    __device__ __forceinline__ void operator()(bool, const OutPack&, float) const {}
};

class RowNorm : public RowPacks {
public:
    __device__ __forceinline__ RowNorm(const RowsParams& p, Scratch& scratch, Trace& trace)
        : RowPacks(p), p_(p), scratch_(scratch), trace_(trace), done_(0), mean_(p.columns) {
        mean_.keep();
        if constexpr (KEEP_GAMMA) {
#pragma unroll
            for (int i = 0; i < PACKS; ++i) {
                if (has(i)) load_of_row(gamma_[i], p.gamma, 0, in_vector(i), p);
                if (BETA && has(i)) load_of_row(beta_[i], beta_of(p), 0, in_vector(i), p);
            }
        }
    }

    // Called once before each normalise(): prepares the exchange of a row's sums between the blocks of a cluster.
    __device__ __forceinline__ void expect() { scratch_.expect(done_, PACKS); }

    // Normalises and quantises x. Calls store(index, pack) with the output, and with NORMED store_normed(index, pack)
    // with the normed row. One thread calls store_scale(group, scale) for each scale. With GROUPED a warp processes its
    // lanes' packs of one index i together: first all its lanes call meet(exists, pack, scale), also lanes whose pack
    // does not exist; then the lanes call store and store_scale. Called by all threads.
    template <typename Store, typename StoreScale, typename StoreNormed, typename Meet = NoMeeting>
    __device__ __forceinline__ void normalise(float (&x)[PACKS][W], const Store& store, const StoreScale& store_scale,
                                              const StoreNormed& store_normed, const Meet& meet = {}) {
        refresh();
        if constexpr (HEAD != 0) return normalise_heads(x, store, store_scale, store_normed, meet);
        if constexpr (LAYER) subtract_mean(x);
        float squares[PACKS];
        u32 maximum = 0;
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            squares[i] = 0.0f;
            if (has(i)) {
                float g[W];
                gamma(g, i);
#pragma unroll
                for (int k = 0; k < W; ++k) {
                    squares[i] = __fadd_rn(squares[i], __fmul_rn(x[i][k], x[i][k]));
                    x[i][k] = __fmul_rn(x[i][k], __fadd_rn(g[k], p_.weight_offset));
                    // The padding after the row's last element is left out: its x is 0, and 0 * infinity would be NaN.
                    if (!RAGGED || index(i) * W + k < p_.columns) maximum = max(maximum, magnitude_bits(x[i][k]));
                }
            }
        }
        const RowStatistics row = reduce_row(scratch_, done_++, squares, maximum);
        const float f = inverse_root(mean_.of(row.sum_of_squares, p_.columns), p_.epsilon);
        trace_.need(f);
        float largest = __fmul_rn(row.maximum, f);
        if constexpr (BETA) largest = add_beta(x, f);
        trace_.lap(TraceRole::reduce);
        float inverse = 1.0f;
        if constexpr (QUANT == Quant::row) {
            const Quantisation scale = quantisation<Out, Scale>(largest, p_.given);
            inverse = scale.inverse;
            if (thread_ == 0) store_scale(0, scale.scale);
        } else if constexpr (QUANT == Quant::fixed) {
            inverse = finite_inverse(p_.given);
        }
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            if constexpr (GROUPED) {
                if constexpr (!BETA) multiply(x[i], f);
                if constexpr (NORMED) hand_normed(x[i], i, store_normed);
                quantise_group(x[i], i, largest_of(x[i], i), store, store_scale, meet);
            } else if (has(i)) {
                if constexpr (NORMED) {
                    if constexpr (!BETA) multiply(x[i], f);
                    hand_normed(x[i], i, store_normed);
                }
#pragma unroll
                for (int k = 0; k < W; ++k) {
                    if constexpr (!BETA && !NORMED) x[i][k] = __fmul_rn(x[i][k], f);
                    if constexpr (QUANTISE) x[i][k] = __fmul_rn(x[i][k], inverse);
                }
                OutPack pack;
                from_float(pack, x[i]);
                store(index(i), pack);
            }
        }
        trace_.lap(TraceRole::store);
    }

    // Does normalise(), and stores the results to row `row` of the outputs.
    __device__ __forceinline__ void normalise_to_output(float (&x)[PACKS][W], int row) {
        normalise(
            x, [&](int at, const OutPack& pack) { store_of_row(p_.output, row, at, p_, pack); },
            [&](int group, float scale) { store_scalar(scale_at(p_, 0, row, group), scale); },
            [&](int at, const InPack& pack) { store_of_row(normed_output_of(p_), row, at, p_, pack); });
    }

protected:
    const RowsParams& p_;
    Scratch& scratch_;
    Trace& trace_;

private:
    // Returns the mean over a head; `sum` is this lane's part of the sum. The tree of additions is that of reduce.cuh,
    // where packs that do not exist add +0.
    static __device__ __forceinline__ float head_mean(float sum) {
        // HEAD is a power of two, so the product is equal to the quotient.
        return __fmul_rn(butterfly_sum<HEAD_LANES / 2>(sum), 1.0f / HEAD);
    }

    // Does normalise() for rows that consist of heads. The lanes that hold a head add by shuffles. Called by whole
    // warps.
    template <typename Store, typename StoreScale, typename StoreNormed, typename Meet>
    __device__ __forceinline__ void normalise_heads(float (&x)[PACKS][W], const Store& store,
                                                    const StoreScale& store_scale, const StoreNormed& store_normed,
                                                    const Meet& meet) {
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            float g[W], b[W];
            if (!has(i)) clear(x[i]);
            if constexpr (LAYER) {
                float sum = 0.0f;
#pragma unroll
                for (int k = 0; k < W; ++k) sum = __fadd_rn(sum, x[i][k]);
                const float mean = head_mean(sum);
#pragma unroll
                for (int k = 0; k < W; ++k) x[i][k] = __fsub_rn(x[i][k], mean);
            }
            float squares = 0.0f;
#pragma unroll
            for (int k = 0; k < W; ++k) squares = __fadd_rn(squares, __fmul_rn(x[i][k], x[i][k]));
            const float f = inverse_root(head_mean(squares), p_.epsilon);
            clear(g), clear(b);
            if (has(i)) gamma(g, i);
            if (BETA && has(i)) vector(b, beta_, beta_of(p_), i);
#pragma unroll
            for (int k = 0; k < W; ++k) x[i][k] = __fmul_rn(x[i][k], __fadd_rn(g[k], p_.weight_offset));
            float largest = 0.0f;
            if constexpr (QUANT == Quant::row && !BETA) largest = __fmul_rn(largest_of(x[i], i), f);
            multiply(x[i], f);
            if constexpr (BETA) {
#pragma unroll
                for (int k = 0; k < W; ++k) x[i][k] = __fadd_rn(x[i][k], b[k]);
            }
            if constexpr (NORMED) hand_normed(x[i], i, store_normed);
            if constexpr (GROUPED) {
                if constexpr (QUANT == Quant::group || BETA) largest = largest_of(x[i], i);
                quantise_group(x[i], i, largest, store, store_scale, meet);
            } else if (has(i)) {
                if constexpr (QUANTISE) multiply(x[i], finite_inverse(p_.given));
                OutPack pack;
                from_float(pack, x[i]);
                store(index(i), pack);
            }
        }
        trace_.lap(TraceRole::reduce);
        trace_.lap(TraceRole::store);
    }

    // Subtracts the row's mean from x; the padding after the row's last element stays 0.
    __device__ __forceinline__ void subtract_mean(float (&x)[PACKS][W]) {
        float sums[PACKS];
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            sums[i] = 0.0f;
            if (has(i)) {
#pragma unroll
                for (int k = 0; k < W; ++k) sums[i] = __fadd_rn(sums[i], x[i][k]);
            }
        }
        const float mean = mean_.of(reduce_row(scratch_, done_++, sums, 0).sum_of_squares, p_.columns);
        scratch_.expect(done_, PACKS);
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
#pragma unroll
            for (int k = 0; k < W; ++k) {
                if (has(i) && (!RAGGED || index(i) * W + k < p_.columns)) x[i][k] = __fsub_rn(x[i][k], mean);
            }
        }
    }

    // Sets x to x * f + beta. Returns the largest |x| of the row if the row has one scale, else 0.
    __device__ __forceinline__ float add_beta(float (&x)[PACKS][W], float f) {
        const float none[1] = {0.0f};
        u32 maximum = 0;
        if (QUANT == Quant::row) scratch_.expect(done_, 1);
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            if (has(i)) {
                float b[W];
                vector(b, beta_, beta_of(p_), i);
#pragma unroll
                for (int k = 0; k < W; ++k) {
                    x[i][k] = __fadd_rn(__fmul_rn(x[i][k], f), b[k]);
                    if (!RAGGED || index(i) * W + k < p_.columns) maximum = max(maximum, magnitude_bits(x[i][k]));
                }
            }
        }
        return QUANT == Quant::row ? reduce_row(scratch_, done_++, none, maximum).maximum : 0.0f;
    }

    template <typename StoreNormed>
    __device__ __forceinline__ void hand_normed(const float (&y)[W], int i, const StoreNormed& store_normed) const {
        InPack pack;
        from_float(pack, y);
        if (has(i)) store_normed(index(i), pack);
    }

    // The largest |v| in the group of pack i. Called by whole warps, also by lanes without a pack.
    __device__ __forceinline__ float largest_of(const float (&v)[W], int i) const {
        u32 maximum = 0;
#pragma unroll
        for (int k = 0; k < W; ++k) maximum = max(maximum, magnitude_bits(v[k]));
        return __uint_as_float(group_max<LANES * W, W>(has(i) ? maximum : 0));
    }

    // Quantises and stores pack i, whose group has the maximum `largest`. Called by whole warps.
    template <typename Store, typename StoreScale, typename Meet>
    __device__ __forceinline__ void quantise_group(float (&y)[W], int i, float largest, const Store& store,
                                                   const StoreScale& store_scale, const Meet& meet) const {
        const Quantisation scale = quantisation<Out, Scale>(largest, p_.given);
        multiply(y, scale.inverse);
        OutPack pack;
        from_float(pack, y);
        meet(has(i), pack, scale.scale);
        if (!has(i)) return;
        store(index(i), pack);
        if (index(i) % LANES == 0) store_scale(index(i) / LANES, scale.scale);
    }

    __device__ __forceinline__ void gamma(float (&g)[W], int i) const { vector(g, gamma_, p_.gamma, i); }

    // Sets v to this thread's pack i of gamma or beta.
    template <int N>
    __device__ __forceinline__ void vector(float (&v)[W], const Pack<Gamma, W> (&kept)[N], const void* from,
                                           int i) const {
        Pack<Gamma, W> pack;
        if constexpr (KEEP_GAMMA) {
            pack = kept[i];
            forget(pack);
        } else {
            load_of_row(pack, from, 0, in_vector(i), p_);
        }
        to_float(v, pack);
    }

    u32 done_;  // the number of reductions that this call has made
    Mean mean_;
    Pack<Gamma, W> gamma_[KEEP_GAMMA ? PACKS : 1];
    Pack<Gamma, W> beta_[KEEP_GAMMA && BETA ? PACKS : 1];
};
