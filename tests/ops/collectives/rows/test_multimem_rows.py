# SPDX-License-Identifier: Apache-2.0
"""The fused op by multicast memory: norm and quantisation have the reference's bits for the sums that the hardware
gave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from collective_support import (
    assert_bits,
    codes_per_row,
    every_number_of_ranks,
    garbage,
    random_inputs,
    replicate,
)
from multimem_support import (
    Arrays,
    assert_equal_on_ranks,
    assert_room,
    assert_within_bounds,
    cancelling_inputs,
    exact_inputs,
)

import drvfuse as df
from drvfuse import dtypes, reference
from drvfuse.plans.quantisation import PER_ROW

pytestmark = pytest.mark.emulated

EPSILON = 1e-5
PLACES = ("staged", "direct")
places = pytest.mark.parametrize("where", PLACES)


@pytest.fixture(scope="module")
def open_group() -> Iterator[Callable[..., df.Group]]:
    groups = {}
    with df.emu.Machine(devices=8) as machine:

        def find(n: int, **options: int) -> df.Group:
            key = (n, *options.items())
            if key not in groups:
                settings = {"max_blocks": 4, "workspace_bytes": 1 << 18, **options}
                groups[key] = df.Group.local(n, driver=machine, **settings)
            return groups[key]

        yield find
        for group in groups.values():
            group.close()


def run(group, rng, hosts, where, *, quantisation=PER_ROW, residual=None, **options):
    """Run the op. Returns its result and gamma. Outputs and residual outputs hold garbage before the call."""
    shape, dtype = hosts[0].shape, dtypes.get(hosts[0].dtype).name
    gamma = (1 + 0.3 * rng.standard_normal(shape[-1])).astype(np.float32).astype(hosts[0].dtype)
    inputs = Arrays(group, hosts, where).inputs
    result = df.allreduce_rmsnorm_fp8(
        group,
        inputs,
        replicate(group, gamma),
        epsilon=EPSILON,
        residuals=None if residual is None else replicate(group, residual),
        residual_outputs=None if residual is None else garbage(group, shape, dtype),
        quantisation=quantisation,
        outputs=garbage(group, shape, quantisation.output_dtype(dtypes.get(dtype))),
        scales=garbage(group, shape[:-1], quantisation.scales) if quantisation.scales else None,
        use_multimem=True,
        **options,
    )
    for x, host in zip(inputs, hosts, strict=True):
        assert_bits([x], host, "input of")
    return result, gamma


def check_exact(group, rng, hosts, where, *, residual=None, quantisation=PER_ROW, **options):
    kinds = {"residual": residual, "quantisation": quantisation}
    result, gamma = run(group, rng, hosts, where, **kinds, **options)
    expected = reference.allreduce_rmsnorm_fp8(hosts, gamma, EPSILON, **kinds, multimem=True)
    for found, wanted in zip(result, expected, strict=True):
        assert (found is None) == (wanted is None)
        if wanted is not None:
            assert_bits(found, wanted, f"{where} {hosts[0].shape} {quantisation}")


@pytest.mark.parametrize(
    ("n", "form"), every_number_of_ranks([(residual, where) for residual in (False, True) for where in PLACES], least=2)
)
def test_sums_that_are_exact_in_any_order_give_the_bits_of_the_reference(open_group, rng, n, form):
    group, (residual, where) = open_group(n), form
    for rows in sorted({1, n - 1, n + 1, 17}):
        added = random_inputs(rng, 1, (rows, 264), "bfloat16")[0] if residual else None
        check_exact(group, rng, exact_inputs(rng, n, (rows, 264), "bfloat16"), where, residual=added)


@pytest.mark.parametrize(
    ("dtype", "codes", "scales", "residual", "where"),
    [
        ("bfloat16", "float8_e5m2", "bfloat16", True, "direct"),
        ("bfloat16", "float8_e4m3fn", "bfloat16", False, "staged"),
        ("bfloat16", "bfloat16", "float32", False, "direct"),
        ("bfloat16", "bfloat16", "float32", True, "staged"),
        ("float16", "float8_e4m3fn", "float32", True, "direct"),
        ("float16", "float8_e5m2", "bfloat16", False, "staged"),
        ("float16", "float16", "float32", False, "direct"),
        ("float32", "float8_e4m3fn", "float32", False, "staged"),
        ("float32", "float8_e5m2", "bfloat16", True, "direct"),
        ("float32", "float32", "float32", True, "staged"),
    ],
)
def test_every_dtype_and_mode_has_the_bits_of_the_reference(open_group, rng, dtype, codes, scales, residual, where):
    group, shape = open_group(3), (7, 264)
    added = random_inputs(rng, 1, shape, dtype)[0] if residual else None
    made = codes_per_row(dtype, codes, scales)
    check_exact(group, rng, exact_inputs(rng, 3, shape, dtype), where, residual=added, quantisation=made)


@places
@pytest.mark.parametrize("residual", [False, True])
def test_ragged_and_odd_columns_have_the_bits_of_the_reference(open_group, rng, residual, where):
    """FP8 rows of 24 columns are not aligned to 16 bytes; other rows end in a partial pack."""
    group = open_group(3)
    for columns in (1, 7, 9, 24, 263, 1001):
        added = random_inputs(rng, 1, (5, columns), "bfloat16")[0] if residual else None
        check_exact(group, rng, exact_inputs(rng, 3, (5, columns), "bfloat16"), where, residual=added)


@places
@pytest.mark.parametrize("columns", [5120, 16384])
def test_long_rows_have_the_bits_of_the_reference(open_group, rng, columns, where):
    group = open_group(2)
    check_exact(group, rng, exact_inputs(rng, 2, (3, columns), "bfloat16"), where)
    check_exact(group, rng, exact_inputs(rng, 2, (2, columns), "float32"), where)


@places
@pytest.mark.parametrize("residual", [False, True])
def test_inputs_larger_than_the_staging_memory_are_processed_in_chunks(open_group, rng, residual, where):
    group = open_group(3, workspace_bytes=8192)
    for rows in (1, 40, 100):
        added = random_inputs(rng, 1, (rows, 264), "bfloat16")[0] if residual else None
        check_exact(group, rng, exact_inputs(rng, 3, (rows, 264), "bfloat16"), where, residual=added)


@places
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_sum_of_two_random_inputs_has_one_order(open_group, rng, dtype, where):
    """Addition of two values is commutative, so sums of random data have the reference's bits too."""
    check_exact(open_group(2), rng, random_inputs(rng, 2, (9, 264), dtype), where)


