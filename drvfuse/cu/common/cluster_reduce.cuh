// SPDX-License-Identifier: Apache-2.0
// The reduction of one row that a cluster of blocks holds: the tree of reduce.cuh, whose last step every warp computes.
//
// Pack (j * Cluster + block) * threads + t of the row belongs to thread t of block `block`, and blocks have `threads`
// threads, so the 32 packs of a group belong to one warp, as in reduce.cuh. Each warp sends its group's sum and maximum
// to every block of the cluster by asynchronous stores, which complete on an mbarrier of the receiving block. Every
// warp waits for the mbarrier of its block and reads the sums and maxima of all groups of the row.
//
// Two sets of words, each with an mbarrier, are used alternately. A block can be one row ahead of another and no more:
// it has passed the exchange of row k + 1 only when every warp has sent its part of that row, and each warp sends its
// part after it has read the words of row k. So no thread still reads the words of row k when those of row k + 2
// arrive.
//
// Lifetime and memory order: cluster_exchange.cuh; the first `expect` waits at the cluster's barrier. A block exits
// only after it has received the words of its last row from every block, and all blocks send their parts of the same
// number of rows, so no block sends to a block that has exited. This holds after a time-out too, because threads that
// give up still take part in every exchange (push.cuh).
#pragma once
#include "common/cluster_exchange.cuh"
#include "common/reduce.cuh"

// The pair of a group of 32 packs is the sum of their squares, and the maximum of the warp that holds them.
template <int Cluster>
struct ClusterScratch : ClusterExchange<MAX_GROUPS> {
    static_assert(Cluster <= 32, "a lane for each block");

    // Announces the pairs that reduce_row() will receive for this row, which has `packs` packs per thread. Called by
    // all threads of the block before reduce_row(). This is a function of its own, so that a caller can call it while
    // the loads of the row are in flight.
    __device__ __forceinline__ void expect(u32 row, u32 packs) {
        if (row == 0 && !FAULT("no-cluster-barrier")) ptx::cluster_wait();
        expect_pairs(row % 2, packs * Cluster * (blockDim.x / 32));
    }

    static __device__ __forceinline__ u32 block() { return ptx::block_in_cluster(); }
};

// The reduce_row of reduce.cuh for a cluster.
template <int Cluster, int PACKS>
__device__ __forceinline__ RowStatistics reduce_row(ClusterScratch<Cluster>& scratch, u32 row,
                                                    const float (&squares)[PACKS], u32 maximum) {
    const u32 lane = threadIdx.x % 32;
    const u32 warp = threadIdx.x / 32;
    const u32 warps = blockDim.x / 32;
    const u32 set = row % 2;
    maximum = ptx::warp_max(maximum);
    // No lane sends pairs of this row before all lanes of the warp have read those of the previous row. The
    // instructions by which lanes exchange values do not order memory, so they do not ensure this.
    __syncwarp();
#pragma unroll
    for (int j = 0; j < PACKS; ++j) {
        const float sum = butterfly_sum(squares[j]);
        const u32 group = (j * Cluster + scratch.block()) * warps + warp;
        if (lane < Cluster) scratch.send(set, group, lane, __float_as_uint(sum), maximum);
    }
    scratch.wait(set, row / 2 % 2);
    const uint2(&groups)[MAX_GROUPS] = scratch.pairs[set];
    const u32 count = PACKS * Cluster * warps;
    if (count <= 32) {
        // A butterfly over 32 lanes with at most one group each would give the same sum. To save its steps 16 and 8,
        // each lane loads four groups and adds them in the order of these steps.
        float sums[4];
        maximum = 0;
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const u32 group = lane % 8 + 8 * i;
            const uint2 found = group < count ? groups[group] : make_uint2(0, 0);
            sums[i] = __uint_as_float(found.x);
            maximum = max(maximum, found.y);
        }
        const float sum = __fadd_rn(__fadd_rn(sums[0], sums[2]), __fadd_rn(sums[1], sums[3]));
        return {butterfly_sum<4>(sum), __uint_as_float(ptx::warp_max(maximum))};
    }
    float sum = 0.0f;
    maximum = 0;
#pragma unroll 1
    for (u32 group = lane; group < count; group += 32) {
        sum = __fadd_rn(sum, __uint_as_float(groups[group].x));
        maximum = max(maximum, groups[group].y);
    }
    return {butterfly_sum(sum), __uint_as_float(ptx::warp_max(maximum))};
}
