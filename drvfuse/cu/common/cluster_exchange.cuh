// SPDX-License-Identifier: Apache-2.0
// An exchange of pairs of words between the blocks of a cluster. The bytes complete on an mbarrier of the receiving
// block: a thread that has waited for the mbarrier may read all pairs of the exchange. Global memory is not used.
//
// There are two sets of pairs, each with an mbarrier. An exchange uses one set. A kernel may use a set again only when
// no thread still reads the set; cluster_reduce.cuh proves this for its exchanges.
//
// Memory order. The pairs are stored by st.async, which completes on the receiving block's mbarrier; a wait with
// acquire at cluster scope for the phase that counts these bytes makes them visible. `init` is followed by an arrival
// at the cluster's barrier, and ptx::cluster_wait() comes before the first `send`: no block sends to a block that has
// not begun or has not initialised its mbarriers. Bytes may arrive before expect_pairs() is called, since the phase
// cannot end before the arrival in expect_pairs(). A block must not exit before it has received everything that is sent
// to it.
#pragma once
#include "common/types.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"

template <int Pairs>
struct ClusterExchange {
    uint2 pairs[2][Pairs];  // the pairs of each set, which all blocks send to this block
    u64 arrived[2];         // the mbarrier of each set, on which the bytes of its pairs complete

    // Initialises the mbarriers, and arrives at the cluster's barrier. Called by all threads of the block. The
    // arrival is relaxed, as the fence covers everything that other blocks must see; a release would wait for a fence
    // of the whole GPU.
    __device__ __forceinline__ void init() {
        if (threadIdx.x == 0) {
#pragma unroll
            for (int set = 0; set < 2; ++set) ptx::mbarrier_init(barrier(set), 1);
            ptx::fence_mbarrier_init();
        }
        ptx::cluster_arrive();
    }

    // Announces that `count` pairs will arrive in set `set`. Called by all threads of the block.
    __device__ __forceinline__ void expect_pairs(u32 set, u32 count) {
        if (threadIdx.x == 0) ptx::mbarrier_arrive_expecting(barrier(set), count * u32(sizeof(uint2)));
    }

    // Sends the pair (first, second) to block `block` of the cluster, as its pair `index` of set `set`.
    __device__ __forceinline__ void send(u32 set, u32 index, u32 block, u32 first, u32 second) {
        const u32 to = u32(__cvta_generic_to_shared(&pairs[set][index]));
        ptx::store_async_v2(ptx::address_in_block(to, block), first, second,
                            ptx::address_in_block(barrier(set), block));
    }

    // Waits until all announced pairs of set `set` have arrived. `parity` is the parity of the mbarrier's phase: 0 for
    // the first use of the set, 1 for the second, 0 for the third, and so on.
    __device__ __forceinline__ void wait(u32 set, u32 parity) {
        const u32 object = barrier(set);
        while (!ptx::mbarrier_try_wait_cluster(object, parity)) {
        }
    }

private:
    __device__ __forceinline__ u32 barrier(u32 set) { return u32(__cvta_generic_to_shared(&arrived[set])); }
};
