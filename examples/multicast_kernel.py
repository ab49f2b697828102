# SPDX-License-Identifier: Apache-2.0
"""An all-gather by a kernel of one's own on multicast memory: each store reaches every rank.

Rank r writes its part of the result once, to the multicast address, and the switch delivers it to all members. Then one
`multimem.red` adds 1 to the counter of every rank, and each rank waits for its own counter. The GPUs are
always emulated: read in docs/multicast.md what a multicast object depends on before you create one on real GPUs.

    python examples/multicast_kernel.py

Output:

    every rank has all parts: [True, True, True, True]
    bytes that a rank stored: 4096; bytes that it received from others: 12288
    reports of the race detector: []
"""

from __future__ import annotations

import numpy as np

import drvfuse as df

RANKS, THREADS = 4, 256
PART = 16 * THREADS  # bytes of a rank's part
COUNTER = RANKS * PART  # offset of the counter, which follows the parts

SOURCE = r"""
// One block. `mine`: this rank's part of the result, at the multicast address. `arrived`: this rank's counter at its
// own address; `arrived_everywhere`: the counters of all ranks at the multicast address.
extern "C" __global__ void gather(const float4* part, float4* mine, unsigned* arrived_everywhere, unsigned* arrived,
                                  unsigned ranks) {
  float4 v = part[threadIdx.x];
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};"
               :: "l"(mine + threadIdx.x), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("multimem.red.release.sys.global.add.u32 [%0], 1;" :: "l"(arrived_everywhere) : "memory");
    // From here on the same memory is read by its own address.
    asm volatile("fence.proxy.alias;" ::: "memory");
    unsigned seen;
    do asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(arrived) : "memory");
    while (seen < ranks);  // Without a bound: a program that others run needs one.
    asm volatile("fence.proxy.alias;" ::: "memory");
  }
}
"""


def main() -> None:
    machine = df.emu.Machine(devices=RANKS, race=True)
    parts = [np.random.default_rng(rank).standard_normal(PART // 4).astype(np.float32) for rank in range(RANKS)]
    with (
        df.Group.local(RANKS, driver=machine, max_blocks=4) as group,
        group.symmetric(COUNTER + 16, multicast=True) as buffer,
    ):
        kernel = df.compile(SOURCE, driver=machine, arch=group[0].device.arch)["gather"]
        for counter in buffer.arrays(1, "uint32", COUNTER):
            counter.copy_from(np.zeros(1, np.uint32))
        inputs = [rank.array(part) for rank, part in zip(group, parts, strict=True)]
        group.synchronize()  # now every counter is 0
        everywhere = buffer.multicast_ptr
        for rank, own, part in zip(group, buffer.ptrs, inputs, strict=True):
            mine = everywhere + rank.index * PART
            launch = kernel.prepare(
                1, THREADS, part, mine, everywhere + COUNTER, own + COUNTER, group.size, device=rank.device
            )
            launch(rank.stream)
        group.synchronize()
        results = [array.numpy() for array in buffer.arrays(COUNTER // 4, "float32")]
        print("every rank has all parts:", [bool((result == np.concatenate(parts)).all()) for result in results])
        print(f"bytes that a rank stored: {PART}; bytes that it received from others: {(RANKS - 1) * PART}")
        print("reports of the race detector:", machine.reports)


if __name__ == "__main__":
    main()
