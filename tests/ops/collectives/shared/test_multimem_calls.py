# SPDX-License-Identifier: Apache-2.0
"""Calls with `use_multimem=True`: what is refused, first calls in a capture, time-outs, counted bytes."""

from __future__ import annotations

import numpy as np
import pytest
import scenarios
from collective_support import assert_bits, garbage, place
from multimem_support import Arrays, exact_inputs

import drvfuse as df
from drvfuse import config, reference
from drvfuse.errors import ArgumentError, BarrierTimeout, CaptureError, ClosedError, Unsupported

pytestmark = pytest.mark.emulated

OPS = ("allreduce", "allreduce_rmsnorm_fp8")


@pytest.fixture
def machine():
    with df.emu.Machine(devices=4) as made:
        yield made


@pytest.fixture
def group(machine):
    with df.Group.local(3, driver=machine, max_blocks=4, workspace_bytes=1 << 16) as made:
        yield made


def call(op, group, xs, gammas=None, **options):
    options = {"use_multimem": True, **options}
    if op == "allreduce":
        return df.allreduce(group, xs, **options)
    gammas = gammas or [rank.zeros(xs[0].shape[-1], "bfloat16") for rank in group]
    return df.allreduce_rmsnorm_fp8(group, xs, gammas, epsilon=1e-6, **options)


@pytest.fixture
def xs(group):
    return [rank.zeros((4, 64), "bfloat16") for rank in group]


def nothing_was_made(group) -> bool:
    return not group._memory.staged


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("algo", ["naive", "push_one_shot", "push_two_shot"])
def test_algorithms_without_multimem_are_refused(group, xs, refused, op, algo):
    refused(lambda: call(op, group, xs, algo=algo), "algo", "with use_multimem=True")
    refused(lambda: call(op, group, xs, algo="best"), "algo")
    assert nothing_was_made(group)


@pytest.mark.parametrize("op", OPS)
def test_a_group_of_one_gpu_is_refused(machine, op):
    with df.Group.local(1, driver=machine, workspace_bytes=1 << 16, max_blocks=1) as group:
        with pytest.raises(Unsupported, match="two devices"):
            call(op, group, [group[0].zeros((4, 64), "bfloat16")])
        assert nothing_was_made(group)


@pytest.mark.parametrize("value", ["0", "False", None, 1, np.bool_(True)], ids=repr)
@pytest.mark.parametrize("op", OPS)
def test_use_multimem_must_be_a_bool(group, refused, op, value):
    """The string "no" would be true as a condition."""
    xs = [rank.zeros((4, 64), "bfloat16") for rank in group]
    refused(lambda: call(op, group, xs, use_multimem=value), "use_multimem", "True or False")
    refused(lambda: group.symmetric(64, multicast=value), "multicast", "True or False")
    assert nothing_was_made(group)


@pytest.mark.parametrize("op", OPS)
def test_devices_without_multicast_are_refused(op):
    with (
        df.emu.Machine(devices=2, arch="sm_80") as machine,
        df.Group.local(2, driver=machine, workspace_bytes=1 << 16, max_blocks=1) as group,
    ):
        with pytest.raises(Unsupported, match="multicast"):
            call(op, group, [rank.zeros((4, 64), "bfloat16") for rank in group])
        assert nothing_was_made(group)


@pytest.mark.parametrize("op", OPS)
def test_unaligned_and_mistyped_inputs_are_refused(group, refused, op):
    with group.symmetric(1 << 12, multicast=True) as buffer:
        wholes = buffer.arrays((1024,), "bfloat16")
        unaligned = [whole[1:257].reshape((4, 64)) for whole in wholes]
        refused(lambda: call(op, group, unaligned), "inputs[0]", "aligned to 16 bytes")
        integers = buffer.arrays((4, 64), "int32")
        refused(lambda: call(op, group, integers), "dtype of inputs[0]")
    assert nothing_was_made(group)


@pytest.mark.parametrize("op", OPS)
def test_inputs_in_a_closed_buffer_and_a_closed_group_are_refused(machine, op):
    group = df.Group.local(2, driver=machine, workspace_bytes=1 << 16, max_blocks=1)
    buffer = group.symmetric(1 << 12, multicast=True)
    inputs = buffer.arrays((4, 64), "bfloat16")
    buffer.close()
    with pytest.raises(ClosedError):
        call(op, group, inputs)
    assert nothing_was_made(group)
    xs = [rank.zeros((4, 64), "bfloat16") for rank in group]
    group.close()
    with pytest.raises(ClosedError):
        call(op, group, xs)


@pytest.mark.parametrize("op", OPS)
def test_a_staging_that_holds_no_row_is_an_error_before_it_is_made(machine, op):
    with df.Group.local(4, driver=machine, workspace_bytes=4096, max_blocks=1) as group:
        xs = [rank.zeros((2, 2048), "bfloat16") for rank in group]
        if op == "allreduce":
            call(op, group, xs)
        else:
            with pytest.raises(ArgumentError, match="workspace_bytes"):
                call(op, group, xs)
            assert nothing_was_made(group)


