# SPDX-License-Identifier: Apache-2.0
"""Asynchronous copies from global to shared memory: every form, wrong results without a wait, faults, counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from driver_helpers import function, ok, primary
from engine_harness import PRELUDE, Rig, line_of

from drvfuse.emu import Machine
from drvfuse.emu.findings.faults import Fault
from drvfuse.emu.machine.run.engine_launch import EngineLaunch

SEEDS = range(12)
TOP = """
__device__ __forceinline__ u32 at(const void* p) { return (u32)__cvta_generic_to_shared(p); }
#define CP(how, dst, src, ...) asm volatile("cp.async." how ".global" "%s [%%0], [%%1], " #__VA_ARGS__ ";" \\
    :: "r"(at(dst)), "l"(__cvta_generic_to_global(src)) : "memory");
#define COMMIT asm volatile("cp.async.commit_group;" ::: "memory");
#define WAIT(n) asm volatile("cp.async.wait_group " #n ";" ::: "memory");
#define WAIT_ALL asm volatile("cp.async.wait_all;" ::: "memory");
"""
TOP = TOP.replace('"%s', '"').replace("%%", "%")


def data(rng: np.random.Generator, nbytes: int) -> np.ndarray:
    return rng.integers(1, 256, nbytes, np.uint8)


def copied(rig: Rig, copy: str, source: np.ndarray, nbytes: int = 64, **options: Any) -> np.ndarray:
    """Run copies of one thread and the waits for them. Returns the thread's shared memory, which was 0xEE everywhere
    before."""
    body = f"""{TOP}
