# SPDX-License-Identifier: Apache-2.0
"""Races of accesses by multicast addresses, and fence.proxy.alias."""

from __future__ import annotations

import numpy as np
import pytest
from emu.driver_helpers import R, ok
from emu.multicast_helpers import PRELUDE, launch, read, shared, write

from drvfuse.emu import Machine, Report

MEET = "meet(t, 64, 1);"
AGAIN = "meet(t, 96, 1);"
FLAGS = 128


def races(body: str, *, devices: int = 2, threads: int = 32, seeds: range = range(3)) -> set[tuple[str, str]]:
    """The races of a kernel body under these seeds, each as the marks (`// @mark`) of its two lines. Seed 0 runs with
    the strict profile.
    """
    found: set[tuple[str, str]] = set()
    for seed, profile in ((seed, "hardware" if seed else "strict") for seed in seeds):
        for report in reports(body, devices=devices, threads=threads, seed=seed, profile=profile):
            assert report.kind == "race", report
            assert report.other is not None and report.line is not None and report.other.line is not None
            one, two = sorted(_mark(body, line) for line in (report.line, report.other.line))
            found.add((one, two))
    return found


def reports(body: str, *, devices: int = 2, threads: int = 32, seed: int = 0, profile: str = "strict") -> list[Report]:
    with Machine(devices=devices, seed=seed, race=profile) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        made = shared(cuda, devices)
        for address in made.own:
            write(cuda, address, np.zeros(1024, np.uint32))
        assert launch(cuda, made, body, threads=threads) == [R.CUDA_SUCCESS] * devices
        return list(machine.reports)


def _mark(body: str, line: int) -> str:
    return body.splitlines()[line - PRELUDE.count("\n") - 3].split("// @")[1]


# Words of all members -----------------------------------------------------------------------------------------------

STAGED = """
u32 v;
if (threadIdx.x == 0) ST(weak, t.own[t.rank], t.rank)  // @w
$before
if (threadIdx.x == 0) REDUCE(v, $sem, add.u32, t.mc)  // @r
"""


@pytest.mark.parametrize("sem", ["weak", "relaxed.sys"])
def test_a_multimem_load_reads_the_word_of_every_member(sem: str) -> None:
    body = STAGED.replace("$sem", sem)
    assert races(body.replace("$before", "ALIAS\n" + MEET)) == set()
    assert races(body.replace("$before", MEET + "\nALIAS")) == set()
    assert races(body.replace("$before", "ALIAS")) == {("r", "w")}
    assert races(body.replace("$before", MEET)) == {("r", "w")}


GIVEN = """
u32 v;
if (threadIdx.x == 0 && t.rank == 0) MST($sem, t.mc, 7)  // @w
$before
if (threadIdx.x == 0) LD(v, weak, t.own[t.rank])  // @r
"""


@pytest.mark.parametrize("sem", ["weak", "relaxed.sys"])
def test_a_multimem_store_writes_the_word_of_every_member(sem: str) -> None:
    body = GIVEN.replace("$sem", sem)
    assert races(body.replace("$before", "ALIAS\n" + MEET)) == set()
    assert races(body.replace("$before", MEET + "\nALIAS")) == set()
    assert races(body.replace("$before", "")) == {("r", "w")}
    assert races(body.replace("$before", MEET)) == {("r", "w")}


def test_weak_stores_by_two_ranks_race_and_strong_ones_do_not() -> None:
    body = "if (threadIdx.x == 0) MST($sem, t.mc, t.rank)  // @w"
    assert races(body.replace("$sem", "weak")) == {("w", "w")}
    assert races(body.replace("$sem", "relaxed.gpu")) == {("w", "w")}
    assert races(body.replace("$sem", "relaxed.sys")) == set()


def test_a_reduction_is_an_atomic_at_its_scope() -> None:
    body = "MRED($sem, t.mc, 1)  // @w"
    assert races(body.replace("$sem", "relaxed.sys")) == set()
    assert races(body.replace("$sem", "relaxed.gpu")) == {("w", "w")}
    mixed = "if (t.rank) MRED(relaxed.sys, t.mc, 1)  // @a\nelse MST($sem, t.mc, 1)  // @w"
    assert races(mixed.replace("$sem", "weak"), threads=1) == {("a", "w")}
    assert races(mixed.replace("$sem", "relaxed.sys"), threads=1) == set()


