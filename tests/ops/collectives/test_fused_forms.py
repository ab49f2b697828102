# SPDX-License-Identifier: Apache-2.0
"""LayerNorm, normed outputs, gammas and residuals in float32, and heads, bit for bit by every algorithm."""

from __future__ import annotations

import pytest
from collective_support import ALGOS, ALL_ALGOS, assert_bits, garbage, place, random_inputs, replicate

import drvfuse as df
from drvfuse import reference

EVERYTHING = {"norm": "layer", "beta": "float32", "gamma": "float32", "normed": True}
FORMS = {
    "layer": EVERYTHING,
    "residual": {"residual": "float32", "gamma": "float32", "normed": True},
}


def check(group, rng, shape, algo, *, dtype="bfloat16", gamma=None, beta=None, residual=None, normed=False, **options):
    """Run the op and compare all results with the reference; the keywords in front of `options` are dtypes."""
    columns = options.get("head_columns") or shape[-1]
    rows = (*shape[:-1], shape[-1] // columns) if "head_columns" in options else shape[:-1]
    hosts = random_inputs(rng, group.size, shape, dtype)
    weights = random_inputs(rng, 1, columns, gamma or dtype)[0]
    shifts = random_inputs(rng, 1, columns, beta)[0] if beta else None
    added = random_inputs(rng, 1, shape, residual)[0] if residual else None
    kinds = {name: options.pop(name) for name in ("norm", "head_columns", "weight_offset") if name in options}
    result = df.allreduce_rmsnorm_fp8(
        group,
        place(group, hosts),
        replicate(group, weights),
        epsilon=1e-5,
        betas=replicate(group, shifts) if beta else None,
        residuals=replicate(group, added) if residual else None,
        residual_outputs=garbage(group, shape, residual) if residual else None,
        outputs=garbage(group, shape, "float8_e4m3fn"),
        scales=garbage(group, rows, "float32"),
        normed_outputs=(normed_outputs := garbage(group, shape, dtype)) if normed else None,
        algo=algo,
        **kinds,
        **options,
    )
    kinds |= {"beta": shifts, "residual": added, "multimem": options.get("use_multimem", False), "nodes": group.nodes}
    expected = reference.allreduce_rmsnorm_fp8(hosts, weights, 1e-5, **kinds)
    what = f"{algo} {shape}"
    assert_bits(result.output, expected.output, what)
    assert_bits(result.scales, expected.scales, "scales of " + what)
    if residual:
        assert_bits(result.residual, expected.residual, "residual of " + what)
    if normed:
        unquantised = reference.allreduce_rmsnorm_fp8(hosts, weights, 1e-5, out_dtype=dtype, **kinds)
        assert_bits(normed_outputs, unquantised.output, "normed rows of " + what)


@pytest.mark.gpus(3)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("algo", ALL_ALGOS)
def test_every_algorithm_in_few_and_many_rows_and_chunks(open_group, rng, algo, form):
    group = open_group(3)
    for rows in (1, 4, 17):
        check(group, rng, (rows, 264), algo, **FORMS[form])
    check(open_group(3, workspace_bytes=16384), rng, (29, 264), algo, **FORMS[form])


@pytest.mark.gpus(2)
@pytest.mark.parametrize("algo", ALGOS)
def test_ragged_rows(open_group, rng, algo):
    check(open_group(2), rng, (5, 61), algo, **EVERYTHING, residual="float32", weight_offset=1.0)


@pytest.mark.gpus(2)
@pytest.mark.parametrize(("algo", "columns"), [("push_one_shot", 8192), ("one_stage", 16384), ("push_two_shot", 8200)])
def test_layer_norm_of_wide_rows(open_group, rng, algo, columns):
    check(open_group(2), rng, (3, columns), algo, norm="layer", beta="bfloat16")


@pytest.mark.gpus(2)
@pytest.mark.parametrize("algo", ALL_ALGOS)
def test_heads_are_rows_of_their_own(open_group, rng, algo):
    check(open_group(2), rng, (2, 3, 512), algo, head_columns=64)
