// SPDX-License-Identifier: Apache-2.0
// Loops over a range of a tensor's packs. Pack j of the range belongs to thread j mod (blocks * threads) of the grid,
// on every rank.
#pragma once
#include "collectives/sums/packs.cuh"
#include "common/partition.cuh"

using Packs = Partition<i64, RANKS>;

__device__ __forceinline__ i64 thread_index() { return i64(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ __forceinline__ i64 thread_count() { return i64(gridDim.x) * blockDim.x; }

// Sums each of B packs over the sources: load(pack, source, j) loads pack j of a source, and store(j, sum) stores the
// fp32 sum of pack j. All loads are issued before the first sum.
template <int B, typename Load, typename Store>
__device__ __forceinline__ void reduce_packs(i64 j, i64 stride, Trace& trace, const Load& load, const Store& store) {
    SourcePack packs[B][SOURCES];
#pragma unroll
    for (int b = 0; b < B; ++b) {
#pragma unroll
        for (int source = 0; source < SOURCES; ++source) load(packs[b][source], source, j + b * stride);
    }
    trace.need(packs);
    trace.lap(TraceRole::load);
#pragma unroll
    for (int b = 0; b < B; ++b) {
        float sum[W];
        sum_packs(sum, packs[b]);
        store(j + b * stride, sum);
    }
}

// Sums this thread's packs of the range [0, count), with the loads of PACKS packs in flight.
template <typename Load, typename Store>
__device__ __forceinline__ void reduce_range(i64 count, Trace& trace, const Load& load, const Store& store) {
    const i64 stride = thread_count();
    i64 j = thread_index();
    if constexpr (PACKS > 1) {
#pragma unroll 1
        for (; j + (PACKS - 1) * stride < count; j += PACKS * stride)
            reduce_packs<PACKS>(j, stride, trace, load, store);
    }
#pragma unroll 1
    for (; j < count; j += stride) reduce_packs<1>(j, stride, trace, load, store);
}

// Copies this thread's packs of the range [first, first + count) of this rank's input to `staging`.
__device__ __forceinline__ void stage_input(const AllreduceParams& p, char* staging, i64 first, i64 count) {
#pragma unroll 2
    for (i64 j = thread_index(); j < count; j += thread_count()) {
        InPack pack;
        load_input(pack, p.call.input, first + j, p.count);
        store_pack(staging + j * IN_BYTES, pack);
    }
}
