# SPDX-License-Identifier: Apache-2.0
"""Asynchronous reductions, arrivals of cp.async at mbarriers, and arrivals that drop."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from engine_harness import Rig, line_of

TOP = """
__device__ __forceinline__ u32 at(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ u32 in_block(const void* p, u32 rank) {
    u32 r;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(at(p)), "r"(rank));
    return r;
}
#define INIT(b, n) asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(at(b)), "r"((u32)(n)) : "memory");
#define ARRIVE(b) asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(at(b)) : "memory");
#define ARRIVE_TX(b, n) asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" \\
    :: "r"(at(b)), "r"((u32)(n)) : "memory");
#define TEST(d, b, parity) asm volatile( \\
    "{ .reg .pred q; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 q, [%1], " \\
    "%2; selp.u32 %0, 1, 0, q; }" : "=r"(d) : "r"(at(b)), "r"((u32)(parity)) : "memory");
#define AWAIT(b, parity) { u32 d_; do TEST(d_, b, parity) while (!d_); }
#define CP(dst, src) asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(at(dst)), "l"(src) : "memory");
#define ARRIVE_COPIED(how, b) asm volatile("cp.async.mbarrier.arrive" how ".shared.b64 [%0];" :: "r"(at(b)) : "memory");
#define REDUCE(op, dst, src, n) asm volatile( \\
    "cp.reduce.async.bulk.global.shared::cta.bulk_group." op " [%0], [%1], %2;" \\
    :: "l"(dst), "r"(at(src)), "r"((u32)(n)) : "memory");
#define WAIT_GROUPS asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
#define FENCE asm volatile("fence.proxy.async; fence.mbarrier_init.release.cluster;" ::: "memory");
#define CLUSTER_BARRIER asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
"""


@pytest.fixture(params=[0, 1, 2, 5])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(request.param)
    yield made
    made.close()


@pytest.fixture
def rig0() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


GLOBAL = (
    TOP
    + """
KERNEL k(const u32* x, u32* out) {
    __shared__ alignas(16) u32 s[64];
    s[threadIdx.x] = x[blockIdx.x * 64 + threadIdx.x];
    FENCE
    __syncthreads();
    if (threadIdx.x == 0) {
        REDUCE("add.u32", out, s, 256) // here
        REDUCE("max.s32", out + 64, s, 256)
        REDUCE("xor.b64", out + 128, s, 256)
        REDUCE("inc.u32", out + 192, s + 32, 128)
        WAIT_GROUPS
    }
}"""
)


def test_blocks_reduce_into_the_same_global_memory(rig: Rig, rng: np.random.Generator) -> None:
    blocks = 9
    x, start = rng.integers(0, 1 << 32, (blocks, 64), np.uint32), rng.integers(0, 1 << 32, 224, np.uint32)
    out = rig.array(start)
    launch = rig.run(GLOBAL, rig.array(x), out, grid=blocks, block=64)
    found = rig.read(out, np.uint32, 224)
    assert np.array_equal(found[:64], start[:64] + x.sum(0, dtype=np.uint32))
    assert np.array_equal(
        found[64:128].view(np.int32), np.maximum(start[64:128].view(np.int32), x.view(np.int32).max(0))
    )
    assert np.array_equal(found[128:192], start[128:192] ^ np.bitwise_xor.reduce(x, 0))
    counts = {line: count for (_, line), count in launch.counters.lines.items()}
    count = counts[line_of(GLOBAL, "here")]
    assert (count.local_read, count.local_written, count.shared_read) == (256 * blocks,) * 3


def test_an_uninitialised_target_of_a_reduction_is_found(rig0: Rig) -> None:
    launch = rig0.launch(GLOBAL, rig0.array(np.ones(64, np.uint32)), rig0.empty(1024), grid=1, block=64)
    assert rig0.finish(launch) and launch.fault is not None
    assert (launch.fault.kind, launch.fault.line) == ("uninitialised", line_of(GLOBAL, "here"))


CLUSTER = (
    TOP
    + """
KERNEL k(u32* out) {
    __shared__ alignas(16) u32 sums[8], mine[4];
    __shared__ u64 b;
    u32 rank = blockIdx.x % 4, t = threadIdx.x;
    if (t < 8) sums[t] = 1000 * rank;
    if (t < 4) mine[t] = (blockIdx.x + 1) << 4 * t;
    if (t == 0) { INIT(&b, 1) }
    FENCE
    CLUSTER_BARRIER
    if (t == 0) ARRIVE_TX(&b, 4 * (4 + 16))
    if (t < 4) {
        asm volatile("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%0], %1, [%2];"
            :: "r"(in_block(sums + 1, t)), "r"(blockIdx.x + 7), "r"(in_block(&b, t)) : "memory");
        asm volatile(
            "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.s32 "
            "[%0], [%1], 16, [%2];"
            :: "r"(in_block(sums + 4, t)), "r"(at(mine)), "r"(in_block(&b, t)) : "memory");
    }
    AWAIT(&b, 0)
    if (t < 8) out[blockIdx.x * 8 + t] = sums[t];
    CLUSTER_BARRIER
}"""
)


def test_the_blocks_of_a_cluster_reduce_into_one_another(rig: Rig) -> None:
    out = rig.empty(8 * 8 * 4)
    rig.run(CLUSTER, out, grid=8, cluster=(4, 1, 1))
    found = rig.read(out, np.uint32, 64).reshape(8, 8)
    for block in range(8):
        group = np.arange(4) + block // 4 * 4
        want = np.full(8, block % 4 * 1000)
        want[1] += (group + 7).sum()
        want[4:] += ((group[:, None] + 1) << 4 * np.arange(4)).sum(0)
        assert np.array_equal(found[block], want), block


COPIED = (
    TOP
    + """