KERNEL k(const unsigned char* in, unsigned char* out, u32 n, u32 p) {{
    __shared__ alignas(16) unsigned char s[{nbytes}];
    for (u32 i = 0; i < {nbytes}; i++) s[i] = 0xEE;
    {copy}
    for (u32 i = 0; i < {nbytes}; i++) out[i] = s[i];
}}"""
    out = rig.empty(nbytes)
    arguments = {"n": 0, "p": 0, **options}
    rig.run(body, rig.array(source), out, arguments["n"], arguments["p"], block=1)
    return rig.read(out, np.uint8, nbytes)


# Forms ---------------------------------------------------------------------------------------------------------------

FORMS = [
    (f"{cache}.{shared}", size)
    for cache, sizes in (("ca", (4, 8, 16)), ("cg", (16,)))
    for shared in ("shared", "shared::cta")
    for size in sizes
]


@pytest.mark.parametrize(("how", "size"), FORMS)
def test_a_copy_moves_its_bytes_and_no_others(rig: Rig, rng: np.random.Generator, how: str, size: int) -> None:
    source = data(rng, 64)
    got = copied(rig, f'CP("{how}", s + 16, in + 32, {size}) COMMIT WAIT(0)', source)
    want = np.full(64, 0xEE, np.uint8)
    want[16 : 16 + size] = source[32 : 32 + size]
    assert np.array_equal(got, want)


@pytest.mark.parametrize("hint", [".L2::64B", ".L2::128B", ".L2::256B"])
def test_prefetch_sizes_change_nothing(rig: Rig, rng: np.random.Generator, hint: str) -> None:
    source = data(rng, 64)
    copy = f'asm volatile("cp.async.cg.shared.global{hint} [%0], [%1+16], 16;" :: "r"(at(s)), "l"(in)); WAIT_ALL'
    assert np.array_equal(copied(rig, copy, source)[:16], source[16:32])


def test_a_cache_policy_changes_nothing(rig: Rig, rng: np.random.Generator) -> None:
    source = data(rng, 64)
    copy = """asm volatile("{ .reg .b64 c; createpolicy.fractional.L2::evict_last.b64 c, 1.0;"
        "cp.async.ca.shared.global.L2::cache_hint [%0], [%1], 8, c;"
        "cp.async.ca.shared.global.L2::cache_hint.L2::128B [%0+8], [%1+8], 8, %2, c; }"
        :: "r"(at(s)), "l"(in), "r"(n)); WAIT_ALL"""
    want = [*source[:8], *source[8:11], *[0] * 5]
    assert copied(rig, copy, source, n=3)[:16].tolist() == want


@pytest.mark.parametrize(("size", "count"), [(s, n) for s in (4, 8, 16) for n in range(s + 1)])
def test_bytes_beyond_the_source_size_are_zero(rig: Rig, rng: np.random.Generator, size: int, count: int) -> None:
    """Bytes beyond the source size lie outside of the allocation; reading them would be a fault."""
    source = data(rng, 16 + count)
    copy = f"""asm volatile("cp.async.ca.shared.global [%0], [%1], {size}, %2;" :: "r"(at(s)), "l"(in + 16), "r"(n));
    WAIT_ALL"""
    got = copied(rig, copy, source, n=count)
    assert got[:size].tolist() == [*source[16:].tolist(), *[0] * (size - count)]
    assert (got[size:] == 0xEE).all()


@pytest.mark.parametrize("ignored", [0, 1])
def test_an_ignored_source_is_not_read_and_gives_zeros(rig: Rig, rng: np.random.Generator, ignored: int) -> None:
    source = data(rng, 16)
    copy = """asm volatile("{ .reg .pred q; setp.ne.u32 q, %2, 0; cp.async.ca.shared.global [%0], [%1], 8, q; }"
        :: "r"(at(s)), "l"(p ? 0ull : (u64)in), "r"(p));
    WAIT_ALL"""
    got = copied(rig, copy, source, p=ignored)
    assert got[:8].tolist() == ([0] * 8 if ignored else source[:8].tolist())
    assert (got[8:] == 0xEE).all()


def test_a_false_guard_issues_no_copy(rig: Rig, rng: np.random.Generator) -> None:
    copy = """asm volatile("{ .reg .pred q; setp.ne.u32 q, %2, 0; @q cp.async.cg.shared.global [%0], [%1], 16; "
        "@!q cp.async.cg.shared.global [%0+16], [%1], 16; }" :: "r"(at(s)), "l"(in), "r"(p)); WAIT_ALL"""
    source = data(rng, 16)
    assert copied(rig, copy, source, p=1)[:32].tolist() == [*source, *[0xEE] * 16]


def test_a_prefetch_changes_nothing_wherever_it_points(rig: Rig, rng: np.random.Generator) -> None:
    source = data(rng, 64)
    copy = """asm volatile("{ .reg .b64 c; createpolicy.fractional.L2::evict_first.b64 c, 1.0;"
        "cp.async.bulk.prefetch.L2.global [%1], 64; cp.async.bulk.prefetch.L2.global.L2::cache_hint [%2], 32, c;"
        "prefetch.global.L2 [%1+32]; prefetch.global.L2::evict_last [%2];"
        "cp.async.cg.shared.global [%0], [%1], 16; }" :: "r"(at(s)), "l"(in), "l"(in + 4096)); WAIT_ALL"""
    assert copied(rig, copy, source)[:32].tolist() == [*source[:16], *[0xEE] * 16]


# Groups --------------------------------------------------------------------------------------------------------------

LAST = 8 * 16
GROUPS = {  # the number of copies, from COPY(0) on, that are complete after the wait
    "COPY(0) COMMIT COPY(1) COMMIT COPY(2) COMMIT WAIT(1)": 2,
    "COPY(0) COMMIT COPY(1) COMMIT COPY(2) COMMIT WAIT(0)": 3,
    "COPY(0) COMMIT COPY(1) COMMIT COPY(2) COMMIT WAIT(3)": 0,
    "COPY(0) COMMIT COPY(1) COMMIT COPY(2) COMMIT WAIT(7)": 0,
    "COPY(0) COPY(1) COMMIT COPY(2) COMMIT WAIT(1)": 2,
    "COPY(0) COMMIT COMMIT WAIT(1)": 1,  # the second group is empty, so the first is complete
    "COPY(0) COMMIT COPY(1) WAIT(0)": 1,  # the wait does not cover the group that is still open
    "COPY(0) COMMIT COPY(1) WAIT_ALL": 2,
    "COPY(0) COMMIT COPY(1) COMMIT WAIT(1) COPY(2) COMMIT WAIT(1)": 2,
    "COPY(0) WAIT_ALL COPY(1) COMMIT COPY(2) COMMIT WAIT(1)": 2,
    "COPY(0) WAIT_ALL WAIT_ALL WAIT(0) COMMIT WAIT(0)": 1,
    "WAIT(0) COPY(0)": 0,
}


@pytest.mark.parametrize("program", GROUPS)
def test_a_wait_ends_the_groups_that_it_names_and_with_seed_0_no_others(
    rig: Rig, rng: np.random.Generator, program: str
) -> None:
    source = data(rng, LAST)
    top = '#define COPY(i) CP("ca.shared", s + 8 * i, in + 8 * i, 8)\n'
    got = copied(rig, top + program, source, LAST)
    made = GROUPS[program]
    assert np.array_equal(got[: 8 * made], source[: 8 * made]) and (got[8 * made :] == 0xEE).all()


@pytest.mark.parametrize("program", GROUPS)
def test_waited_for_copies_are_complete_under_every_seed(rng: np.random.Generator, program: str) -> None:
    source = data(rng, LAST)
    top = '#define COPY(i) CP("ca.shared", s + 8 * i, in + 8 * i, 8)\n'
    early = set()
    for seed in SEEDS:
        rig = Rig(seed)
        got = copied(rig, top + program, source, LAST)
        rig.close()
        made = GROUPS[program]
        assert np.array_equal(got[: 8 * made], source[: 8 * made])
        early |= {np.array_equal(got[8 * i :][:8], source[8 * i :][:8]) for i in range(made, program.count("COPY"))}
    assert early in (set(), {False, True}), "copies are made at different moments"


def test_the_source_may_be_read_as_late_as_at_the_wait(rng: np.random.Generator) -> None:
    """With some seeds the source is read when the copy is issued, and with others after the store that follows."""
    source = data(rng, 16)
    program = 'CP("ca.shared", s, in, 4) *(u32*)in = 0x01010101; COMMIT WAIT(0)'
    seen = set()
    for seed in SEEDS:
        rig = Rig(seed)
        seen.add(bytes(copied(rig, program, source)[:4]))
        rig.close()
    assert seen == {b"\x01\x01\x01\x01", source[:4].tobytes()}


def test_copies_of_a_thread_that_exits_may_come_too_late_for_all_others(rng: np.random.Generator) -> None:
    body = (
        TOP
        + """
