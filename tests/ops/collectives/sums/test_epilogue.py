# SPDX-License-Identifier: Apache-2.0
"""Epilogues: an expression on the fp32 sum, rounded once, with parameters that change without a recompile."""

from __future__ import annotations

import numpy as np
import pytest
from collective_support import ALL_ALGOS, LEAST, assert_bits, garbage, place, random_inputs, replicate

import drvfuse as df
from drvfuse import reference
from drvfuse.errors import ArgumentError
from drvfuse.ops.call import specialisation

pytestmark = pytest.mark.gpus(3)

SHAPE = (11, 13)


@pytest.fixture
def group(open_group):
    return open_group(3)


@pytest.fixture
def hosts(rng):
    return random_inputs(rng, 3, SHAPE, "bfloat16")


@pytest.mark.parametrize("algo", ALL_ALGOS)
def test_epilogues_take_scalar_and_array_parameters(group, rng, hosts, algo):
    """The last dimension is no multiple of a pack, so packs cross rows."""
    bias = rng.standard_normal(13).astype(np.float32).astype(hosts[0].dtype)
    epilogue = df.Epilogue("x * scale + bias[col]", scale=df.float32(0.37), bias=df.Replicated(replicate(group, bias)))
    ys = df.allreduce(group, place(group, hosts), algo=algo, epilogue=epilogue)
    scale = np.float32(0.37)
    expected = reference.allreduce(hosts, epilogue=lambda x: x * scale + bias.astype(np.float32))
    assert_bits(ys, expected, algo)


@pytest.mark.parametrize("algo", ALL_ALGOS)
def test_epilogues_know_index_row_and_column(open_group, rng, algo):
    group = open_group(3, workspace_bytes=LEAST[algo])
    shape = (3, 50, 77)
    hosts = random_inputs(rng, 3, shape, "float32")
    ys = df.allreduce(
        group, place(group, hosts), algo=algo, epilogue=df.Epilogue("x + i * 0.5f + row * 100 - (col % 3)")
    )
    i = np.arange(3 * 50 * 77).reshape(shape)
    row, col = i // 77, i % 77

    def epilogue(x):
        value = x + i.astype(np.float32) * np.float32(0.5)
        return value + (row * 100).astype(np.float32) - (col % 3).astype(np.float32)

    assert_bits(ys, reference.allreduce(hosts, epilogue=epilogue), algo)


@pytest.mark.parametrize("algo", ["auto", "one_stage", "naive"])
def test_parameters_may_differ_by_rank(group, rng, hosts, algo):
    scales = [1.0, 2.5, -0.125]
    residuals = random_inputs(rng, 3, SHAPE, "float16")
    epilogue = df.Epilogue(
        "x * s + r[i] + rank",
        s=[df.float32(s) for s in scales],
        r=[rank.array(r) for rank, r in zip(group, residuals, strict=True)],
    )
    ys = df.allreduce(group, place(group, hosts), algo=algo, epilogue=epilogue)
    for rank in range(3):
        expected = reference.allreduce(
            hosts,
            epilogue=lambda x, k=rank: x * np.float32(scales[k]) + residuals[k].astype(np.float32) + np.float32(k),
        )
        assert_bits([ys[rank]], expected)


def test_auto_avoids_the_two_shot_form_for_an_epilogue_that_differs(group):
    xs = [rank.empty(1 << 19, "bfloat16") for rank in group]
    ys = [rank.empty(1 << 19, "bfloat16") for rank in group]
    assert df.allreduce.prepare(group, xs, ys).algo == "push_two_shot"
    assert df.allreduce.prepare(group, xs, ys, epilogue=df.Epilogue("x + rank")).algo == "push_one_shot"
    assert df.allreduce.prepare(group, xs, ys, epilogue=df.Epilogue("x + 1")).algo == "push_two_shot"