@places
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("n", [3, 8])
def test_random_sums_are_within_the_bound_and_their_norm_has_the_bits_of_the_reference(
    open_group, rng, n, dtype, where
):
    """The residual is zero, so residual_out is the sum itself; all other results follow from it, bit for bit."""
    group, shape = open_group(n), (9, 264)
    hosts = cancelling_inputs(rng, n, shape, dtype)
    result, gamma = run(group, rng, hosts, where, residual=np.zeros(shape, hosts[0].dtype))
    assert_within_bounds(result.residual, hosts)
    obtained = result.residual[0].numpy()
    expected = reference.allreduce_rmsnorm_fp8([obtained], gamma, EPSILON)
    assert_bits(result.residual, obtained)
    assert_bits(result.output, expected.output)
    assert_bits(result.scales, expected.scales)


@places
@pytest.mark.parametrize("n", [3, 8])
def test_without_residual_ranks_have_equal_bits_and_results_are_within_the_bound(open_group, rng, n, where):
    """y = x g f for a sum x, gamma g and the row's factor f. To first order an error d of x changes y by g f d and,
    through f, by |y| sum(|x d|) / sum(x^2). The other operations make fewer than 2 (columns + 8) roundings.
    """
    group, shape = open_group(n), (9, 264)
    hosts = cancelling_inputs(rng, n, shape, "float32")
    result, gamma = run(group, rng, hosts, where, quantisation=df.Quantisation.none())
    assert_equal_on_ranks(result.output)
    x = np.sum([host.astype(np.float64) for host in hosts], axis=0)
    d = (n - 1) * 2.0**-24 * np.sum([np.abs(host.astype(np.float64)) for host in hosts], axis=0)
    squares = (x * x).sum(axis=1, keepdims=True)
    f = 1 / np.sqrt(squares / shape[1] + EPSILON)
    y = x * gamma.astype(np.float64) * f
    rounding = 2 * (shape[1] + 8) * 2.0**-24
    bound = np.abs(gamma * f) * d + np.abs(y) * ((np.abs(x) * d).sum(axis=1, keepdims=True) / squares + rounding)
    assert (np.abs(result.output[0].numpy() - y) <= 1.01 * bound).all()