KERNEL k(const u32* in, u32* out) {
    __shared__ u32 s[64];
    s[threadIdx.x] = 7;
    __syncthreads();
    CP("ca.shared", s + (threadIdx.x ^ 32), in + threadIdx.x, 4)
    if (threadIdx.x >= 32) return;
    __nanosleep(100000);
    out[threadIdx.x] = s[threadIdx.x];
}"""
    )
    source = rng.integers(8, 1 << 32, 64, np.uint32)
    for seed in range(4):
        rig = Rig(seed)
        in_, out = rig.array(source), rig.empty(128)
        kept = []
        for _ in range(3):
            rig.run(body, in_, out, block=64)
            kept.append(rig.engine.copies[:4].tobytes())  # the entries for pending copies that the runs use
        late = rig.read(out, np.uint32, 32) == 7
        assert late.all() if seed == 0 else late.any() and not late.all()
        assert np.array_equal(rig.read(out, np.uint32, 32)[~late], source[32:][~late])
        assert kept[0] == kept[1] == kept[2], "copies that nobody waited for are dropped"
        rig.close()


def test_more_copies_than_can_be_pending_are_all_made(rig: Rig, rng: np.random.Generator) -> None:
    body = (
        TOP
        + """
KERNEL k(const u32* in, u32* out) {
    __shared__ u32 s[1024];
    for (u32 i = 0; i < 1100; i++) CP("ca.shared", s + threadIdx.x, in + (i + threadIdx.x) % 2048, 4)
    WAIT_ALL
    out[threadIdx.x] = s[threadIdx.x];
}"""
    )
    source = rng.integers(0, 1 << 32, 2048, np.uint32)
    out = rig.empty(4096)
    rig.run(body, rig.array(source), out, block=1024)
    assert np.isin(rig.read(out, np.uint32, 1024), source).all()


def test_copies_in_called_functions_belong_to_the_calling_thread(rig: Rig, rng: np.random.Generator) -> None:
    body = (
        TOP
        + """
