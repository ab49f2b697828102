# SPDX-License-Identifier: Apache-2.0
"""Clusters of blocks on the native engine: addresses, their barrier, stores and copies to other blocks, misuse."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from cluster_source import TOP
from engine_harness import Rig, line_of

from drvfuse.emu.findings.faults import Fault
from drvfuse.emu.findings.reports import standstill
from drvfuse.emu.machine.process.failure import error_of


@pytest.fixture(params=[0, 1, 2])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(request.param)
    yield made
    made.close()


@pytest.fixture
def rig0() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def output_of(rig: Rig, body: str, words: int, grid: int = 4, size: int = 4, block: int = 32) -> list[int]:
    """The contents of `out` after a kernel with clusters of `size` blocks; `r` is a block's rank in its cluster."""
    source = f"{TOP}\nKERNEL k(u32* out) {{ u32 b = blockIdx.x, t = threadIdx.x, r = rank_();\n{body}\n}}"
    out = rig.array(np.full(words, 77, np.uint32))
    rig.run(source, out, grid=grid, block=block, cluster=(size, 1, 1))
    return rig.read(out, np.uint32, words).tolist()


def fault_of(rig: Rig, body: str, size: int = 2, block: int = 32) -> Fault:
    source = f"{TOP}\nKERNEL k(u32* out) {{ u32 t = threadIdx.x, r = rank_();\n{body}\n}}"
    launch = rig.launch(source, rig.array(np.zeros(64, np.uint32)), grid=size, block=block, cluster=(size, 1, 1))
    assert rig.finish(launch)
    assert launch.fault is not None
    expected = line_of(source, "fault") if "// fault" in source else launch.fault.line
    assert launch.fault.line == expected, launch.fault
    return launch.fault


# Addresses -----------------------------------------------------------------------------------------------------------


