# SPDX-License-Identifier: Apache-2.0
"""`gemv_partial_norm`: streams, graphs, PDL, the counter by which the last block is found, traces, schedules and bad
input."""

from __future__ import annotations

import math

import numpy as np
import pytest
from gemv_support import EPS, Case, case, check, expected, numbers, run

import drvfuse as df
from drvfuse import coat
from drvfuse.errors import ArgumentError, CaptureError, DriverUnavailable, GridTimeout, Unsupported
from drvfuse.ops.call import faults, operands
from drvfuse.ops.call.planned import PlanCache
from drvfuse.ops.call.scratch import Scratch, check_device
from drvfuse.plans import gemv as gemv_plan
from drvfuse.reference import bits

M, N, K, NORMED = 2, 60, 520, 41


@pytest.fixture
def values(rng) -> Case:
    return case(rng, M, N, K, NORMED)


@pytest.fixture
def arrays(device, values):
    return tuple(device.array(array) for array in values[:3])


def outputs(device):
    return {
        "normed_output": device.empty((M, NORMED), "bfloat16"),
        "unnormed_output": device.empty((M, N - NORMED), "bfloat16"),
    }


def call(arrays, **rest):
    return df.gemv_partial_norm(*arrays, n_normed=NORMED, epsilon=EPS, **rest)


def test_captured_calls_replay_on_new_contents(device, rng, values, arrays):
    out = outputs(device)
    call(arrays, **out)
    with df.Graph.capture(device.stream) as graph:
        results = call(arrays, **out)
        with pytest.raises(CaptureError, match="unnormed_output"):
            call(arrays, normed_output=out["normed_output"])
    assert results == (out["normed_output"], out["unnormed_output"])
    for again in (values, case(rng, M, N, K, NORMED)):
        for array, host in zip(arrays, again, strict=False):
            array.copy_from(host)
        for _ in range(3):
            graph.launch(device.stream)
        device.synchronize()
        check(results, expected(again))


def test_a_first_call_cannot_be_captured(device, arrays):
    stream = df.Stream(device)
    with df.Graph.capture(stream), pytest.raises(CaptureError, match="before the capture, call the op once") as caught:
        call(arrays, stream=stream, **outputs(device))
    assert "workspace" not in str(caught.value)  # the op takes no `workspace`, so the message does not offer one


def test_consecutive_calls_may_change_their_size(device, rng):
    """A call never mistakes words of an earlier call of another shape for its own words."""
    cases = [
        case(rng, m, n, 264, n_normed) for m, n, n_normed in ((8, 90, 80), (None, 9, 8), (1, 200, 199), (3, 30, 9))
    ]
    found = [(values, run(device, values)) for _ in range(5) for values in cases]
    device.synchronize()
    for values, results in found:
        check(results, expected(values))


def test_calls_on_two_streams_at_once_have_the_bits_of_the_reference(device, values, arrays):
    streams = [df.Stream(device) for _ in range(2)]
    device.synchronize()
    found = [call(arrays, stream=stream) for _ in range(4) for stream in streams]
    device.synchronize()
    for results in found:
        check(results, expected(values))


COPY = """
extern "C" __global__ void late(const unsigned* from, unsigned* to, int words, int* spun) {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    for (int i = 0; i < 2000; ++i) atomicAdd(spun, 1);
    for (int i = threadIdx.x; i < words; i += blockDim.x) to[i] = from[i];
}
"""