def test_every_rank_reads_a_single_array_on_its_own_device(group, rng, hosts):
    bias = rng.standard_normal(13).astype(np.float32)
    epilogue = df.Epilogue("x - bias[col]", bias=group.ranks[1].array(bias))
    ys = df.allreduce(group, place(group, hosts), epilogue=epilogue)
    assert_bits(ys, reference.allreduce(hosts, epilogue=lambda x: x - bias))


@pytest.mark.parametrize("algo", ["push_one_shot", "two_stage", "naive"])
def test_parameters_change_without_a_recompile(group, rng, hosts, algo, monkeypatch):
    bias = [rng.standard_normal(13).astype(np.float32) for _ in range(2)]
    epilogue = df.Epilogue("x * k + b[col]", k=df.int32(2), b=group.ranks[0].array(bias[0]))
    prepared = df.allreduce.prepare(group, place(group, hosts), algo=algo, epilogue=epilogue)
    assert_bits(prepared.launch(), reference.allreduce(hosts, epilogue=lambda x: x * np.float32(2) + bias[0]))

    def refuse(*_, **__):
        raise AssertionError("compiled again")

    monkeypatch.setattr(specialisation, "compile_source", refuse)
    prepared.set(k=df.int32(-3))
    assert_bits(prepared.launch(), reference.allreduce(hosts, epilogue=lambda x: x * np.float32(-3) + bias[0]))
    prepared.set(b=group.ranks[2].array(bias[1]))
    assert_bits(prepared.launch(), reference.allreduce(hosts, epilogue=lambda x: x * np.float32(-3) + bias[1]))
    again = df.allreduce(group, place(group, hosts), algo=algo, epilogue=epilogue.with_(k=df.int32(7)))
    assert_bits(again, reference.allreduce(hosts, epilogue=lambda x: x * np.float32(7) + bias[0]))


@pytest.mark.parametrize("algo", ["two_stage", "push_two_shot"])
def test_set_refuses_unknown_names_and_other_types(group, hosts, algo):
    ys = garbage(group, SHAPE, "bfloat16")
    epilogue = df.Epilogue("x * scale + bias[col]", scale=df.float32(2), bias=group.ranks[0].zeros(13, "bfloat16"))
    prepared = df.allreduce.prepare(group, place(group, hosts), ys, algo=algo, epilogue=epilogue)
    with pytest.raises(ArgumentError, match="types"):
        prepared.set(scale=df.int32(2))
    with pytest.raises(ArgumentError, match="unknown"):
        prepared.set(c=df.int32(2))
    with pytest.raises(ArgumentError, match="by rank"):
        prepared.set(scale=[df.float32(1), df.float32(2), df.float32(3)])
    with pytest.raises(ArgumentError, match="overlapping"):
        prepared.set(bias=ys[0])
    with pytest.raises(ArgumentError, match="no epilogue"):
        df.allreduce.prepare(group, ys).set(scale=df.float32(2))
    assert_bits(prepared.launch(), reference.allreduce(hosts, epilogue=lambda x: x * np.float32(2)))


@pytest.mark.parametrize("algo", ALL_ALGOS)
def test_the_sum_is_not_rounded_before_the_epilogue(group, algo):
    values = [np.full(8, v, np.float32).astype("float32") for v in (1.0, 2.0**-20, 0.0)]
    half = [v.astype(np.float16) for v in values]
    ys = df.allreduce(group, place(group, half), algo=algo, epilogue=df.Epilogue("(x - 1.0f) * 1048576.0f"))
    assert_bits(ys, np.full(8, 1.0, np.float16))


def test_expressions_may_use_functions_and_conditions(group, hosts):
    ys = df.allreduce(group, place(group, hosts), epilogue=df.Epilogue("col < 5 && x > 0.0f ? fminf(x, 1.5f) : -x"))
    col = np.arange(13)

    def epilogue(x):
        return np.where((col < 5) & (x > 0), np.minimum(x, np.float32(1.5)), -x)

    assert_bits(ys, reference.allreduce(hosts, epilogue=epilogue))