def test_each_block_reads_the_shared_memory_of_its_neighbour(rig: Rig) -> None:
    body = """__shared__ u32 s[32]; s[t] = 100 * b + t;
    C_SYNC u32 v; C_LD(v, s + t, (r + 1) % 4) out[32 * b + t] = v; C_SYNC"""
    expected = [100 * (4 * (b // 4) + (b + 1) % 4) + t for b in range(8) for t in range(32)]
    assert output_of(rig, body, 256, grid=8) == expected


def test_generic_addresses_reach_other_blocks_and_give_their_rank(rig: Rig) -> None:
    body = """__shared__ u32 s[4]; extern __shared__ u32 dynamic[];
    if (t < 4) s[t] = 0; C_SYNC
    if (!t) { u64 p; asm("mapa.u64 %0, %1, %2;" : "=l"(p) : "l"(s), "r"((r + 1) % 4));
      u32 n, of, mine; asm("getctarank.u64 %0, %1;" : "=r"(n) : "l"(p));
      asm("getctarank.shared::cluster.u32 %0, %1;" : "=r"(of) : "r"(of_(s, 2)));
      asm("getctarank.shared::cluster.u32 %0, %1;" : "=r"(mine) : "r"(at_(s)));
      u32 a, c, g;
      asm("{ .reg .pred q; isspacep.shared::cta q, %1; selp.u32 %0, 1, 0, q; }" : "=r"(a) : "l"(p));
      asm("{ .reg .pred q; isspacep.shared::cluster q, %1; selp.u32 %0, 1, 0, q; }" : "=r"(c) : "l"(p));
      asm("{ .reg .pred q; isspacep.global q, %1; selp.u32 %0, 1, 0, q; }" : "=r"(g) : "l"(p));
      u64 to; asm("cvta.shared::cluster.u64 %0, %1;" : "=l"(to) : "l"((u64)of_(s, (r + 1) % 4)));
      *(volatile u32*)p = 10 + r; atomicAdd((u32*)p + 1, r); atomicAdd((float*)p + 2, 1.5f);
      out[8 * b] = n; out[8 * b + 1] = of; out[8 * b + 2] = mine; out[8 * b + 3] = a; out[8 * b + 4] = c;
      out[8 * b + 5] = g; out[8 * b + 6] = to == p;
    }
    C_SYNC if (!t) out[8 * b + 7] = s[0] + 100 * s[1] + (s[2] == 0x3fc00000u ? 1000 : 0);"""
    found = np.array(output_of(rig, body, 32)).reshape(4, 8)
    before = [3, 0, 1, 2]
    assert found.tolist() == [[(b + 1) % 4, 2, b, 0, 1, 0, 1, 1010 + 101 * before[b]] for b in range(4)]


def test_an_address_means_the_same_to_all_blocks_of_a_cluster(rig: Rig) -> None:
    body = """__shared__ u32 s[1], where[1]; s[0] = 7 + r;
    C_SYNC if (!t && r == 0) C_ST(where, 3, at_(s)) C_SYNC
    if (!t && r == 3) { u32 v; asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(where[0])); out[0] = v; }
    C_SYNC"""
    assert output_of(rig, body, 1) == [7]


def test_blocks_of_a_cluster_in_three_dimensions_have_registers_that_agree(rig0: Rig) -> None:
    names = ["cluster_ctarank", "cluster_nctarank", *(f"{n}.{a}" for n in (
        "clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid") for a in "xyz")]  # fmt: skip
    reads = "".join(f'asm("mov.u32 %0, %%{n};" : "=r"(v)); o[{i}] = v;\n' for i, n in enumerate(names))
    source = f"""{TOP}
    KERNEL k(u32* out) {{ u32 v, *o = out + 16 * (blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z));
      {reads}
      asm("{{ .reg .pred q; mov.pred q, %%is_explicit_cluster; selp.u32 %0, 1, 0, q; }}" : "=r"(v)); o[14] = v;
    }}"""
    out = rig0.array(np.zeros(16 * 64, np.uint32))
    rig0.run(source, out, grid=(4, 4, 4), block=1, cluster=(2, 1, 4))
    found = rig0.read(out, np.uint32, 16 * 64).reshape(4, 4, 4, 16)
    for z, y, x in np.ndindex(4, 4, 4):
        rank = x % 2 + 2 * z
        expected = [rank, 8, x // 2, y, 0, 2, 4, 1, x % 2, 0, z, 2, 1, 4, 1, 0]
        assert found[z, y, x].tolist() == expected


# The barrier ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aligned", ["", ".aligned"])
def test_no_thread_passes_the_cluster_barrier_before_all_have_arrived(rig: Rig, aligned: str) -> None:
    body = f"""__shared__ u32 n; if (!t) n = 0; C_SYNC
    for (u32 i = 0; i < 5; i++) {{
      u32 old; asm volatile("atom.shared::cluster.add.u32 %0, [%1], 1;" : "=r"(old) : "r"(of_(&n, 0)) : "memory");
      C_ARRIVE("{aligned}") asm volatile("barrier.cluster.wait{aligned};" ::: "memory");
      u32 v; C_LD(v, &n, 0) if (v != (i + 1) * 4 * 40) out[0] = i;
      C_SYNC
    }}
    if (!t && !b) out[1] = n;"""
    assert output_of(rig, body, 2, block=40) == [77, 800]


def test_the_cluster_barrier_does_not_wait_for_exited_threads(rig: Rig) -> None:
    body = """if (r == 1 || t >= 40) return;
    if (r == 2) { C_ARRIVE("") return; }
    C_ARRIVE(".relaxed") asm volatile("barrier.cluster.wait;"); C_ARRIVE("") asm volatile("barrier.cluster.wait;");
    if (!t) out[r] = r;"""
    assert output_of(rig, body, 4, block=64) == [0, 77, 77, 3]


def test_lanes_may_reach_an_unaligned_barrier_by_different_instructions(rig: Rig) -> None:
    body = """if (t < 7) { C_ARRIVE("") asm volatile("barrier.cluster.wait;"); out[4 * b] = 1; }
    else { C_ARRIVE(".release") asm volatile("barrier.cluster.wait.acquire;"); out[4 * b + 1] = 1; }"""
    assert output_of(rig, body, 8, grid=2, size=2) == [1, 1, 77, 77] * 2


def test_threads_run_on_between_arrival_and_wait(rig: Rig) -> None:
    body = """C_ARRIVE(".release.aligned") out[32 * b + t] = b; __syncthreads(); C_WAIT"""
    assert output_of(rig, body, 128) == [b for b in range(4) for _ in range(32)]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('C_ARRIVE(".aligned") C_ARRIVE(".aligned")  // fault', "without having waited"),
        ("C_WAIT  // fault", "without having arrived"),
        ("C_SYNC\nC_WAIT  // fault", "without having arrived"),
        (
            'if (t < 5) C_ARRIVE(".aligned")\nelse C_ARRIVE(".relaxed.aligned")  // fault',
            "different barriers: this one at the barrier of the cluster",
        ),
        ('if (t < 5) C_ARRIVE(".aligned")\nelse __syncthreads();', "different barriers"),
    ],
)
def test_misuse_of_the_cluster_barrier_is_found(rig0: Rig, body: str, message: str) -> None:
    assert message in fault_of(rig0, body).message


def test_a_deadlock_names_the_barrier_of_the_cluster(rig0: Rig) -> None:
    source = f"""{TOP}
    KERNEL k(u32* out) {{
      if (rank_() == 1 && threadIdx.x < 3) {{ while (*(volatile u32*)out == 0) {{}} }}
      C_ARRIVE("") asm volatile("barrier.cluster.wait;");  // wait
    }}"""
    launch = rig0.launch(source, rig0.array(np.zeros(1, np.uint32)), grid=2, cluster=(2, 1, 1))
    assert not rig0.finish(launch)
    found = {b.status for b in launch.blocked() if b.line == line_of(source, "wait")}
    assert found == {"at the barrier of the cluster, which misses 3 of its threads"}
    report = standstill("deadlock", "nothing can go on", [("k", 0, launch)], [], {})
    assert "at the barrier of the cluster, which misses 3 of its threads" in report.message


# Blocks that are not there -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "access",
    [
        "C_ST(s, 1, 1)",
        "{ u32 v; C_LD(v, s, 1) out[0] = v; }",
        '{ u64 p; asm("mapa.u64 %0, %1, %2;" : "=l"(p) : "l"(s), "r"(1)); *(u32*)p = 1; }',
        'C_ARRIVE_AT("", s, 1)',
        "C_SEND(s + 2, 1, 1, s)",
        "C_COPY(s, 1, s, 16, s)",
        'asm volatile("red.shared::cluster.add.u32 [%0], 1;" :: "r"(of_(s, 1)) : "memory");',
    ],
)
def test_shared_memory_of_a_block_that_has_not_begun_or_has_exited_is_a_fault(rig0: Rig, access: str) -> None:
    shared = "__shared__ alignas(16) u32 s[8];\n"
    fault = fault_of(rig0, f"{shared} if (r == 0 && !t) {access}  // fault")
    assert fault.kind == "cluster_absent"
    if "ARRIVE" not in access and "red" not in access:  # a thread suspends before these, and block 1 runs
        assert "block 1, which has not started (CTA not present)" in fault.message
    late = f"{shared} s[t % 8] = 0; C_SYNC if (r == 0 && !t) {{ for (u32 i = 0; i < 20; i++) __nanosleep(1000);\n"
    fault = fault_of(rig0, f"{late} {access} }}  // fault")
    assert fault.kind == "cluster_absent"
    assert "block 1, whose threads have exited (CTA not present)" in fault.message


def test_asynchronous_stores_to_an_exited_block_are_found(rig0: Rig) -> None:
    body = """__shared__ u64 m; __shared__ u32 s; if (!t) { C_INIT(&m, 1) C_EXPECT(&m, 4) } C_SYNC
    if (!t && r == 1) { C_SEND(&s, 0, 1, &m) }  // fault"""
    fault = fault_of(rig0, body)
    assert fault.kind == "cluster_absent"
    assert "have exited before it arrived" in fault.message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("C_SYNC C_ST(s, 2, 1)  // fault", "of each of the 2 blocks of the cluster"),
        ("C_SYNC C_ST(s + 1000, 1, 1)  // fault", "of each of the 2 blocks of the cluster"),
        (
            'C_SYNC asm volatile("st.shared::cta.u32 [%0], %1;" :: "r"(of_(s, 1 - r)), "r"(0));  // fault',
            "outside of the block's 64 bytes",
        ),
        ('C_SYNC { u32 d; C_TRY("", d, (u64*)0 + (of_(s, 1 - r) - at_((void*)0)) / 8, 0) }', "outside of"),
        ("C_INIT(s, 1) C_INIT(s + 2, 1) C_SYNC C_SEND(s + 4, 1 - r, 0, s + 20)  // fault", "outside of the 64 bytes"),
    ],
)
def test_addresses_outside_the_reach_of_an_instruction_are_found(rig0: Rig, body: str, message: str) -> None:
    assert message in fault_of(rig0, f"__shared__ alignas(16) u32 s[16];\n{body}").message


