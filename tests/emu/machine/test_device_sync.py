# SPDX-License-Identifier: Apache-2.0
"""Devices, blocks and warps that synchronise through memory: flags, locks, the last arriving block, clusters, seeds."""

from __future__ import annotations

import numpy as np
import pytest
from engine_harness import Rig, line_of

ALLREDUCE = """
struct Table { const float* in[4]; u32* flags[4]; };
KERNEL k(const __grid_constant__ Table table, float* out, int count, int rank, u32 epoch) {
    int t = threadIdx.x, b = blockIdx.x;
    if (t < 4) {
        store(table.flags[t] + b * 4 + rank, epoch);
        while (load(table.flags[rank] + b * 4 + t) < epoch);
    }
    __syncthreads();
    for (int i = b * blockDim.x + t; i < count; i += gridDim.x * blockDim.x) {
        float s = 0;
        for (int r = 0; r < 4; r++) s += table.in[r][i]; // sum
        out[i] = s;
    }
}"""


def allreduce(rig: Rig, rng: np.random.Generator, calls: int = 2) -> tuple[list[np.ndarray], list[object]]:
    count = 1000
    flags = [rig.array(np.zeros(16, np.uint32), d) for d in range(4)]
    outs = [rig.empty(4 * count, d, 1 << d, 1 << d) for d in range(4)]
    trace: list[object] = []
    for epoch in range(1, calls + 1):
        x = rng.standard_normal((4, count), np.float32)
        ins = [rig.array(x[d], d) for d in range(4)]
        launches = []
        for d in range(4):
            source = ALLREDUCE.replace(
                "const __grid_constant__ Table table",
                ", ".join([f"const float* i{j}" for j in range(4)] + [f"u32* f{j}" for j in range(4)]),
            ).replace("int t =", "Table table = {{i0, i1, i2, i3}, {f0, f1, f2, f3}}; int t =", 1)
            launches.append(rig.launch(source, *ins, *flags, outs[d], count, d, epoch, grid=4, block=64, device=d))
        assert rig.finish(*launches)
        assert all(x.fault is None for x in launches)
        total = ((x[0] + x[1]) + x[2]) + x[3]
        for d in range(4):
            assert (rig.read(outs[d], np.float32, count) == total).all()
        trace += [x.counters for x in launches] + [rig.engine.clock_ns]
    return [rig.read(o, np.float32, count) for o in outs], trace


@pytest.mark.parametrize("seed", range(6))
def test_devices_synchronise_by_flags(rng, seed):
    rig = Rig(seed)
    allreduce(rig, rng)
    rig.close()


def test_the_same_seed_gives_the_same_run_and_another_seed_another():
    traces = []
    for seed in (3, 3, 4):
        rig = Rig(seed)
        traces.append(allreduce(rig, np.random.default_rng(1))[1])
        rig.close()
    assert traces[0] == traces[1]
    assert traces[0] != traces[2]


def test_some_seeds_let_warps_of_a_block_run_ahead():
    source = """
    KERNEL k(u32* turn, u32* first) {
        if (threadIdx.x % 32) return;
        while (atomicAdd(turn + 1, 1) < 500) if (!atomicCAS(turn, 0, 1)) *first = threadIdx.x / 32;
    }"""
    found = set()
    for seed in range(12):
        rig = Rig(seed)
        first = rig.empty(4)
        rig.run(source, rig.array(np.zeros(2, np.uint32)), first, block=256)
        found.add(int(rig.read(first, np.uint32, 1)[0]))
        rig.close()
    assert 0 in found and len(found) > 1


def test_accesses_of_a_collective_are_counted_by_line_and_device(rig, rng):
    _, trace = allreduce(rig, rng, calls=1)
    counters = trace[0]
    line = line_of(ALLREDUCE, "sum")
    (count,) = [c for (file, n), c in counters.lines.items() if n == line and file.endswith("test.cu")]
    assert (count.accesses, count.local_read, count.remote_read) == (4000, 4000, 12000)
    assert counters.total.local_written == 4000 + 4 * 4
    assert counters.total.remote_written == 3 * 4 * 4
    assert counters.barriers == 4


def test_the_last_arriving_block_sees_the_data_of_all_blocks(rig):
    source = """
    KERNEL k(int* data, u32* count, int* out) {
        __shared__ bool last;
        data[blockIdx.x] = blockIdx.x + 1;
        __threadfence();
        if (!threadIdx.x) last = atomicAdd(count, 1) == gridDim.x - 1;
        __syncthreads();
        if (last && !threadIdx.x) { int s = 0; for (int i = 0; i < gridDim.x; i++) s += data[i]; out[0] = s; }
    }"""
    out = rig.empty(4)
    rig.run(source, rig.empty(400), rig.array(np.zeros(1, np.uint32)), out, grid=100, resident=3)
    assert rig.read(out, np.int32, 1)[0] == 5050


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_lock_gives_mutual_exclusion(seed):
    source = """
    KERNEL k(u32* lock, int* value) {
        if (threadIdx.x) return;
        for (int i = 0; i < 5; i++) {
            while (atomicCAS(lock, 0, 1));
            __threadfence();
            int v = *(volatile int*)value;
            *(volatile int*)value = v + 1;
            __threadfence();
            atomicExch(lock, 0);
        }
    }"""
    rig = Rig(seed)
    value = rig.array(np.zeros(1, np.int32))
    rig.run(source, rig.array(np.zeros(1, np.uint32)), value, grid=20)
    assert rig.read(value, np.int32, 1)[0] == 100
    rig.close()


def test_blocks_of_a_cluster_have_ranks_and_are_resident_together(rig):
    source = """
    KERNEL k(u32* count, u32* out) {
        u32 rank, id;
        asm("mov.u32 %0,%%cluster_ctarank;" : "=r"(rank));
        asm("mov.u32 %0,%%clusterid.y;" : "=r"(id));
        u32 b = blockIdx.x + gridDim.x * blockIdx.y;
        u32 cluster = blockIdx.x / 2 + gridDim.x / 2 * (blockIdx.y / 3);
        if (!threadIdx.x) { atomicAdd(count + cluster, 1); while (load(count + cluster) < 6); }
        out[b] = rank | id << 8;
    }"""
    out = rig.empty(4 * 24)
    rig.run(source, rig.array(np.zeros(4, np.uint32)), out, grid=(4, 6, 1), cluster=(2, 3, 1), resident=8)
    y, x = np.indices((6, 4))
    assert (rig.read(out, np.uint32, 24).reshape(6, 4) == (x % 2 + 2 * (y % 3) | y // 3 << 8)).all()
