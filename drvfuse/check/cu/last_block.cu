// SPDX-License-Identifier: Apache-2.0
// A sum whose last step is done by the block that arrives last: the pattern of split reductions and of norms behind a
// matrix product, for a fault that drvfuse's own kernels have no place for.
//
// Each block sums its part of x into `partial`, fences and counts itself; the last one fences, adds the partial sums in
// the order of the blocks and sets the counter back to 0 for the next launch. The result does not depend on which block is
// last. One warp a block.
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
