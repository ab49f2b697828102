// SPDX-License-Identifier: Apache-2.0
// Which packs of a row a thread of the fused kernels holds.
//
// A row is held by a block or, with DRVFUSE_CLUSTER blocks per cluster, by a cluster, whose threads are numbered
// block by block. Pack i * threads + t of the row belongs to thread t.
#pragma once
#include "collectives/rows/form.cuh"
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

// Declares the size of the cluster. Otherwise every cluster instruction is compiled with a test for launches without
// clusters.
#if DRVFUSE_CLUSTER > 1
#define OF_CLUSTER __cluster_dims__(CLUSTER, 1, 1)
#else
#define OF_CLUSTER
#endif

class RowPacks {
public:
    __device__ __forceinline__ explicit RowPacks(const RowsParams& p)
        : packs_(packs_of_row(p)), block_(Scratch::block()) {
        refresh();
    }

    // The index in the row of this thread's pack i.
    __device__ __forceinline__ int index(int i) const { return i * int(CLUSTER * blockDim.x) + thread_; }
    // Whether this thread's pack i exists.
    __device__ __forceinline__ bool has(int i) const { return EXACT || index(i) < packs_; }
    // The index, in gamma and beta, of the pack for this thread's pack i. The heads of a row share gamma and beta.
    __device__ __forceinline__ int in_vector(int i) const { return HEAD != 0 ? index(i) % HEAD_LANES : index(i); }

protected:
    // Called at the start of each step. Hides from the compiler that the thread's index does not change. Otherwise the
    // offsets of all packs in all tensors are hoisted out of the loop over rows, and the registers do not suffice.
    __device__ __forceinline__ void refresh() {
        thread_ = block_ * blockDim.x + threadIdx.x;
        ptx::forget(thread_);
    }

    const int packs_;
    int thread_;
    const u32 block_;  // the index of this block in the cluster
};
