# SPDX-License-Identifier: Apache-2.0
"""The emulator's native engine: blocks, barriers, dependent launches, printf, and the memory of launches."""

from __future__ import annotations

import numpy as np
import pytest
from engine_harness import Rig, line_of, ptx


def test_machines_share_the_native_code_of_a_module():
    one, other = Rig(), Rig(1)
    text = ptx("KERNEL k() {}")
    assert one.engine.load(text) is other.engine.load(text)
    one.close()
    other.close()


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