@pytest.mark.parametrize(
    ("level", "m"), [(df.PDLLevel.ON, M), (df.PDLLevel.OVERLAP_AT_BEGINNING, M), (df.PDLLevel.ON, 1)]
)
def test_a_dependent_launch_waits_for_a_late_producer_of_act(device, driver, rng, monkeypatch, level, m):
    """The preceding kernel triggers at once and writes act at its end; each call reads its own act."""
    if m == 1:
        monkeypatch.setattr(gemv_plan, "COPIED_ROWS", 1 << 20)  # so that each warp multiplies whole rows
    steps = [case(rng, m, N, K, NORMED) for _ in range(4)]
    steps = [step._replace(weight=steps[0].weight, gamma=steps[0].gamma) for step in steps]
    machines = [None] if driver == "cuda" else [df.emu.Machine(devices=1, sm_count=6, seed=seed) for seed in range(3)]
    for machine in machines:
        where = device if machine is None else df.device(0, driver=machine)
        late = df.compile(COPY, driver=where.driver)["late"]
        act, weight, gamma = (where.array(array) for array in steps[0][:3])
        spun = where.zeros(1, "int32")
        sources = [where.array(step.act) for step in steps]
        where.synchronize()
        found = []
        for source in sources:
            late.prepare(1, 64, source, act, source.nbytes // 4, spun, pdl=True)(where.stream)
            found.append(call((act, weight, gamma), pdl_level=level))
        where.synchronize()
        for step, results in zip(steps, found, strict=True):
            check(results, expected(step))
        if machine is not None:
            assert not machine.reports
            machine.close()


@pytest.mark.emulated
@pytest.mark.parametrize(("delay", "k"), [(False, 4104), (True, 4104), (True, 1000)])
def test_no_race_and_the_same_bits_under_many_schedules(rng, monkeypatch, delay, k):
    """In some schedules the last block begins to poll before the words are written, in others afterwards."""
    if k == 1000:
        monkeypatch.setattr(gemv_plan, "COPIED_ROWS", 1 << 20)  # so that each warp multiplies whole rows
    values = case(rng, 1, 45, k, 31)  # a block has several steps
    levels = (df.PDLLevel.OFF, df.PDLLevel.ON, df.PDLLevel.OVERLAP_AT_BEGINNING)
    calls = [values._replace(act=numbers(rng, (1, k), "bfloat16")) for _ in levels]
    wanted = [expected(one) for one in calls]
    for seed in range(12):
        with df.emu.Machine(devices=1, sm_count=5, seed=seed, race="strict", delay_stores=delay) as machine:
            device = df.device(0, driver=machine)
            found = [run(device, one, pdl_level=level) for one, level in zip(calls, levels, strict=True)]
            for results, right in zip(found, wanted, strict=True):
                check(results, right)
            assert machine.reports == [], f"seed {seed}"


@pytest.mark.emulated
def test_a_call_moves_the_expected_number_of_bytes(rng):
    """The weight is read once. A block reads act at most once for each of its rows of the weight."""
    values = case(rng, None, 60, 1024, 40)
    with df.emu.Machine(devices=1, sm_count=6) as machine:
        check(run(df.device(0, driver=machine), values), expected(values))
        total = list(machine.launches)[-1].counters.total
    weight, act = values.weight.nbytes, values.act.nbytes
    # The other bytes that are read: act, once by each of the 8 teams of a block; gamma; the epoch; and polls of the
    # words by which blocks exchange partial sums.
    assert weight + act <= total.local_read <= weight + 6 * 8 * act + 1000 * 8 * 40
    assert 60 * 2 + 40 * 8 <= total.local_written <= 60 * 2 + 40 * 8 + 64


def test_the_finish_counter_is_zero_after_a_call(device, values, arrays):
    counter = device.zeros(1, "int32")
    for _ in range(3):
        results = call(arrays, finish_counter=counter)
    out = outputs(device)
    with df.Graph.capture(device.stream) as graph:
        call(arrays, finish_counter=counter, **out)
    for _ in range(100):
        graph.launch(device.stream)
    assert counter.numpy()[0] == 0
    check(results, expected(values))
    check(out.values(), expected(values))


@pytest.mark.parametrize(("held", "dtype"), [(1, "uint32"), (5, "int32"), (-3, "int32"), (2**31 - 1, "int32")])
def test_a_finish_counter_that_is_not_zero_is_an_error(device, values, arrays, held, dtype):
    counter = device.array(np.array([held], dtype))
    call(arrays, finish_counter=counter)
    device.synchronize()
    with pytest.raises(GridTimeout, match=f"finish_counter held {held % 2**32}.*counter is zero again") as caught:
        check_device(device)
    assert "workspace" not in str(caught.value)
    assert counter.numpy()[0] == 0
    with pytest.raises(GridTimeout):
        call(arrays, finish_counter=device.array(np.array([held], np.int32)))
        device.synchronize()
        call(arrays)
    check(call(arrays, finish_counter=counter), expected(values))


@pytest.mark.emulated
def test_a_wait_without_an_end_is_reported(rng, values):
    """A block writes words with the number of another launch, so the awaited words never arrive; the report names the
    block.
    """
    with df.emu.Machine(devices=1, sm_count=6) as machine, df.config.override(spin_timeout=0.01):
        device = df.device(0, driver=machine)
        arrays = tuple(device.array(array) for array in values[:3])
        with faults.in_kernels("block-3-of-another-launch"):
            call(arrays)
            device.synchronize()
        with pytest.raises(GridTimeout, match="block 5 of a kernel gave up waiting for block 3 "):
            call(arrays)
        check(call(arrays), expected(values))


@pytest.fixture
def state(device, arrays):
    """`state(word, value)` sets a word in the workspace of the device's own stream. Word 0 is the epoch, 1 the abort
    word, 3 the number of launches that use the workspace.
    """
    call(arrays)

    def set_(word: int, value: int) -> None:
        words = device.part(Scratch).own[device.stream.handle, "gemv"].array
        host = words.numpy()
        host[4 * word : 4 * word + 4] = np.array([value], np.uint32).view(np.uint8)
        words.copy_from(host)

    return set_


def test_launch_numbers_may_wrap_around(device, rng, values, arrays, state):
    more = case(rng, M, 9, K, 7)
    words = device.part(Scratch).own[device.stream.handle, "gemv"].array
    words.copy_from(np.zeros(words.shape, np.uint8))  # an earlier test may have left the same launch number in them
    state(0, 2**32 - 1)
    check(run(device, more), expected(more))  # the words of this shape were never written
    state(0, 2**32 - 3)
    for _ in range(3):
        check(call(arrays), expected(values))
        check(run(device, more), expected(more))
    check_device(device)


def test_two_launches_in_one_workspace_at_once_are_an_error(device, values, arrays, state):
    state(3, 1)
    call(arrays)
    device.synchronize()
    with pytest.raises(GridTimeout, match="two launches used one workspace at the same time"):
        call(arrays)
    check(call(arrays), expected(values))


def test_a_launch_in_an_abandoned_workspace_is_an_error(device, values, arrays, state):
    """The abort word of a time-out is still set, as the host has not zeroed the workspace. The next launch raises an
    error that says so."""
    state(1, 1)
    call(arrays)
    device.synchronize()
    with pytest.raises(GridTimeout, match="not zeroed after a time-out"):
        call(arrays)
    check(call(arrays), expected(values))


def test_traced_calls_have_the_same_bits(device, values, arrays):
    trace = df.Trace(device)
    plain = call(arrays)
    traced = [call(arrays, trace=trace) for _ in range(2)]
    for results in traced:
        for one, other in zip(results, plain, strict=True):
            assert (bits(one.numpy()) == bits(other.numpy())).all()
    records = trace.records()
    for launch in np.unique(records["launch"]):
        of_launch = records[records["launch"] == launch]
        finishers = {role: set(of_launch["block"][of_launch["role"] == role]) for role in np.unique(of_launch["role"])}
        assert len(finishers["apply_load"]) == len(finishers["apply_reduce"]) == len(finishers["apply_store"]) == 1
        assert finishers["apply_load"] == {of_launch["block"].max()}
        for block in np.unique(of_launch["block"]):
            phases = of_launch[(of_launch["block"] == block) & (of_launch["role"] != "block")]
            assert (phases["start"] <= phases["end"]).all() and (phases["start"][1:] >= phases["end"][:-1]).all()
    small = df.Trace(device, nbytes=1024)
    with pytest.raises(ArgumentError, match="too small"):
        for _ in range(3):
            call(arrays, trace=small)


def test_shapes_that_do_not_match_are_refused(device, arrays, refused):
    act, weight, gamma = arrays
    bf16 = "bfloat16"

    def op(act=act, weight=weight, gamma=gamma, n_normed=NORMED, epsilon=EPS, **rest):
        return lambda: df.gemv_partial_norm(act, weight, gamma, n_normed=n_normed, epsilon=epsilon, **rest)

    refused(op(weight=device.zeros((N, 0), bf16), act=device.zeros((M, 0), bf16)), "weight", "K of at least 1")
    refused(op(weight=device.zeros(K, bf16)), "weight", "[N, K]")
    many = df.view(weight.ptr, (1 << 31, K), bf16, device, owner=weight)
    refused(op(weight=many), "weight", "less than 2^31 rows")
    refused(op(act=device.zeros((M, K + 8), bf16)), "act", f"[M, {K}]")
    refused(op(act=device.zeros((9, K), bf16)), "act", "M from 1 to 8")
    refused(op(act=device.zeros((0, K), bf16)), "act")
    refused(op(act=device.zeros((1, M, K), bf16)), "act")
    refused(op(gamma=device.zeros(NORMED + 1, bf16)), "gamma", f"({NORMED},)")
    for count in (-1, N + 1, 1.5, True, "3"):
        refused(op(n_normed=count), "n_normed", f"0 to {N}")
    for epsilon in (-1.0, math.nan, math.inf, "1e-5"):
        refused(op(epsilon=epsilon), "epsilon")
    refused(op(weight_scales=device.zeros(N, "float32")), "weight_scales", "None")
    fp8 = device.zeros((N, K), "float8_e4m3fn")
    refused(op(weight=fp8, weight_scales=device.zeros((N, 4), "float32")), "weight_scales", f"({N}, 5)")
    refused(op(weight=fp8, weight_scales=device.zeros(N, "bfloat16")), "weight_scales.dtype", "float32")
    refused(op(normed_output=device.zeros((M, NORMED + 1), bf16)), "normed_output", f"({M}, {NORMED})")
    refused(op(unnormed_output=device.zeros((N - NORMED,), bf16)), "unnormed_output")
    refused(op(act=device.zeros((M, K), "float64")), "act.dtype", "float16")
    refused(op(weight=device.zeros((N, K), "float8_e5m2")), "weight.dtype", "float8_e4m3fn")
    refused(op(normed_output=device.zeros((M, NORMED), "float8_e4m3fn")), "normed_output.dtype")
    mixed = outputs(device) | {"unnormed_output": device.empty((M, N - NORMED), "float32")}
    refused(op(**mixed), "unnormed_output.dtype", "is float32; it must be bfloat16, as that of normed_output")
    refused(op(gamma=None), "gamma", "None")


def test_wrong_counters_streams_levels_and_memory_are_refused(device, arrays, refused):
    act, weight, gamma = arrays

    def op(**rest):
        return lambda: call(arrays, **rest)

    refused(op(finish_counter=device.zeros(2, "int32")), "finish_counter", "one element")
    refused(op(finish_counter=device.zeros(1, "float32")), "finish_counter.dtype", "int32")
    refused(op(stream="mine"), "stream")
    refused(op(pdl_level=9), "pdl_level")
    refused(op(trace=True), "trace", "bool")
    refused(op(trace=df.Trace), "trace", "type")
    refused(op(normed_output=df.view(act.ptr, (M, NORMED), "bfloat16", device, owner=act)), "normed_output", "act")
    with pytest.raises(Unsupported):
        call(arrays, pdl_level=df.PDLLevel.NO_WAIT_OVERLAP_AT_END)


@pytest.mark.parametrize("argument", ["act", "weight", "gamma", "finish_counter", "normed_output", "unnormed_output"])
def test_addresses_not_aligned_to_the_element_size_are_refused(device, refused, argument):
    """Foreign arrays may begin at addresses that are no multiple of their element size."""
    shapes = {"act": (8,), "weight": (4, 8), "gamma": (3,), "normed_output": (3,), "unnormed_output": (1,)}
    arrays = {name: device.zeros(shape, "float16") for name, shape in shapes.items()}
    arrays["finish_counter"] = device.zeros(1, "int32")
    right = arrays[argument]
    wide = device.zeros((4, 9), str(right.dtype))
    shifted = Columns(wide, right.shape, 0)
    step = right.dtype.itemsize // 2
    shifted.__cuda_array_interface__ |= {"strides": None, "data": (wide.ptr + step, False)}
    with df.config.override(driver=device.driver):
        refused(
            lambda: df.gemv_partial_norm(**arrays | {argument: shifted}, n_normed=3, epsilon=EPS),
            argument,
            "aligned to",
        )


def test_a_call_without_normed_columns_needs_no_gamma(device, rng):
    values = case(rng, M, 9, K, 0)
    act, weight = (device.array(array) for array in values[:2])
    results = df.gemv_partial_norm(act, weight, None, n_normed=0, epsilon=EPS, stream=df.Stream(device))
    check(results, expected(values))
    check(results, expected(values._replace(gamma=values.gamma[:0])))


def test_a_capture_without_normed_columns_needs_no_empty_array(device, rng):
    values = case(rng, M, 9, K, 0)
    act, weight = (device.array(array) for array in values[:2])
    unnormed = device.empty((M, 9), "bfloat16")
    prepared = df.gemv_partial_norm.prepare(act, weight, None, n_normed=0, epsilon=EPS, unnormed_output=unnormed)
    with df.Graph.capture(device.stream) as graph:
        results = df.gemv_partial_norm(act, weight, None, n_normed=0, epsilon=EPS, unnormed_output=unnormed)
        prepared.launch()
    assert results[0].shape == (M, 0) and results[1] is unnormed
    graph.launch(device.stream)
    check(results, expected(values))


def test_a_prepared_product_is_launched_on_any_stream(device, rng, values, arrays):
    """Each stream has its own workspace, and a launch reads what the inputs contain at that time."""
    prepared = df.gemv_partial_norm.prepare(*arrays, n_normed=NORMED, epsilon=EPS)
    other = df.Stream(device)
    for stream in (None, other, other.handle, "current", None):
        again = case(rng, M, N, K, NORMED)
        for array, host in zip(arrays, again, strict=False):
            array.copy_from(host)
        results = prepared.launch(stream=stream)
        device.synchronize()
        check(results, expected(again))
    with pytest.raises(ArgumentError, match="use stream="):
        prepared.launch(rank=0)
    with pytest.raises(ArgumentError, match="use stream="):
        prepared.launch([other])


@pytest.mark.emulated
def test_plans_depend_on_shapes_and_alignment_and_not_on_addresses(device, rng):
    plans = device.part(PlanCache)
    for _ in range(3):
        run(device, case(rng, M, N, K, NORMED))
    assert len(plans) == 1
    run(device, case(rng, M, N, K, NORMED - 1))
    assert len(plans) == 2


def test_host_memory_is_refused_by_name_if_no_driver_is_available(refused, monkeypatch):
    """All arguments are numpy arrays, so none of them determines a driver."""

    def unavailable(spec):
        raise DriverUnavailable("no driver")

    monkeypatch.setattr(operands, "get_driver", unavailable)
    host = np.zeros((4, 8), np.float32)
    refused(lambda: df.gemv_partial_norm(host, host, host[0], n_normed=4, epsilon=EPS), "act", "host memory (ndarray)")
    refused(lambda: coat.fp8_division(host, 16, "E4M3"), "x", "host memory (ndarray)")
    with pytest.raises(DriverUnavailable):
        df.gemv_partial_norm(object(), object(), None, n_normed=0, epsilon=EPS)


def test_a_weight_without_rows_gives_an_empty_result(device):
    arrays = device.zeros((2, 16), "bfloat16"), device.zeros((0, 16), "bfloat16"), device.zeros(0, "float32")
    normed, unnormed = df.gemv_partial_norm(*arrays, n_normed=0, epsilon=EPS)
    assert normed.shape == unnormed.shape == (2, 0)


def test_addresses_and_rows_not_aligned_to_16_bytes_have_the_bits_of_the_reference(device, rng):
    """Arrays begin at any element, and the distance between rows is larger than a row."""
    values = case(rng, 2, 20, 256, 12)
    wide = rng.standard_normal((20, 300)).astype(values.weight.dtype)
    wide[:, 3:259] = values.weight
    around = device.array(wide)
    for offset, columns in ((3, 256), (4, 256)):
        weight = Columns(around, (20, columns), offset)
        taken = values._replace(weight=np.ascontiguousarray(wide[:, offset : offset + columns]))
        act = np.zeros((2 * 256 + 1,), values.act.dtype)
        act[1:] = values.act.reshape(-1)
        odd = device.array(act)
        with df.config.override(driver=device.driver):
            results = df.gemv_partial_norm(
                df.view(odd.ptr + 2, (2, 256), "bfloat16", device, owner=odd),
                weight,
                device.array(values.gamma),
                n_normed=12,
                epsilon=EPS,
            )
        check(results, expected(taken))


class Columns:
    """The operands are some columns of wider arrays."""

    def __init__(self, array: df.Array, shape: tuple[int, int], offset: int) -> None:
        self.array, self.dtype = array, str(array.dtype)
        size = array.dtype.itemsize
        self.__cuda_array_interface__ = {
            **array.__cuda_array_interface__,
            "shape": shape,
            "strides": (array.shape[1] * size, size),
            "data": (array.ptr + offset * size, False),
        }
