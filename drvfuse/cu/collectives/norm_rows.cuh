// SPDX-License-Identifier: Apache-2.0
// The steps that a row of the fused kernels goes through: sum over the ranks, residual, norm, quantisation.
//
// A row is held by a block or, with DRVFUSE_CLUSTER blocks per cluster, by a cluster, whose threads are numbered block
// by block. Layout, numerics and the meaning of the definitions are at the top of the kernels' files.
#pragma once
#include "collectives/norm_form.cuh"
#include "common/reduce.cuh"
#if DRVFUSE_CLUSTER > 1
#include "common/cluster_reduce.cuh"
#endif

constexpr int CLUSTER = DRVFUSE_CLUSTER;
constexpr bool EXACT = DRVFUSE_EXACT;  // every thread has PACKS packs of a row
#if DRVFUSE_CLUSTER > 1
using Scratch = ClusterScratch<CLUSTER>;
#else
using Scratch = RowScratch;
#endif
// One stage is for few rows, so gamma is in registers before the row comes; long rows and two stages need these.
constexpr bool KEEP_GAMMA = !DRVFUSE_TWO_STAGE && PACKS <= 2;
// Packs of every source in flight: four to eight loads a thread where the row has as many, and registers are left. With
// NODES a source has that many itself (nodes.cuh).
constexpr int WISHED = NODES || SOURCES > 4 || (PACKS * SOURCES > 12) ? 1 : SOURCES > 2 || PACKS > 3 ? 2 : 4;
constexpr int BATCH = WISHED < PACKS ? WISHED : PACKS;

// Hides the pack's origin from the compiler, so that its conversion to fp32 is not hoisted out of the loop over rows: a
// row's gamma in fp32 would take two or four times as many registers.
template <typename T>
__device__ __forceinline__ void keep_packed(Pack<T, W>& pack) {
#pragma unroll
    for (int i = 0; i < Pack<T, W>::words; ++i) ptx::forget(pack.word[i]);
}

// One block's share of a call: the steps that a row goes through.
class Rows {
public:
    __device__ __forceinline__ Rows(const FusedParams& p, Scratch& scratch, Trace& trace)
        : p_(p), scratch_(scratch), trace_(trace), packs_(packs_of_row(p)), done_(0), block_(Scratch::block()) {
        refresh();
        share_ = (p.columns & (p.columns - 1)) == 0 ? __float_as_uint(__frcp_rn(float(p.columns))) : 0;
        ptx::forget(share_);
        if constexpr (KEEP_GAMMA) {
#pragma unroll
            for (int i = 0; i < PACKS; ++i) {
                if (has(i)) load_of_row(gamma_[i], p.gamma, 0, in_vector(i), p);
                if (BETA && has(i)) load_of_row(beta_[i], beta_of(p), 0, in_vector(i), p);
                if (early_residual() && has(i)) load_of_row(residual_[i], p.residual, first_row(), index(i), p);
            }
        }
    }