__device__ __noinline__ void fetch(u32* s, const u32* in) { CP("ca.shared", s, in, 4) COMMIT }
__device__ __noinline__ void finish() { WAIT(0) }
KERNEL k(const u32* in, u32* out) {
    __shared__ u32 s[32];
    fetch(s + threadIdx.x, in + threadIdx.x);
    finish();
    out[threadIdx.x] = s[threadIdx.x];
}"""
    )
    source = rng.integers(0, 1 << 32, 32, np.uint32)
    out = rig.empty(128)
    rig.run(body, rig.array(source), out)
    assert np.array_equal(rig.read(out, np.uint32, 32), source)


# Faults --------------------------------------------------------------------------------------------------------------


def fault_of(rig: Rig, copy: str, *arguments: int, bytes_shared: int = 32) -> Fault:
    """Launch a kernel with this copy. Return the fault, which must be on the line of the copy."""
    body = f"""{TOP}
KERNEL k(const unsigned char* in, u32 n) {{
    __shared__ alignas(16) unsigned char s[{bytes_shared}];
    {copy} // here
    COMMIT
    WAIT(0)
}}"""
    launch = rig.launch(body, *(arguments or (rig.array(np.ones(64, np.uint8)), 0)), block=1)
    assert rig.finish(launch) and launch.fault is not None
    assert launch.fault.line == line_of(body, "here")
    return launch.fault


@pytest.mark.parametrize("where", ["s + 4, in, 8", "s, in + 8, 16", "s + 1, in, 4", "s, in + 2, 4"])
def test_misaligned_addresses_are_found(rig: Rig, where: str) -> None:
    fault = fault_of(rig, f'CP("ca.shared", {where})')
    assert fault.kind == "misaligned"
    assert fault.message.startswith("write of" if where.startswith("s +") else "read of")


def test_a_source_beyond_the_allocation_is_found_at_the_copy(rig: Rig) -> None:
    source = rig.array(np.ones(24, np.uint8))
    fault = fault_of(rig, 'CP("cg.shared", s, in + 16, 16)', source, 0)
    assert (fault.kind, fault.address) == ("out_of_bounds", source + 24)


def test_a_target_outside_of_shared_memory_is_found_at_the_copy(rig: Rig) -> None:
    fault = fault_of(rig, 'CP("cg.shared", s + 32, in, 16)')
    assert fault.kind == "foreign_shared" and "32 bytes of shared memory" in fault.message


def test_an_uninitialised_source_is_found(rig: Rig) -> None:
    assert fault_of(rig, 'CP("cg.shared", s, in, 16)', rig.empty(16), 0).kind == "uninitialised"


def test_a_source_size_above_the_size_is_refused(rig: Rig) -> None:
    copy = 'asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" :: "r"(at(s)), "l"(in), "r"(n));'
    fault = fault_of(rig, copy, rig.array(np.ones(64, np.uint8)), 9)
    assert fault.kind == "copy_size" and "8 bytes with a src-size of 9" in fault.message


def test_endless_copies_end_at_the_limit_of_accesses() -> None:
    rig = Rig(loop_limit=1000)
    assert fault_of(rig, 'while (true) CP("ca.shared", s, in, 4)').kind == "endless"
    rig.close()


MISSING = (
    TOP
    + """
