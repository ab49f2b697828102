# SPDX-License-Identifier: Apache-2.0
"""`reduce_scatter_rmsnorm_fp8`: each rank's rows of the fused all-reduce, bit for bit."""

from __future__ import annotations

import pytest
from collective_support import assert_bits, place, private_array, random_inputs, replicate

import drvfuse as df
from drvfuse import reference
from drvfuse.ops.call.repeat import Repeats

ALGOS = ("push", "pull", "naive")


def check(group, rng, shape, *, splits=None, algo="auto", residual=False, inputs=None, dtype="bfloat16", **options):
    n = len(group)
    hosts = random_inputs(rng, n, shape, dtype)
    columns = options.get("head_columns", shape[-1])
    gamma = random_inputs(rng, 1, columns, dtype)[0]
    rows = [len(part) for part in reference.reduce_scatter([h.reshape(-1, shape[-1]) for h in hosts], splits)]
    added = [random_inputs(rng, 1, (count, shape[-1]), dtype)[0] for count in rows] if residual else None
    expected = reference.reduce_scatter_rmsnorm_fp8(hosts, gamma, 1e-6, residuals=added, splits=splits, **options)
    call = df.reduce_scatter_rmsnorm_fp8.prepare(
        group,
        place(group, hosts) if inputs is None else inputs(hosts),
        replicate(group, gamma),
        epsilon=1e-6,
        splits=splits,
        residuals=None if added is None else place(group, added),
        algo=algo,
        **options,
    )
    assert_rows(call.launch(), expected, f"{algo} {shape} {splits}")


def assert_rows(result, expected, what=""):
    for rank, wanted in enumerate(expected):
        for name, arrays in zip(result._fields, result, strict=True):
            host = getattr(wanted, name)
            assert (arrays is None) == (host is None)
            if host is not None:
                assert_bits([arrays[rank]], host, f"{what} {name} of rank {rank}")


@pytest.mark.gpus(3)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("algo", ALGOS)
def test_bits_are_those_of_the_fused_all_reduce(open_group, rng, algo, residual):
    """Ranks own about equally many rows, or some own none, or one owns all. Some inputs have leading dimensions."""
    group = open_group(3)
    for shape, splits in (((7, 264), None), ((2, 264), None), ((5, 264), [0, 5, 0]), ((2, 3, 264), [1, 2, 3])):
        check(group, rng, shape, splits=splits, algo=algo, residual=residual)
    check(group, rng, (0, 264), algo=algo, residual=residual)


@pytest.mark.gpus(2)
def test_rows_of_partial_packs_and_heads_are_exact(open_group, rng):
    group = open_group(2)
    check(group, rng, (5, 61), algo="push")
    check(group, rng, (5, 3 * 61), algo="push", head_columns=61)
    check(group, rng, (5, 3 * 64), algo="push", head_columns=64)  # each warp holds whole rows of 64 columns


@pytest.mark.parametrize(
    ("n", "dtype"), [pytest.param(n, d, marks=pytest.mark.gpus(n)) for n, d in ((1, "float32"), (8, "float16"))]
)
def test_other_numbers_of_ranks_and_dtypes_are_exact(open_group, rng, n, dtype):
    check(open_group(n), rng, (n + 3, 136), dtype=dtype, residual=True, quantisation=df.Quantisation.none())


@pytest.mark.gpus(2)
def test_rows_shared_by_a_cluster_are_exact(new_group, rng):
    group = new_group(2, max_blocks=16)
    check(group, rng, (3, 4096), algo="push", residual=True)
    check(group, rng, (40, 4096), algo="push", residual=True)


@pytest.mark.gpus(3)
@pytest.mark.parametrize("algo", ALGOS)
def test_rows_larger_than_the_workspace_take_rounds_or_chunks(new_group, rng, algo):
    group = new_group(3, workspace_bytes=8192)
    for rows, splits in ((29, None), (9, [9, 0, 0]), (21, [0, 20, 1]), (1, None)):
        check(group, rng, (rows, 264), splits=splits, algo=algo, residual=True)


@pytest.mark.gpus(3)
def test_inputs_that_peers_cannot_read_are_staged(new_group, rng):
    group, kept = new_group(3, workspace_bytes=8192), []

    def private(hosts):
        kept.extend(private_array(rank.device, host) for rank, host in zip(group, hosts, strict=True))
        return [array for array, _ in kept[-3:]]

    for rows, splits in ((14, None), (9, [0, 8, 1])):
        check(group, rng, (rows, 264), splits=splits, algo="pull", residual=True, inputs=private)