# Asynchronous stores and copies --------------------------------------------------------------------------------------


def test_the_mbarrier_of_an_asynchronous_store_must_be_in_its_target_block(rig0: Rig) -> None:
    body = """__shared__ alignas(16) u64 m[2]; if (!t) C_INIT(m, 1) C_SYNC
    if (!t) asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];"
      :: "r"(of_(m + 1, 1 - r)), "r"(1), "r"(at_(m)));  // fault"""
    fault = fault_of(rig0, body)
    assert "not in the shared memory of the block that is written" in fault.message


def test_an_asynchronous_store_is_illegal_in_a_launch_without_clusters(rig0: Rig) -> None:
    """An H200 behaves in this way. A cluster of one block makes the instruction legal."""
    source = f"""{TOP}
KERNEL k(u32* out) {{ __shared__ alignas(16) u64 m[2]; C_INIT(m, 1)
  C_EXPECT(m, 4)
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];"
    :: "r"(at_(m + 1)), "r"(7), "r"(at_(m)) : "memory");  // fault
  C_AWAIT(".acquire.cluster", m, 0)
  out[0] = *(u32*)(m + 1); }}"""
    out = rig0.array(np.zeros(1, np.uint32))
    launch = rig0.launch(source, out, grid=1, block=1)
    assert rig0.finish(launch) and launch.fault is not None
    assert (launch.fault.kind, launch.fault.line) == ("no_cluster", line_of(source, "fault"))
    assert error_of(launch.fault.kind).name == "CUDA_ERROR_ILLEGAL_INSTRUCTION"
    rig0.run(source, out, grid=1, block=1, cluster=(1, 1, 1))
    assert rig0.read(out, np.uint32, 1).tolist() == [7]


