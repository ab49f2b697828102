// SPDX-License-Identifier: Apache-2.0
// The steps that a row of the fused kernels goes through: sum over the ranks, residual, norm, quantisation.
//
// A row is held by a block or, with DRVFUSE_CLUSTER blocks per cluster, by a cluster, whose threads are numbered block
// by block. Layout, numerics and the meaning of the definitions are at the top of the kernels' files.
#pragma once
#include "collectives/kernel.cuh"
#include "common/quantise.cuh"
#include "common/reduce.cuh"
#if DRVFUSE_CLUSTER > 1
#include "common/cluster_reduce.cuh"
#endif

using Gamma = DRVFUSE_GAMMA_DTYPE;
using Scale = DRVFUSE_SCALES_DTYPE;
constexpr bool RESIDUAL = DRVFUSE_RESIDUAL;
constexpr bool QUANTISE = sizeof(Out) == 1;
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

struct FusedParams {
    Call call;
    const void* gamma;
    const void* residual;
    void* residual_output;
    void* output;
    void* scales;
    int rows;
    int chunk_rows;  // see Payload in the .cu, which stays below 4 GiB; unused by one_stage direct
    int columns;
    float epsilon;
    float weight_offset;
    float scale_ub;
};

__device__ __forceinline__ int packs_of_row(const FusedParams& p) { return (p.columns + W - 1) / W; }
__device__ __forceinline__ u32 input_stride(const FusedParams& p) { return packs_of_row(p) * u32(sizeof(InPack)); }
__device__ __forceinline__ u32 output_stride(const FusedParams& p) {
    return (packs_of_row(p) * u32(sizeof(OutPack)) + 15) / 16 * 16;
}

// Pack `index` of row `row` of a user's tensor.
template <typename T>
__device__ __forceinline__ void load_of_row(Pack<T, W>& pack, const void* tensor, int row, int index,
                                            const FusedParams& p) {
    const char* address = static_cast<const char*>(tensor) + (i64(row) * p.columns + index * W) * sizeof(T);
    if constexpr (RAGGED) {
        load_elements(pack, address, p.columns - index * W);
    } else {
        load_pack(pack, address);
    }
}

template <typename T>
__device__ __forceinline__ void store_of_row(void* tensor, int row, int index, const FusedParams& p,
                                             const Pack<T, W>& pack) {
    char* address = static_cast<char*>(tensor) + (i64(row) * p.columns + index * W) * sizeof(T);
    if constexpr (RAGGED) {
        store_elements(address, pack, p.columns - index * W);
    } else {
        store_pack(address, pack);
    }
}

// Hides where the pack comes from, so that its conversion to fp32 is not hoisted out of the loop over rows: the
// registers for a row's gamma in fp32 would be twice as many, or four times.
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
                if (has(i)) load_of_row(gamma_[i], p.gamma, 0, index(i), p);
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

    // Before normalise(), once for each: makes ready for the exchange of a row's sums between blocks.
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

    // Normalise and quantise x; store(index, pack) takes the output, store_scale(s) runs on one thread. All threads.
    template <typename Store, typename StoreScale>
    __device__ __forceinline__ void normalise(float (&x)[PACKS][W], const Store& store, const StoreScale& store_scale) {
        refresh();
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
        trace_.lap(TraceRole::reduce);
        float inverse = 1.0f;
        if constexpr (QUANTISE) {
            const Quantisation scale = quantisation<Out, Scale>(__fmul_rn(row.maximum, f), p_.scale_ub);
            inverse = scale.inverse;
            if (thread_ == 0) store_scale(scale.scale);
        }
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            if (has(i)) {
#pragma unroll
                for (int k = 0; k < W; ++k) {
                    x[i][k] = __fmul_rn(x[i][k], f);
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
            [&](float scale) { store_scalar(static_cast<Scale*>(p_.scales) + row, scale); });
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
        InPack packs[PACKS];
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            if (has(i)) load_pack(packs[i], from + index(i) * sizeof(InPack));
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

    // Which pack of a row is this thread's number i, and whether there is one.
    __device__ __forceinline__ int index(int i) const { return i * int(CLUSTER * blockDim.x) + thread_; }
    __device__ __forceinline__ bool has(int i) const { return EXACT || index(i) < packs_; }

private:
    static __device__ constexpr bool early_residual() {
        return FAULT("operand-before-pdl-wait") && RESIDUAL && KEEP_GAMMA && PACKS == 1;
    }
    static __device__ __forceinline__ int first_row() { return blockIdx.x / CLUSTER; }

    // Begins each step. Hides that the thread's index does not change: otherwise the offsets of all packs in all
    // tensors are hoisted out of the loop over rows, and take more registers than there are.
    __device__ __forceinline__ void refresh() {
        thread_ = block_ * blockDim.x + threadIdx.x;
        ptx::forget(thread_);
    }

    // sum / columns, by a multiplication where that gives the same bits in a fraction of the time.
    __device__ __forceinline__ float mean_of(float sum) const {
        return share_ != 0 ? __fmul_rn(sum, __uint_as_float(share_)) : __fdiv_rn(sum, float(p_.columns));
    }

    __device__ __forceinline__ InPack add_residual_pack(float (&x)[W], int row, int at, const InPack* fetched) const {
        InPack pack;
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

    __device__ __forceinline__ void gamma(float (&g)[W], int i) const {
        Pack<Gamma, W> pack;
        if constexpr (KEEP_GAMMA) {
            pack = gamma_[i];
            keep_packed(pack);
        } else {
            load_of_row(pack, p_.gamma, 0, index(i), p_);
        }
        to_float(g, pack);
    }

    const FusedParams& p_;
    Scratch& scratch_;
    Trace& trace_;
    const int packs_;
    int thread_;
    u32 share_;  // the bits of 1 / columns where that is exact, else 0
    u32 done_;
    const u32 block_;  // of the cluster
    InPack residual_[PACKS];
    Pack<Gamma, W> gamma_[KEEP_GAMMA ? PACKS : 1];
};