KERNEL k(const u32* in, u32* out) {
    __shared__ u32 s[32];
    CP("ca.shared", s + threadIdx.x, in + threadIdx.x, 4) // here
    COMMIT
    %s
    out[threadIdx.x] = s[threadIdx.x]; // read
}"""
)


@pytest.mark.parametrize("instead", ["", "WAIT(1)", "__syncthreads();"])
def test_a_read_without_a_wait_is_found_and_its_copy_is_named(rig: Rig, instead: str) -> None:
    body = MISSING.replace("%s", instead)
    launch = rig.launch(body, rig.array(np.arange(32, dtype=np.uint32)), rig.empty(128))
    assert rig.finish(launch) and launch.fault is not None
    assert (launch.fault.kind, launch.fault.line) == ("uninitialised", line_of(body, "read"))
    assert f"the cp.async at line {line_of(body, 'here')}" in launch.fault.message
    assert "cp.async.wait_group" in launch.fault.message
    again: EngineLaunch = rig.run(MISSING.replace("%s", "WAIT(0)"), rig.array(np.zeros(32, np.uint32)), rig.empty(128))
    assert again.done, "what the stopped launch had pending is gone"


def run_on(machine: Machine, body: str, words: np.ndarray, **launch: int) -> np.ndarray:
    """The output of kernel `k` for these input words; it has as many words as the input."""
    cuda = machine.driver
    ok(cuda.cuInit(0))
    primary(cuda)
    in_, out = (ok(cuda.cuMemAlloc(words.nbytes)) for _ in range(2))
    ok(cuda.cuMemcpyHtoD(in_, words, words.nbytes))
    kernel = function(cuda, PRELUDE + TOP + body, "k")
    shape = {"grid": 1, "block": 32, **launch}
    ok(cuda.cuLaunchKernel(kernel, shape["grid"], 1, 1, shape["block"], 1, 1, 0, 0, ((in_, out), (None, None)), 0))
    ok(cuda.cuCtxSynchronize())
    result = np.empty_like(words)
    ok(cuda.cuMemcpyDtoH(result, out, words.nbytes))
    return result


STALE = """
KERNEL k(const u32* in, u32* out) {
    __shared__ u32 s[64];
    u32 t = threadIdx.x;
    s[t] = 7;
    __syncthreads();
    CP("ca.shared", s + t, in + t, 4)
    COMMIT
    %s
    out[t] = s[t ^ 32];
}"""


def test_with_seed_0_a_missing_wait_reads_the_old_shared_memory(rng: np.random.Generator) -> None:
    words = rng.integers(8, 1 << 32, 64, np.uint32)
    for between, stale in (("WAIT(0) __syncthreads();", 0), ("__syncthreads();", 64), ("WAIT(0)", 32)):
        with Machine(devices=1) as machine:
            got = run_on(machine, STALE.replace("%s", between), words, block=64)
        want = words[np.arange(64) ^ 32]
        assert ((got == want) | (got == 7)).all() and (got == 7).sum() == stale


def test_a_race_report_has_the_copy_and_the_wait_in_its_timeline(rng: np.random.Generator) -> None:
    words = rng.integers(8, 1 << 32, 64, np.uint32)
    with Machine(devices=1, race=True) as machine:
        run_on(machine, STALE.replace("%s", "WAIT(0) if (t < 32)"), words, block=64)
    line = line_of((PRELUDE + TOP + STALE).replace("    COMMIT\n    %s", "// commit"), "commit") - 1
    (report,) = machine.reports
    assert report.other is not None and report.other.line == line and report.timeline is not None
    assert "between the copying thread's wait" in (report.edge or "")
    assert f"cp.async.ca.shared t32 (test.cu:{line})" in report.timeline
    assert f"cp.async.wait_group t32 (test.cu:{line + 2})" in report.timeline


@pytest.mark.parametrize("seed", range(6))
def test_a_copy_sees_the_delayed_stores_of_its_own_block(rng: np.random.Generator, seed: int) -> None:
    body = """
KERNEL k(u32* in, u32* out) {
    __shared__ u32 s[64];
    u32 t = threadIdx.x, i = blockIdx.x * 64 + t;
    out[i] = in[i] + 1;
    __syncthreads();
    CP("ca.shared", s + t, out + (i ^ 33), 4)
    WAIT_ALL
    __syncthreads();
    out[i] = s[t ^ 33] * 2;
}"""
    words = rng.integers(0, 1 << 32, 256, np.uint32)
    with Machine(devices=1, seed=seed, race=True, delay_stores=True) as machine:
        assert np.array_equal(run_on(machine, body, words, grid=4, block=64), (words + 1) * 2)
        assert machine.reports == []


# Counts --------------------------------------------------------------------------------------------------------------


def test_a_copy_counts_as_a_load_and_a_store_of_its_size(rig: Rig) -> None:
    body = (
        TOP
        + """
