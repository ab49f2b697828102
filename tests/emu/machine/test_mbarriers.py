# SPDX-License-Identifier: Apache-2.0
"""Barrier objects in shared memory: phases, forms, misuse, and bulk copies that complete on them."""

from __future__ import annotations

import re

import numpy as np
import pytest
from engine_harness import Rig, line_of

from drvfuse.emu.findings import mbarriers
from drvfuse.emu.findings.faults import Fault
from drvfuse.emu.findings.reports import standstill
from drvfuse.emu.machine.run.engine_launch import EngineLaunch

TOP = """
__device__ __forceinline__ u32 at(const void* p) { return (u32)__cvta_generic_to_shared(p); }
#define INIT(b, n) asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(at(b)), "r"((u32)(n)) : "memory");
#define INVAL(b) asm volatile("mbarrier.inval.shared.b64 [%0];" :: "r"(at(b)) : "memory");
#define ARRIVE(b) { u64 s_; asm volatile("mbarrier.arrive.shared.b64 %0, [%1];" : "=l"(s_) : "r"(at(b)) : "memory"); }
#define ARRIVE_N(b, n) asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0], %1;" \\
    :: "r"(at(b)), "r"((u32)(n)) : "memory");
#define ARRIVE_TX(b, n) asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" \\
    :: "r"(at(b)), "r"((u32)(n)) : "memory");
#define EXPECT(b, n) asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" \\
    :: "r"(at(b)), "r"((u32)(n)) : "memory");
#define TEST(how, d, b, s, c) asm volatile( \\
    "{ .reg .pred q; mbarrier." how ".b64 q, [%1], %2; selp.u32 %0, 1, 0, q; }" \\
    : "=r"(d) : "r"(at(b)), c(s) : "memory");
#define AWAIT(b, parity) { u32 d_; do TEST("try_wait.parity.shared::cta", d_, b, (u32)(parity), "r") while (!d_); }
#define BULK(dst, src, n, b) asm volatile( \\
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" \\
    :: "r"(at(dst)), "l"(src), "r"((u32)(n)), "r"(at(b)) : "memory");
"""


def output_of(rig: Rig, program: str, words: int) -> list[int]:
    """The contents of `out` after a kernel of one thread."""
    body = f"{TOP}\nKERNEL k(u32* out) {{ __shared__ u64 b[2]; u64 s = 0; u32 d; {program} }}"
    out = rig.array(np.full(words, 77, np.uint32))
    rig.run(body, out, block=1)
    return rig.read(out, np.uint32, words).tolist()


# One thread ----------------------------------------------------------------------------------------------------------

PARITY = 'TEST("try_wait.parity.shared::cta", d, b, {}u, "r") out[{}] = d;'


