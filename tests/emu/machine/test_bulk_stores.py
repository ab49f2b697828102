# SPDX-License-Identifier: Apache-2.0
"""Bulk copies from shared to global memory: every form, wrong results without a wait, faults, counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from driver_helpers import function, ok, primary
from engine_harness import PRELUDE, Rig, line_of

from drvfuse.emu import Machine
from drvfuse.emu.findings.faults import Fault

SEEDS = range(8)
OLD = 0xEE
TOP = """
__device__ __forceinline__ u32 at(const void* p) { return (u32)__cvta_generic_to_shared(p); }
#define PUT(dst, src, n) asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" \\
    :: "l"(dst), "r"(at(src)), "r"((u32)(n)) : "memory");
#define COMMIT asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#define WAIT(n) asm volatile("cp.async.bulk.wait_group " #n ";" ::: "memory");
#define WAIT_READ(n) asm volatile("cp.async.bulk.wait_group.read " #n ";" ::: "memory");
"""


def words(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(256, 1 << 32, count, np.uint32)


def copied(rig: Rig, program: str, source: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Run a program of one thread. At its start the shared memory `s` holds `source`, and every word of the global
    memory `y` is OLD. Returns the words of `y` twice: as the thread reads them after the program, and as the host reads
    them after the launch.
    """
    body = f"""{TOP}
KERNEL k(const u32* x, u32* y, u32* out) {{
    __shared__ alignas(16) u32 s[{len(source)}];
    for (u32 i = 0; i < {len(source)}; i++) s[i] = x[i];
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    {program}
    for (u32 i = 0; i < {len(source)}; i++) out[i] = y[i];
}}"""
    old, out = rig.array(np.full(len(source), OLD, np.uint32)), rig.empty(source.nbytes)
    rig.run(body, rig.array(source), old, out, block=1)
    return rig.read(out, np.uint32, len(source)), rig.read(old, np.uint32, len(source))


