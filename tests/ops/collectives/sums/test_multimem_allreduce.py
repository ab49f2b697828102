# SPDX-License-Identifier: Apache-2.0
"""All-reduce by multicast memory: sums are within their error bound, and algorithm "two_stage" gives all ranks the same
bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from collective_support import assert_bits, every_number_of_ranks, garbage, place, random_inputs, replicate
from multimem_support import (
    PLACES,
    Arrays,
    assert_equal_on_ranks,
    assert_room,
    assert_within_bounds,
    cancelling_inputs,
    exact_inputs,
)

import drvfuse as df
from drvfuse import dtypes, reference

pytestmark = pytest.mark.emulated

ALGOS = ("one_stage", "two_stage")
FORMS = [(algo, where) for algo in ALGOS for where in PLACES if (algo, where) != ("one_stage", "to_outputs")]
forms = pytest.mark.parametrize(("algo", "where"), FORMS)


@pytest.fixture(scope="module")
def open_group() -> Iterator[Callable[..., df.Group]]:
    """`open_group(n, **options)`: a group of n emulated devices, shared by all tests that pass equal arguments."""
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


def run(group, hosts, algo, where, **options) -> list[df.Array]:
    """Run the call, check that it leaves its inputs unchanged, and return its outputs."""
    arrays = Arrays(group, hosts, where)
    outputs = df.allreduce(group, arrays.inputs, arrays.outputs, algo=algo, use_multimem=True, **options)
    assert outputs == arrays.outputs
    for x, host in zip(arrays.inputs, hosts, strict=True):
        assert_bits([x], host, "input of")
    return outputs


def check_exact(group, hosts, algo, where, **options) -> None:
    assert_bits(run(group, hosts, algo, where, **options), reference.allreduce(hosts, multimem=True), f"{algo} {where}")


@pytest.mark.parametrize(("n", "form"), every_number_of_ranks(FORMS, least=2))
def test_sums_that_are_exact_in_any_order_have_the_bits_of_the_reference(open_group, rng, n, form):
    group, (algo, where) = open_group(n), form
    for count in (8, 8 * n, 8 * (n * 5 + n - 1), 8 * 256 * 5):
        check_exact(group, exact_inputs(rng, n, count, "bfloat16"), algo, where)


RANKS_AND_DTYPES = [(3, "float16"), (3, "bfloat16"), (8, "float32")]
"""Few combinations of ranks and dtype, so that tests share kernels."""
KINDS = pytest.mark.parametrize(("n", "dtype"), RANKS_AND_DTYPES)


@forms
@KINDS
def test_ragged_counts_have_the_bits_of_the_reference(open_group, rng, n, dtype, algo, where):
    """Some counts of 16-bit types are no whole words, and the last pack of a range may have one element."""
    group = open_group(n)
    for count in (1, 2, 3, 7, 8 * n + 1, 8 * n + 6, 1029):
        check_exact(group, exact_inputs(rng, n, count, dtype), algo, where)


@forms
@KINDS
def test_random_sums_are_within_the_bound_under_cancellation(open_group, rng, n, dtype, algo, where):
    group = open_group(n)
    for count in (4096, 1003):
        hosts = cancelling_inputs(rng, n, count, dtype)
        outputs = run(group, hosts, algo, where)
        assert_within_bounds(outputs, hosts)
        if algo == "two_stage":
            assert_equal_on_ranks(outputs)


def test_the_bound_excludes_a_lost_rank_and_includes_other_orders(rng):
    hosts = cancelling_inputs(rng, 4, 5000, "float32")
    low, high = reference.sum_bounds(hosts)
    backwards = reference.allreduce(hosts[::-1])
    assert ((low <= backwards) & (backwards <= high)).all()
    assert (backwards != reference.allreduce(hosts)).any()
    lost = reference.allreduce(hosts[:3])
    assert ((low <= lost) & (lost <= high)).mean() < 0.01  # exceptions: elements that are almost 0 on rank 3


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_seed_decides_the_order_of_the_sum_and_two_stages_give_all_ranks_the_same(rng, dtype):
    """A sum of 8 float32 values has other bits if the values are added in another order. With one stage the bits of
    ranks may differ, with two stages they are equal.
    """
    hosts = cancelling_inputs(rng, 8, 512, dtype)
    seen = set()
    for seed in range(3):
        with (
            df.emu.Machine(devices=8, seed=seed) as machine,
            df.Group.local(8, driver=machine, max_blocks=2, workspace_bytes=1 << 16) as group,
        ):
            for algo in ALGOS:
                outputs = run(group, hosts, algo, "staged")
                assert_within_bounds(outputs, hosts)
                seen |= {(algo, output.numpy().tobytes()) for output in outputs}
                if algo == "two_stage":
                    assert_equal_on_ranks(outputs)
    if dtype == "float32":
        assert len({result for algo, result in seen if algo == "two_stage"}) > 1


@forms
def test_auto_takes_two_stages_and_prepared_calls_name_their_algorithm(open_group, rng, algo, where):
    group, hosts = open_group(3), exact_inputs(rng, 3, 256, "bfloat16")
    arrays = Arrays(group, hosts, where)
    options = {"use_multimem": True}
    assert df.allreduce.prepare(group, arrays.inputs, algo=algo, **options).algo == f"multimem_{algo}"
    assert df.allreduce.prepare(group, arrays.inputs, **options).algo == "multimem_two_stage"


@pytest.mark.parametrize("where", ["staged", "direct"])
@pytest.mark.parametrize("algo", ALGOS)
def test_in_place_calls_have_the_bits_of_the_reference(open_group, rng, algo, where):
    group = open_group(3)
    for count in (256 * 8, 1001, 1002):
        hosts = exact_inputs(rng, 3, count, "bfloat16")
        arrays = Arrays(group, hosts, where)
        df.allreduce(group, arrays.inputs, arrays.inputs, algo=algo, use_multimem=True)
        assert_bits(arrays.inputs, reference.allreduce(hosts))


def test_some_ranks_may_use_their_inputs_as_outputs(open_group, rng):
    group, hosts = open_group(3), exact_inputs(rng, 3, 5000, "bfloat16")
    for algo in ALGOS:
        arrays = Arrays(group, hosts, "direct")
        outputs = [arrays.inputs[0], arrays.outputs[1], arrays.inputs[2]]
        df.allreduce(group, arrays.inputs, outputs, algo=algo, use_multimem=True)
        assert_bits(outputs, reference.allreduce(hosts))


@forms
def test_special_values_have_the_bits_of_the_reference(open_group, algo, where):
    """A sum of zeros is +0, a NaN result is the canonical NaN, and sums with infinities do not depend on the order of
    the additions."""
    nan, inf = np.nan, np.inf
    rows = [
        [-0.0, -0.0, 0.0, nan, inf, inf, -nan, 1.5, -1.5, 2.0**-133, 1.0, 1.0],
        [-0.0, 0.0, -0.0, 1.0, 1.0, -inf, nan, -1.5, 1.5, 2.0**-133, 2.0**-9, -1.0],
        [-0.0, 0.0, 0.0, nan, inf, 0.0, 1.0, -0.0, -0.0, -(2.0**-133), 0.0, 2.0**-20],
    ]
    for n, dtype in RANKS_AND_DTYPES:
        every = rows + [[-0.0] * len(rows[0])] * (n - len(rows))
        hosts = [np.array(row, np.float32).astype(dtypes.get(dtype).numpy) for row in every]
        check_exact(open_group(n), hosts, algo, where)


@forms
def test_inputs_larger_than_the_staging_memory_are_processed_in_chunks(open_group, rng, algo, where):
    group = open_group(3, workspace_bytes=4096)
    for count in (3000, 40_000, 12_345):
        check_exact(group, exact_inputs(rng, 3, count, "bfloat16"), algo, where)


@forms
def test_grid_does_not_change_the_bits(open_group, rng, algo, where):
    group = open_group(3, max_blocks=16)
    hosts = exact_inputs(rng, 3, 8 * 256 * 9 + 8, "bfloat16")
    for blocks in (1, 3, 16, None):
        check_exact(group, hosts, algo, where, max_num_blocks=blocks)


@forms
def test_epilogue_gets_the_rounded_sum_of_16_bit_inputs_and_is_rounded_once_more(open_group, rng, algo, where):
    group, shape = open_group(3), (11, 13)
    bias = rng.standard_normal(13).astype(np.float32)
    epilogue = df.Epilogue("x * scale + bias[col]", scale=df.float32(0.37), bias=df.Replicated(replicate(group, bias)))
    for dtype in ("bfloat16", "float32"):
        hosts = exact_inputs(rng, 3, shape, dtype)
        outputs = run(group, hosts, algo, where, epilogue=epilogue)
        after = [lambda x: x * np.float32(0.37) + bias] * 2
        expected, unrounded = (
            reference.allreduce(hosts, epilogue=f, multimem=m) for f, m in zip(after, (1, 0), strict=True)
        )
        assert_bits(outputs, expected)
        assert (reference.bits(expected) != reference.bits(unrounded)).any() == (dtype == "bfloat16")


def test_an_epilogue_that_differs_by_rank_requires_one_stage(open_group, rng, refused):
    group, hosts = open_group(3), exact_inputs(rng, 3, 100, "float32")
    epilogue = df.Epilogue("x + rank")
    xs = place(group, hosts)
    refused(lambda: df.allreduce(group, xs, use_multimem=True, epilogue=epilogue), "algo", "differs by rank")
    ys = df.allreduce(group, xs, use_multimem=True, algo="one_stage", epilogue=epilogue)
    for rank, y in enumerate(ys):
        assert_bits([y], reference.allreduce(hosts, epilogue=lambda x, rank=rank: x + np.float32(rank)))


def test_parameters_change_between_launches_and_stay_equal_by_two_stages(open_group, rng, refused):
    group, hosts = open_group(3), exact_inputs(rng, 3, 100, "float32")
    xs, ys = place(group, hosts), garbage(group, 100, "float32")
    epilogue = df.Epilogue("x + shift", shift=df.float32(1))
    prepared = df.allreduce.prepare(group, xs, ys, use_multimem=True, epilogue=epilogue)
    prepared.set(shift=df.float32(3))
    assert_bits(prepared.launch(), reference.allreduce(hosts, epilogue=lambda x: x + np.float32(3)))
    different = [df.float32(rank) for rank in range(3)]
    refused(lambda: prepared.set(shift=different), "parameters", 'algo is "multimem_two_stage"')


@forms
def test_a_call_without_elements_launches_nothing(open_group, algo, where):
    group = open_group(2)
    xs = [rank.empty((0, 5), "bfloat16") for rank in group]
    prepared = df.allreduce.prepare(group, xs, algo=algo, use_multimem=True)
    assert prepared.traffic == (0, 0) and not any(prepared.launches)
    assert [y.shape for y in prepared.launch()] == [(0, 5)] * 2


def test_calls_with_other_arrays_and_without_multicast_may_alternate(open_group, rng):
    group = open_group(3)
    for number in range(4):
        hosts = exact_inputs(rng, 3, 1000, "bfloat16")
        xs = place(group, hosts)
        ys = df.allreduce(group, xs, use_multimem=True)
        zs = df.allreduce(group, xs, algo=("two_stage", "push_two_shot", "one_stage", "naive")[number])
        assert_bits(ys, reference.allreduce(hosts))
        assert_bits(zs, reference.allreduce(hosts))


def test_slices_at_different_offsets_of_multicast_memory_are_staged(open_group, rng):
    group, hosts = open_group(3), exact_inputs(rng, 3, 512, "bfloat16")
    with group.symmetric(1 << 16, multicast=True) as buffer:
        wholes = buffer.arrays((4096,), "bfloat16")
        xs = [whole[16 * i : 16 * i + 512] for i, whole in enumerate(wholes)]
        for x, host in zip(xs, hosts, strict=True):
            x.copy_from(host)
        apart = df.allreduce.prepare(group, xs, use_multimem=True)
        assert_bits(apart.launch(), reference.allreduce(hosts))
        group.synchronize()


def test_multicast_memory_can_be_used_by_algorithms_without_multicast(open_group, rng):
    group, hosts = open_group(3), random_inputs(rng, 3, 1000, "bfloat16")
    arrays = Arrays(group, hosts, "to_outputs")
    for algo in ("one_stage", "two_stage", "push_one_shot"):
        df.allreduce(group, arrays.inputs, arrays.outputs, algo=algo)
        assert_bits(arrays.outputs, reference.allreduce(hosts))
    group.synchronize()
    arrays.close()


@forms
def test_graphs_replay_on_new_contents(open_group, rng, algo, where):
    group = open_group(3)
    hosts = exact_inputs(rng, 3, 3000, "bfloat16")
    arrays = Arrays(group, hosts, where)
    zs = garbage(group, 3000, "bfloat16")
    run(group, hosts, "two_stage", "staged")  # makes the staging memory
    group.synchronize()
    streams = [rank.stream for rank in group]
    with df.Graph.capture(streams) as graph:
        df.allreduce(group, arrays.inputs, arrays.outputs, algo=algo, use_multimem=True)
        df.allreduce(group, arrays.outputs, zs, algo=algo, use_multimem=True)
    for _ in range(3):
        hosts = exact_inputs(rng, 3, 3000, "bfloat16")
        for x, host in zip(arrays.inputs, hosts, strict=True):
            x.copy_from(host)
        graph.launch(streams[0])
        group.synchronize()
        once = reference.allreduce(hosts)
        assert_bits(arrays.outputs, once)
        assert_bits(zs, reference.allreduce([once] * 3))
    graph.close()


@forms
def test_a_trace_has_room_for_all_phases(open_group, rng, algo, where):
    group, hosts = open_group(3, workspace_bytes=4096), exact_inputs(rng, 3, 20_000, "bfloat16")
    trace = df.Trace(group)
    check_exact(group, hosts, algo, where, trace=trace)
    group.synchronize()
    assert_room(trace)
    assert f"allreduce_multimem_{algo}" in trace.summary()
