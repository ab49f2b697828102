# SPDX-License-Identifier: Apache-2.0
"""The fused all-reduce + RMSNorm + FP8 gives the reference's bits by every algorithm, dtype, rank and shape."""

from __future__ import annotations

import math

import numpy as np
import pytest
from collective_support import (
    ALGOS,
    ALL_ALGOS,
    ON_GPUS,
    assert_bits,
    codes_per_row,
    every_number_of_ranks,
    garbage,
    place,
    random_inputs,
    ranks,
    replicate,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import drvfuse as df
from drvfuse import dtypes, reference
from drvfuse.plans.quantisation import PER_ROW


def gamma_for(rng, columns, dtype):
    return (1 + 0.3 * rng.standard_normal(columns)).astype(np.float32).astype(dtypes.get(dtype).numpy)


def check(
    group,
    rng,
    shape,
    *,
    algo,
    dtype="bfloat16",
    quantisation=PER_ROW,
    residual=False,
    hosts=None,
    gamma=None,
    epsilon=1e-5,
    weight_offset=0.0,
    **options,
):
    """Run the op and compare all results with the reference."""
    hosts = random_inputs(rng, group.size, shape, dtype) if hosts is None else hosts
    gamma = gamma_for(rng, shape[-1], dtype) if gamma is None else gamma
    added = random_inputs(rng, 1, shape, dtype)[0] if residual else None
    quantised, out_dtype = quantisation.scales, quantisation.output_dtype(dtypes.get(dtype))
    result = df.allreduce_rmsnorm_fp8(
        group,
        place(group, hosts),
        replicate(group, gamma),
        epsilon=epsilon,
        weight_offset=weight_offset,
        residuals=replicate(group, added) if residual else None,
        residual_outputs=garbage(group, shape, dtype) if residual else None,
        quantisation=quantisation,
        outputs=garbage(group, shape, out_dtype),
        scales=garbage(group, shape[:-1], quantised) if quantised else None,
        algo=algo,
        **options,
    )
    expected = reference.allreduce_rmsnorm_fp8(hosts, gamma, epsilon, weight_offset, added, quantisation=quantisation)
    what = f"{algo} {dtype} {quantisation} {shape}"
    assert_bits(result.output, expected.output, what)
    assert (result.scales is None) == (not quantised)
    assert (result.residual is None) == (not residual)
    if quantised:
        assert_bits(result.scales, expected.scales, "scales of " + what)
    if residual:
        assert_bits(result.residual, expected.residual, "residual of " + what)
    return result, expected


@pytest.mark.parametrize(("n", "algo"), every_number_of_ranks(ALL_ALGOS))
def test_bfloat16_to_e4m3_is_exact_for_every_number_of_ranks(open_group, rng, n, algo):
    group = open_group(n)
    for rows in sorted({1, n - 1, n, n + 1, 17} - {0}):
        check(group, rng, (rows, 264), algo=algo)


@pytest.mark.parametrize("algo", ALGOS)
@pytest.mark.parametrize("n", ranks(3, 8))
def test_residuals_are_exact_for_several_numbers_of_ranks(open_group, rng, n, algo):
    group = open_group(n)
    for rows in (1, n + 1, 9):
        check(group, rng, (rows, 264), algo=algo, residual=True)


@pytest.mark.gpus(3)
@pytest.mark.parametrize("algo", ALL_ALGOS)
def test_ragged_columns_are_exact(open_group, rng, algo):
    group = open_group(3)
    for columns in (1, 7, 9, 263, 1001):
        check(group, rng, (5, columns), algo=algo)
    check(group, rng, (4, 61), algo=algo, residual=True)


MODES = [
    ("bfloat16", "float8_e5m2", "bfloat16", True),
    ("bfloat16", "float8_e5m2", "float32", False),
    ("bfloat16", "float8_e4m3fn", "bfloat16", False),
    ("bfloat16", "bfloat16", "float32", False),
    ("bfloat16", "bfloat16", "float32", True),
    ("float16", "float8_e4m3fn", "float32", True),
    ("float16", "float8_e5m2", "bfloat16", False),
    ("float16", "float16", "float32", False),
    ("float32", "float8_e4m3fn", "float32", False),
    ("float32", "float8_e5m2", "bfloat16", True),
    ("float32", "float32", "float32", True),
]
# On the emulated driver each algorithm runs every second mode only, as kernels take long to compile.
PAIRS = [
    (algo, *mode) for a, algo in enumerate(ALL_ALGOS) for m, mode in enumerate(MODES) if ON_GPUS or (a + m) % 2 == 0
]


@pytest.mark.gpus(2)
@pytest.mark.parametrize("algo,dtype,codes,scales,residual", PAIRS)
def test_every_dtype_and_mode_is_exact(open_group, rng, dtype, codes, scales, residual, algo):
    group = open_group(2)
    made = codes_per_row(dtype, codes, scales)
    check(group, rng, (5, 264), algo=algo, dtype=dtype, quantisation=made, residual=residual)


# On the emulated driver each algorithm has the longest rows of both dtypes and one or two of the other lengths.
WIDE = [("bfloat16", 4096), ("bfloat16", 8200), ("bfloat16", 16384), ("float32", 16384), ("bfloat16", 16383)]


@pytest.mark.gpus(2)
@pytest.mark.parametrize(
    ("dtype", "columns", "algo"),
    [
        (dtype, columns, algo)
        for number, (dtype, columns) in enumerate(WIDE)
        for position, algo in enumerate(ALGOS)
        if ON_GPUS or columns == 16384 or (number + position) % 2
    ],
)
def test_wide_rows_are_exact(open_group, rng, dtype, columns, algo):
    check(open_group(2), rng, (3, columns), algo=algo, dtype=dtype)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("algo", ALL_ALGOS)
def test_every_size_of_the_reduction_tree_is_exact(open_group, rng, algo):
    for columns in (8, 16, 248, 256, 264, 512, 2048, 2056):
        check(open_group(2), rng, (2, columns), algo=algo)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("algo", ALL_ALGOS)
def test_scale_bound_weight_offset_and_epsilon_are_exact(open_group, rng, algo):
    group = open_group(2)
    for bound in (math.inf, 1.0, 0.01, 0.0):
        check(group, rng, (3, 64), algo=algo, quantisation=df.Quantisation.per_row(upper_bound=bound))
    for weight_offset in (1.0, -1.0):
        check(group, rng, (3, 64), algo=algo, weight_offset=weight_offset)
    gamma = -np.ones(64, np.float32).astype(dtypes.get("bfloat16").numpy)
    check(group, rng, (3, 64), algo=algo, gamma=gamma, weight_offset=1.0)
    check(group, rng, (3, 64), algo=algo, gamma=gamma)
    for epsilon in (0.0, 1e-30, 1.0, 1e30):
        check(group, rng, (3, 64), algo=algo, epsilon=epsilon)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("algo", ALL_ALGOS)
def test_special_rows_change_their_own_results_only(open_group, rng, algo, residual):
    """Zero, one-hot, denormal, huge, infinite and NaN rows: each only changes its own results."""
    group = open_group(2)
    kind = dtypes.get("bfloat16").numpy
    values = random_inputs(rng, 2, (9, 64), "float32")
    for value in values:
        value[0] = 0
        value[1] = -0.0
        value[2] = 0
        value[2, 5] = 3
        value[3] *= 2.0**-130
        value[4] *= 2.0**120
        value[5, 7] = np.inf
        value[6, 8] = np.nan
        value[7] *= np.exp2(np.linspace(-60, 60, 64))
    hosts = [value.astype(kind) for value in values]
    for epsilon in (1e-6, 0.0):
        check(group, rng, (9, 64), algo=algo, hosts=hosts, epsilon=epsilon, residual=residual)


@pytest.mark.gpus(3)
@pytest.mark.parametrize("residual", [False, True])
def test_batch_and_algorithm_do_not_change_a_row(open_group, rng, residual):
    group = open_group(3)
    hosts = random_inputs(rng, 3, (19, 264), "bfloat16")
    gamma = gamma_for(rng, 264, "bfloat16")
    added = random_inputs(rng, 1, (19, 264), "bfloat16")[0]

    def run(rows, algo, blocks):
        result = df.allreduce_rmsnorm_fp8(
            group,
            place(group, [host[rows] for host in hosts]),
            replicate(group, gamma),
            epsilon=1e-6,
            residuals=replicate(group, added[rows]) if residual else None,
            algo=algo,
            max_num_blocks=blocks,
        )
        return [[array.numpy() for array in arrays] for arrays in result if arrays is not None]

    whole = run(slice(None), "one_stage", None)
    for rows, algo, blocks in (
        (slice(0, 1), "two_stage", None),
        (slice(4, 5), "one_stage", 1),
        (slice(2, 19), "two_stage", 1),
        (slice(7, 12), "naive", 2),
    ):
        for all_rows, some in zip(whole, run(rows, algo, blocks), strict=True):
            for rank in range(3):
                assert np.array_equal(reference.bits(all_rows[0][rows]), reference.bits(some[rank]))


@pytest.mark.gpus(3)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("algo", ALL_ALGOS)
def test_inputs_larger_than_the_workspace_are_chunked(open_group, rng, algo, residual):
    group = open_group(3, workspace_bytes=4096)
    check(group, rng, (29, 264), algo=algo, residual=residual)
    check(group, rng, (29, 263), algo=algo, residual=residual)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("algo", ALL_ALGOS)
def test_residual_output_may_be_the_residual(open_group, rng, algo):
    group = open_group(2)
    hosts = random_inputs(rng, 2, (7, 72), "bfloat16")
    added = random_inputs(rng, 1, (7, 72), "bfloat16")[0]
    gamma = gamma_for(rng, 72, "bfloat16")
    residuals = replicate(group, added)
    result = df.allreduce_rmsnorm_fp8(
        group,
        place(group, hosts),
        replicate(group, gamma),
        epsilon=1e-6,
        residuals=residuals,
        residual_outputs=residuals,
        algo=algo,
    )
    expected = reference.allreduce_rmsnorm_fp8(hosts, gamma, 1e-6, residual=added)
    assert result.residual == residuals
    assert_bits(result.residual, expected.residual)
    assert_bits(result.output, expected.output)
    assert_bits(result.scales, expected.scales)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("algo", ["auto", *ALL_ALGOS])
def test_a_call_without_rows_launches_nothing(open_group, algo):
    group = open_group(2)
    result = df.allreduce_rmsnorm_fp8(
        group,
        [rank.empty((2, 0, 16), "bfloat16") for rank in group],
        [rank.zeros(16, "bfloat16") for rank in group],
        epsilon=1e-6,
        residuals=[rank.empty((2, 0, 16), "bfloat16") for rank in group],
        algo=algo,
    )
    assert [a.shape for a in result.output] == [(2, 0, 16)] * 2
    assert [a.shape for a in result.scales] == [(2, 0)] * 2
    assert [a.shape for a in result.residual] == [(2, 0, 16)] * 2
    assert result.output[0].dtype.name == "float8_e4m3fn"


@pytest.mark.gpus(2)
def test_inputs_may_have_leading_dimensions_and_results_are_allocated(open_group, rng):
    group = open_group(2)
    hosts = random_inputs(rng, 2, (2, 3, 40), "bfloat16")
    gamma = gamma_for(rng, 40, "bfloat16")
    result = df.allreduce_rmsnorm_fp8(group, place(group, hosts), replicate(group, gamma), epsilon=1e-6)
    expected = reference.allreduce_rmsnorm_fp8(hosts, gamma, 1e-6)
    assert_bits(result.output, expected.output)
    assert_bits(result.scales, expected.scales)
    row = df.allreduce_rmsnorm_fp8(
        group, place(group, [host[0, 0] for host in hosts]), replicate(group, gamma), epsilon=1e-6
    )
    assert row.scales[0].shape == ()
    assert_bits(row.output, expected.output[0, 0])


def test_one_local_rank_takes_and_returns_bare_arrays(open_group, rng):
    group = open_group(1)
    (host,) = random_inputs(rng, 1, (4, 32), "float16")
    gamma = gamma_for(rng, 32, "float16")
    rank = group.ranks[0]
    result = df.allreduce_rmsnorm_fp8(group, rank.array(host), rank.array(gamma), epsilon=1e-6)
    expected = reference.allreduce_rmsnorm_fp8([host], gamma, 1e-6)
    assert_bits([result.output], expected.output)
    assert_bits([result.scales], expected.scales)
    assert result.residual is None


@pytest.mark.gpus(4)
def test_auto_takes_the_two_shot_form_for_many_rows(open_group):
    group = open_group(4)

    def algo(rows, residual):
        def arrays(shape):
            return [rank.empty(shape, "bfloat16") for rank in group]

        return df.allreduce_rmsnorm_fp8.prepare(
            group,
            arrays((rows, 4096)),
            arrays(4096),
            epsilon=1e-6,
            residuals=arrays((rows, 4096)) if residual else None,
        ).algo

    assert algo(8, False) == "push_one_shot"
    assert algo(32, False) == "push_two_shot"
    assert algo(16, True) == "push_one_shot"
    assert algo(64, True) == "push_two_shot"


@pytest.mark.gpus(3)
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_shapes_and_algorithms_have_the_bits_of_the_reference(open_group, data):
    group = open_group(3)
    rows, packs = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 70))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    check(
        group,
        rng,
        (rows, packs * 8),
        algo=data.draw(st.sampled_from(["auto", *ALL_ALGOS])),
        quantisation=df.Quantisation.per_row(upper_bound=data.draw(st.sampled_from([math.inf, 2.0]))),
        weight_offset=data.draw(st.sampled_from([0.0, 1.0])),
        max_num_blocks=data.draw(st.none() | st.integers(1, 4)),
    )