# Forms and groups ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [16, 48, 4000])
@pytest.mark.parametrize(
    "how", ["shared::cta.bulk_group", "shared.bulk_group", "shared::cta.bulk_group.L2::cache_hint"]
)
def test_a_copy_moves_its_bytes_and_no_others(rig: Rig, rng: np.random.Generator, how: str, nbytes: int) -> None:
    source = words(rng, 1024)
    policy = ", c" if "hint" in how else ""
    program = f"""asm volatile("{{ .reg .b64 c; createpolicy.fractional.L2::evict_first.b64 c, 1.0;"
        "cp.async.bulk.global.{how} [%0], [%1], %2{policy}; }}" :: "l"(y + 4), "r"(at(s + 8)), "r"({nbytes}));
    COMMIT WAIT(0)"""
    want = np.full(1024, OLD, np.uint32)
    want[4:][: nbytes // 4] = source[8:][: nbytes // 4]
    assert np.array_equal(copied(rig, program, source)[0], want)


GROUPS = {  # the number of copies, from COPY(0) on, that are complete after the last wait
    "COPY(0) COMMIT COPY(1) COMMIT COPY(2) COMMIT WAIT(1)": 2,
    "COPY(0) COMMIT COPY(1) COMMIT COPY(2) COMMIT WAIT(0)": 3,
    "COPY(0) COMMIT COPY(1) COMMIT COPY(2) COMMIT WAIT(3)": 0,
    "COPY(0) COPY(1) COMMIT COPY(2) COMMIT WAIT(1)": 2,
    "COPY(0) COMMIT COMMIT WAIT(1)": 1,  # the second group is empty, so the first is complete
    "COPY(0) COMMIT COPY(1) WAIT(0)": 1,  # the wait does not cover the group that is still open
    "COPY(0) COMMIT COPY(1) COMMIT WAIT_READ(0)": 0,
    "COPY(0) COMMIT WAIT_READ(0) COPY(1) COMMIT WAIT_READ(0) WAIT(1)": 1,
    "COPY(0) COMMIT WAIT(1) COPY(1) COMMIT WAIT(1) COPY(2) COMMIT WAIT(1)": 2,
    'asm volatile("cp.async.commit_group; cp.async.wait_all;"); COPY(0) COMMIT asm volatile("cp.async.wait_all;");': 0,
}
COPY = "#define COPY(i) PUT(y + 8 * i, s + 8 * i, 32)\n"


@pytest.mark.parametrize("program", GROUPS)
def test_a_wait_ends_the_groups_that_it_names(rng: np.random.Generator, program: str) -> None:
    """Under seed 0 a wait completes only the groups that it has to wait for; under other seeds it sometimes completes
    more groups. The end of the kernel completes all groups.
    """
    source, made, early = words(rng, 24), 8 * GROUPS[program], set()
    issued = 8 * program.count("COPY(")
    for seed in SEEDS:
        rig = Rig(seed)
        got, ended = copied(rig, COPY + program, source)
        rig.close()
        assert np.array_equal(got[:made], source[:made])
        assert np.array_equal(ended[:issued], source[:issued])
        assert (seed or got[made:issued].tolist() == [OLD] * (issued - made)) and (got[issued:] == OLD).all()
        early |= set((got[made:issued] != OLD).tolist())
    assert early == ({False, True} if issued > made else set()), "copies are written at different moments"


@pytest.mark.parametrize(
    ("before", "after", "moments"),
    [
        ("COMMIT", "WAIT(0)", {"old", "new"}),
        ("", "COMMIT WAIT_READ(0) WAIT(0)", {"old", "new"}),
        ("COMMIT WAIT_READ(1)", "WAIT(0)", {"old", "new"}),
        ("COMMIT WAIT_READ(0)", "WAIT(0)", {"old"}),
        ("COMMIT WAIT(0)", "", {"old"}),
    ],
)
def test_the_source_may_be_read_as_late_as_the_wait_for_the_read(
    rng: np.random.Generator, before: str, after: str, moments: set[str]
) -> None:
    source = words(rng, 32)
    program = f"PUT(y, s, 128) {before} for (u32 i = 0; i < 32; i++) s[i] = ~s[i]; {after}"
    seen = set()
    for seed in SEEDS:
        rig = Rig(seed)
        got, _ = copied(rig, program, source)
        rig.close()
        old, new = got == source, got == ~source
        assert (old | new).all()
        assert seed or (new if "new" in moments else old).all()
        seen |= {name for name, found in (("old", old), ("new", new)) if found.any()}
    assert seen == moments


# What others see -----------------------------------------------------------------------------------------------------

MESSAGE = (
    TOP
    + """
KERNEL k(const u32* x, u32* y, u32* flag, u32* out) {
    __shared__ alignas(16) u32 s[64];
    u32 t = threadIdx.x;
    if (blockIdx.x == 0) {
        s[t] = x[t];
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        if (t == 0) {
            PUT(y, s, 256) // put
            COMMIT
            %s
            store(flag, 1);
        }
        return;
    }
    if (t == 0) while (!load(flag));
    __syncthreads();
    out[t] = y[t ^ 21]; // read
}"""
)


@pytest.mark.parametrize(("wait", "late"), [("WAIT(0)", False), ("WAIT_READ(0)", True), ("", True)])
def test_without_the_full_wait_another_block_may_read_old_values(
    rng: np.random.Generator, wait: str, late: bool
) -> None:
    source = words(rng, 64)
    for seed in SEEDS:
        rig = Rig(seed)
        out = rig.empty(256)
        old = rig.array(np.full(64, OLD, np.uint32))
        rig.run(MESSAGE.replace("%s", wait), rig.array(source), old, rig.array([0]), out, grid=2, block=64)
        got = rig.read(out, np.uint32, 64)
        stale = got == OLD
        assert np.array_equal(got[~stale], source[np.arange(64) ^ 21][~stale])
        assert stale.any() == late and (seed or stale.all() == late)
        rig.close()


def test_an_uninitialised_source_is_found_and_its_copy_is_named(rig: Rig, rng: np.random.Generator) -> None:
    body = MESSAGE.replace("%s", "WAIT_READ(0)")
    launch = rig.launch(
        body, rig.array(words(rng, 64)), rig.empty(256), rig.array([0]), rig.empty(256), grid=2, block=64
    )
    assert rig.finish(launch) and launch.fault is not None
    assert (launch.fault.kind, launch.fault.line) == ("uninitialised", line_of(body, "read"))
    text = f"the cp.async.bulk at line {line_of(body, 'put')} will write it, and no "
    text += "cp.async.bulk.wait_group (without .read)"
    assert text in launch.fault.message


POLLED = (
    TOP
    + """
KERNEL k(const u32* x, u32* y, u32* out, u32* count) {
    __shared__ alignas(16) u32 s[32];
    __shared__ u32 stop;
    u32 t = threadIdx.x;
    if (blockIdx.x == 0) {
        s[t % 32] = x[t % 32];
        stop = 0;
        __syncthreads();
        if (t == 0) { PUT(y, s, 128) COMMIT %s }
        return;
    }
    u32 v;
    u64 start = timer();
    for (u32 i = 1; !(v = load(y + t)); i++)
        if (i % 16 == 0 && timer() - start > 500000) break;
    out[t] = v;
}"""
)


@pytest.mark.parametrize(
    "on", ["", "while (!load(y + 32));", "while (!load(y + 32)) atomicAdd(count, 1);"], ids=["exits", "waits", "works"]
)
def test_a_poll_sees_the_copied_words_even_without_a_wait(rng: np.random.Generator, on: str) -> None:
    source = words(rng, 32)
    body = POLLED.replace("%s", on).replace("out[t] = v;", "out[t] = v; __syncwarp(); if (t == 0) store(y + 32, 1);")
    for seed in range(3):
        rig = Rig(seed)
        out = rig.empty(128)
        y, count = (rig.array(np.zeros(64, np.uint32)) for _ in range(2))
        rig.run(body, rig.array(source), y, out, count, grid=2, block=32)
        assert np.array_equal(rig.read(out, np.uint32, 32), source)
        rig.close()


@pytest.mark.parametrize("wait", ["COMMIT WAIT(0)", "COMMIT", ""])
def test_repeating_the_same_copy_in_a_poll_is_no_progress(wait: str) -> None:
    body = (
        TOP
        + """
KERNEL k(u32* y, u32* flag) {
    __shared__ alignas(16) u32 s[16];
    for (u32 i = 0; i < 16; i++) s[i] = i;
    while (!load(flag)) { PUT(y, s, 64) %s }
}"""
    )
    for seed in range(2):
        rig = Rig(seed, loop_limit=1 << 20)
        launch = rig.launch(body.replace("%s", wait), rig.array(np.zeros(16, np.uint32)), rig.array([0]), block=1)
        assert not rig.finish(launch), launch.fault
        rig.close()


EACH = (
    TOP
    + """
KERNEL k(const u32* x, u32* y) {
    __shared__ alignas(16) u32 s[64];
    u32 t = threadIdx.x, i = blockIdx.x * 64 + t;
    s[t] = x[i];
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (t % 32 == 5) { PUT(y + i - 5, s + t - 5, 128) COMMIT %s }
}"""
)


@pytest.mark.parametrize("wait", ["", "WAIT_READ(0)", "WAIT(0)"])
def test_blocks_that_take_turns_write_every_word(rng: np.random.Generator, wait: str) -> None:
    source = words(rng, 9 * 64)
    for seed in range(3):
        rig = Rig(seed)
        kept = []
        for _ in range(3):
            y = rig.empty(source.nbytes)
            rig.run(EACH.replace("%s", wait), rig.array(source), y, grid=9, block=64, resident=2)
            assert np.array_equal(rig.read(y, np.uint32, source.size), source)
            kept.append(rig.engine.copies[:4].tobytes())  # the entries for pending copies that the runs use
        assert kept[0] == kept[1] == kept[2], "copies that nobody waited for are dropped"
        rig.close()


def test_more_pieces_than_can_be_pending_are_all_written(rig: Rig, rng: np.random.Generator) -> None:
    body = (
        TOP
        + """
KERNEL k(const u32* x, u32* y) {
    __shared__ alignas(16) u32 s[8192];
    u32 t = threadIdx.x;
    for (u32 i = t; i < 8192; i += 1024) s[i] = x[i];
    __syncthreads();
    if (t < 600) PUT(y + t % 2 * 8192, s, 32768)
}"""
    )
    source = words(rng, 8192)
    y = rig.empty(2 * source.nbytes)
    rig.run(body, rig.array(source), y, block=1024)
    assert np.array_equal(rig.read(y, np.uint32, 16384), np.tile(source, 2))


@pytest.mark.parametrize("seed", range(6))
def test_a_copy_overwrites_earlier_delayed_stores_of_its_block(rng: np.random.Generator, seed: int) -> None:
    body = """
KERNEL k(u32* x, u32* y) {
    __shared__ alignas(16) u32 s[64];
    u32 t = threadIdx.x, i = blockIdx.x * 64 + t;
    x[i] = x[i] + 1;
    s[t] = x[i] * 2;
    asm volatile("fence.proxy.async;" ::: "memory");
    y[i] = 1;
    __syncthreads();
    if (t == 40) PUT(y + blockIdx.x * 64, s, 240)
    if (blockIdx.x % 2) return;
    if (t == 40) { COMMIT WAIT(0) }
    __syncthreads();
    y[i] += x[i ^ 1];
}"""
    source = words(rng, 256)
    with Machine(devices=1, seed=seed, race=True, delay_stores=True) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        primary(cuda)
        x, y = (ok(cuda.cuMemAlloc(source.nbytes)) for _ in range(2))
        ok(cuda.cuMemcpyHtoD(x, source, source.nbytes))
        kernel = function(cuda, PRELUDE + TOP + body, "k")
        ok(cuda.cuLaunchKernel(kernel, 4, 1, 1, 64, 1, 1, 0, 0, ((x, y), (None, None)), 0))
        ok(cuda.cuCtxSynchronize())
        got = np.empty_like(source)
        ok(cuda.cuMemcpyDtoH(got, y, source.nbytes))
        assert machine.reports == []
    want = (source + 1) * 2
    want[np.arange(256) % 64 >= 60] = 1
    goes_on = np.arange(256) // 64 % 2 == 0
    assert np.array_equal(got, want + np.where(goes_on, (source + 1)[np.arange(256) ^ 1], 0))


# Faults and counts ---------------------------------------------------------------------------------------------------


def fault_of(rig: Rig, copy: str, target: int, **options: Any) -> Fault:
    """Launch a kernel with this copy. Return the fault, which must be on the line of the copy."""
    body = f"""{TOP}
KERNEL k(u32* y) {{
    __shared__ alignas(16) u32 s[16];
    __shared__ alignas(16) u32 never[4];
    if (y == nullptr) never[threadIdx.x] = 1;
    for (u32 i = 0; i < 16; i++) s[i] = i;
    {copy} // here
}}"""
    launch = rig.launch(body, target, block=1, **options)
    assert rig.finish(launch) and launch.fault is not None
    assert launch.fault.line == line_of(body, "here")
    return launch.fault


@pytest.mark.parametrize(
    ("copy", "kind", "message"),
    [
        ("PUT(y, s, 8)", "copy_size", "cp.async.bulk of 8 bytes"),
        ("PUT(y, s, 0)", "copy_size", "cp.async.bulk of 0 bytes"),
        ("PUT(y + 1, s, 16)", "misaligned", "write of 16 bytes"),
        ("PUT(y, s + 2, 16)", "misaligned", "read of 16 bytes"),
        ("PUT(y + 12, s, 32)", "out_of_bounds", "write of 16 bytes"),
        ("PUT(y, s + 12, 4096)", "foreign_shared", "read of 16 bytes"),
        ("PUT(y, never, 16)", "uninitialised", "read of 16 bytes"),
    ],
)
def test_misuse_of_bulk_stores_is_found_at_the_copy(rig: Rig, copy: str, kind: str, message: str) -> None:
    fault = fault_of(rig, copy, rig.empty(64))
    assert fault.kind == kind and fault.message.startswith(message)


def test_a_target_without_write_access_is_found_at_the_copy(rig: Rig) -> None:
    fault = fault_of(rig, "PUT(y, s, 64)", rig.empty(64, device=1, writers=0b10))
    assert fault.kind == "read_only"


def test_every_16_bytes_of_a_copy_count_against_the_limit_of_accesses() -> None:
    rig = Rig(loop_limit=1000)
    assert fault_of(rig, "for (u32 i = 0; i < 300; i++) PUT(y, s, 64)", rig.empty(64)).kind == "endless"
    rig.close()


def test_a_copy_counts_as_shared_loads_and_stores_to_its_target(rig: Rig) -> None:
    body = (
        TOP
        + """
KERNEL k(u32* near, u32* far) {
    __shared__ alignas(16) u32 s[64];
    for (u32 i = 0; i < 64; i++) s[i] = i;
    PUT(near, s, 256) // near
    PUT(far, s, 48) // far
    COMMIT WAIT(0)
}"""
    )
    near, far = (rig.empty(256, device=i) for i in (0, 1))
    lines = {line: count for (_, line), count in rig.run(body, near, far, block=1).counters.lines.items()}
    a, b = lines[line_of(body, "near")], lines[line_of(body, "far")]
    assert (a.accesses, a.shared_read, a.local_written, a.remote_written) == (16, 256, 256, 0)
    assert (b.accesses, b.shared_read, b.local_written, b.remote_written) == (3, 48, 0, 48)