def test_a_phase_completes_with_its_last_arrival_and_the_next_begins(rig: Rig) -> None:
    program = "INIT(b, 3) INIT(b + 1, 1)"
    for i in range(7):
        program += PARITY.format(0, 2 * i) + PARITY.format(1, 2 * i + 1) + "ARRIVE(b)"
    phases = [i // 3 % 2 for i in range(7)]
    assert output_of(rig, program, 14) == [x for phase in phases for x in (phase != 0, phase != 1)]


def test_a_state_token_refers_to_the_phase_in_which_it_was_returned(rig: Rig) -> None:
    give = 'asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];" : "=l"(s) : "r"(at(b)) : "memory");'
    ask = 'TEST("test_wait.acquire.cta.shared::cta", d, b, s, "l") out[{}] = d;'
    program = f"INIT(b, 2) {give} {ask.format(0)} ARRIVE(b) {ask.format(1)} {give} {ask.format(2)} ARRIVE_N(b, 1)"
    assert output_of(rig, program + ask.format(3), 4) == [0, 1, 0, 1]


@pytest.mark.parametrize(
    "how",
    [
        "test_wait.parity.shared",
        "test_wait.parity.acquire.cta.shared::cta",
        "test_wait.parity.relaxed.cta.shared::cta",
        "try_wait.parity.shared",
        "try_wait.parity.acquire.cta.shared::cta",
    ],
)
def test_every_form_of_a_wait_works(rig: Rig, how: str) -> None:
    ask = f'TEST("{how}", d, b, 0u, "r") out[%d] = d;'
    assert output_of(rig, f"INIT(b, 1) {ask % 0} ARRIVE(b) {ask % 1}", 2) == [0, 1]


def test_a_wait_may_have_a_time_limit(rig: Rig) -> None:
    ask = 'asm volatile("{ .reg .pred q; mbarrier.try_wait.parity.shared.b64 q, [%1], 0, 1000; selp.u32 %0, 1, 0, q; }"'
    ask += ' : "=r"(d) : "r"(at(b)) : "memory"); out[0] = d;'
    assert output_of(rig, f"INIT(b, 1) {ask}", 1) == [0]


def test_an_arrival_counts_several_and_an_expectation_keeps_a_phase_open(rig: Rig) -> None:
    program = "INIT(b, 5) ARRIVE_N(b, 4) " + PARITY.format(0, 0) + "EXPECT(b, 32) ARRIVE(b)" + PARITY.format(0, 1)
    assert output_of(rig, program, 2) == [0, 0]


def test_an_mbarrier_can_be_initialised_again(rig: Rig) -> None:
    program = "INIT(b, 1) ARRIVE(b) INVAL(b) INIT(b, 2) " + PARITY.format(0, 0) + "ARRIVE_N(b, 2)" + PARITY.format(0, 1)
    assert output_of(rig, program, 2) == [0, 1]


# Misuse --------------------------------------------------------------------------------------------------------------


def fault_of(rig: Rig, program: str, *arguments: int) -> Fault:
    body = f"""{TOP}
KERNEL k(const u64* in) {{
    __shared__ alignas(128) u64 b[2], s[64];
    s[0] = b[1] = 0;
    {program} // here
}}"""
    launch = rig.launch(body, *(arguments or (rig.array(np.ones(512, np.uint8)),)), block=1)
    assert rig.finish(launch) and launch.fault is not None
    assert launch.fault.line == line_of(body, "here")
    return launch.fault


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("ARRIVE(b + 1)", "there is no mbarrier"),
        ("INIT(b, 1) INVAL(b) ARRIVE(b)", "there is no mbarrier"),
        ("INIT(b, 1) b[0] = 5; AWAIT(b, 0)", "there is no mbarrier"),
        ("INIT(b, 0)", "a count of 0"),
        ("INIT(b, 1 << 20)", "a count of 1048576"),
        ("INIT(b, 2) ARRIVE_N(b, 3)", "3 arrivals"),
        ("INIT(b, 2) ARRIVE_N(b, 0)", "a count of 0"),
        ("INIT(b, 2) EXPECT(b, 1 << 20)", "1048576 bytes"),
        ("BULK(s, in, 16, b + 1)", "there is no mbarrier"),
    ],
)
def test_misuse_of_mbarriers_is_found_at_its_line(rig: Rig, program: str, reason: str) -> None:
    fault = fault_of(rig, program)
    assert fault.kind == "mbarrier" and reason in fault.message


@pytest.mark.parametrize(
    ("program", "kind"),
    [
        ("ARRIVE(b)", "uninitialised"),
        ("INIT((char*)b + 4, 1)", "misaligned"),
        ("INIT(b, 1) BULK(s, in, 8, b)", "copy_size"),
        ("INIT(b, 1) BULK(s, in, 0, b)", "copy_size"),
        ("INIT(b, 1) BULK(s + 1, in, 16, b)", "misaligned"),
        ("INIT(b, 1) BULK(s, in + 1, 16, b)", "misaligned"),
        ("INIT(b, 1) BULK(s + 60, in, 64, b)", "foreign_shared"),
        ("INIT(b, 1) BULK(s, in + 62, 32, b)", "out_of_bounds"),
    ],
)
def test_bad_addresses_are_found_at_their_line(rig: Rig, program: str, kind: str) -> None:
    assert fault_of(rig, program).kind == kind


# Bulk copies ---------------------------------------------------------------------------------------------------------

ONE = (
    TOP
    + """
KERNEL k(const u32* in, u32* out, u32 bytes) {
    __shared__ alignas(16) u32 s[512];
    __shared__ u64 b;
    u32 t = threadIdx.x;
    for (u32 i = t; i < 512; i += 64) s[i] = 7;
    if (t == 0) {
        INIT(&b, 1)
        asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    if (t == 0) {
        ARRIVE_TX(&b, bytes)
        BULK(s + 4, in + 8, bytes - 16, &b) // many
        BULK(s + 256, in, 16, &b) // few
    }
    AWAIT(&b, 0) // wait
    for (u32 i = t; i < 512; i += 64) out[i] = s[i]; // read
}"""
)