@pytest.mark.gpus(2)
def test_in_place_residuals_replay_in_a_graph(open_group, rng):
    group = open_group(2)
    gamma = random_inputs(rng, 1, 264, "bfloat16")[0]
    xs = [rank.zeros((5, 264), "bfloat16") for rank in group]
    rows = (3, 2)
    added = [random_inputs(rng, 1, (count, 264), "bfloat16")[0] for count in rows]
    residuals = place(group, added)
    result = {
        "outputs": [rank.empty((count, 264), "float8_e4m3fn") for rank, count in zip(group, rows, strict=True)],
        "scales": [rank.empty((count,), "float32") for rank, count in zip(group, rows, strict=True)],
    }
    call = df.reduce_scatter_rmsnorm_fp8.prepare(
        group, xs, replicate(group, gamma), epsilon=1e-6, residuals=residuals, residual_outputs=residuals, **result
    )
    with df.Graph.capture([rank.stream for rank in group]) as graph:
        found = call.launch()
    for _ in range(3):
        hosts = random_inputs(rng, 2, (5, 264), "bfloat16")
        for x, host in zip(xs, hosts, strict=True):
            x.copy_from(host)
        graph.launch(group[0].stream)
        group.synchronize()
        expected = reference.reduce_scatter_rmsnorm_fp8(hosts, gamma, 1e-6, residuals=added)
        assert_rows(found, expected)
        added = [part.residual for part in expected]


@pytest.mark.gpus(2)
def test_calls_of_one_layout_are_repeated_with_other_addresses(open_group, rng):
    group = open_group(2)
    group.part(Repeats).clear()
    gammas = replicate(group, random_inputs(rng, 1, 264, "bfloat16")[0])
    for _ in range(3):
        hosts = random_inputs(rng, 2, (5, 264), "bfloat16")
        found = df.reduce_scatter_rmsnorm_fp8(group, place(group, hosts), gammas, epsilon=1e-6)
        assert_rows(found, reference.reduce_scatter_rmsnorm_fp8(hosts, gammas[0].numpy(), 1e-6))
    (repeats,) = group.part(Repeats)._plans.values()
    assert [repeat.note.op for repeat in repeats] == ["reduce_scatter_rmsnorm_fp8"]


@pytest.mark.gpus(2)
@pytest.mark.parametrize("algo", ["push", "pull"])
def test_moved_bytes_agree_with_the_formula(open_group, algo):
    group = open_group(2)
    xs, gammas = ([rank.zeros(shape, "bfloat16") for rank in group] for shape in ((4, 264), 264))
    call = df.reduce_scatter_rmsnorm_fp8.prepare(group, xs, gammas, epsilon=1e-6, algo=algo)
    assert call.algo == algo
    local, remote = call.traffic
    whole = 4 * 264 * 2
    assert remote == whole
    assert local == {"push": 4 * whole, "pull": whole}[algo] + whole // 2 + 4 * 4


@pytest.mark.gpus(2)
def test_bad_input_is_an_argument_error(open_group, refused):
    group = open_group(2)
    xs, gammas = ([rank.zeros(shape, "bfloat16") for rank in group] for shape in ((5, 264), 264))

    def of(*rows, dtype="bfloat16", columns=(264,)):
        return [rank.zeros((count, *columns), dtype) for rank, count in zip(group, rows, strict=True)]

    def call(**options):
        return lambda: df.reduce_scatter_rmsnorm_fp8(group, xs, gammas, epsilon=1e-6, **options)

    refused(call(splits=[5, 1]), "splits", "the sum 5")
    refused(call(residuals=of(5, 5)), "residuals[0]", "of shape (3, 264)")
    refused(call(residuals=of(2, 3)), "residuals[0]", "of shape (3, 264)")
    refused(call(residuals=of(3, 2, dtype="float16")), "residuals[0]", "of dtype bfloat16")
    refused(call(outputs=of(5, 5, dtype="float8_e4m3fn")), "outputs[0]", "of shape (3, 264)")
    refused(call(splits=[1, 4], scales=of(3, 2, dtype="float32", columns=())), "scales[0]", "of shape (1,)")
    refused(call(algo="two_stage"), "algo", "'push'")
