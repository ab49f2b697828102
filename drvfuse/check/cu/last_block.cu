// SPDX-License-Identifier: Apache-2.0
// A sum whose last step is done by the block that arrives last, as in split reductions and in norms after a matrix product.
// It is here for a fault that cannot be planted in drvfuse's own kernels.
//
// Each block stores the sum of its part of x to `partial`, executes a fence and increments the counter. The last block
// executes a fence, adds the partial sums in the order of the blocks, and resets the counter to 0 for the next launch. The
// result does not depend on which block is last. A block has one warp.
#include "common/faults.cuh"
#include "common/types.cuh"

extern "C" __global__ void last_block(const u32* x, int count, u32* partial, u32* counter, u32* sum) {
    u32 own = 0;
    for (int i = blockIdx.x * 32 + threadIdx.x; i < count; i += 32 * gridDim.x) own += x[i];
    own = __reduce_add_sync(0xffffffffu, own);
    if (threadIdx.x != 0) return;
    partial[blockIdx.x] = own;
    if (!FAULT("last-arriver-no-fence")) __threadfence();
    if (atomicAdd(counter, 1u) != gridDim.x - 1) return;
    if (!FAULT("last-arriver-no-fence")) __threadfence();
    u32 total = 0;
    for (u32 block = 0; block < gridDim.x; ++block) total += partial[block];
    *sum = total;
    atomicExch(counter, 0u);
}