def test_multicast_memory_of_another_group_is_staged(machine, rng):
    hosts = exact_inputs(rng, 2, 512, "bfloat16")
    with (
        df.Group.local(2, driver=machine, workspace_bytes=1 << 16, max_blocks=2) as first,
        df.Group.local(2, driver=machine, workspace_bytes=1 << 16, max_blocks=2) as second,
    ):
        arrays = Arrays(first, hosts, "to_outputs")
        df.allreduce(second, arrays.inputs, arrays.outputs, use_multimem=True)
        assert_bits(arrays.outputs, reference.allreduce(hosts))
        assert nothing_was_made(first) and not nothing_was_made(second)
        second.synchronize()
        arrays.close()


@pytest.mark.parametrize("op", OPS)
def test_the_staging_is_not_made_in_a_capture(group, rng, op):
    hosts = exact_inputs(rng, 3, (4, 64), "bfloat16")
    xs, ys = place(group, hosts), garbage(group, (4, 64), "bfloat16")
    options = {"outputs": ys, "gammas": [rank.zeros(64, "bfloat16") for rank in group]}
    if op != "allreduce":
        options["quantisation"] = df.Quantisation.none()
    group.synchronize()
    with df.Graph.capture([rank.stream for rank in group]):
        with pytest.raises(CaptureError, match="multicast staging"):
            call(op, group, xs, **options)
        assert nothing_was_made(group)
    call(op, group, xs, **options)
    group.synchronize()
    with df.Graph.capture([rank.stream for rank in group]) as graph:
        call(op, group, xs, **options)
    graph.launch(group[0].stream)
    group.synchronize()
    if op == "allreduce":
        assert_bits(ys, reference.allreduce(hosts))
    graph.close()


def test_only_calls_with_use_multimem_use_multicast(group, xs):
    for algo in ("auto", "one_stage", "two_stage", "push_one_shot", "push_two_shot", "naive"):
        df.allreduce(group, xs, algo=algo)
        call("allreduce_rmsnorm_fp8", group, xs, algo=algo, use_multimem=False)
    assert nothing_was_made(group)


def test_inputs_and_outputs_in_multicast_memory_need_no_staging(group, rng):
    hosts = exact_inputs(rng, 3, 512, "bfloat16")
    arrays = Arrays(group, hosts, "to_outputs")
    df.allreduce(group, arrays.inputs, arrays.outputs, use_multimem=True)
    df.allreduce(group, arrays.inputs, algo="one_stage", use_multimem=True)
    assert_bits(arrays.outputs, reference.allreduce(hosts))
    assert nothing_was_made(group)
    group.synchronize()
    arrays.close()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("missing", [0, 2])
def test_a_rank_that_is_never_launched_ends_in_a_timeout_and_the_group_works_again(group, rng, op, missing):
    hosts = exact_inputs(rng, 3, (4, 64), "bfloat16")
    with config.override(spin_timeout=0.05):
        prepare = df.allreduce.prepare if op == "allreduce" else df.allreduce_rmsnorm_fp8.prepare
        more = [] if op == "allreduce" else [[rank.zeros(64, "bfloat16") for rank in group]]
        options = {} if op == "allreduce" else {"epsilon": 1e-6}
        prepared = prepare(group, place(group, hosts), *more, use_multimem=True, **options)
    for rank in range(3):
        if rank != missing:
            prepared.launch(rank=rank)
    with pytest.raises(BarrierTimeout, match=f"{op} multimem_two_stage") as caught:
        group.synchronize()
    assert caught.value.peer == missing and caught.value.phase == "start"
    group.reset()
    for algo in ("one_stage", "two_stage"):
        ys = df.allreduce(group, place(group, hosts), algo=algo, use_multimem=True)
        assert_bits(ys, reference.allreduce(hosts))
    assert_bits(df.allreduce(group, place(group, hosts)), reference.allreduce(hosts))


MULTIMEM = [("allreduce", "multimem_one_stage"), ("allreduce", "multimem_two_stage"), (OPS[1], "multimem_two_stage")]


@pytest.mark.parametrize(("op", "algo"), MULTIMEM)
def test_one_rank_that_gives_up_ends_the_wait_of_all_and_later_calls_write_nothing(op, algo):
    scenarios.one_timeout_ends_all(op, algo)


@pytest.mark.parametrize(("op", "algo"), MULTIMEM)
@pytest.mark.parametrize("level", [df.PDLLevel.OFF, df.PDLLevel.ON, df.PDLLevel.OVERLAP_AT_BEGINNING])
def test_a_dependent_starts_as_early_as_its_level_allows(op, algo, level):
    scenarios.dependent_starts_at_once_if_it_may(op, algo, level)


@pytest.mark.parametrize(("op", "algo"), MULTIMEM)
def test_a_dependent_of_level_on_starts_before_the_end(op, algo):
    scenarios.dependent_starts_before_the_end(op, algo, df.PDLLevel.ON)