EXCHANGE = """__shared__ alignas(16) u64 slots[8][2]; __shared__ u64 m;
u32 lane = t % 32, warp = t / 32;
if (!t) { C_INIT(&m, 1) C_INIT_FENCE }
C_ARRIVE(".release.aligned")
C_WAIT
if (!t) C_EXPECT(&m, 8 * 2 * 8)
if (lane < 8) {
  u32 v = 1000 * r + 10 * warp + 1;
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];"
    :: "r"(of_(&slots[r][warp], lane)), "r"(v), "r"(v + 1), "r"(of_(&m, lane)) : "memory");
}
C_AWAIT(".acquire.cluster", &m, 0)
u32 sum = 0;
for (u32 i = 0; i < 8; i++) for (u32 w = 0; w < 2; w++) sum += (u32)slots[i][w] + (u32)(slots[i][w] >> 32);
out[64 * b + t] = sum;"""


def test_every_block_sends_to_every_other_and_waits_for_its_own_mbarrier(rig: Rig) -> None:
    total = sum(2 * (1000 * r + 10 * w + 1) + 1 for r in range(8) for w in range(2))
    assert output_of(rig, EXCHANGE, 1024, grid=16, size=8, block=64) == [total] * 1024


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("b32", 1), ("u32", 1), ("s32", 1), ("f32", 1), ("v2.b32", 2), ("v4.s32", 4), ("v4.f32", 4), ("b64", 2),
        ("u64", 2), ("s64", 2), ("f64", 2), ("v2.u64", 4), ("v2.f64", 4),
    ],
)  # fmt: skip
def test_every_form_of_st_async_stores_its_elements(rig0: Rig, form: str, words: int) -> None:
    kind, n = form[-3:], 1 if "." not in form else int(form[1])
    letter, c = {"f32": ("f", "float"), "f64": ("d", "double")}.get(kind, ("rl"[kind[1:] == "64"], "u" + kind[1:]))
    given = ", ".join(f"%{i + 2}" for i in range(n))
    values = ", ".join(f'"{letter}"(v[{i}])' for i in range(n))
    body = f"""__shared__ alignas(16) u32 s[4]; __shared__ u64 m; if (t < 4) s[t] = 9; if (!t) C_INIT(&m, 1)
    C_SYNC
    {c} v[{n}]; for (u32 i = 0; i < {words}; i++) ((u32*)v)[i] = 0x40100000u + i + r;
    if (!t) {{ C_EXPECT(&m, {4 * words})
      asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.{form} [%0], {{{given}}}, [%1];"
        :: "r"(of_(s, 1 - r)), "r"(of_(&m, 1 - r)), {values} : "memory"); }}
    C_AWAIT(".acquire.cluster", &m, 0)
    if (t < 4) out[4 * r + t] = s[t];"""
    if n == 1:
        body = body.replace("{%2}", "%2")
    expected = [[0x40100000 + i + 1 - r if i < words else 9 for i in range(4)] for r in range(2)]
    assert output_of(rig0, body, 8, grid=2, size=2) == sum(expected, [])


