# SPDX-License-Identifier: Apache-2.0
"""Delayed stores: a weak-memory mistake shows a wrong result under some seed, and correct code never does."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as types
from driver_helpers import R, code, function, ok, primary

from drvfuse.emu import Machine

PRELUDE = """
typedef unsigned u32;
#define KERNEL extern "C" __global__ void
#define LOAD(name, how) __device__ u32 name(const u32* p) { \\
    u32 v; asm volatile("ld." how ".global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
#define STORE(name, how) __device__ void name(u32* p, u32 v) { \\
    asm volatile("st." how ".global.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory"); }
#define FENCE(name, how) __device__ void name() { asm volatile("fence." how ";" ::: "memory"); }
LOAD(acquire, "acquire.sys") LOAD(relaxed, "relaxed.sys") LOAD(relaxed_gpu, "relaxed.gpu") LOAD(read, "volatile")
STORE(release, "release.sys") STORE(release_gpu, "release.gpu") STORE(release_cta, "release.cta")
STORE(put, "relaxed.sys") STORE(plain, "weak")
FENCE(fence_sc, "sc.sys") FENCE(fence_sys, "acq_rel.sys") FENCE(fence_gpu, "acq_rel.gpu")
FENCE(fence_cta, "acq_rel.cta") FENCE(fence_acquire, "acquire.sys")
__device__ u32 cas(u32* p, u32 a, u32 b) { return atomicCAS_system(p, a, b); }
__device__ void await(const u32* p, u32 v) { while (acquire(p) != v) {} }
"""
X, Y, Z, FLAG, OUT = 0, 8, 16, 24, 32  # words of the array that the kernels get
MP = """
KERNEL k(u32* m) {
    u32 *x = m, *flag = m + 24, t = threadIdx.x;
    if (blockIdx.x == 0) { %s }
    else { while (acquire(flag) != 1) {} m[32] = *x; }
}"""


def _argument(kernel_argument: Any) -> Any:
    return ((kernel_argument,), (None,))


def _run(
    body: str,
    seed: int,
    *,
    grid: int = 2,
    block: int = 1,
    devices: int = 1,
    words: int = 64,
    delay: bool = True,
    race: bool = False,
) -> list[int]:
    """Launch kernel `k` once on each device, without a wait between the launches, with one array of zeros as its
    argument. Returns the array.

    With `race`, returns the array and the number of reports. Otherwise a report fails the test.
    """
    with Machine(devices=devices, seed=seed, delay_stores=delay, race=race) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        contexts = [primary(cuda, i) for i in range(devices)]
        for context in contexts[1:]:
            ok(cuda.cuCtxSetCurrent(context))
            ok(cuda.cuCtxEnablePeerAccess(contexts[0], 0))
        ok(cuda.cuCtxSetCurrent(contexts[0]))
        memory = ok(cuda.cuMemAlloc(words * 4))
        ok(cuda.cuMemsetD32(memory, 0, words))
        ok(cuda.cuCtxSynchronize())
        for context in contexts:
            ok(cuda.cuCtxSetCurrent(context))
            kernel = function(cuda, PRELUDE + body, "k")
            ok(cuda.cuLaunchKernel(kernel, grid, 1, 1, block, 1, 1, 0, 0, _argument(memory), 0))
        for context in contexts:
            ok(cuda.cuCtxSetCurrent(context))
            ok(cuda.cuCtxSynchronize())
        out = np.zeros(words, np.uint32)
        ok(cuda.cuMemcpyDtoH(out, memory, out.nbytes))
        assert race or not machine.reports
        return [int(word) for word in out] + [len(machine.reports)] * race


def _outcomes(body: str, *places: int, seeds: int = 16, **options: Any) -> set[tuple[int, ...]]:
    """The final values of the words at `places`, collected over seeds."""
    found = set()
    for seed in range(seeds):
        words = _run(body, seed, **options)
        found.add(tuple(words[i] for i in places))
    return found


# Message passing ----------------------------------------------------------------------------------------------------

UNORDERED = {
    "relaxed": "*x = 1; put(flag, 1);",
    "both relaxed": "put(x, 1); put(flag, 1);",
    "volatile": "*x = 1; *(volatile u32*)flag = 1;",
    "release at .cta": "*x = 1; release_cta(flag, 1);",
    "fence at .cta": "*x = 1; fence_cta(); put(flag, 1);",
    "fence too early": "fence_sc(); *x = 1; put(flag, 1);",
    "fence.acquire": "*x = 1; fence_acquire(); put(flag, 1);",
    "atomic": "*x = 1; atomicExch(flag, 1);",
    "trigger": '*x = 1; asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); put(flag, 1);',
}
ORDERED = {
    "release": "*x = 1; release(flag, 1);",
    "release at .gpu": "*x = 1; release_gpu(flag, 1);",
    "fence": "*x = 1; fence_sys(); put(flag, 1);",
    "fence.sc": "put(x, 1); fence_sc(); put(flag, 1);",
    "fence at .gpu": "*x = 1; fence_gpu(); put(flag, 1);",
    "__threadfence and a volatile store": "*x = 1; __threadfence(); *(volatile u32*)flag = 1;",
    "__threadfence and an atomic": "*x = 1; __threadfence(); atomicExch(flag, 1);",
    "atomic that releases": 'u32 v; *x = 1; asm volatile("atom.release.gpu.global.exch.b32 %0, [%1], 1;" '
    ': "=r"(v) : "l"(flag) : "memory");',
}


@pytest.mark.parametrize("how", UNORDERED)
def test_a_flag_can_overtake_data_that_nothing_orders_before_it(how: str) -> None:
    assert _outcomes(MP % UNORDERED[how], OUT) == {(0,), (1,)}


CLUSTER = """
extern "C" __global__ void __cluster_dims__(2, 1, 1) k(u32* m) {
    u32 *x = m;
    if (blockIdx.x == 0 && threadIdx.x == 3) *x = 1;
    %s
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
    if (blockIdx.x == 1 && threadIdx.x == 40) m[32] = *x;
}"""


@pytest.mark.parametrize(
    ("arrival", "overtakes"),
    [
        ("barrier.cluster.arrive.aligned;", False),
        ("barrier.cluster.arrive.release;", False),
        ("fence.acq_rel.cluster; barrier.cluster.arrive.relaxed.aligned;", False),
        ("barrier.cluster.arrive.relaxed.aligned;", True),
    ],
)
def test_an_arrival_at_the_barrier_of_a_cluster_releases_unless_it_is_relaxed(arrival: str, overtakes: bool) -> None:
    body = CLUSTER % f'asm volatile("{arrival}" ::: "memory");'
    assert ((0,) in _outcomes(body, OUT, block=64, seeds=8)) == overtakes


@pytest.mark.parametrize("how", ORDERED)
def test_a_release_or_fence_keeps_data_before_its_flag(how: str) -> None:
    assert _outcomes(MP % ORDERED[how], OUT, seeds=24) == {(1,)}


def test_without_delays_a_flag_never_overtakes_data() -> None:
    assert _outcomes(MP % UNORDERED["relaxed"], OUT, delay=False) == {(1,)}


SCOPES = """
KERNEL k(u32* m) {
    if (atomicAdd_system(m + 40, 1) == 0) { *m = 1; %s }
    else { await(m + 24, 1); m[32] = *m; }
}"""


@pytest.mark.parametrize(
    ("send", "narrow"),
    [
        ("release_gpu(m + 24, 1);", True),
        ("fence_gpu(); put(m + 24, 1);", True),
        ("__threadfence(); atomicExch_system(m + 24, 1);", True),
        ("release(m + 24, 1);", False),
        ("__threadfence_system(); put(m + 24, 1);", False),
        ("__threadfence_system(); atomicExch_system(m + 24, 1);", False),
    ],
)
def test_another_device_needs_the_system_scope(send: str, narrow: bool) -> None:
    body = SCOPES % send
    assert _outcomes(body, OUT, grid=1, devices=2) == ({(0,), (1,)} if narrow else {(1,)})


# What a release covers ----------------------------------------------------------------------------------------------

OTHERS = """
KERNEL k(u32* m) {
    u32 t = threadIdx.x;
    __shared__ volatile u32 turn;
    if (blockIdx.x == 0) { m[t] = 1; %s if (t == 0) release(m + 128, 1); }
    else if (t == 0) { await(m + 128, 1); u32 n = 0; for (u32 i = 0; i < 64; i++) n += m[i]; m[129] = n; }
}"""


def test_a_release_covers_other_threads_only_after_a_barrier() -> None:
    missing = _outcomes(OTHERS % "", 129, block=64, words=256)
    assert {n for (n,) in missing} - {64}
    assert _outcomes(OTHERS % "__syncthreads();", 129, block=64, words=256) == {(64,)}


def test_named_and_warp_barriers_order_their_participants_only() -> None:
    named = 'asm volatile("bar.sync 1, 64;" ::: "memory");'
    assert _outcomes(OTHERS % named, 129, block=64, words=256) == {(64,)}
    warp = OTHERS.replace("i < 64", "i < 32")
    assert _outcomes(warp % "__syncwarp();", 129, block=64, words=256) == {(32,)}
    shuffle = "m[t + 64] = __shfl_sync(~0u, t, 0);"  # a shuffle orders no memory accesses
    assert {n for (n,) in _outcomes(warp % shuffle, 129, block=64, words=256)} - {32}


def test_a_release_is_cumulative_over_blocks_threads_and_scopes() -> None:
    """A thread acquires data of another thread and passes it on, at the same scope or a wider one."""
    inside = """
    KERNEL k(u32* m) {
        u32 t = threadIdx.x;
        if (blockIdx.x == 0) {
            if (t == 0) { *m = 1; release_cta(m + 8, 1); }
            if (t == 32) { await(m + 8, 1); release(m + 24, 1); }
        } else if (t == 0) { await(m + 24, 1); m[32] = *m; }
    }"""
    assert _outcomes(inside, OUT, block=64) == {(1,)}
    across = """
    KERNEL k(u32* m) {
        u32 n = atomicAdd_system(m + 40, 1);
        if (n == 0) { *m = 1; release_gpu(m + 8, 1); }
        if (n == 1) { await(m + 8, 1); release_gpu(m + 16, 1); }
        if (n == 2) { await(m + 16, 1); m[32] = *m; }
    }"""
    assert _outcomes(across, OUT, grid=3) == {(1,)}
    observed = """
    KERNEL k(u32* m) {
        u32 t = threadIdx.x;
        if (blockIdx.x == 0) {
            if (t == 0) put(m, 1);
            if (t == 32) { while (relaxed(m) != 1) {} release(m + 24, 1); }
        } else if (t == 0) { await(m + 24, 1); m[32] = relaxed(m); }
    }"""
    assert _outcomes(observed, OUT, block=64) == {(1,)}


# Other patterns -----------------------------------------------------------------------------------------------------

BUFFERING = """
KERNEL k(u32* m) {
    u32 *mine = m + blockIdx.x * 8, *other = m + (blockIdx.x ^ 1) * 8;
    %s
    m[32 + blockIdx.x] = relaxed(other);
}"""


def test_store_buffering_shows_unless_both_fence() -> None:
    places = (OUT, OUT + 1)
    for how in ("put(mine, 1);", "*mine = 1;", "release(mine, 1);", "put(mine, 1); fence_acquire();"):
        assert (0, 0) in _outcomes(BUFFERING % how, *places)
    for how in ("put(mine, 1); fence_sc();", "*mine = 1; __threadfence();", "atomicExch(mine, 1);"):
        assert (0, 0) not in _outcomes(BUFFERING % how, *places, seeds=24)


def test_all_threads_agree_on_the_order_of_stores_to_one_location() -> None:
    """A thread reads its own last store, values never revert to older ones, and accesses of mixed sizes keep their
    order."""
    body = """
    KERNEL k(u32* m) {
        if (blockIdx.x == 0) {
            for (u32 i = 1; i <= 20; i++) { plain(m, i); if (read(m) < i) m[40] = 1; relaxed(m + 9); }
            *(unsigned char*)(m + 16) = 1;
            *(volatile unsigned short*)(m + 16) = 0x202;
            relaxed(m + 9);
            *((volatile unsigned char*)(m + 16) + 1) = 3;
            *(volatile u32*)(m + 17) = 4;
            relaxed(m + 9);
            *(volatile unsigned long long*)(m + 18) = 0x600000005ull;
            relaxed(m + 9);
            *(volatile u32*)(m + 19) = 7;
        } else {
            u32 last = 0;
            while (last != 20) { u32 now = read(m); if (now < last) m[41] = 1; last = now; }
        }
    }"""
    assert _outcomes(body, X, 16, 17, 18, 19, 40, 41) == {(20, 0x302, 4, 5, 7, 0, 0)}


def test_an_atomic_follows_earlier_stores_of_its_block_to_the_same_location() -> None:
    body = """
    KERNEL k(u32* m) {
        put(m + blockIdx.x, 5);
        m[32 + blockIdx.x] = atomicAdd(m + blockIdx.x, 1);
        m[34 + blockIdx.x] = atomicAdd(m + blockIdx.x, 1);
        put(m + blockIdx.x, 9);
        fence_gpu();
        m[36 + blockIdx.x] = atomicAdd_system(m + blockIdx.x, 1);
    }"""
    assert _outcomes(body, 32, 33, 34, 35, 36, 37, 0, 1) == {(5, 5, 6, 6, 9, 9, 10, 10)}


def test_atomics_lose_no_update() -> None:
    body = """
    KERNEL k(u32* m) {
        for (u32 i = 0; i < 5; i++) { m[64 + blockIdx.x * 32 + threadIdx.x] = i; atomicAdd(m, 1); atomicMax(m + 1, i); }
        atomicAdd_system(m + 2, 1);
    }"""
    assert _outcomes(body, 0, 1, 2, grid=12, block=32, devices=2, words=512, seeds=6) == {(12 * 32 * 10, 4, 12 * 64)}


LAST = """
KERNEL k(u32* m) {
    __shared__ u32 last;
    m[64 + blockIdx.x * 32 + threadIdx.x] = blockIdx.x * 32 + threadIdx.x;
    %s
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(m, 1) == gridDim.x - 1;
    __syncthreads();
    if (last) { __threadfence(); for (u32 i = threadIdx.x; i < 32 * gridDim.x; i += 32) atomicAdd(m + 32, m[64 + i]); }
}"""


def test_the_last_block_to_arrive_needs_the_others_to_have_fenced() -> None:
    total = sum(range(8 * 32))
    missing = _outcomes(LAST % "", OUT, grid=8, block=32, words=512, seeds=8)
    assert {n for (n,) in missing} - {total}
    assert _outcomes(LAST % "__threadfence();", OUT, grid=8, block=32, words=512) == {(total,)}


# The end of a kernel ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_the_next_kernel_and_the_host_see_what_a_kernel_stored(seed: int) -> None:
    source = """
    KERNEL fill(u32* m) { m[blockIdx.x * 64 + threadIdx.x] = blockIdx.x * 64 + threadIdx.x; }
    KERNEL twice(u32* m) { u32 i = (31 - blockIdx.x) * 64 + threadIdx.x; m[i] = 2 * m[i]; }"""
    with Machine(devices=1, seed=seed, delay_stores=True) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        primary(cuda)
        memory = ok(cuda.cuMemAlloc(32 * 64 * 4))
        for name in ("fill", "twice"):
            kernel = function(cuda, PRELUDE + source, name)
            ok(cuda.cuLaunchKernel(kernel, 32, 1, 1, 64, 1, 1, 0, 0, _argument(memory), 0))
        out = np.zeros(32 * 64, np.uint32)
        ok(cuda.cuMemcpyDtoH(out, memory, out.nbytes))
        assert np.array_equal(out, 2 * np.arange(32 * 64, dtype=np.uint32))


def test_more_stores_than_can_be_pending_are_all_made() -> None:
    body = "KERNEL k(u32* m) { for (u32 i = threadIdx.x; i < 40000; i += 64) m[blockIdx.x * 40000 + i] = i + 1; }"
    words = _run(body, 0, block=64, words=80000)
    assert words == 2 * list(range(1, 40001))


def test_a_wait_for_a_delayed_store_ends_and_a_deadlock_is_found() -> None:
    """Threads wait for plain stores of each other repeatedly, and finally for a store that never happens."""
    body = """
    KERNEL k(u32* m) {
        u32 me = blockIdx.x;
        for (u32 i = 1; i <= 10; i++) { plain(m + me * 8, i); while (read(m + (me ^ 1) * 8) < i) {} }
        m[32] = 1;
        %s
    }"""
    for seed in range(6):
        assert _run(body % "", seed)[OUT] == 1
        with Machine(devices=1, seed=seed, delay_stores=True) as machine:
            cuda = machine.driver
            ok(cuda.cuInit(0))
            primary(cuda)
            memory = ok(cuda.cuMemAlloc(256))
            ok(cuda.cuMemsetD32(memory, 0, 64))
            kernel = function(cuda, PRELUDE + body % "plain(m + 41, 1); while (read(m + 40) != 1) {}", "k")
            ok(cuda.cuLaunchKernel(kernel, 2, 1, 1, 1, 1, 1, 0, 0, _argument(memory), 0))
            assert code(cuda.cuCtxSynchronize()) == R.CUDA_ERROR_LAUNCH_TIMEOUT
            assert [report.kind for report in machine.reports] == ["deadlock"]


def test_the_host_sees_what_a_kernel_that_waits_for_it_has_stored() -> None:
    body = "KERNEL k(u32* m) { plain(m, 7); while (read(m + 8) != 1) {} m[16] = 9; }"
    with Machine(devices=1, delay_stores=True) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        primary(cuda)
        address = ok(cuda.cuMemHostAlloc(256, types.CU_MEMHOSTALLOC_PORTABLE))
        words = (ctypes.c_uint32 * 64).from_address(int(address))
        kernel = function(cuda, PRELUDE + body, "k")
        ok(cuda.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, _argument(types.CUdeviceptr(int(address))), 0))
        while words[0] != 7:
            assert code(cuda.cuStreamQuery(0)) == R.CUDA_ERROR_NOT_READY
        words[8] = 1
        ok(cuda.cuCtxSynchronize())
        assert words[16] == 9


def test_the_machine_works_after_a_fault() -> None:
    body = """
    KERNEL k(u32* m) {
        m[blockIdx.x] = 1;
        if (blockIdx.x == 1) { read(m); asm volatile("trap;"); }
        read(m + 8);
    }"""
    for seed in range(4):
        with Machine(devices=2, seed=seed, delay_stores=True) as machine:
            cuda = machine.driver
            ok(cuda.cuInit(0))
            primary(cuda)
            memory = ok(cuda.cuMemAlloc(256))
            ok(cuda.cuMemsetD32(memory, 0, 64))
            kernel = function(cuda, PRELUDE + body, "k")
            ok(cuda.cuLaunchKernel(kernel, 8, 1, 1, 1, 1, 1, 0, 0, _argument(memory), 0))
            assert code(cuda.cuCtxSynchronize()) == R.CUDA_ERROR_LAUNCH_FAILED
            primary(cuda, 1)
            other = ok(cuda.cuMemAlloc(256))
            ok(cuda.cuMemsetD32(other, 0, 64))
            kernel = function(cuda, PRELUDE + "KERNEL k(u32* m) { m[blockIdx.x] = 3; }", "k")
            ok(cuda.cuLaunchKernel(kernel, 8, 1, 1, 1, 1, 1, 0, 0, _argument(other), 0))
            out = np.zeros(8, np.uint32)
            ok(cuda.cuMemcpyDtoH(out, other, out.nbytes))
            assert list(out) == [3] * 8


@pytest.mark.parametrize("devices", [1, 2])
def test_a_flag_that_is_read_before_its_store_arrives_orders_nothing(devices: int) -> None:
    body = """
    KERNEL k(u32* m) {
        if (atomicAdd_system(m + 40, 1) == 0) {
            *m = 1;
            for (u32 i = 0; i < 4; i++) read(m + 8 + i);
            release(m + 24, 1);
        } else { u32 seen = acquire(m + 24); m[32] = 1 + seen; if (!seen) m[33] = *m; }
    }"""
    found = set()
    for seed in range(12):
        words = _run(body, seed, grid=2 // devices, devices=devices, race=True)
        found.add((words[OUT], words[-1]))
    assert found == {(1, 1), (2, 0)}


def test_the_same_seed_gives_the_same_run() -> None:
    body = """
    KERNEL k(u32* m) {
        for (u32 i = 0; i < 8; i++) {
            plain(m + blockIdx.x * 8, i + 1);
            m[64 + atomicAdd(m + 56, 1)] = blockIdx.x << 8 | read(m + (blockIdx.x + 1) % 4 * 8);
        }
    }"""
    runs = [tuple(_run(body, seed, grid=4, words=128)) for seed in (0, 1, 2, 3, 0, 1, 2, 3)]
    assert runs[:4] == runs[4:]
    assert len(set(runs)) > 1