    // x = the sum over the ranks; load(pack, source, index) reads one pack of the row.
    template <typename Load>
    __device__ __forceinline__ void sum(float (&x)[PACKS][W], const Load& load) {
        refresh();
#pragma unroll
        for (int first = 0; first < PACKS; first += BATCH) {
            SourcePack packs[BATCH][SOURCES];
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
#pragma unroll
                for (int source = 0; source < SOURCES; ++source) {
                    if (first + b < PACKS && has(first + b)) load(packs[b][source], source, index(first + b));
                }
            }
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                if (first + b < PACKS && has(first + b)) {
                    sum_packs(x[first + b], packs[b]);
                    trace_.need(x[first + b]);
                }
            }
        }
        trace_.lap(TraceRole::load);
    }

    // Loads the row's residual, for add_residual<true>().
    __device__ __forceinline__ void fetch_residual(int row) {
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            if (has(i) && !early_residual()) load_of_row(residual_[i], p_.residual, row, index(i), p_);
        }
    }

    // Called once before each normalise(): prepares the exchange of a row's sums between blocks.
    __device__ __forceinline__ void expect() { scratch_.expect(done_, PACKS); }

    // x = x + residual, rounded; store(index, pack) takes residual_out.
    template <bool FETCHED = false, typename Store>
    __device__ __forceinline__ void add_residual(float (&x)[PACKS][W], int row, const Store& store) {
        refresh();
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            if (has(i)) store(index(i), add_residual_pack(x[i], row, index(i), FETCHED ? &residual_[i] : nullptr));
        }
    }

    // sum() and add_residual() for a row whose values are needed no more: only one pack at a time is in registers.
    template <typename Load, typename Store>
    __device__ __forceinline__ void sum_with_residual(int row, const Load& load, const Store& store) {
#pragma unroll 1
        for (int at = thread_; at < packs_; at += CLUSTER * blockDim.x) {
            SourcePack packs[SOURCES];
#pragma unroll
            for (int source = 0; source < SOURCES; ++source) load(packs[source], source, at);
            float x[W];
            sum_packs(x, packs);
            store(at, add_residual_pack(x, row, at, nullptr));
        }
        trace_.lap(TraceRole::load);
    }

    // Normalise and quantise x; store(index, pack) takes the output, store_scale(group, scale, marks) runs on one thread
    // for each scale, and with NORMED store_normed(index, pack) takes the normed row. All threads. With MARKS bit l of
    // `marks` says that the pack of lane l of the group is a word of ABSENT.
    template <bool MARKS = false, typename Store, typename StoreScale, typename StoreNormed>
    __device__ __forceinline__ void normalise(float (&x)[PACKS][W], const Store& store, const StoreScale& store_scale,
                                              const StoreNormed& store_normed) {
        refresh();
        if constexpr (HEAD != 0) return normalise_heads<MARKS>(x, store, store_scale, store_normed);
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
                    // A ragged row's padding is x = 0, which must not become 0 * infinity.
                    if (!RAGGED || index(i) * W + k < p_.columns)
                        maximum = max(maximum, __float_as_uint(x[i][k]) & 0x7fffffffu);
                }
            }
        }
        const RowStatistics row = reduce_row(scratch_, done_++, squares, maximum);
        const float f = __frcp_rn(__fsqrt_rn(__fadd_rn(mean_of(row.sum_of_squares), p_.epsilon)));
        trace_.need(f);
        float largest = __fmul_rn(row.maximum, f);
        if constexpr (BETA) largest = add_beta(x, f);
        trace_.lap(TraceRole::reduce);
        float inverse = 1.0f;
        if constexpr (QUANT == Quant::row) {
            const Quantisation scale = quantisation<Out, Scale>(largest, p_.scale_ub);
            inverse = scale.inverse;
            if (thread_ == 0) store_scale(0, scale.scale, 0);
        } else if constexpr (QUANT == Quant::fixed) {
            inverse = finite_inverse(p_.scale_ub);
        }
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            if constexpr (GROUPED) {
                if constexpr (!BETA) multiply(x[i], f);
                if constexpr (NORMED) hand_normed(x[i], i, store_normed);
                quantise_group<MARKS>(x[i], i, largest_of(x[i], i), store, store_scale);
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

    // normalise() into row `row` of the outputs.
    __device__ __forceinline__ void normalise_to_output(float (&x)[PACKS][W], int row) {
        normalise(
            x, [&](int at, const OutPack& pack) { store_of_row(p_.output, row, at, p_, pack); },
            [&](int group, float scale, u32) { store_scalar(scale_at(p_, 0, row, group), scale); },
            [&](int at, const InPack& pack) { store_of_row(normed_output_of(p_), row, at, p_, pack); });
    }

    // Copy the own input's row to `staging`.
    __device__ __forceinline__ void stage(char* staging, int row) const {
#pragma unroll 2
        for (int at = threadIdx.x; at < packs_; at += blockDim.x) {
            InPack pack;
            load_of_row(pack, p_.call.input, row, at, p_);
            store_pack(staging + at * sizeof(InPack), pack);
        }
    }

    // Read a row of residual_out from a payload, and store it to row `row` of residual_output.
    __device__ __forceinline__ void take_residual(float (&x)[PACKS][W], const char* from, int row) {
        refresh();
        ResidualPack packs[PACKS];
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            if (has(i)) load_pack(packs[i], from + index(i) * sizeof(ResidualPack));
        }
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            if (has(i)) {
                store_of_row(p_.residual_output, row, index(i), p_, packs[i]);
                to_float(x[i], packs[i]);
                trace_.need(x[i]);
            }
        }
        trace_.lap(TraceRole::gather);
    }

    // The index in the row of this thread's pack i, and whether that pack exists.
    __device__ __forceinline__ int index(int i) const { return i * int(CLUSTER * blockDim.x) + thread_; }
    __device__ __forceinline__ bool has(int i) const { return EXACT || index(i) < packs_; }
    // The same of gamma and beta, which a row's heads share.
    __device__ __forceinline__ int in_vector(int i) const { return HEAD != 0 ? index(i) % HEAD_LANES : index(i); }