COUNTED = [  # algorithm, where inputs and outputs lie
    ("one_stage", "staged"),
    ("one_stage", "direct"),
    ("two_stage", "staged"),
    ("two_stage", "direct"),
    ("two_stage", "to_outputs"),
]


def counts(machine, group, prepared):
    group.synchronize()
    before = len(machine.launches)
    prepared.launch()
    group.synchronize()
    return [record.counters.total for record in list(machine.launches)[before:]]


@pytest.mark.parametrize(("algo", "where"), COUNTED)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_requested_bytes_of_allreduce_agree_with_the_formulas(machine, rng, n, dtype, algo, where):
    """Inputs have S bytes. In one stage each rank reduces S bytes; in two it reduces S / n and broadcasts S / n."""
    with df.Group.local(n, driver=machine, max_blocks=4, workspace_bytes=1 << 18) as group:
        arrays = Arrays(group, exact_inputs(rng, n, 16 * n * 77, dtype), where)
        prepared = df.allreduce.prepare(group, arrays.inputs, arrays.outputs, algo=algo, use_multimem=True)
        nbytes, found = arrays.inputs[0].nbytes, counts(machine, group, prepared)
        arrays.close()
    share = nbytes if algo == "one_stage" else nbytes // n
    assert [count.reduced for count in found] == [share] * n
    assert [count.broadcast for count in found] == [0 if algo == "one_stage" else share] * n
    assert_traffic(prepared, found)


def assert_traffic(prepared, found, gamma: int = 0) -> None:
    """Check counted bytes against `traffic`, which leaves out two things: barrier words, which take at most 10_000
    bytes locally and as many remotely, and gamma, whose local reads take at most `gamma` bytes.
    """
    local = sum(count.local_read + count.local_written for count in found)
    remote = sum(count.remote_read + count.remote_written for count in found)
    assert prepared.traffic[0] <= local <= prepared.traffic[0] + 10_000 + gamma
    assert prepared.traffic[1] <= remote <= prepared.traffic[1] + 10_000


@pytest.mark.parametrize("where", ["staged", "direct"])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("n", [2, 4])
def test_requested_bytes_of_the_fused_op_agree_with_the_formulas(machine, rng, n, residual, where):
    """Inputs have S bytes. Each rank reduces S / n, and broadcasts its rows of residual_out or of FP8 and scales."""
    rows, columns = 4 * n, 512
    with df.Group.local(n, driver=machine, max_blocks=4, workspace_bytes=1 << 18) as group:
        arrays = Arrays(group, exact_inputs(rng, n, (rows, columns), "bfloat16"), where)
        prepared = df.allreduce_rmsnorm_fp8.prepare(
            group,
            arrays.inputs,
            [rank.zeros(columns, "bfloat16") for rank in group],
            epsilon=1.0,
            residuals=[rank.zeros((rows, columns), "bfloat16") for rank in group] if residual else None,
            use_multimem=True,
        )
        found = counts(machine, group, prepared)
        arrays.close()
    share = rows // n * columns * 2
    sent = share if residual else rows // n * (columns + 4)
    assert [count.reduced for count in found] == [share] * n
    assert [count.broadcast for count in found] == [sent] * n
    assert_traffic(prepared, found, gamma=n * rows * columns * 2)


def test_a_tail_is_reduced_and_broadcast_by_words(machine, rng):
    with df.Group.local(2, driver=machine, max_blocks=1, workspace_bytes=1 << 16) as group:
        hosts = exact_inputs(rng, 2, 1002, "bfloat16")
        arrays = Arrays(group, hosts, "to_outputs")
        prepared = df.allreduce.prepare(group, arrays.inputs, arrays.outputs, use_multimem=True)
        found = counts(machine, group, prepared)
        assert sum(count.reduced for count in found) == sum(count.broadcast for count in found) == 2004
        assert_bits(arrays.outputs, reference.allreduce(hosts))
        arrays.close()


def test_nothing_outside_the_outputs_is_written(group, rng):
    """The outputs end within a pack of multicast memory. The rest of that pack must stay unchanged."""
    for count in (1002, 1003):
        hosts = exact_inputs(rng, 3, count, "bfloat16")
        arrays = Arrays(group, hosts, "to_outputs")
        buffer = arrays._buffers[1]
        before = [whole.numpy().copy() for whole in buffer.arrays((4096 + 2 * count + 64,), "uint8")]
        df.allreduce(group, arrays.inputs, arrays.outputs, use_multimem=True)
        assert_bits(arrays.outputs, reference.allreduce(hosts))
        for whole, old in zip(buffer.arrays((4096 + 2 * count + 64,), "uint8"), before, strict=True):
            new = whole.numpy()
            assert (new[:4096] == old[:4096]).all() and (new[4096 + 2 * count :] == old[4096 + 2 * count :]).all()
        group.synchronize()
        arrays.close()


def test_vetoes_of_multicast_apply_to_the_cuda_driver_only(group, xs):
    with config.override(multicast=False):
        ys = df.allreduce(group, xs, use_multimem=True)
    assert not np.any(ys[0].numpy().astype(np.float32))
