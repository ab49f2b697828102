# SPDX-License-Identifier: Apache-2.0
"""LayerNorm, normed outputs, gammas and residuals in float32, and heads, bit for bit by every algorithm."""

from __future__ import annotations

import numpy as np
import pytest
from collective_support import (
    ALL_ALGOS,
    PULL,
    assert_bits,
    garbage,
    place,
    private_array,
    random_inputs,
    ranks,
    replicate,
)
from multimem_support import Arrays, exact_inputs

import drvfuse as df
from drvfuse import reference

NONE = df.Quantisation.none()

EVERYTHING = {"norm": "layer", "beta": "float32", "gamma": "float32", "normed": True}
FORMS = {
    "layer": EVERYTHING,
    "residual": {"residual": "float32", "gamma": "float32", "normed": True},
}

# Algorithms in which one rank sends a row's results to all ranks are tested with both FORMS. For the others one form is
# enough.
PAIRS = [(algo, form) for algo in ("two_stage", "push_two_shot") for form in FORMS]
PAIRS += [("one_stage", "residual"), ("push_one_shot", "layer"), ("naive", "layer")]


def check(
    group,
    rng,
    shape,
    algo="auto",
    *,
    dtype="bfloat16",
    gamma=None,
    beta=None,
    residual=None,
    normed=False,
    hosts=None,
    xs=None,
    epsilon=1e-5,
    **options,
):
    """Run the op and compare all results with the reference; gamma, beta and residual are dtypes."""
    columns = options.get("head_columns") or shape[-1]
    rows = (*shape[:-1], shape[-1] // columns) if "head_columns" in options else shape[:-1]
    hosts = random_inputs(rng, group.size, shape, dtype) if hosts is None else hosts
    weights = random_inputs(rng, 1, columns, gamma or dtype)[0]
    shifts = random_inputs(rng, 1, columns, beta)[0] if beta else None
    added = random_inputs(rng, 1, shape, residual)[0] if residual else None
    kinds = {name: options.pop(name) for name in ("norm", "head_columns", "weight_offset") if name in options}
    result = df.allreduce_rmsnorm_fp8(
        group,
        place(group, hosts) if xs is None else xs,
        replicate(group, weights),
        epsilon=epsilon,
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
    group.synchronize()  # raises after a time-out, which the comparison may miss: the bits can be right by chance
    kinds |= {"beta": shifts, "residual": added, "multimem": options.get("use_multimem", False), "nodes": group.nodes}
    expected = reference.allreduce_rmsnorm_fp8(hosts, weights, epsilon, **kinds)
    what = f"{algo} {shape}"
    assert_bits(result.output, expected.output, what)
    assert_bits(result.scales, expected.scales, "scales of " + what)
    if residual:
        assert_bits(result.residual, expected.residual, "residual of " + what)
    if normed:
        unquantised = reference.allreduce_rmsnorm_fp8(hosts, weights, epsilon, **kinds | {"quantisation": NONE})
        assert_bits(normed_outputs, unquantised.output, "normed rows of " + what)


@pytest.mark.gpus(3)
@pytest.mark.parametrize(("algo", "form"), PAIRS)
def test_every_algorithm_is_exact_for_few_rows_many_rows_and_chunks(open_group, rng, algo, form):
    group = open_group(3)
    for rows in (1, 4, 17):
        check(group, rng, (rows, 264), algo, **FORMS[form])
    check(open_group(3, workspace_bytes=16384), rng, (29, 264), algo, **FORMS[form])


@pytest.mark.gpus(2)
@pytest.mark.parametrize("algo", ["two_stage", "push_two_shot"])
def test_ragged_rows_are_exact(open_group, rng, algo):
    for rows in (1, 5):
        check(open_group(2), rng, (rows, 61), algo, **EVERYTHING, weight_offset=1.0)


@pytest.mark.gpus(2)
@pytest.mark.parametrize(("algo", "columns"), [("push_one_shot", 8192), ("one_stage", 16384)])
def test_layer_norm_of_rows_held_by_several_blocks_is_exact(open_group, rng, algo, columns):
    check(open_group(2), rng, (3, columns), algo, norm="layer", beta="bfloat16")


@pytest.mark.gpus(2)
@pytest.mark.parametrize("algo", ALL_ALGOS)
def test_each_head_is_normalised_like_a_row(open_group, rng, algo):
    check(open_group(2), rng, (2, 3, 512), algo, head_columns=64)


@pytest.mark.gpus(2)
def test_heads_of_any_size_are_exact(open_group, rng):
    for columns, head in ((264, 8), (512, 256), (264, 24), (61 * 3, 61), (512, 512)):
        check(open_group(2), rng, (5, columns), "push_one_shot", head_columns=head)
    check(open_group(2, workspace_bytes=16384), rng, (29, 512), "push_two_shot", **EVERYTHING, head_columns=128)


@pytest.mark.gpus(2)
def test_special_heads_change_their_own_results_only(open_group, rng):
    hosts = random_inputs(rng, 2, (4, 512), "bfloat16")
    for host in hosts:
        host[0, :64], host[0, 64:128], host[1, 70], host[1, 200] = 0, -0.0, np.nan, np.inf
        # the squares of these values underflow to 0
        host[2] = (host[2].astype(np.float32) * 2.0**-120).astype(host.dtype)
        host[2, 5::7] = 0
    for options in ({}, {"norm": "layer"}, {"norm": "layer", "beta": "bfloat16"}):
        check(open_group(2), rng, (4, 512), "one_stage", hosts=hosts, head_columns=64, epsilon=0.0, **options)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("algo", PULL)
def test_inputs_that_peers_cannot_read_are_staged(open_group, rng, algo):
    group = open_group(2, workspace_bytes=16384)
    hosts = random_inputs(rng, 2, (23, 264), "float16")
    private = [private_array(rank.device, host) for rank, host in zip(group, hosts, strict=True)]
    form = FORMS["layer" if algo == "one_stage" else "residual"]
    check(group, rng, (23, 264), algo, dtype="float16", hosts=hosts, xs=[array for array, _ in private], **form)
    group.synchronize()


@pytest.mark.emulated
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("where", ["staged", "direct"])
def test_multicast_memory_gives_the_same_bits(rng, where, form):
    with df.emu.Machine(devices=3, race=True) as machine:
        for nbytes in (1 << 18, 16384):
            with df.Group.local(3, driver=machine, max_blocks=4, workspace_bytes=nbytes) as group:
                hosts = exact_inputs(rng, 3, (23, 264), "bfloat16")
                xs = Arrays(group, hosts, where).inputs
                check(group, rng, (23, 264), hosts=hosts, xs=xs, use_multimem=True, **FORMS[form])
        assert not machine.reports


@pytest.mark.emulated
def test_groups_over_several_nodes_give_the_same_bits(rng):
    with df.emu.Machine(devices=4, race=True) as machine:
        for nbytes in (1 << 18, 16384):
            with df.Group.local(4, driver=machine, nodes=2, max_blocks=4, workspace_bytes=nbytes) as group:
                check(group, rng, (23, 264), **EVERYTHING)
                check(group, rng, (9, 256), residual="float32", gamma="float32", head_columns=64)
        assert not machine.reports


@pytest.mark.parametrize("n", ranks(1))
def test_calls_with_other_arrays_reuse_the_plan_of_the_first(open_group, rng, n):
    for _ in range(3):
        check(open_group(n), rng, (4, 264), "one_stage", **EVERYTHING, residual="float32")


def test_bad_input_is_an_argument_error(open_group, refused):
    group = open_group(1)
    x, gamma = [group.ranks[0].zeros(shape, "float16") for shape in ((4, 24), 24)]

    def call(**changes):
        given = {"gammas": gamma, "epsilon": 1e-5, **changes}
        return lambda: df.allreduce_rmsnorm_fp8(group, x, **given)

    def zeros(shape, dtype):
        return group.ranks[0].zeros(shape, dtype)

    refused(call(norm="batch"), "norm", "'rms' or 'layer'")
    refused(call(betas=gamma), "betas", 'None, as norm is "rms"')
    refused(call(norm="layer", betas=zeros(23, "float16")), "betas", "(24,)")
    refused(call(norm="layer", betas=zeros(24, "float32")), "betas", "float16, as the inputs require")
    refused(call(gammas=zeros(24, "bfloat16")), "gammas", "float16 or float32")
    refused(call(residuals=zeros((4, 24), "bfloat16")), "residuals", "float16 or float32")
    wide = zeros((4, 24), "float32")
    refused(call(residuals=wide, residual_outputs=zeros((4, 24), "float16")), "residual_outputs", "float32")
    refused(call(normed_outputs=wide), "normed_outputs", "float16")
    refused(call(normed_outputs=x), "normed_outputs", "overlapping inputs")
    refused(call(quantisation=NONE, normed_outputs=zeros((4, 24), "float16")), "normed_outputs", "quantised")
    for heads in (0, 5, 48, 2.0, True):
        refused(call(head_columns=heads), "head_columns")
    refused(call(head_columns=12), "gammas", "(12,)")
    refused(call(head_columns=12, gammas=zeros(12, "float16"), scales=zeros((4,), "float32")), "scales", "(4, 2)")
    wider = zeros((1, 1 << 15), "float16")
    refused(lambda: df.allreduce_rmsnorm_fp8(group, wider, gamma, epsilon=1.0), "inputs", "16384")
    refused(lambda: df.allreduce_rmsnorm_fp8(group, wider, gamma, epsilon=1.0, head_columns=1 << 15), "head_columns")
