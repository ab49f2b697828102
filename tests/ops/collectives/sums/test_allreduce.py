# SPDX-License-Identifier: Apache-2.0
"""All-reduce gives the reference's bits: every algorithm, dtype, number of ranks and ragged size."""

from __future__ import annotations

import numpy as np
import pytest
from collective_support import (
    ALGOS,
    ALL_ALGOS,
    LEAST,
    assert_bits,
    every_number_of_ranks,
    garbage,
    place,
    random_inputs,
    ranks,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import drvfuse as df
from drvfuse import dtypes, reference


def check(group, hosts, algo, **options):
    xs = place(group, hosts)
    ys = garbage(group, hosts[0].shape, dtypes.get(hosts[0].dtype).name)
    df.allreduce(group, xs, ys, algo=algo, **options)
    expected = reference.allreduce(hosts)
    assert_bits(ys, expected, f"{algo} {hosts[0].shape}")
    for x, host in zip(xs, hosts, strict=True):
        assert_bits([x], host, "input of")
    return expected


@pytest.mark.parametrize(("n", "algo"), every_number_of_ranks(ALL_ALGOS))
def test_bfloat16_is_exact_for_every_number_of_ranks(open_group, rng, n, algo):
    group = open_group(n)
    partitions = [8 * (n * 5 + k) for k in range(n)]
    for count in (8, 8 * n, *partitions[:: max(1, n // 3)], 8 * 256 * 4 + 64):
        check(group, random_inputs(rng, n, count, "bfloat16"), algo)


@pytest.mark.parametrize("algo", ALGOS)
@pytest.mark.parametrize("n", ranks(1, 3, 8))
def test_ragged_counts_are_exact(open_group, rng, n, algo):
    group = open_group(n)
    for count in (1, 7, 9, 8 * n - 1, 8 * n + 3, 8 * 300 * n + 5):
        check(group, random_inputs(rng, n, count, "bfloat16"), algo)


# Few combinations of ranks and dtype, as kernels take long to compile. The last ones share kernels with the test of
# special values.
OTHER_DTYPES = [(2, "float16"), (8, "float32"), (3, "float16"), (3, "float32")]


@pytest.mark.parametrize("algo", ALL_ALGOS)
@pytest.mark.parametrize(
    ("n", "dtype"), [pytest.param(*kind, marks=pytest.mark.gpus(kind[0])) for kind in OTHER_DTYPES]
)
def test_other_dtypes_are_exact(open_group, rng, n, dtype, algo):
    group = open_group(n)
    for count in (1, 3, 127, 1029):
        check(group, random_inputs(rng, n, count, dtype), algo)


@pytest.mark.gpus(3)
@pytest.mark.parametrize("algo", ALL_ALGOS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_special_values_have_the_bits_of_the_reference(open_group, dtype, algo):
    group = open_group(3)
    kind = dtypes.get(dtype).numpy
    tiny = {"bfloat16": 2.0**-133, "float16": 2.0**-24, "float32": 2.0**-149}[dtype]
    huge = {"bfloat16": 3.3895314e38, "float16": 65504.0, "float32": 3.4028235e38}[dtype]
    nan, inf = np.nan, np.inf
    rows = [
        [-0.0, -0.0, 0.0, nan, inf, inf, tiny, tiny, huge, -huge, huge, 1.0, 2.0**24, 1.0, inf, -nan, 1.5, -1.5],
        [-0.0, 0.0, -0.0, 1.0, 1.0, -inf, tiny, -tiny, huge, -huge, -huge, nan, 1.0, 2.0**24, inf, nan, -1.5, 1.5],
        [-0.0, 0.0, 0.0, nan, inf, 0.0, -tiny, 0.0, 0.0, -huge, huge, nan, -(2.0**24), -(2.0**24), inf, 0, -0.0, -0.0],
    ]
    with np.errstate(over="ignore"):
        hosts = [np.array(row, np.float32).astype(kind) for row in rows]
    hosts[0].view(f"u{kind.itemsize}")[3] |= 5  # a NaN with a payload
    check(group, hosts, algo)


@pytest.mark.gpus(3)
@pytest.mark.parametrize("algo", ALL_ALGOS)
@pytest.mark.parametrize("count", [40, 1001])
def test_in_place_calls_have_the_bits_of_the_reference(open_group, rng, algo, count):
    group = open_group(3)
    hosts = random_inputs(rng, 3, count, "bfloat16")
    xs = place(group, hosts)
    ys = df.allreduce(group, xs, xs, algo=algo)
    assert ys == xs
    assert_bits(xs, reference.allreduce(hosts), algo)


@pytest.mark.gpus(3)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("algo", ALL_ALGOS)
def test_inputs_larger_than_the_workspace_are_chunked(open_group, rng, algo, in_place):
    group = open_group(3, workspace_bytes=LEAST[algo])
    for count in (4096, 6001):
        hosts = random_inputs(rng, 3, count, "bfloat16")
        xs = place(group, hosts)
        ys = df.allreduce(group, xs, xs if in_place else None, algo=algo)
        assert_bits(ys, reference.allreduce(hosts), algo)


@pytest.mark.gpus(3)
@pytest.mark.parametrize("algo", ALL_ALGOS)
def test_grid_does_not_change_the_bits(open_group, rng, algo):
    group = open_group(3, max_blocks=16)
    hosts = random_inputs(rng, 3, 8 * 256 * 9 + 8, "bfloat16")
    for blocks in (1, 3, 16, None):
        check(group, hosts, algo, max_num_blocks=blocks)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("algo", ["auto", *ALL_ALGOS])
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5, 2)])
def test_a_call_without_elements_launches_nothing(open_group, algo, shape):
    group = open_group(2)
    xs = [rank.empty(shape, "bfloat16") for rank in group]
    prepared = df.allreduce.prepare(group, xs, algo=algo)
    assert prepared.traffic == (0, 0)
    ys = prepared.launch()
    assert [y.shape for y in ys] == [shape, shape]
    assert [y.dtype.name for y in ys] == ["bfloat16"] * 2
    assert df.allreduce(group, xs, xs, algo=algo) == xs


@pytest.mark.gpus(2)
def test_results_have_the_shape_of_the_inputs(open_group, rng):
    group = open_group(2)
    for shape in ((), (1, 1, 1), (3, 5), (2, 3, 4)):
        hosts = random_inputs(rng, 2, shape, "float32")
        ys = df.allreduce(group, place(group, hosts))
        assert_bits(ys, reference.allreduce(hosts))


def test_one_local_rank_takes_and_returns_bare_arrays(open_group, rng):
    group = open_group(1)
    (host,) = random_inputs(rng, 1, 50, "float16")
    x = group.ranks[0].array(host)
    y = df.allreduce(group, x)
    assert isinstance(y, df.Array)
    assert_bits([y], reference.allreduce([host]))
    assert isinstance(df.allreduce(group, [x]), list)
    out = group.ranks[0].empty(50, "float16")
    assert df.allreduce(group, x, out) is out


@pytest.mark.gpus(4)
def test_mixed_sizes_and_algorithms_need_no_synchronisation(open_group, rng, driver):
    group = open_group(4)
    sizes = (8, 4099, 64, 1, 8 * 256 * 5, 100, 12000)
    hosts = {size: random_inputs(rng, 4, size, "bfloat16") for size in sizes}
    calls = []
    for size in sizes:
        xs = place(group, hosts[size])
        for algo in ALL_ALGOS:
            ys = garbage(group, size, "bfloat16")
            calls.append((size, ys, df.allreduce.prepare(group, xs, ys, algo=algo)))
    for repeat in range(1000 // len(calls) if driver == "cuda" else 3):
        for i in range(len(calls)):
            calls[(i * 9 + repeat) % len(calls)][2].launch()
    group.synchronize()
    for size, ys, call in calls:
        assert_bits(ys, reference.allreduce(hosts[size]), f"{call.algo} {size}")


@pytest.mark.gpus(4)
def test_auto_takes_the_tuned_algorithm(open_group):
    group = open_group(4)
    for count, algo in ((1 << 10, "push_one_shot"), (64 << 10, "push_one_shot"), (128 << 10, "push_two_shot")):
        xs = [rank.empty(count, "bfloat16") for rank in group]
        ys = [rank.empty(count, "bfloat16") for rank in group]
        assert df.allreduce.prepare(group, xs, ys).algo == algo


@pytest.mark.gpus(3)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_shapes_and_algorithms_have_the_bits_of_the_reference(open_group, data):
    group = open_group(3)
    shape = data.draw(st.lists(st.integers(0, 12), max_size=3).map(tuple) | st.integers(1, 5000).map(lambda k: (k,)))
    algo = data.draw(st.sampled_from(["auto", *ALL_ALGOS]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    blocks = data.draw(st.none() | st.integers(1, 4))
    check(group, random_inputs(rng, 3, shape, "bfloat16"), algo, max_num_blocks=blocks)