KERNEL k(const unsigned char* near, const unsigned char* far) {
    __shared__ alignas(16) unsigned char s[2][512];
    CP("cg.shared", s[0] + 16 * threadIdx.x, near + 16 * threadIdx.x, 16) // near
    CP("ca.shared", s[1] + 8 * threadIdx.x, far + 8 * threadIdx.x, 8) // far
    WAIT_ALL
}"""
    )
    near, far = (rig.array(np.ones(512, np.uint8), device=i) for i in (0, 1))
    lines = {line: count for (_, line), count in rig.run(body, near, far).counters.lines.items()}
    a, b = lines[line_of(body, "near")], lines[line_of(body, "far")]
    assert (a.accesses, a.local_read, a.shared_written) == (32, 512, 512)
    assert (b.accesses, b.remote_read, b.shared_written) == (32, 256, 256)
    assert a.local_written == b.remote_written == a.shared_read == 0


# A pipeline ----------------------------------------------------------------------------------------------------------

PIPELINE = (
    TOP
    + """
template <bool ASYNC> __device__ void rows(const float* x, const float* w, float* out, u32 n, u32 tiles) {
    constexpr u32 STAGES = 3, TILE = 256;  // each thread copies 16 bytes of each tile, and uses those of others
    __shared__ alignas(16) float buffer[STAGES][TILE];
    __shared__ float part[64];
    const float* row = x + blockIdx.x * n;
    u32 t = threadIdx.x;
    float sum = 0;
    auto fetch = [&](u32 tile) {
        if (tile < tiles) {
            u32 first = tile * TILE + t * 4;
            u32 left = first >= n ? 0 : (n - first) * 4;
            u32 bytes = left < 16 ? left : 16;
            float* to = buffer[tile % STAGES] + t * 4;
            const float* from = row + (bytes ? first : 0);
            if (ASYNC) {
                asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                             :: "r"(at(to)), "l"(from), "r"(bytes) : "memory");
            } else {
                for (u32 i = 0; i < 4; i++) to[i] = i * 4 < bytes ? from[i] : 0.f;
            }
        }
        if (ASYNC) COMMIT
    };
    for (u32 tile = 0; tile < STAGES - 1; tile++) fetch(tile);
    for (u32 tile = 0; tile < tiles; tile++) {
        if (ASYNC) WAIT(1)
        __syncthreads();  // all have waited for this tile, and are done with the one before
        fetch(tile + STAGES - 1);
        const float* s = buffer[tile % STAGES];
        for (u32 i = 0; i < 4; i++) {
            u32 k = (t + 64 * i + 17 * tile) % TILE;
            sum += s[k] * w[k];
        }
    }
    part[t] = sum;
    __syncthreads();
    if (t == 0) {
        for (u32 i = 1; i < 64; i++) sum += part[i];
        out[blockIdx.x] = sum;
    }
}
KERNEL k(const float* x, const float* w, float* out, u32 n, u32 tiles) { rows<true>(x, w, out, n, tiles); }
KERNEL plain(const float* x, const float* w, float* out, u32 n, u32 tiles) { rows<false>(x, w, out, n, tiles); }
"""
)


@pytest.mark.parametrize("n", [1024, 1020, 256, 12])
def test_a_pipeline_of_three_stages_gives_the_bits_of_plain_loads_under_every_seed(
    rng: np.random.Generator, n: int
) -> None:
    blocks, tiles = 5, -(-n // 256)
    x, w = rng.standard_normal((blocks, n)).astype(np.float32), rng.standard_normal(256).astype(np.float32)
    results = set()
    for seed in range(20):
        rig = Rig(seed)
        out, want = rig.empty(4 * blocks), rig.empty(4 * blocks)
        x_, w_ = rig.array(x), rig.array(w)
        rig.run(PIPELINE, x_, w_, out, n, tiles, grid=blocks, block=64)
        rig.run(PIPELINE, x_, w_, want, n, tiles, grid=blocks, block=64, kernel="plain")
        results |= {rig.read(a, np.float32, blocks).tobytes() for a in (out, want)}
        rig.close()
    assert len(results) == 1