KERNEL k(const u32* x, u32* out, u32 how) {
    __shared__ u32 s[2][64];
    __shared__ u64 b[2];
    u32 t = threadIdx.x;
    s[0][t] = s[1][t] = 7;
    if (t == 0) { INIT(b, 64) INIT(b + 1, 64) }
    __syncthreads();
    for (u32 i = 0; i < 4; i++) {
        CP(&s[i & 1][t], x + 64 * i + t)
        if (i % 2) { ARRIVE_COPIED(".noinc", b + i % 2) }
        else { ARRIVE_COPIED("", b) ARRIVE(b) }
        if (how) AWAIT(b + i % 2, i / 2 & 1)
        out[64 * i + t] = s[i & 1][t ^ 33];
        __syncthreads();
    }
}"""
)


def test_an_mbarrier_waits_for_the_copies_of_all_threads(rig: Rig, rng: np.random.Generator) -> None:
    x = rng.integers(8, 1 << 32, 256, np.uint32)
    out = rig.empty(1024)
    rig.run(COPIED, rig.array(x), out, 1, block=64)
    assert np.array_equal(rig.read(out, np.uint32, 256), x.reshape(4, 64)[:, np.arange(64) ^ 33].reshape(-1))


def test_without_the_wait_the_old_values_are_read(rig0: Rig, rng: np.random.Generator) -> None:
    out = rig0.empty(1024)
    rig0.run(COPIED, rig0.array(rng.integers(8, 1 << 32, 256, np.uint32)), out, 0, block=64)
    assert (rig0.read(out, np.uint32, 64) == 7).all()


def output_of(rig: Rig, program: str, words: int) -> list[int]:
    body = f"{TOP}\nKERNEL k(u32* out) {{ __shared__ u64 b[2]; u64 s = 0, g; u32 d; {program} // here\n}}"
    out = rig.array(np.full(words, 77, np.uint32))
    launch = rig.launch(body, out, block=1)
    assert rig.finish(launch)
    if launch.fault is not None:
        assert launch.fault.line == line_of(body, "here")
        raise RuntimeError(launch.fault.message)
    return rig.read(out, np.uint32, words).tolist()


ASK = "TEST(d, b, {}) out[{}] = d;"
DROP = 'asm volatile("mbarrier.arrive_drop.shared.b64 %0, [%1], {};" : "=l"(s) : "r"(at(b)) : "memory");'
PENDING = 'asm volatile("mbarrier.pending_count.b64 %0, %1;" : "=r"(d) : "l"(s)); out[{}] = d;'


def test_later_phases_do_not_wait_for_threads_that_dropped_out(rig0: Rig) -> None:
    program = "INIT(b, 3)" + DROP.format(2) + PENDING.format(0) + ASK.format(0, 1) + "ARRIVE(b)" + ASK.format(0, 2)
    for phase in (1, 2):
        program += ASK.format(phase % 2, 2 * phase + 1) + "ARRIVE(b)" + ASK.format(phase % 2, 2 * phase + 2)
    assert output_of(rig0, program, 7) == [3, 0, 1, 0, 1, 0, 1]


def test_an_mbarrier_may_have_a_generic_address(rig0: Rig) -> None:
    program = 'asm volatile("cvta.shared.u64 %0, %1;" : "=l"(g) : "l"((u64)at(b)));'
    program += 'asm volatile("mbarrier.init.b64 [%0], 2;" :: "l"(g) : "memory");'
    program += 'asm volatile("mbarrier.arrive.b64 %0, [%1];" : "=l"(s) : "l"(g) : "memory");' + ASK.format(0, 0)
    program += 'asm volatile("mbarrier.arrive_drop.b64 %0, [%1];" : "=l"(s) : "l"(g) : "memory");' + PENDING.format(1)
    assert output_of(rig0, program + ASK.format(0, 2), 3) == [0, 1, 1]


NO_COMPLETE = 'asm volatile("mbarrier.arrive.noComplete.shared.b64 %0, [%1], {};" : "=l"(s) : "r"(at(b)) : "memory");'


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("INIT(b, 2)" + DROP.format(3), "3 arrivals are more than the phase expects"),
        ("INIT(b, 2)" + DROP.format(0), "a count of 0"),
        ("INIT(b, 2)" + NO_COMPLETE.format(2), "with .noComplete completes the phase"),
        ('INIT(b, 1) ARRIVE_COPIED("", b + 1)', "there is no mbarrier"),
        (
            'INIT(b, (1 << 20) - 1) ARRIVE_COPIED("", b)',
            "the phase already expects as many arrivals as an mbarrier can count",
        ),
        ('INIT(b, 1) ARRIVE(b) ARRIVE(b) ARRIVE_COPIED(".noinc", b)', None),
        ('asm volatile("mbarrier.init.b64 [%0], 2;" :: "l"(out) : "memory");', "write of 8 bytes"),
    ],
)
def test_misuse_of_reductions_and_arrivals_is_found_at_its_line(rig0: Rig, program: str, message: str | None) -> None:
    program = "b[1] = 0; " + program
    if message is None:
        assert output_of(rig0, program, 1) == [77]
        return
    with pytest.raises(RuntimeError, match=message):
        output_of(rig0, program, 1)
