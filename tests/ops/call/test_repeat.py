# SPDX-License-Identifier: Apache-2.0
"""Plain calls that differ from an earlier call only in the addresses of their arrays. Such a call writes its addresses
to the launches of the earlier call, and otherwise behaves like it."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import drvfuse as df
from drvfuse import coat, config
from drvfuse.errors import ArgumentError, CaptureError, ClosedError
from drvfuse.ops.call import faults
from drvfuse.ops.call.repeat import Repeats
from drvfuse.runtime import calls

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
N, K, NORMED = 24, 64, 16


@pytest.fixture
def device(driver: str) -> Iterator[df.Device]:
    if driver == "cuda":
        found = df.device(0, driver="cuda")
        found.part(Repeats).clear()
        yield found
        return
    with df.emu.Machine(devices=1, sm_count=4) as machine:
        yield df.device(0, driver=machine)
        assert not machine.reports


@pytest.fixture
def group(driver: str) -> Iterator[df.Group]:
    if driver == "cuda":
        with df.Group.local(2, driver="cuda", max_blocks=2) as found:
            yield found
        return
    with df.emu.Machine(devices=2, sm_count=4) as machine, df.Group.local(2, driver=machine, max_blocks=2) as found:
        yield found
        assert not machine.reports


def filled(where: Any, value: float, shape: Any = (3, 64), dtype: Any = BF16) -> df.Array:
    return where.array(np.full(shape, value, dtype))


def each(group: df.Group, *values: float, shape: Any = (3, 64), dtype: Any = BF16) -> list[df.Array]:
    """An array per rank, filled with the rank's value. Ranks beyond the last value get the last value."""
    return [filled(rank, values[min(i, len(values) - 1)], shape, dtype) for i, rank in enumerate(group)]


def repeats(owner: Any) -> list[Any]:
    """The calls that a group or device keeps for repetition."""
    return [repeat for idle in owner.part(Repeats)._plans.values() for repeat in idle]


def launched(prepared: Any) -> Any:
    """The last launch's parameters, in the structure type of `prepared`, which must be a call of the same op."""
    (*_, (_, (_, _, packed), _)) = (entry for entry in calls.ring if entry[0] == "cuLaunchKernelEx")
    return type(prepared._ready[0].parameters).from_buffer_copy(packed)


def first(arrays: Any) -> Any:
    return np.unique(arrays.numpy().astype(np.float32)).tolist()


def _allreduce(group: df.Group, **options: Any) -> tuple[Any, Any, Callable[[], Any]]:
    def arrays() -> Any:
        return (group, each(group, 1), each(group, 0)), options

    return df.allreduce, group, arrays


def _in_place(group: df.Group) -> tuple[Any, Any, Callable[[], Any]]:
    def arrays() -> Any:
        xs = each(group, 1)
        return (group, xs, xs), {}

    return df.allreduce, group, arrays


def _fused(group: df.Group, residual: bool) -> tuple[Any, Any, Callable[[], Any]]:
    def arrays() -> Any:
        options = {
            "epsilon": 1e-6,
            "outputs": each(group, 0, dtype=E4M3),
            "scales": each(group, 0, shape=3, dtype="f4"),
        }
        if residual:
            options |= {"residuals": each(group, 1), "residual_outputs": each(group, 0)}
        return (group, each(group, 1), each(group, 1, shape=64)), options

    return df.allreduce_rmsnorm_fp8, group, arrays


COLLECTIVES = {
    "allreduce": _allreduce,
    "two stages": lambda group: _allreduce(group, algo="two_stage"),
    "push": lambda group: _allreduce(group, algo="push_one_shot"),
    "push in two": lambda group: _allreduce(group, algo="push_two_shot"),
    "in place": _in_place,
    "fused": lambda group: _fused(group, False),
    "residual": lambda group: _fused(group, True),
}


def _gemv(device: df.Device, **more: Any) -> Any:
    act, weight, gamma = filled(device, 1, K), filled(device, 1, (N, K)), filled(device, 1, NORMED)
    outputs = {"normed_output": filled(device, 0, NORMED), "unnormed_output": filled(device, 0, N - NORMED)}
    return df.gemv_partial_norm, (act, weight, gamma), {"n_normed": NORMED, "epsilon": 1e-6, **outputs, **more}


def _gemv_counter(device: df.Device) -> Any:
    return _gemv(device, finish_counter=device.zeros(1, "uint32"))