@places
def test_special_rows_change_their_own_results_only(open_group, rng, where):
    """A row of zeros has scale 0; one with a NaN has a NaN scale; infinities give NaN."""
    group, shape = open_group(3), (5, 264)
    hosts = exact_inputs(rng, 3, shape, "bfloat16")
    for host in hosts:
        host[0] = 0
    hosts[1][1, 7], hosts[2][2, 100], hosts[0][3] = np.nan, np.inf, 0
    check_exact(group, rng, hosts, where)
    check_exact(group, rng, hosts, where, residual=random_inputs(rng, 1, shape, "bfloat16")[0])


def test_residual_outputs_may_be_the_residuals(open_group, rng):
    group, shape = open_group(3), (9, 264)
    for where in PLACES:
        hosts, residual = exact_inputs(rng, 3, shape, "bfloat16"), random_inputs(rng, 1, shape, "bfloat16")[0]
        gamma = np.ones(264, np.float32).astype(hosts[0].dtype)
        added = replicate(group, residual)
        result = df.allreduce_rmsnorm_fp8(
            group,
            Arrays(group, hosts, where).inputs,
            replicate(group, gamma),
            epsilon=EPSILON,
            residuals=added,
            residual_outputs=added,
            use_multimem=True,
        )
        expected = reference.allreduce_rmsnorm_fp8(hosts, gamma, EPSILON, residual=residual, multimem=True)
        assert_bits(result.output, expected.output)
        assert_bits(added, expected.residual)


def test_two_stage_is_the_only_algorithm(open_group, rng, refused):
    group, hosts = open_group(3), exact_inputs(rng, 3, (4, 64), "bfloat16")
    inputs = Arrays(group, hosts, "staged").inputs
    gammas = [rank.zeros(64, "bfloat16") for rank in group]

    def prepared(algo):
        options = {"epsilon": EPSILON, "use_multimem": True, "algo": algo}
        return df.allreduce_rmsnorm_fp8.prepare(group, inputs, gammas, **options)

    assert prepared("auto").algo == prepared("two_stage").algo == "multimem_two_stage"
    for algo in ("one_stage", "naive", "push_one_shot", "push_two_shot"):
        refused(lambda algo=algo: prepared(algo), "algo", 'one of "auto", "two_stage" with use_multimem=True')


def test_a_call_without_rows_launches_nothing(open_group):
    group = open_group(2)
    inputs, gammas = ([rank.zeros(shape, "bfloat16") for rank in group] for shape in ((0, 64), (64,)))
    call = df.allreduce_rmsnorm_fp8.prepare(group, inputs, gammas, epsilon=EPSILON, use_multimem=True)
    assert not any(call.launches) and call.algo == "multimem_two_stage"


@places
@pytest.mark.parametrize("residual", [False, True])
def test_graphs_replay_on_new_contents(open_group, rng, residual, where):
    group, shape = open_group(3), (6, 264)
    arrays = Arrays(group, exact_inputs(rng, 3, shape, "bfloat16"), where)
    gamma = np.ones(264, np.float32).astype(dtypes.get("bfloat16").numpy)
    added = random_inputs(rng, 1, shape, "bfloat16")[0] if residual else None
    call = df.allreduce_rmsnorm_fp8.prepare(
        group,
        arrays.inputs,
        replicate(group, gamma),
        epsilon=EPSILON,
        residuals=replicate(group, added) if residual else None,
        use_multimem=True,
    )
    group.synchronize()
    with df.Graph.capture([rank.stream for rank in group]) as graph:
        result = call.launch()
    for _ in range(2):
        hosts = exact_inputs(rng, 3, shape, "bfloat16")
        for x, host in zip(arrays.inputs, hosts, strict=True):
            x.copy_from(host)
        graph.launch(group[0].stream)
        group.synchronize()
        expected = reference.allreduce_rmsnorm_fp8(hosts, gamma, EPSILON, residual=added, multimem=True)
        assert_bits(result.output, expected.output)
        assert_bits(result.scales, expected.scales)
    graph.close()


@places
@pytest.mark.parametrize("residual", [False, True])
def test_a_trace_has_room_for_all_phases(open_group, rng, residual, where):
    group = open_group(3, workspace_bytes=8192)
    trace = df.Trace(group)
    added = random_inputs(rng, 1, (40, 264), "bfloat16")[0] if residual else None
    check_exact(group, rng, exact_inputs(rng, 3, (40, 264), "bfloat16"), where, residual=added, trace=trace)
    group.synchronize()
    assert_room(trace)
    assert "allreduce_rmsnorm_fp8_multimem_two_stage" in trace.summary()
