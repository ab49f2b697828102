# SPDX-License-Identifier: Apache-2.0
"""The scheduler: barriers, warp operations, spins across devices, residency, clocks, deadlocks."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
from engine_harness import Rig, line_of, ptx


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def test_machines_share_the_native_code_of_a_module():
    one, other = Rig(), Rig(1)
    text = ptx("KERNEL k() {}")
    assert one.engine.load(text) is other.engine.load(text)
    one.close()
    other.close()


# Blocks and barriers -------------------------------------------------------------------------------------------------

REDUCE = """
KERNEL k(const int* in, int* out) {
    extern __shared__ int s[];
    int t = threadIdx.x;
    s[t] = in[blockIdx.x * blockDim.x + t];
    for (int n = blockDim.x / 2; n; n /= 2) {
        __syncthreads();
        if (t < n) s[t] += s[t + n];
    }
    if (!t) out[blockIdx.x] = s[0];
}"""


def test_a_block_reduction_with_barriers_is_right(rig, rng):
    x = rng.integers(-1000, 1000, (50, 256), dtype=np.int32)
    out = rig.empty(200)
    launch = rig.run(REDUCE, rig.array(x), out, grid=50, block=256, smem=1024, resident=7)
    assert (rig.read(out, np.int32, 50) == x.sum(1)).all()
    assert launch.counters.barriers == 50 * 8


def test_three_dimensional_launches_have_the_right_indices(rig):
    source = """
    KERNEL k(u32* out) {
        u32 b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
        u32 t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
        u32 lane; asm("mov.u32 %0,%%laneid;" : "=r"(lane));
        out[b * 24 + t] = threadIdx.x | threadIdx.y << 4 | threadIdx.z << 8 | blockIdx.x << 12 | blockIdx.y << 16 |
                          blockIdx.z << 20 | lane << 24;
    }"""
    out = rig.empty(5 * 3 * 2 * 24 * 4)
    rig.run(source, out, grid=(5, 3, 2), block=(2, 3, 4))
    got = rig.read(out, np.uint32, 30 * 24).reshape(2, 3, 5, 4, 3, 2)
    z, y, x, c, b, a = np.indices(got.shape)
    expected = a | b << 4 | c << 8 | x << 12 | y << 16 | z << 20 | (a + 2 * b + 6 * c) << 24
    assert (got == expected).all()


def test_named_barriers_let_producers_run_ahead(rig):
    source = """
    KERNEL k(int* out) {
        __shared__ int box;
        if (threadIdx.x < 32) {
            box = 41;
            asm volatile("bar.arrive 3, 64;" ::: "memory");
        } else {
            asm volatile("bar.sync 3, 64;" ::: "memory");
            out[threadIdx.x - 32] = box + threadIdx.x;
        }
    }"""
    out = rig.empty(128)
    rig.run(source, out, block=64)
    assert (rig.read(out, np.int32, 32) == 41 + np.arange(32, 64)).all()


def test_barriers_count_and_combine_predicates(rig):
    source = """
    KERNEL k(int* out) {
        int t = threadIdx.x;
        int n = __syncthreads_count(t % 3 == 0), all = __syncthreads_and(t < 99), any = __syncthreads_or(t == 77);
        out[t] = n | all << 8 | any << 9 | __syncthreads_and(t < 100) << 10 | __syncthreads_or(t > 200) << 11;
    }"""
    out = rig.empty(400)
    rig.run(source, out, block=100)
    assert (rig.read(out, np.int32, 100) == (34 | 0 << 8 | 1 << 9 | 1 << 10)).all()


@pytest.mark.parametrize("block", [64, 48, 33])
def test_partial_warps_count_as_whole_warps_at_a_barrier(rig, block):
    source = """
    KERNEL k(u32* out) {
        __shared__ u32 s;
        if (threadIdx.x < 32) { if (!threadIdx.x) s = 5; asm volatile("bar.arrive 2, 64;" ::: "memory"); }
        else { asm volatile("bar.sync 2, 64;" ::: "memory"); out[threadIdx.x] = s; }
        asm volatile("bar.sync 1, 64;" ::: "memory");
        if (threadIdx.x < 32) out[threadIdx.x] = s;
    }"""
    out = rig.empty(256)
    rig.run(source, out, block=block)
    assert (rig.read(out, np.uint32, block) == 5).all()


def test_lanes_may_reach_an_unaligned_barrier_by_different_paths(rig):
    source = """
    KERNEL k(u32* out) {
        __shared__ u32 s[64];
        s[threadIdx.x] = threadIdx.x;
        if (threadIdx.x % 2) asm volatile("barrier.sync 0;" ::: "memory");
        else { s[threadIdx.x] += 100; asm volatile("barrier.sync 0;" ::: "memory"); }
        out[threadIdx.x] = s[63 - threadIdx.x];
    }"""
    out = rig.empty(256)
    rig.run(source, out, block=64)
    assert rig.read(out, np.uint32, 64).tolist() == [63 - i + (100 if i % 2 else 0) for i in range(64)]


def test_exited_threads_do_not_hold_up_a_barrier(rig):
    source = """
    KERNEL k(int* out) {
        if (threadIdx.x % 2) return;
        __syncthreads();
        out[threadIdx.x] = 1;
    }"""
    out = rig.array(np.zeros(64, np.int32))
    rig.run(source, out, block=64)
    assert rig.read(out, np.int32, 64).sum() == 32


# Warps ---------------------------------------------------------------------------------------------------------------

WARP = """
KERNEL k(const int* in, int* out, int n) {
    int t = threadIdx.x, v = in[t], r = 0;
    u32 all = 0xffffffffu;
    r = %s;
    out[t] = r;
}"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("__shfl_sync(all, v, 5)", lambda v, t: v[np.full(32, 5)]),
        ("__shfl_sync(all, v, t + 3, 8)", lambda v, t: v[(t & ~7) | (t + 3) % 8]),
        ("__shfl_up_sync(all, v, 3)", lambda v, t: v[np.where(t >= 3, t - 3, t)]),
        ("__shfl_up_sync(all, v, 3, 16)", lambda v, t: v[np.where(t % 16 >= 3, t - 3, t)]),
        ("__shfl_down_sync(all, v, 7)", lambda v, t: v[np.where(t + 7 < 32, t + 7, t)]),
        ("__shfl_xor_sync(all, v, 9)", lambda v, t: v[t ^ 9]),
        ("__ballot_sync(all, v & 1)", lambda v, t: np.full(32, sum((int(x) & 1) << i for i, x in enumerate(v)))),
        ("__any_sync(all, v == n)", lambda v, t: np.zeros(32)),
        ("__all_sync(all, v != n)", lambda v, t: np.ones(32)),
        ("__reduce_add_sync(all, v)", lambda v, t: np.full(32, v.sum())),
        ("__reduce_min_sync(all, v)", lambda v, t: np.full(32, v.min())),
        ("(int)__reduce_max_sync(all, (u32)v)", lambda v, t: np.full(32, v.view(np.uint32).max())),
        ("__reduce_xor_sync(all, (u32)v)", lambda v, t: np.full(32, np.bitwise_xor.reduce(v))),
        ("__match_any_sync(all, t / 5)", lambda v, t: sum((t // 5 == i // 5).astype(int) << i for i in range(32))),
        ("__match_all_sync(all, n, &r)", lambda v, t: np.full(32, -1)),
        ("__activemask()", lambda v, t: np.full(32, -1)),
    ],
)
def test_warp_operations_give_the_documented_results(rig, rng, text, expected):
    v = rng.integers(-(2**20), 2**20, 32, dtype=np.int32)
    out = rig.empty(128)
    rig.run(WARP % text, rig.array(v), out, 1 << 30)
    want = np.asarray(expected(v, np.arange(32))).astype(np.int64).astype(np.uint32).view(np.int32)
    assert (rig.read(out, np.int32, 32) == want).all()


ALL = 0xFFFFFFFF
GARBAGE = 0xDEADBEEF


@pytest.mark.parametrize(
    "block, leaves", [(32, "threadIdx.x >= 17"), (17, "false"), (32, "threadIdx.x >= 17 && load(out)")]
)
def test_warp_operations_wait_for_the_present_lanes_of_their_mask(rig, block, leaves):
    source = f"""
    KERNEL k(u32* out) {{
        u32 i = threadIdx.x;
        if ({leaves}) return;
        out[i] = __shfl_xor_sync({ALL}, i, 1);
        out[32 + i] = __shfl_sync({ALL}, i * 3, 5);
        out[64 + i] = __ballot_sync({ALL}, i & 1);
        out[96 + i] = __all_sync({ALL}, i < 17);
        out[128 + i] = __reduce_add_sync({ALL}, i);
        __syncwarp();
        out[160 + i] = __match_any_sync({ALL}, i / 16);
    }}"""
    out = rig.array(np.ones(192, np.uint32))
    rig.run(source, out, block=block)
    got = rig.read(out, np.uint32, 192).reshape(6, 32)[:, :17].tolist()
    assert got[0] == [i ^ 1 for i in range(16)] + [GARBAGE]
    assert got[1] == [15] * 17
    assert got[2] == [0xAAAA] * 17
    assert got[3] == [1] * 17
    assert got[4] == [sum(range(17))] * 17
    assert got[5] == [0xFFFF] * 16 + [1 << 16]


def test_halves_of_a_warp_can_shuffle_independently(rig):
    source = """
    KERNEL k(int* out) {
        int t = threadIdx.x, v = t * t;
        if (t < 16) for (int i = 8; i; i /= 2) v += __shfl_xor_sync(0xffff, v, i);
        else for (int i = 8; i; i /= 2) v = max(v, __shfl_xor_sync(0xffff0000, v, i));
        __syncwarp();
        out[t] = v;
    }"""
    out = rig.empty(128)
    rig.run(source, out)
    assert rig.read(out, np.int32, 32).tolist() == [sum(i * i for i in range(16))] * 16 + [31 * 31] * 16


def test_lanes_of_one_warp_make_progress_independently(rig):
    source = """
    KERNEL k(u32* flag, u32* out) {
        if (threadIdx.x == 0) { while (!load(flag)); out[0] = 7; }
        else if (threadIdx.x == 31) store(flag, 1);
    }"""
    out = rig.array(np.zeros(1, np.uint32))
    rig.run(source, rig.array(np.zeros(1, np.uint32)), out)
    assert rig.read(out, np.uint32, 1)[0] == 7


# Spins ---------------------------------------------------------------------------------------------------------------

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


SPINS = {
    "plain": "while (!load(flag));",
    "two words": "int i = 0; while (!load(flag)) if (++i % 32 == 0 && load(flag + 1)) break;",
    "vote": "while (!__all_sync(0xffffffffu, load(flag)));",
    "block": """__shared__ int go;
        do { __syncthreads(); if (!threadIdx.x) go = load(flag); __syncthreads(); } while (!go);""",
    "sleep": "while (!load(flag)) __nanosleep(100);",
    "vector": """uint4 v; do asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3},[%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(flag)); while (!v.x || v.w);""",
    "many words": "for (u32 n = 0; !n;) for (int i = 0; i < 40; i++) n |= load(flag + i);",
    "atomic": "while (!atomicAdd(flag, 0));",
}


@pytest.mark.parametrize("kind", SPINS)
def test_every_kind_of_spin_is_released(rig, kind):
    waiter = f"KERNEL k(u32* flag, int* out) {{ {SPINS[kind]} out[threadIdx.x] = 5; }}"
    setter = """
    KERNEL k(u32* flag, u32* data) {
        u32 s = 0;
        for (int i = 0; i < 300; i++) s += load(data + i);
        store(flag, s);
    }"""
    flag, out = rig.array(np.zeros(64, np.uint32)), rig.array(np.zeros(32, np.int32), 1)
    first = rig.launch(waiter, flag, out, device=1)
    while not rig.engine.idle:
        rig.engine.run([first])
    assert not first.done
    second = rig.launch(setter, flag, rig.array(np.ones(300, np.uint32)), block=1)
    assert rig.finish(first, second)
    assert rig.read(out, np.int32, 32).tolist() == [5] * 32


@pytest.mark.parametrize("kind", SPINS)
def test_every_kind_of_endless_spin_is_a_deadlock(kind):
    rig = Rig(loop_limit=10_000_000)
    spin = SPINS[kind].replace("\n", " ")
    waiter = f"KERNEL k(u32* flag, int* out) {{\n {spin} // spin\n out[threadIdx.x] = 5; }}"
    flag = rig.array(np.zeros(64, np.uint32))
    launch = rig.launch(waiter, flag, rig.empty(128))
    start = time.monotonic()
    assert not rig.finish(launch)
    assert time.monotonic() - start < 10
    blocked = launch.blocked()
    assert len(blocked) == 32
    polling = [b for b in blocked if b.status.startswith("polling")]
    line = line_of(waiter, "spin")
    assert polling and all(b.line == line or f"test.cu:{line}" in b.status for b in polling)
    launch.abandon()
    assert not launch.running and launch.fault is None
    rig.close()


def test_a_bounded_loop_over_one_word_is_no_deadlock(rig):
    source = """
    KERNEL k(const u32* word, u32* out) {
        u32 s = 0;
        for (int i = 0; i < 5000; i++) s += load(word);
        out[threadIdx.x] = s;
    }"""
    out = rig.empty(128)
    rig.run(source, rig.array(np.full(1, 3, np.uint32)), out)
    assert (rig.read(out, np.uint32, 32) == 15000).all()


@pytest.mark.parametrize("block, reads", [(1, 70_000), (32, 70_000), (1, 300_000)])
def test_a_long_loop_over_one_word_is_no_deadlock(rig, block, reads):
    source = """
    KERNEL k(const u32* word, u32* out, u32 n) {
        u32 s = 0;
        for (u32 i = 0; i < n; i++) s += load(word);
        out[threadIdx.x] = s;
        if (!threadIdx.x) while (!load(out + 32));
    }"""
    out = rig.array(np.zeros(33, np.uint32))
    launch = rig.launch(source, rig.array(np.full(1, 3, np.uint32)), out, reads, block=block)
    assert not rig.finish(launch)
    assert (rig.read(out, np.uint32, block) == 3 * reads).all()
    assert [b.thread for b in launch.blocked()] == [(0, 0, 0)] and not rig.engine.undecided


def test_a_loop_over_shared_memory_with_a_sleep_is_no_deadlock(rig):
    source = """
    KERNEL k(u32* out) {
        __shared__ volatile u32 word;
        if (threadIdx.x == 1) while (!load(out)) __nanosleep(20);
        if (threadIdx.x) return;
        word = 3;
        u32 s = 0;
        for (u32 i = 0; i < 5000; i++) { s += word; __nanosleep(1000000); }
        store(out, s);
    }"""
    out = rig.array(np.zeros(1, np.uint32))
    rig.run(source, out)
    assert rig.read(out, np.uint32, 1) == 15000


def test_an_endless_spin_that_counts_its_polls_ends_at_the_limit():
    source = """
    KERNEL k(u32* flag, u32* out) {
        u32 n = 0;
        while (!load(flag)) n++; // spin
        out[threadIdx.x] = n;
    }"""
    rig = Rig(loop_limit=1_000_000)
    launch = rig.launch(source, rig.array(np.zeros(1, np.uint32)), rig.empty(128))
    assert not rig.finish(launch)
    assert "after 1000000 polls; DRVFUSE_EMU_LOOP_LIMIT raises this limit" in launch.blocked()[7].status
    rig.close()


LIVELOCKS = {
    "plain store": "do out[threadIdx.x] = ++n; while (!load(flag));",
    "strong store": "do store(out + threadIdx.x, ++n); while (!load(flag));",
    "shared store": "__shared__ volatile u32 s[32]; do s[threadIdx.x] = ++n; while (!load(flag));",
    "atomic count": "do atomicAdd(out, 1); while (!load(flag));",
    "atomics": "for (;;) n += atomicAdd(out, 1);",
    "barriers": "for (;;) n += __syncthreads_or(n & 1);",
    "shuffles": "for (;;) n += __shfl_xor_sync(0xffffffffu, n, 1);",
}


@pytest.mark.parametrize("kind", LIVELOCKS)
def test_a_livelock_ends_at_the_limit_of_steps(kind):
    source = f"KERNEL k(u32* flag, u32* out) {{ u32 n = 0; {LIVELOCKS[kind]} out[threadIdx.x] = n; }}"
    rig = Rig(loop_limit=200_000)
    launch = rig.launch(source, rig.array(np.zeros(1, np.uint32)), rig.array(np.zeros(32, np.uint32)))
    assert rig.finish(launch)
    assert launch.fault.kind == "endless" and "livelock" in launch.fault.message
    assert "DRVFUSE_EMU_LOOP_LIMIT" in launch.fault.message
    rig.close()


# Waiting for ever, and time ------------------------------------------------------------------------------------------


def test_a_deadlock_lists_the_waiting_threads_and_their_lines(rig):
    source = """
    KERNEL k(u32* flag) {
        if (threadIdx.x == 3)
            while (load(flag) < 9); // spin
        __syncthreads(); // barrier
    }"""
    flag = rig.array(np.full(1, 7, np.uint32))
    launch = rig.launch(source, flag, grid=(1, 2, 1), block=64)
    assert not rig.finish(launch)
    blocked = launch.blocked()
    assert len(blocked) == 128
    spinner = blocked[64 + 3]
    assert (spinner.block, spinner.thread) == ((0, 1, 0), (3, 0, 0))
    assert spinner.status == f"polling, called at test.cu:{line_of(source, 'spin')}"
    assert (spinner.address, spinner.seen, spinner.file) == (flag, 7, spinner.file)
    assert spinner.file.endswith("test.cu")
    assert blocked[0].status == "at barrier 0" and blocked[0].line == line_of(source, "barrier")


def test_more_blocks_than_fit_cannot_wait_for_one_another(rig):
    source = """
    KERNEL k(u32* count) {
        if (!threadIdx.x) { atomicAdd(count, 1); while (load(count) < gridDim.x); }
    }"""
    assert rig.finish(rig.launch(source, rig.array(np.zeros(1, np.uint32)), grid=8, resident=8))
    launch = rig.launch(source, rig.array(np.zeros(1, np.uint32)), grid=8, resident=7)
    assert not rig.finish(launch)
    assert {b.block for b in launch.blocked()} == {(i, 0, 0) for i in range(7)}


TIMEOUT = """
KERNEL k(u32* flag, u32* out, u64 limit) {
    u64 start = timer();
    for (u32 polls = 1; !load(flag); polls++)
        if (polls % 1024 == 0 && timer() - start > limit) { out[threadIdx.x] = 0xdead; return; }
    out[threadIdx.x] = 1;
}"""


def test_a_spin_bounded_by_the_clock_times_out_quickly(rig):
    out = rig.empty(4 * 64)
    launch = rig.launch(TIMEOUT, rig.array(np.zeros(1, np.uint32)), out, 10**10, block=64)
    rig.engine.run([launch])
    assert rig.engine.idle and rig.engine.clock_ns < 10**8
    start = time.monotonic()
    assert rig.finish(launch)
    assert time.monotonic() - start < 3
    assert (rig.read(out, np.uint32, 64) == 0xDEAD).all()
    assert 10**10 < rig.engine.clock_ns < 10**11


def test_a_kernel_that_only_watches_the_clock_ends(rig):
    source = """
    KERNEL k(u64* out) {
        u64 start = timer(), now;
        do now = timer(); while (now - start < 5000000000ull);
        *out = now - start;
    }"""
    out = rig.empty(8)
    rig.run(source, out, block=1)
    assert 5 * 10**9 <= rig.read(out, np.uint64, 1)[0] < 6 * 10**9


@pytest.mark.parametrize("words", [1, 2, 3, 8])
def test_a_loop_that_polls_several_words_reads_its_clock_regularly(rig, words):
    """Each polled word takes a scheduling turn, so a thread that polls several words reads the clock late."""
    source = """
    KERNEL k(u32* flags, u32* out, u32 words, u64 limit) {
        u64 deadline = 0;
        for (u32 polls = 1;; polls++) {
            u32 missing = 0;
            for (u32 i = 0; i < words; i++) missing += *(volatile u32*)(flags + i) == 0;
            if (!missing) break;
            if (polls % 1024 == 0) {
                u64 now = timer();
                if (!deadline) deadline = now + limit;
                if (now > deadline) { out[threadIdx.x] = 0xDEAD; return; }
            }
        }
        out[threadIdx.x] = 1;
    }"""
    out = rig.empty(4 * 32)
    start = time.monotonic()
    rig.run(source, rig.array(np.zeros(words, np.uint32)), out, words, 10**10)
    assert time.monotonic() - start < 10
    assert (rig.read(out, np.uint32, 32) == 0xDEAD).all()


def test_nanosleep_takes_virtual_time(rig):
    source = """
    KERNEL k(u64* out) {
        u64 start = timer();
        for (int i = 0; i < 100; i++) __nanosleep(1000000);
        out[threadIdx.x] = timer() - start;
    }"""
    out = rig.empty(8 * 32)
    start = time.monotonic()
    rig.run(source, out)
    assert time.monotonic() - start < 2
    assert (rig.read(out, np.uint64, 32) >= 10**8).all()


def test_a_run_returns_at_the_end_of_its_time_slice(rig):
    source = "KERNEL k(u32* out) { for (u32 i = 0; i < 3000000; i++) __syncwarp(); out[threadIdx.x] = 1; }"
    launch = rig.launch(source, rig.empty(128))
    start = time.monotonic()
    rig.engine.run([launch], budget_ms=1)
    assert time.monotonic() - start < 1
    assert not launch.done and not rig.engine.idle
    launch.abandon()


# Dependent launches --------------------------------------------------------------------------------------------------

PRIMARY = """
KERNEL k(u32* data, u32* flag) {
    asm volatile("griddepcontrol.launch_dependents;");
    if (!threadIdx.x) while (!load(flag));
    data[blockIdx.x] = 5;
}"""
SECONDARY = """
KERNEL k(const u32* data, u32* early, u32* out) {
    if (!threadIdx.x) store(early, 1);
    asm volatile("griddepcontrol.wait;" ::: "memory"); // wait
    if (!threadIdx.x) out[0] = data[0] + data[1];
}"""


def test_a_dependent_launch_starts_at_the_trigger_and_waits_for_completion(rig):
    data, flag, out = rig.empty(8), rig.array(np.zeros(1, np.uint32)), rig.empty(4)
    primary = rig.launch(PRIMARY, data, flag, grid=2)
    assert not primary.triggered
    rig.engine.run([primary])
    assert primary.triggered and not primary.done
    secondary = rig.launch(SECONDARY, data, flag, out)
    secondary.gdc_open = False
    while not primary.done:
        rig.engine.run([primary, secondary])
        assert not rig.engine.idle
    rig.engine.run([secondary])
    assert rig.engine.idle
    assert {(b.status, b.line) for b in secondary.blocked()} == {("at griddepcontrol.wait", line_of(SECONDARY, "wait"))}
    secondary.gdc_open = True
    assert rig.finish(secondary)
    assert rig.read(out, np.uint32, 1)[0] == 10


def test_a_kernel_without_a_trigger_triggers_by_ending(rig):
    launch = rig.launch("KERNEL k() {}", grid=3)
    assert not launch.triggered
    assert rig.finish(launch)
    assert launch.triggered


# printf --------------------------------------------------------------------------------------------------------------


def test_printf_reaches_standard_output(rig, capsys):
    source = """
    extern "C" __device__ int printf(const char*, ...);
    KERNEL k(int n) {
        if (threadIdx.x == 2) printf("%d of %5.2f%% %s|%08x|%lld|%c\\n", n, 2.5, "words", 0xbeef, 1ll << 40, 'q');
    }"""
    rig.run(source, -7)
    assert capsys.readouterr().out == "-7 of  2.50% words|0000beef|1099511627776|q\n"


PRINTF = 'extern "C" __device__ int printf(const char*, ...);\nKERNEL k(u32* out) {\n'


def test_printf_follows_c_and_returns_the_number_of_arguments(rig, capsys):
    source = (
        PRINTF
        + r"""
        out[0] = printf("%*.*f|%-*d|%%|%.f\n", 8, 2, 3.14159, 4, 7, 2.5);
        out[1] = printf("%hd %hhd %hu %hhx %+5d|%#o|%5c|%6s|%e|%ld\n",
                        65541, 300, -1, 0xabc, 5, 8, 'q', "ab", 0.5, -5l);
        out[2] = printf("100%%\n");
        out[3] = printf("%n %y %\n");
        out[4] = printf((const char*)0);
    }"""
    )
    out = rig.empty(20)
    rig.run(source, out, block=1)
    text = "    3.14|7   |%|2\n5 44 65535 bc    +5|010|    q|    ab|5.000000e-01|-5\n100%\n%n %y %\n"
    assert capsys.readouterr().out == text
    assert rig.read(out, np.int32, 5).tolist() == [6, 10, 0, 0, -1]


def test_printf_without_its_arguments_leaves_the_directive(rig, capsys):
    source = PRINTF + r"""out[0] = 7; printf("%d\n", out[0]); printf("100%%\n"); printf("%d %s\n"); }"""
    rig.run(source, rig.empty(4), block=1)
    assert capsys.readouterr().out == "7\n100%\n%d %s\n"


def test_long_work_without_a_store_is_no_deadlock(rig):
    source = """
    KERNEL k(const u32* word, u32* out) {
        u32 s = load(word) + load(word);
        for (u32 i = 0; i < 100000; i++) s = __shfl_xor_sync(0xffffffffu, s, 1) + 1;
        out[threadIdx.x] = s;
    }"""
    out = rig.empty(128)
    launch = rig.launch(source, rig.array(np.ones(1, np.uint32)), out)
    while not launch.done:
        rig.engine.run([launch])
        assert not rig.engine.idle
    assert (rig.read(out, np.uint32, 32) == 100002).all()


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


def test_finished_launches_release_their_memory(rig):
    source = """
    KERNEL k(int* out) {
        extern __shared__ int s[];
        volatile int local[4];
        local[threadIdx.x % 4] = 1;
        s[threadIdx.x] = local[threadIdx.x % 4];
        out[threadIdx.x] = s[threadIdx.x];
    }"""
    out = rig.empty(128)

    def taken() -> int:
        for _ in range(20):
            rig.run(source, out, smem=1024, grid=4)
        return rig.window._addresses.next

    assert taken() == taken()
