# SPDX-License-Identifier: Apache-2.0
"""Programmatic dependent launch: each level, with a producer that is late and a consumer that is early."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import scenarios
from collective_support import ALGOS, ALL_ALGOS, assert_bits, fill_late, garbage, helper

import drvfuse as df
from drvfuse import dtypes, reference

pytestmark = pytest.mark.gpus(2)

LEVELS = [df.PDLLevel.OFF, df.PDLLevel.ON, df.PDLLevel.OVERLAP_AT_BEGINNING]
BF16 = dtypes.get("bfloat16").numpy
ONE = 0x3F80


@pytest.fixture(scope="module", params=[0, 1], ids=["late", "early"])
def group(request, driver):
    """On the emulator, one group whose dependent launches start as late as possible and one as early as allowed."""
    with contextlib.ExitStack() as stack:
        if driver == "emu":
            driver = stack.enter_context(df.emu.Machine(devices=2, seed=request.param))
        yield stack.enter_context(df.Group.local(2, driver=driver, max_blocks=4))


def test_pdl_levels_have_the_documented_values():
    assert df.PDLLevel.ON == df.PDLLevel.OVERLAP_AT_END == 1
    assert [int(level) for level in df.PDLLevel] == [0, 1, 2, 3]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("algo", ALL_ALGOS)
def test_results_are_right_with_a_late_producer_and_an_early_consumer(group, algo, level):
    count = 2000
    xs, ys, zs = (garbage(group, count, "bfloat16") for _ in range(3))
    call = df.allreduce.prepare(group, xs, ys, algo=algo, pdl_level=level)
    produce = [fill_late(group, x, ONE) for x in xs]
    consume = [helper(group, "consume").prepare(1, 64, y, z, count, pdl=True) for y, z in zip(ys, zs, strict=True)]
    if algo == "naive":
        for launch, rank in zip(produce, group, strict=True):
            launch(rank.stream)
        call.launch()
    else:
        for position, rank in enumerate(group):
            produce[position](rank.stream)
            call.launch(rank=position)
    for launch, rank in zip(consume, group, strict=True):
        launch(rank.stream)
    group.synchronize()
    assert_bits(zs, np.full(count, 2, np.float32).astype(BF16), f"{algo} {level!r}")


def _owners(group, op, algo, xs, level):
    """A call of `op` on inputs [2, 1000], its outputs, and the value of the outputs if all inputs are 1."""
    if op == "allreduce_many":
        ys = garbage(group, (2, 1000), "bfloat16")
        call = df.allreduce_many.prepare(group, [[x] for x in xs], [[y] for y in ys], algo=algo, pdl_level=level)
        return call, ys, 2
    ys = garbage(group, (1, 1000), "bfloat16")
    if op == "reduce_scatter":
        return df.reduce_scatter.prepare(group, xs, ys, algo=algo, pdl_level=level), ys, 2
    gammas = [rank.array(np.ones(1000, BF16)) for rank in group]
    options = {"epsilon": 0.0, "quantisation": df.Quantisation.none(), "outputs": ys, "algo": algo, "pdl_level": level}
    return df.reduce_scatter_rmsnorm_fp8.prepare(group, xs, gammas, **options), ys, 1


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("op", "algo"),
    [
        *((op, algo) for op in ("reduce_scatter", "reduce_scatter_rmsnorm_fp8") for algo in ("push", "pull")),
        ("allreduce_many", "push_one_shot"),
    ],
)
def test_reduce_scatter_and_allreduce_many_are_right_with_a_late_producer_and_an_early_consumer(group, op, algo, level):
    xs = garbage(group, (2, 1000), "bfloat16")
    call, ys, value = _owners(group, op, algo, xs, level)
    zs = garbage(group, ys[0].shape, "bfloat16")
    produce = [fill_late(group, x, ONE) for x in xs]
    consume = [helper(group, "consume").prepare(1, 64, y, z, y.size, pdl=True) for y, z in zip(ys, zs, strict=True)]
    for position, rank in enumerate(group):
        produce[position](rank.stream)
        call.launch(rank=position)
        consume[position](rank.stream)
    group.synchronize()
    assert_bits(zs, np.full(ys[0].shape, value, np.float32).astype(BF16), f"{op} {algo} {level!r}")


@pytest.mark.parametrize("level", LEVELS)
def test_chains_of_collectives_have_the_bits_of_the_reference(group, rng, level):
    hosts = [rng.standard_normal((9, 64)).astype(np.float32).astype(BF16) for _ in range(2)]
    gamma = (1 + rng.standard_normal(64)).astype(np.float32).astype(BF16)
    xs = [rank.array(host) for rank, host in zip(group, hosts, strict=True)]
    gammas = [rank.array(gamma) for rank in group]
    ys, zs = garbage(group, (9, 64), "bfloat16"), garbage(group, (9, 64), "bfloat16")
    calls = [
        df.allreduce.prepare(group, xs, ys, algo="one_stage", pdl_level=level),
        df.allreduce.prepare(group, ys, zs, algo="two_stage", pdl_level=level),
        df.allreduce_rmsnorm_fp8.prepare(group, zs, gammas, epsilon=1e-6, algo="two_stage", pdl_level=level),
        df.allreduce_rmsnorm_fp8.prepare(group, ys, gammas, epsilon=1e-6, algo="one_stage", pdl_level=level),
    ]
    for _ in range(3):
        results = [call.launch() for call in calls]
    group.synchronize()
    once = reference.allreduce(hosts)
    twice = reference.allreduce([once] * 2)
    assert_bits(zs, twice)
    for result, inputs in ((results[2], [twice] * 2), (results[3], [once] * 2)):
        expected = reference.allreduce_rmsnorm_fp8(inputs, gamma, 1e-6)
        assert_bits(result.output, expected.output)
        assert_bits(result.scales, expected.scales)


@pytest.mark.emulated
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("algo", ALGOS)
@pytest.mark.parametrize("op", scenarios.OPS)
def test_a_dependent_starts_as_early_as_its_level_allows(op, algo, level):
    """On the emulated driver, odd seeds start a dependent as early as its level allows: before a peer has been
    launched, or before the kernel ends.
    """
    scenarios.dependent_starts_at_once_if_it_may(op, algo, level)
    scenarios.dependent_starts_before_the_end(op, algo, level)