def test_the_report_names_the_multicast_address_and_the_member() -> None:
    found = reports("MST(weak, t.mc + 4, t.rank)", threads=1)
    assert found and all(r.address == found[0].address and "'s memory)" in r.message for r in found)


# Synchronisation ----------------------------------------------------------------------------------------------------

SIGNAL = f"""
u32 v;
if (t.rank == 0) {{ ST(weak, t.own[1], 5)  // @w
  $release }}
else {{
  do LD(v, $acquire.sys, t.own[1] + {FLAGS}) while (!v);
  LD(v, weak, t.own[1])  // @r
}}
"""


@pytest.mark.parametrize("how", ["MST", "MRED"])
def test_a_release_at_a_multicast_address_is_acquired_at_each_members(how: str) -> None:
    signal = f"{how}($release.sys, t.mc + {FLAGS}, 1)"
    for release, acquire, expected in (
        ("release", "acquire", set()),
        ("relaxed", "acquire", {("r", "w")}),
        ("release", "relaxed", {("r", "w")}),
    ):
        body = SIGNAL.replace("$release", signal.replace("$release", release)).replace("$acquire", acquire)
        assert races(body, threads=1) == expected


POLLED = f"""
u32 v;
if (t.rank == 0) {{ ST(weak, t.own[1], 5)  // @w
  ST(release.sys, t.own[1] + {FLAGS}, 1) }}
else {{
  do REDUCE(v, $sem.sys, max.u32, t.mc + {FLAGS}) while (!v);
  LD(v, weak, t.own[1])  // @r
}}
"""


def test_an_acquiring_load_reduce_acquires_from_each_member() -> None:
    assert races(POLLED.replace("$sem", "acquire"), threads=1) == set()
    assert races(POLLED.replace("$sem", "relaxed"), threads=1) == {("r", "w")}


# fence.proxy.alias --------------------------------------------------------------------------------------------------

OWN = """
u32 v;
$first  // @a
$between
$second  // @b
"""
UNICAST = {"read": "LD(v, weak, t.own[0])", "write": "ST(weak, t.own[0], 1)"}
MULTICAST = {"read": "REDUCE(v, weak, add.u32, t.mc)", "write": "MST(weak, t.mc, 1)"}


@pytest.mark.parametrize("multicast", MULTICAST)
@pytest.mark.parametrize("unicast", UNICAST)
@pytest.mark.parametrize("multicast_first", [False, True])
def test_a_thread_needs_an_alias_fence_between_both_kinds_of_address(
    unicast: str, multicast: str, multicast_first: bool
) -> None:
    first, second = UNICAST[unicast], MULTICAST[multicast]
    if multicast_first:
        first, second = second, first
    body = "if (t.rank) return;\n" + OWN.replace("$first", first).replace("$second", second)
    conflict = {("a", "b")} if "write" in (unicast, multicast) else set()
    assert races(body.replace("$between", ""), threads=1, seeds=range(1)) == conflict
    assert races(body.replace("$between", "ALIAS"), threads=1, seeds=range(1)) == set()


def test_between_barriers_one_thread_may_fence_for_its_block() -> None:
    body = """
    u32 v;
    ST(weak, t.own[t.rank] + threadIdx.x, threadIdx.x)  // @w
    $fence
    meet(t, 64, 1);
    REDUCE(v, weak, add.u32, t.mc + threadIdx.x)  // @r
    """
    one = "__syncthreads(); if (threadIdx.x == 5) ALIAS"
    assert races(body.replace("$fence", one), threads=64, devices=3) == set()
    assert races(body.replace("$fence", "if (threadIdx.x == 5) ALIAS"), threads=64, devices=3) == {("r", "w")}
    assert races(body.replace("$fence", "__syncthreads(); if (t.rank) ALIAS"), threads=64) == {("r", "w")}


