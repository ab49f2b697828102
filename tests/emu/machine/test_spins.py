# SPDX-License-Identifier: Apache-2.0
"""Loops that poll memory, on the native engine: they end when another thread stores, or are reported as deadlocks.
Other long loops are not taken for deadlocks."""

from __future__ import annotations

import time

import numpy as np
import pytest
from engine_harness import Rig, line_of

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