def _gemv_scales(device: df.Device) -> Any:
    op, (act, _, gamma), options = _gemv(device, weight_scales=filled(device, 2, N, "f4"))
    return op, (act, filled(device, 1, (N, K), E4M3), gamma), options


def _quantised(device: df.Device) -> tuple[df.Array, df.Array]:
    return filled(device, 1, (16, K), E4M3), filled(device, 1, (16, K // 16))


def _forward(device: df.Device) -> Any:
    shapes = ((16, K), E4M3), ((), BF16), ((K, 16), E4M3), (16, "f4")
    outputs = tuple(filled(device, 0, *shape) for shape in shapes)
    return coat.fp8_rmsnorm_forward, (*_quantised(device), filled(device, 1, K), 16, 1e-6), {"outputs": outputs}


def _backward(device: df.Device) -> Any:
    g, w, v = [filled(device, 1, (16, K)) for _ in range(2)], filled(device, 1, K), filled(device, 1, 16, "f4")
    outputs = filled(device, 0, (16, K)), filled(device, 0, K)
    return coat.fp8_rmsnorm_backward, (*_quantised(device), g, w, v, 16, 8), {"outputs": outputs}


def _division(device: df.Device) -> Any:
    outputs = filled(device, 0, (16, K), E4M3), filled(device, 0, ()), filled(device, 0, (K, 16), E4M3)
    return coat.fp8_division_transpose, (filled(device, 1, (16, K)), 16, "E4M3"), {"outputs": outputs}


def _layernorm(device: df.Device) -> Any:
    op, (x, s_x, w, *rest), _ = _forward(device)
    return coat.fp8_layernorm_param_forward, (x, s_x, w, filled(device, 1, K), *rest), {}


def _add(device: df.Device) -> Any:
    xs = [filled(device, 1, (16, K)) for _ in range(2)]
    return coat.fp8_add_rmsnorm_pg2pg_forward, (*xs, "E4M3", filled(device, 1, K), 16, 1e-6), {}


SINGLE = [_gemv, _gemv_counter, _gemv_scales, _forward, _backward, _division, _layernorm, _add]


def _packed(launches: Any) -> list[bytes]:
    return [bytes(launch._arguments.packed) for of_rank in launches for launch in of_rank]


def _arrays(value: Any) -> list[df.Array]:
    if isinstance(value, (list, tuple)):
        return [array for part in value for array in _arrays(part)]
    return [value] if isinstance(value, df.Array) else []


def _check_repeats(owner: Any, op: Any, sets: list[tuple[Any, Any]]) -> None:
    for position, (args, options) in enumerate(sets):
        result = op(*args, **options)
        (repeat,) = repeats(owner)
        prepared = op.prepare(*args, **options)
        if "outputs" in options or "normed_output" in options:
            assert _packed(repeat._sequence.launches) == _packed(prepared.launches), position
            assert list(map(id, _arrays(result))) == list(map(id, _arrays(prepared._result)))
        assert result is not prepared._result
        again = prepared.launch()
        owner.synchronize()
        for one, other in zip(_arrays(result), _arrays(again), strict=True):
            assert one.numpy().tobytes() == other.numpy().tobytes()


@pytest.mark.gpus(2)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_repeated_collective_launches_what_a_prepared_one_does(group, name):
    op, owner, arrays = COLLECTIVES[name](group)
    _check_repeats(owner, op, [arrays() for _ in range(3)])


@pytest.mark.parametrize("make", SINGLE)
def test_a_repeated_call_on_a_device_launches_what_a_prepared_one_does(device, make):
    sets = [make(device) for _ in range(3)]
    _check_repeats(device, sets[0][0], [given for _, *given in sets])


@pytest.mark.gpus(2)
def test_repeated_calls_compute_on_their_own_arrays(group):
    for value in (1, 2, 3):
        allocated = df.allreduce(group, each(group, value, 10))
        given = df.allreduce(group, each(group, value, 20), each(group, 0))
        assert isinstance(allocated, list) and isinstance(given, list)
        assert [first(array) for array in (*allocated, *given)] == [[value + 10]] * 2 + [[value + 20]] * 2
    assert len(repeats(group)) == 2
    one = df.allreduce_rmsnorm_fp8(group, each(group, 1), each(group, 1, shape=64), epsilon=0.0)
    two = df.allreduce_rmsnorm_fp8(group, each(group, 1), each(group, 2, shape=64), epsilon=0.0)
    assert type(one) is type(two) and two.residual is None and len(repeats(group)) == 3
    assert one.scales[0].numpy() * 2 == pytest.approx(two.scales[0].numpy())


@pytest.mark.gpus(2)
def test_arrays_that_overlap_are_refused_after_a_repeat(group, refused, counted_calls):
    whole, ys = each(group, 1, shape=(4, 64)), each(group, 0)
    xs = [array[:3] for array in whole]
    for _ in range(2):
        df.allreduce(group, xs, ys)
    overlapping = [ys[0], whole[1][1:]]
    text = "overlapping inputs[1]"
    made = counted_calls(
        group.driver, lambda: refused(lambda: df.allreduce(group, xs, overlapping), "outputs[1]", text)
    )
    assert made == []
    df.allreduce(group, xs, xs)
    df.allreduce(group, xs, [array[:3] for array in whole])  # the same memory, given as another array
    assert [first(array[:3]) for array in whole] == [[4.0]] * 2


@pytest.mark.gpus(2)
def test_repeats_on_parts_of_one_array_are_allowed_while_the_parts_do_not_overlap(group, refused):
    whole = each(group, 1, shape=(8, 64))
    xs = [array[:3] for array in whole]
    for start in (4, 5):
        df.allreduce(group, xs, [array[start : start + 3] for array in whole])
    assert len(repeats(group)) == 1
    overlapping = [array[2:5] for array in whole]
    refused(lambda: df.allreduce(group, xs, overlapping), "outputs[0]", "overlapping inputs[0]")


@pytest.mark.gpus(2)
def test_in_place_and_out_of_place_calls_have_different_plans(group):
    for _ in range(2):
        xs, ys = each(group, 1, 2), each(group, 0)
        df.allreduce(group, xs, ys)
        assert [first(array) for array in (*xs, *ys)] == [[1], [2], [3], [3]]
        assert df.allreduce(group, outputs=ys, inputs=ys) == ys
        assert [first(array) for array in ys] == [[6], [6]]


@pytest.mark.gpus(2)
def test_other_alignment_shape_dtype_or_device_is_refused_after_a_repeat(group, refused):
    xs, ys = each(group, 1), each(group, 0)
    for _ in range(2):
        df.allreduce(group, xs, ys)
    shifted = [array[1:].reshape((3, 64)) for array in each(group, 1, shape=193)]
    refused(lambda: df.allreduce(group, shifted, ys), "inputs[0]", "aligned to 16 bytes")
    refused(lambda: df.allreduce(group, xs, [array.reshape(192) for array in ys]), "outputs[0]", "of shape (192,)")
    refused(lambda: df.allreduce(group, xs, each(group, 0, dtype="f4")), "outputs[0]", "of dtype float32")
    refused(lambda: df.allreduce(group, xs, ys[::-1]), "outputs[0]", "on device 1")
    refused(lambda: df.allreduce(group, xs, ys[:1]), "outputs", "1 array;")
    refused(lambda: df.allreduce(group, xs, ys, algo="three"), "algo", "'three'")
    refused(lambda: df.allreduce(group, xs, ys, max_num_blocks=True), "max_num_blocks", "True")


def test_another_alignment_gets_another_plan(device):
    whole, weight, gamma = filled(device, 1, K + 1), filled(device, 1, (N, K)), filled(device, 1, NORMED)
    for act in (whole[:K], whole[1:], whole[:K], whole[1:]):
        _, unnormed = df.gemv_partial_norm(act, weight, gamma, n_normed=NORMED, epsilon=0.0)
        assert first(unnormed) == [K]
    assert len(repeats(device)) == 2


def test_scalars_of_repeated_calls_are_compared_by_type_and_every_bit(device, refused):
    op, args, options = _gemv(device)
    signs = []
    for epsilon in (0.0, -0.0, 0.0, -0.0):
        op(*args, **options | {"epsilon": epsilon})
        signs.append(math.copysign(1, launched(op.prepare(*args, **options)).epsilon))
    assert signs == [1, -1, 1, -1]
    op(*args, **options | {"epsilon": 1})
    op(*args, **options | {"epsilon": 1})
    refused(lambda: op(*args, **options | {"epsilon": True}), "epsilon", "True")
    for _ in range(2):
        refused(lambda: op(*args, **options | {"epsilon": math.nan}), "epsilon", "nan")


@pytest.mark.gpus(2)
def test_a_closed_buffer_or_group_is_refused_after_a_repeat(group):
    xs = each(group, 1)
    with group.symmetric(3 * 64 * 2) as memory:
        ys = [
            df.view(pointer, (3, 64), "bfloat16", rank.device, owner=memory)
            for pointer, rank in zip(memory.ptrs, group, strict=True)
        ]
        for _ in range(2):
            df.allreduce(group, xs, ys)
        group.synchronize()
    with pytest.raises(ClosedError):
        df.allreduce(group, xs, ys)
    with df.Group.local([rank.device for rank in group], max_blocks=1) as other:
        for _ in range(2):
            df.allreduce(other, xs)
    with pytest.raises(ClosedError, match="the group is closed"):
        df.allreduce(other, xs)


@pytest.mark.gpus(2)
def test_a_repeat_that_allocates_is_refused_in_a_capture_and_one_that_does_not_is_captured(group):
    xs, ys = each(group, 1, 2), each(group, 0)
    df.allreduce(group, xs)
    df.allreduce(group, xs, ys)
    group.synchronize()
    with df.Graph.capture([rank.stream for rank in group]) as graph:
        with pytest.raises(CaptureError, match="outputs=None allocates"):
            df.allreduce(group, xs)
        kept = weakref.ref(xs[0])
        df.allreduce(group, xs, ys)
    xs[0].copy_from(np.full((3, 64), 5, BF16))
    del xs
    assert kept() is not None
    graph.launch(group[0].stream)
    group.synchronize()
    assert [first(array) for array in ys] == [[7], [7]]


@pytest.mark.gpus(2)
def test_a_repeat_runs_on_the_streams_given_to_it(group, refused):
    own = [df.Stream(rank.device) for rank in group]
    for streams in (own, own, None, own, [stream.handle for stream in own], "current", "current"):
        xs = each(group, 1, 2)
        ys = df.allreduce(group, xs, streams=streams)
        used = [None, None] if streams in (None, "current") else own
        for rank, y, stream in zip(group, ys, used, strict=True):
            assert y.stream.handle == (stream or rank.stream).handle
        assert [first(array) for array in ys] == [[3], [3]]
    refused(lambda: df.allreduce(group, each(group, 1), streams=own[::-1]), "streams[0]", "a stream of")
    refused(lambda: df.allreduce(group, each(group, 1), streams=own[:1]), "streams", "1 stream;")


def test_a_repeat_on_another_stream_uses_the_workspace_of_that_stream(device):
    other, states = df.Stream(device), []
    for stream in (None, other, other, None):
        op, args, options = _gemv(device)
        op(*args, **options, stream=stream)
        prepared = op.prepare(*args, **options, stream=stream)
        states.append(launched(prepared).scratch.state)
        assert states[-1] == prepared._turns.space.ptr
    assert states[0] == states[3] != states[1] == states[2]
    device.synchronize()


@pytest.mark.gpus(2)
def test_a_repeat_uses_the_settings_and_the_planted_fault_of_its_own_call(group):
    xs, ys = each(group, 1), each(group, 0)
    for seconds in (1, 2, 1, 2):
        with config.override(spin_timeout=seconds):
            df.allreduce(group, xs, ys)
            assert launched(df.allreduce.prepare(group, xs, ys)).call.timeout_ns == seconds * 10**9
    assert len(repeats(group)) == 2
    df.allreduce(group, xs, ys)
    assert len(repeats(group)) == 3
    with faults.in_kernels("of this test"):
        df.allreduce(group, xs, ys)
    assert len(repeats(group)) == 4


@pytest.mark.gpus(2)
def test_repeats_keep_neither_arrays_nor_groups_alive(group):
    devices = [rank.device for rank in group]
    other = df.Group.local(devices, max_blocks=1)
    arrays = [*each(other, 1), *each(other, 0), *(gemv := _gemv(devices[0]))[1]]
    references = [weakref.ref(array) for array in arrays] + [weakref.ref(other)]
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            df.allreduce(other, arrays[:2], arrays[2:4])
            gemv[0](*gemv[1], **gemv[2])
        assert repeats(other) and repeats(devices[0])
        other.synchronize()
        del arrays, gemv, other
        assert [reference() for reference in references] == [None] * len(references)
    finally:
        gc.enable()


def test_a_workspace_of_the_caller_is_used_by_every_call(device):
    op, args, options = _forward(device)
    spaces = [device.zeros(coat.fp8_workspace_bytes(K), "uint8") for _ in range(2)]
    for space in (*spaces, *spaces):
        op(*args, **options, workspace=space)
    with pytest.raises(ArgumentError, match="workspace"):
        op(*args, **options, workspace=spaces[0][:16])
    assert repeats(device) == []
