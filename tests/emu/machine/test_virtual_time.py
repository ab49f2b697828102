# SPDX-License-Identifier: Apache-2.0
"""Virtual time on the native engine: clocks, sleeps, polling loops with a time-out, and time slices."""

from __future__ import annotations

import time

import numpy as np
import pytest

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
    """A thread reads its clock once in 1024 iterations. With several words an iteration takes several scheduling steps,
    and the thread must still time out soon."""
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