def one(rig: Rig, body: str, source: np.ndarray, nbytes: int) -> EngineLaunch:
    out = rig.empty(2048)
    launch = rig.run(body, rig.array(source), out, nbytes, block=64)
    want = np.full(512, 7, np.uint32)
    want[4:][: nbytes // 4 - 4] = source[8:][: nbytes // 4 - 4]
    want[256:260] = source[:4]
    launch.equal = np.array_equal(rig.read(out, np.uint32, 512), want)  # type: ignore[attr-defined]
    return launch


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("nbytes", [32, 1008])
def test_after_a_completed_wait_the_copied_bytes_can_be_read(rng: np.random.Generator, seed: int, nbytes: int) -> None:
    rig = Rig(seed)
    launch = one(rig, ONE, rng.integers(8, 1 << 32, 512, np.uint32), nbytes)
    assert launch.equal  # type: ignore[attr-defined]
    counts = {line: count for (_, line), count in launch.counters.lines.items()}
    for mark, size in (("many", nbytes - 16), ("few", 16)):
        count = counts[line_of(ONE, mark)]
        assert (count.local_read, count.shared_written, count.accesses) == (size, size, size // 16)
    rig.close()


def test_without_a_wait_the_copied_bytes_may_be_missing(rig: Rig, rng: np.random.Generator) -> None:
    body = ONE.replace("AWAIT(&b, 0) // wait", "__syncthreads();")
    assert not one(rig, body, rng.integers(8, 1 << 32, 512, np.uint32), 1008).equal  # type: ignore[attr-defined]


def test_a_read_without_a_wait_is_found_and_its_copy_is_named(rig: Rig) -> None:
    body = ONE.replace("s[i] = 7;", "if (i < 4) s[i] = 7;").replace("AWAIT(&b, 0) // wait", "__syncthreads();")
    launch = rig.launch(body, rig.array(np.ones(512, np.uint32)), rig.empty(2048), 1008, block=64)
    assert rig.finish(launch) and launch.fault is not None
    assert (launch.fault.kind, launch.fault.line) == ("uninitialised", line_of(body, "read"))
    assert (
        f"the cp.async.bulk at line {line_of(body, 'many')} will write it, and no wait for its mbarrier"
        in launch.fault.message
    )


def test_a_refused_copy_occupies_no_pending_slot(rig: Rig) -> None:
    for _ in range(3):
        assert fault_of(rig, "BULK(s, in, 16, b + 1)").kind == "mbarrier"
    assert not rig.engine.copies[:16].any(), "entries that were ever used"


@pytest.mark.parametrize(
    ("call", "state", "brief"),
    [
        ("ARRIVE_TX(&b, bytes + 16)", "parity 0, 0 of 1 arrivals pending, 16 bytes pending", "0 of 1 arrivals, 16 B"),
        ("EXPECT(&b, bytes)", "parity 0, 1 of 1 arrivals pending, 0 bytes pending", "1 of 1 arrivals, 0 B"),
        (
            "EXPECT(&b, bytes - 16)",
            "parity 0, 1 of 1 arrivals pending, 16 bytes more than expected",
            "1 of 1 arrivals, -16 B",
        ),
        (
            "ARRIVE(&b) ARRIVE_TX(&b, bytes + 32)",
            "parity 1, 0 of 1 arrivals pending, 32 bytes pending",
            "0 of 1 arrivals, 32 B",
        ),
    ],
)
def test_a_phase_that_never_completes_is_a_deadlock_that_lists_pending_arrivals(
    rig: Rig, call: str, state: str, brief: str
) -> None:
    body = ONE.replace("ARRIVE_TX(&b, bytes)", call).replace("AWAIT(&b, 0)", "AWAIT(&b, 0) AWAIT(&b, 1)")
    launch = rig.launch(body, rig.array(np.ones(512, np.uint32)), rig.empty(2048), 1008, block=64)
    assert not rig.finish(launch)
    blocked = launch.blocked()
    assert len(blocked) == 64 and {(b.status, b.line) for b in blocked} == {("polling", line_of(body, "wait"))}
    assert {b.mbarrier for b in blocked} == {state}
    report = standstill("deadlock", "nothing can go on", [("k", 0, launch)], [], {})
    assert f", an mbarrier: {state}, at test.cu:" in report.message
    assert report.timeline is not None
    assert report.timeline.splitlines()[1] == f"  it is an mbarrier: {state}"
    assert {mbarriers.brief("mbarrier.arrive.shared.b64", b.seen) for b in blocked} == {f"pending {brief}"}


def test_a_deadlock_of_a_poll_with_sleeps_lists_pending_arrivals(rig: Rig) -> None:
    body = f"""{TOP}
KERNEL k() {{
    __shared__ u64 b;
    u32 d;
    INIT(&b, 3) ARRIVE(&b)
    do {{ __nanosleep(1 << 30); TEST("try_wait.parity.shared::cta", d, &b, 0, "r") }} while (!d);
}}"""
    launch = rig.launch(body, block=1)
    assert not rig.finish(launch)
    assert [(b.status, b.mbarrier) for b in launch.blocked()] == [
        ("polling, asleep at the moment", "parity 0, 2 of 3 arrivals pending, 0 bytes pending")
    ]


def test_endless_copies_end_at_the_limit_of_accesses() -> None:
    rig = Rig(loop_limit=1000)
    assert fault_of(rig, "INIT(b, 1) while (true) BULK(s, in, 16, b)").kind == "endless"
    rig.close()


PIPELINE = (
    TOP
    + """
template <bool ASYNC> __device__ void sums(const u32* x, u32* out, u32 tiles) {
    constexpr u32 STAGES = 3, TILE = 256;
    __shared__ alignas(128) u32 buffer[STAGES][TILE];
    __shared__ u64 full[STAGES], empty[STAGES];
    const u32* row = x + blockIdx.x * tiles * TILE;
    u32 t = threadIdx.x, sum = 0;
    if (ASYNC && t == 0)
        for (u32 i = 0; i < STAGES; i++) { INIT(full + i, 1) INIT(empty + i, 64) }
    __syncthreads();
    if (ASYNC && t >= 64) {
        if (t > 64) return;
        for (u32 i = 0; i < tiles; i++) {
            u32 stage = i % STAGES;
            if (i >= STAGES) AWAIT(empty + stage, i / STAGES - 1 & 1)
            ARRIVE_TX(full + stage, TILE * 4)
            BULK(buffer[stage], row + i * TILE, TILE * 4, full + stage)
        }
        return;
    }
    if (t >= 64) return;
    for (u32 i = 0; i < tiles; i++) {
        u32 stage = i % STAGES;
        if (ASYNC) AWAIT(full + stage, i / STAGES & 1)
        for (u32 k = t; k < TILE; k += 64) {
            u32 v = ASYNC ? buffer[stage][k ^ 129] : row[i * TILE + (k ^ 129)];
            sum = sum * 31 + v;
        }
        if (ASYNC) ARRIVE(empty + stage)
    }
    out[blockIdx.x * 64 + t] = sum;
}
KERNEL k(const u32* x, u32* out, u32 tiles) { sums<true>(x, out, tiles); }
KERNEL plain(const u32* x, u32* out, u32 tiles) { sums<false>(x, out, tiles); }
"""
)


def test_a_producer_and_consumers_give_the_bits_of_plain_loads_under_every_seed(rng: np.random.Generator) -> None:
    x = rng.integers(0, 1 << 32, 4 * 10 * 256, np.uint32)
    results = set()
    for seed in range(16):
        rig = Rig(seed)
        x_, out, want = rig.array(x), rig.empty(1024), rig.empty(1024)
        rig.run(PIPELINE, x_, out, 10, grid=4, block=96)
        rig.run(PIPELINE, x_, want, 10, grid=4, block=96, kernel="plain")
        results |= {rig.read(a, np.uint32, 256).tobytes() for a in (out, want)}
        rig.close()
    assert len(results) == 1


def test_a_stage_that_is_filled_too_early_is_found(rng: np.random.Generator) -> None:
    """The mistake appears as wrong bytes, as too many arrivals in a phase, or as a phase that a consumer missed."""
    body = re.sub(r"if \(i >= STAGES\) AWAIT.*", "", PIPELINE)
    x = rng.integers(0, 1 << 32, 4 * 10 * 256, np.uint32)
    for seed in range(8):
        rig = Rig(seed)
        x_, out, want = rig.array(x), rig.empty(1024), rig.empty(1024)
        rig.run(PIPELINE, x_, want, 10, grid=4, block=96, kernel="plain")
        launch = rig.launch(body, x_, out, 10, grid=4, block=96)
        ended = rig.finish(launch) and launch.fault is None
        assert not ended or rig.read(out, np.uint32, 256).tobytes() != rig.read(want, np.uint32, 256).tobytes()
        rig.close()


def test_a_copy_completes_while_other_threads_of_its_block_run(rng: np.random.Generator) -> None:
    body = (
        TOP
        + """
KERNEL k(const u32* in, u32* out, u32* count) {
    __shared__ alignas(16) u32 s[64];
    __shared__ u64 b;
    __shared__ u32 stop;
    u32 t = threadIdx.x;
    if (t == 0) { INIT(&b, 1) stop = 0; }
    __syncthreads();
    if (t >= 64) {
        while (!atomicAdd(&stop, 0)) atomicAdd(count, 1);
        return;
    }
    if (t == 0) { ARRIVE_TX(&b, 256) BULK(s, in, 256, &b) }
    AWAIT(&b, 0)
    out[t] = s[t];
    asm volatile("bar.sync 1, 64;" ::: "memory");
    if (t == 0) atomicExch(&stop, 1);
}"""
    )
    source = rng.integers(0, 1 << 32, 64, np.uint32)
    for seed in range(3):
        rig = Rig(seed)
        out = rig.empty(256)
        rig.run(body, rig.array(source), out, rig.array(np.zeros(1, np.uint32)), block=96)
        assert np.array_equal(rig.read(out, np.uint32, 64), source)
        rig.close()
