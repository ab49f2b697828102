// SPDX-License-Identifier: Apache-2.0
// The steps of a row in the fused kernels: sum over the ranks, residual, norm, quantisation.
#pragma once
#include "collectives/rows/norm.cuh"

// The number of packs of every source that a thread has in flight: enough for four to eight loads, if the row has so
// many packs and registers suffice. With NODES a pack of the source takes several loads (nodes/sums.cuh).
constexpr int WISHED = NODES || SOURCES > 4 || (PACKS * SOURCES > 12) ? 1 : SOURCES > 2 || PACKS > 3 ? 2 : 4;
constexpr int BATCH = WISHED < PACKS ? WISHED : PACKS;

// The state that a block keeps for all rows of a call, and the steps by which it processes a row.
class Rows : public RowNorm {
public:
    __device__ __forceinline__ Rows(const RowsParams& p, Scratch& scratch, Trace& trace) : RowNorm(p, scratch, trace) {
        if (early_residual() && has(0)) load_of_row(residual_[0], p.residual, first_row(), index(0), p);
    }

    // Sets x to the sum of a row over the ranks; load(pack, source, index) loads one pack of the row.
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

    // Adds the residual to x and rounds x to the residual's type. Calls store(index, pack) with each pack of
    // residual_out.
    template <bool FETCHED = false, typename Store>
    __device__ __forceinline__ void add_residual(float (&x)[PACKS][W], int row, const Store& store) {
        refresh();
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            if (has(i)) store(index(i), add_residual_pack(x[i], row, index(i), FETCHED ? &residual_[i] : nullptr));
        }
    }

    // Does sum() and add_residual() for a row that this rank does not normalise yet. Only one pack at a time is in
    // registers.
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

    // Copies row `row` of this rank's input to `staging`.
    __device__ __forceinline__ void stage(char* staging, int row) const {
#pragma unroll 2
        for (int at = threadIdx.x; at < packs_; at += blockDim.x) {
            InPack pack;
            load_of_row(pack, p_.call.input, row, at, p_);
            store_pack(staging + at * sizeof(InPack), pack);
        }
    }

    // Loads a row of residual_out from a payload into x, and stores it to row `row` of residual_output.
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

private:
    static __device__ constexpr bool early_residual() {
        return FAULT("operand-before-pdl-wait") && RESIDUAL && KEEP_GAMMA && PACKS == 1;
    }
    static __device__ __forceinline__ int first_row() { return blockIdx.x / CLUSTER; }

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

    ResidualPack residual_[PACKS];
};