private:
    static __device__ constexpr bool early_residual() {
        return FAULT("operand-before-pdl-wait") && RESIDUAL && KEEP_GAMMA && PACKS == 1;
    }
    static __device__ __forceinline__ int first_row() { return blockIdx.x / CLUSTER; }

    // Called at the start of each step. Hides from the compiler that the thread's index does not change: otherwise the
    // offsets of all packs in all tensors are hoisted out of the loop over rows, and take more registers than there
    // are.
    __device__ __forceinline__ void refresh() {
        thread_ = block_ * blockDim.x + threadIdx.x;
        ptx::forget(thread_);
    }

    // sum / columns, by a multiplication where that gives the same bits in a fraction of the time.
    __device__ __forceinline__ float mean_of(float sum) const {
        return share_ != 0 ? __fmul_rn(sum, __uint_as_float(share_)) : __fdiv_rn(sum, float(p_.columns));
    }

    // The sum over a head of what each lane has of it. Its tree is that of reduce.cuh: absent packs add +0 there.
    static __device__ __forceinline__ float head_mean(float sum) {
        return __fmul_rn(butterfly_sum<HEAD_LANES / 2>(sum), 1.0f / HEAD);  // a power of two, so this is a division
    }

    // normalise() for heads: a head's sums are found by shuffles. By whole warps.
    template <bool MARKS, typename Store, typename StoreScale, typename StoreNormed>
    __device__ __forceinline__ void normalise_heads(float (&x)[PACKS][W], const Store& store,
                                                    const StoreScale& store_scale, const StoreNormed& store_normed) {
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
            const float f = __frcp_rn(__fsqrt_rn(__fadd_rn(head_mean(squares), p_.epsilon)));
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
                quantise_group<MARKS>(x[i], i, largest, store, store_scale);
            } else if (has(i)) {
                if constexpr (QUANTISE) multiply(x[i], finite_inverse(p_.scale_ub));
                OutPack pack;
                from_float(pack, x[i]);
                store(index(i), pack);
            }
        }
        trace_.lap(TraceRole::reduce);
        trace_.lap(TraceRole::store);
    }

    // x = x - its mean, over the row; a ragged row's padding stays 0.
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
        const float mean = mean_of(reduce_row(scratch_, done_++, sums, 0).sum_of_squares);
        scratch_.expect(done_, PACKS);
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
#pragma unroll
            for (int k = 0; k < W; ++k) {
                if (has(i) && (!RAGGED || index(i) * W + k < p_.columns)) x[i][k] = __fsub_rn(x[i][k], mean);
            }
        }
    }

    // x = x * f + beta. Returns the largest |x| of the row.
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
                    if (!RAGGED || index(i) * W + k < p_.columns)
                        maximum = max(maximum, __float_as_uint(x[i][k]) & 0x7fffffffu);
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

    // The largest |v| of the group of pack i. By whole warps, also where there is no pack.
    __device__ __forceinline__ float largest_of(const float (&v)[W], int i) const {
        u32 maximum = 0;
#pragma unroll
        for (int k = 0; k < W; ++k) maximum = max(maximum, __float_as_uint(v[k]) & 0x7fffffffu);
        return __uint_as_float(group_max<LANES * W, W>(has(i) ? maximum : 0));
    }

    // Quantises pack i, whose group has that maximum. By whole warps.
    template <bool MARKS, typename Store, typename StoreScale>
    __device__ __forceinline__ void quantise_group(float (&y)[W], int i, float largest, const Store& store,
                                                   const StoreScale& store_scale) const {
        const Quantisation scale = quantisation<Out, Scale>(largest, p_.scale_ub);
        multiply(y, scale.inverse);
        OutPack pack;
        from_float(pack, y);
        u32 marks = 0;
        if constexpr (MARKS)
            marks = __ballot_sync(0xffffffffu, pack.word[0] == ~0u) >> (threadIdx.x % 32) & (~0u >> (32 - LANES));
        if (!has(i)) return;
        store(index(i), pack);
        if (index(i) % LANES == 0) store_scale(index(i) / LANES, scale.scale, marks);
    }

    static __device__ __forceinline__ void multiply(float (&x)[W], float factor) {
#pragma unroll
        for (int k = 0; k < W; ++k) x[k] = __fmul_rn(x[k], factor);
    }

    __device__ __forceinline__ ResidualPack add_residual_pack(float (&x)[W], int row, int at,
                                                              const ResidualPack* fetched) const {
        ResidualPack pack;
        float residual[W];
        if (early_residual() && row == first_row()) {
            pack = residual_[0];
        } else if (fetched != nullptr) {
            pack = *fetched;
        } else {
            load_of_row(pack, p_.residual, row, at, p_);
        }
        to_float(residual, pack);
#pragma unroll
        for (int k = 0; k < W; ++k) x[k] = __fadd_rn(x[k], residual[k]);
        from_float(pack, x);
        to_float(x, pack);
        return pack;
    }

    __device__ __forceinline__ void gamma(float (&g)[W], int i) const { vector(g, gamma_, p_.gamma, i); }

    // This thread's pack i of gamma or beta.
    template <int N>
    __device__ __forceinline__ void vector(float (&v)[W], const Pack<Gamma, W> (&kept)[N], const void* from,
                                           int i) const {
        Pack<Gamma, W> pack;
        if constexpr (KEEP_GAMMA) {
            pack = kept[i];
            keep_packed(pack);
        } else {
            load_of_row(pack, from, 0, in_vector(i), p_);
        }
        to_float(v, pack);
    }

    const FusedParams& p_;
    Scratch& scratch_;
    Trace& trace_;
    const int packs_;
    int thread_;
    u32 share_;  // the bits of 1 / columns where that is exact, else 0
    u32 done_;
    const u32 block_;  // rank in the cluster
    ResidualPack residual_[PACKS];
    Pack<Gamma, W> gamma_[KEEP_GAMMA ? PACKS : 1];
    Pack<Gamma, W> beta_[KEEP_GAMMA && BETA ? PACKS : 1];
};