def test_a_fence_of_an_unrelated_rank_does_not_order() -> None:
    body = f"""
    u32 v;
    if (threadIdx.x == 0 && t.rank == 0) ST(weak, t.own[0], 1)  // @w
    {MEET}
    if (t.rank == $who) ALIAS
    $then
    if (threadIdx.x == 0 && t.rank == 1) REDUCE(v, weak, add.u32, t.mc)  // @r
    """
    assert races(body.replace("$who", "1").replace("$then", "")) == set()
    assert races(body.replace("$who", "2").replace("$then", ""), devices=3) == {("r", "w")}
    assert races(body.replace("$who", "2").replace("$then", AGAIN), devices=3) == set()


def test_a_fence_before_the_first_access_does_not_order() -> None:
    body = "u32 v;\nif (t.rank) return;\nALIAS\nST(weak, t.own[0], 1)  // @w\nREDUCE(v, weak, add.u32, t.mc)  // @r"
    assert races(body, threads=1, seeds=range(1)) == {("r", "w")}


def test_an_earlier_bulk_copy_needs_no_alias_fence() -> None:
    body = """
    if (t.rank) return;
    __shared__ alignas(16) u32 s[4];
    __shared__ alignas(8) u64 bar;
    u32 at = (u32)__cvta_generic_to_shared(&bar), to = (u32)__cvta_generic_to_shared(s), done;
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(at) : "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 16;" :: "r"(at) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 16, [%2];"
                 :: "r"(to), "l"(t.own[0]), "r"(at) : "memory");
    do asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}"
                    : "=r"(done) : "r"(at) : "memory"); while (!done);
    ALIAS
    MST(weak, t.mc, 1)
    """
    assert races(body, threads=1) == set()


def test_a_flag_itself_needs_no_alias_fence() -> None:
    body = f"""
    u32 v;
    MRED(release.sys, t.mc + {FLAGS}, 1)
    do LD(v, acquire.sys, t.own[t.rank] + {FLAGS}) while (v < t.ranks);
    """
    assert races(body, threads=1, devices=4) == set()


def test_the_end_of_a_kernel_orders_both_kinds_of_address() -> None:
    with Machine(devices=2, race=True) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        made = shared(cuda, 2)
        launch(cuda, made, "ST(weak, t.own[t.rank] + threadIdx.x, 3)")
        launch(
            cuda,
            made,
            "u32 v; REDUCE(v, weak, add.u32, t.mc + threadIdx.x) ST(weak, t.own[t.rank] + 64 + threadIdx.x, v)",
        )
        launch(cuda, made, "if (!t.rank) MST(weak, t.mc + 128 + threadIdx.x, 9)")
        assert list(read(cuda, made.own[1] + 256, 32)) == [6] * 32
        assert list(read(cuda, made.own[1] + 512, 32)) == [9] * 32
        assert not machine.reports


@pytest.mark.parametrize(
    ("release", "acquire"),
    [
        ("ST(release.sys, $flag, 1)", "do LD(v, acquire.sys, $flag) while (!v);"),
        (
            'asm volatile("fence.acq_rel.sys;" ::: "memory"); ST(relaxed.sys, $flag, 1)',
            'do LD(v, relaxed.sys, $flag) while (!v); asm volatile("fence.acq_rel.sys;" ::: "memory");',
        ),
    ],
)
def test_releases_and_acquires_pass_an_alias_fence_on(release: str, acquire: str) -> None:
    flag = f"t.own[1] + {FLAGS}"
    body = f"""
    u32 v;
    if (t.rank == 0) {{ ST(weak, t.own[1], 5)  // @w
      $here
      {release.replace("$flag", flag)} }}
    else {{
      {acquire.replace("$flag", flag)}
      $there
      REDUCE(v, weak, add.u32, t.mc)  // @r
    }}
    """
    for here, there, expected in (("", "", {("r", "w")}), ("ALIAS", "", set()), ("", "ALIAS", set())):
        found = races(body.replace("$here", here).replace("$there", there), threads=1)
        assert found == expected


def test_after_a_syncwarp_the_fence_of_one_lane_counts_for_its_warp() -> None:
    body = """
    u32 v;
    if (t.rank) return;
    ST(weak, t.own[0] + threadIdx.x, 5)  // @w
    __syncwarp();
    if (threadIdx.x == 3) ALIAS
    $then
    MST(weak, t.mc + (threadIdx.x ^ 1), 6)  // @m
    """
    assert races(body.replace("$then", "__syncwarp();")) == set()
    assert races(body.replace("$then", "")) == {("m", "w")}
