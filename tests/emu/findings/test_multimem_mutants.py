# SPDX-License-Identifier: Apache-2.0
"""An all-reduce of two stages by multicast: right in many schedules. Each planted mistake is found in every schedule
that is tried with it.
"""

from __future__ import annotations

import numpy as np
import pytest
from emu.driver_helpers import ok, primary
from emu.multicast_helpers import launch, read, shared, write

from drvfuse.emu import Machine

RANKS, WORDS = 3, 768
STAGING, RESULT, FLAGS = 0, 4096, 8192  # offsets in each rank's memory, in words of 32 bits
BODY = f"""
u32 part = {WORDS} / t.ranks, first = t.rank * part, v;
for (u32 i = threadIdx.x; i < {WORDS}; i += blockDim.x) t.own[t.rank][i] = t.out[t.rank][i];
ALIAS
meet(t, {FLAGS}, 1);
for (u32 i = first + threadIdx.x; i < first + part; i += blockDim.x) {{
  REDUCE(v, relaxed.sys, add.u32, t.mc + i)
  MST(relaxed.sys, t.mc + {RESULT} + i, v)
}}
ALIAS
meet(t, {FLAGS} + 32, 1);
for (u32 i = threadIdx.x; i < {WORDS}; i += blockDim.x) t.out[t.rank][i] = t.own[t.rank][{RESULT} + i];
"""
FIRST_FENCE = f"ALIAS\nmeet(t, {FLAGS}, 1);"
SECOND_FENCE = f"ALIAS\nmeet(t, {FLAGS} + 32, 1);"
LOAD = "REDUCE(v, relaxed.sys, add.u32, t.mc + i)"
MUTANTS = {
    "no fence before the loads": (FIRST_FENCE, FIRST_FENCE.replace("ALIAS", ""), {"race"}),
    "no fence after the stores": (SECOND_FENCE, SECOND_FENCE.replace("ALIAS", ""), {"race"}),
    "no barrier before the loads": (f"meet(t, {FLAGS}, 1);", "", {"race", "uninitialised"}),
    "no barrier after the stores": (f"meet(t, {FLAGS} + 32, 1);", "", {"race", "uninitialised"}),
    "red where st is meant": ("MST(", "MRED(", {"uninitialised"}),
    "a plain load of the multicast address": (LOAD, "v = t.mc[i];", {"multicast_plain"}),
    "a reduced load of the memory's own address": ("add.u32, t.mc + i", "add.u32, t.own[0] + i", {"no_multicast"}),
    "stores to the rank's memory alone": ("MST(relaxed.sys, t.mc", "ST(relaxed.sys, t.own[t.rank]", {"uninitialised"}),
}  # fmt: skip


def _run(body: str, seed: int, rng: np.random.Generator) -> tuple[set[str], bool]:
    """Run a kernel with this body. Returns the kinds of the reports, and whether all results are right."""
    profile = ("hardware", "strict")[seed % 2]
    with Machine(devices=RANKS, seed=seed, race=profile, delay_stores=seed % 3 == 0) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        made = shared(cuda, RANKS)
        data = rng.integers(0, 1 << 30, (RANKS, WORDS), np.uint32)
        out: list[int] = []
        for rank in range(RANKS):
            primary(cuda, rank)
            out.append(int(ok(cuda.cuMemAlloc(4 * WORDS))))
            write(cuda, made.own[rank] + 4 * FLAGS, np.zeros(64, np.uint32))
            write(cuda, out[rank], data[rank])
        launch(cuda, made, body, threads=64, out=out)
        if machine.reports:
            return {report.kind for report in machine.reports}, False
        total = data.sum(0, dtype=np.uint32)
        return set(), all(np.array_equal(read(cuda, address, WORDS), total) for address in out)


def test_the_all_reduce_is_clean_in_every_schedule(rng: np.random.Generator) -> None:
    for seed in range(12):
        assert _run(BODY, seed, rng) == (set(), True)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_planted_mistake_is_found_in_every_schedule(rng: np.random.Generator, mutant: str) -> None:
    right, wrong, kinds = MUTANTS[mutant]
    assert BODY.count(right) == 1
    for seed in range(4):
        found, _ = _run(BODY.replace(right, wrong), seed, rng)
        assert found & kinds and found <= kinds | {"deadlock"}, found