def test_bulk_copies_reach_another_block(rig: Rig) -> None:
    body = """__shared__ alignas(16) u32 s[64], d[64], e[64]; __shared__ u64 m; if (!t) C_INIT(&m, 1)
    s[t] = 100 * r + t; s[t + 32] = 100 * r + t + 32; out[256 + 64 * b + t] = out[256 + 64 * b + 32 + t] = 5000 + b;
    asm volatile("fence.proxy.async;" ::: "memory"); C_SYNC
    if (!t) { C_EXPECT(&m, 512) C_COPY(d, (r + 1) % 4, s, 256, &m) C_LOAD(e, (r + 3) % 4, out + 256 + 64 * b, 256, &m) }
    C_AWAIT(".acquire.cluster", &m, 0)
    out[64 * b + t] = d[t] + e[t]; out[64 * b + 32 + t] = d[t + 32] + e[t + 32];
    C_SYNC"""
    found = output_of(rig, body, 512)[:256]
    assert found == [100 * ((r + 3) % 4) + t + 5000 + (r + 1) % 4 for r in range(4) for t in range(64)]


def test_a_multicast_copy_reaches_the_blocks_of_its_mask_at_the_same_offset(rig: Rig) -> None:
    body = """__shared__ alignas(16) u32 before[4], d[8]; __shared__ u64 m; if (!t) C_INIT(&m, 1)
    if (t < 8) { d[t] = 9; if (r == 1) out[64 + t] = 500 + t; } before[t % 4] = t;
    C_SYNC
    if (!t && r != 2) C_EXPECT(&m, 32)
    if (!t && r == 1) C_SPREAD(d, out + 64, 32, &m, 0xB)
    if (r != 2) C_AWAIT(".acquire.cluster", &m, 0)
    if (t < 8) out[8 * r + t] = d[t]; C_SYNC"""
    assert output_of(rig, body, 72)[:32] == [9 if r == 2 else 500 + t for r in range(4) for t in range(8)]


def test_threads_arrive_and_expect_bytes_at_the_mbarrier_of_another_block(rig: Rig) -> None:
    body = """__shared__ u64 m; if (!t) C_INIT(&m, 3) C_SYNC
    if (t < 3 && r == 1) {
      if (t == 0) C_ARRIVE_AT(".release.cluster", &m, 0)
      if (t == 1) asm volatile("mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%0], 32;"
        :: "r"(of_(&m, 0)) : "memory");
      if (t == 2) {
        asm volatile("mbarrier.expect_tx.relaxed.cluster.shared::cluster.b64 [%0], 8;" :: "r"(of_(&m, 0)) : "memory");
        asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0], 1;" :: "r"(of_(&m, 0)) : "memory");
        asm volatile("mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%0], 40;" :: "r"(of_(&m, 0)));
      }
    }
    if (r == 0) { C_AWAIT(".acquire.cluster", &m, 0) out[t] = t; }
    C_SYNC"""
    assert output_of(rig, body, 32, grid=2, size=2) == list(range(32))
