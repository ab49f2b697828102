# SPDX-License-Identifier: Apache-2.0
"""Graphs, PDL, streams, traces, schedules, bytes and bad input of the norm on one device."""

from __future__ import annotations

import math

import numpy as np
import pytest
from norm_support import EPSILON, OFFSET, WRITTEN, Q, call, check, expected, on_device, results, run

import drvfuse as df
from drvfuse.errors import ArgumentError, CaptureError, Unsupported
from drvfuse.reference import bits

ROWS, COLUMNS = 11, 1024


@pytest.fixture
def of(rng):
    return call(rng, (ROWS, COLUMNS))


@pytest.fixture
def arrays(device, of):
    return on_device(device, of)


def op(arrays, **rest):
    return df.rmsnorm_fp8(**arrays, **{"epsilon": EPSILON, "weight_offset": OFFSET} | rest)


def test_captured_calls_replay_on_new_contents(device, rng, of, arrays):
    given = results(device, of)
    with df.Graph.capture(device.stream) as graph:  # no call of these shapes was made before
        op(arrays, **given)
        with pytest.raises(CaptureError, match="scales=None"):
            op(arrays, output=given["output"])
    for again in (of, call(rng, (ROWS, COLUMNS))):
        for name, values in again.arrays.items():
            arrays[name].copy_from(values)
        for _ in range(2):
            graph.launch(device.stream)
        device.synchronize()
        check(given, {name: expected(again)[name] for name in given})


def test_prepared_calls_can_be_launched_on_other_streams(device, of, arrays):
    prepared = df.rmsnorm_fp8.prepare(**arrays, epsilon=EPSILON, weight_offset=OFFSET)
    for stream in (None, df.Stream(device)):
        found = prepared.launch(stream=stream)
        device.synchronize()
        check(dict(zip(WRITTEN, found, strict=False)), expected(of))


LATE = """
extern "C" __global__ void late(const unsigned* from, unsigned* to, int words, int* spun) {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    for (int i = 0; i < 2000; ++i) atomicAdd(spun, 1);
    for (int i = threadIdx.x; i < words; i += blockDim.x) to[i] = from[i];
}
"""


@pytest.mark.parametrize("level", [df.PDLLevel.ON, df.PDLLevel.OVERLAP_AT_BEGINNING])
@pytest.mark.parametrize("rows", [1, ROWS])
def test_a_dependent_launch_waits_for_a_late_producer(device, driver, rng, level, rows):
    """The preceding kernel triggers at once and writes a call's inputs late; the call must wait for them. The
    dependent of the call is the producer of the next call, which writes inputs only after its own wait.
    """
    steps = [call(rng, (rows, COLUMNS)) for _ in range(3)]
    steps = [one._replace(arrays=one.arrays | {"gamma": steps[0].arrays["gamma"]}) for one in steps]
    seeds = [None] if driver == "cuda" else range(3)
    for seed in seeds:
        machine = None if seed is None else df.emu.Machine(devices=1, sm_count=4, seed=seed)
        where = device if machine is None else df.device(0, driver=machine)
        late = df.compile(LATE, driver=where.driver)["late"]
        arrays, spun = on_device(where, steps[0]), where.zeros(1, "int32")
        sources = [where.array(one.arrays["inputs"]) for one in steps]
        given = [results(where, one) for one in steps]
        where.synchronize()
        for source, into in zip(sources, given, strict=True):
            late.prepare(1, 64, source, arrays["inputs"], source.nbytes // 4, spun, pdl=True)(where.stream)
            op(arrays, pdl_level=level, **into)
        where.synchronize()
        for one, into in zip(steps, given, strict=True):
            check(into, {name: expected(one)[name] for name in into})
        if machine is not None:
            assert not machine.reports
            machine.close()


@pytest.mark.emulated
@pytest.mark.parametrize("shape", [(2, 8192), (ROWS, 2048)])
def test_no_race_and_the_same_bits_under_many_schedules(rng, shape):
    """With 2 rows a cluster of two blocks holds each row. With many rows a block has several rows."""
    of = call(rng, shape, norm="layer", beta=True, special=False)
    wanted = expected(of)
    for seed in range(6):
        with df.emu.Machine(devices=1, sm_count=4, seed=seed, race="strict", delay_stores=seed % 2 == 1) as machine:
            check(run(df.device(0, driver=machine), of), wanted)
            assert machine.reports == [], f"seed {seed}"


@pytest.mark.emulated
def test_each_byte_is_read_and_written_once(rng):
    """In addition to the bytes of the tensors, each block reads gamma."""
    of = call(rng, (ROWS, COLUMNS), residual="bfloat16", quantisation=Q.per_group(), special=False)
    with df.emu.Machine(devices=1, sm_count=4) as machine:
        found = run(df.device(0, driver=machine), of)
        check(found, expected(of))
        last = list(machine.launches)[-1]
    read = of.arrays["inputs"].nbytes + of.arrays["residual"].nbytes
    assert last.counters.total.local_read == read + ROWS * of.arrays["gamma"].nbytes
    assert last.counters.total.local_written == sum(array.nbytes for array in found.values() if array is not None)


@pytest.mark.parametrize("shape", [(ROWS, COLUMNS), (ROWS, 128)])
def test_traced_calls_have_the_same_bits(device, rng, shape):
    of, trace = call(rng, shape), df.Trace(device)
    check(run(device, of, trace=trace), expected(of))
    records = trace.records()
    assert {"producer", "load", "reduce", "store"} <= set(records["role"].tolist())
    for block in np.unique(records["block"]):
        phases = records[(records["block"] == block) & (records["role"] != "block")]
        assert (phases["start"] <= phases["end"]).all() and (phases["start"][1:] >= phases["end"][:-1]).all()
    small = df.Trace(device, nbytes=1024)
    with pytest.raises(ArgumentError, match="too small"):
        for _ in range(40):
            run(device, of, trace=small)


def test_foreign_arrays_and_a_given_stream_are_ordered(device, of, arrays):
    class Foreign:
        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **rest):
            return self.array.__dlpack__(**rest)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    stream = df.Stream(device)
    found = op(arrays | {"inputs": Foreign(arrays["inputs"])}, stream=stream)
    device.synchronize()
    check(dict(zip(WRITTEN, found, strict=False)), expected(of))


def test_arrays_that_do_not_match_are_refused(device, arrays, refused):
    x, gamma = arrays["inputs"], arrays["gamma"]
    bf16 = "bfloat16"

    def given(inputs=x, gamma=gamma, **rest):
        return lambda: op({"inputs": inputs, "gamma": gamma}, **rest)

    refused(given(inputs=device.zeros((), bf16)), "inputs", "at least one column")
    refused(given(inputs=device.zeros((3, 0), bf16)), "inputs", "at least one column")
    refused(given(inputs=device.zeros((1, 16385), bf16)), "inputs", "16384")
    refused(given(inputs=device.zeros((3, COLUMNS), "int32")), "inputs.dtype", "float32")
    refused(given(gamma=device.zeros(COLUMNS + 1, bf16)), "gamma", f"({COLUMNS},)")
    refused(given(gamma=device.zeros(COLUMNS, "float16")), "gamma.dtype", "bfloat16 or float32")
    refused(given(gamma=None), "gamma", "None")
    refused(given(beta=gamma), "beta", 'None, as norm="rms"')
    refused(given(beta=device.zeros(3, bf16), norm="layer"), "beta", f"({COLUMNS},)")
    refused(given(residual=device.zeros((ROWS, 8), bf16)), "residual", f"({ROWS}, {COLUMNS})")
    refused(given(residual=device.zeros((ROWS, COLUMNS), "float16")), "residual.dtype")
    refused(given(residual_output=device.zeros((ROWS, COLUMNS), bf16)), "residual_output", "no residual")
    kept = device.zeros((ROWS, COLUMNS), "float32")
    refused(given(residual=kept, residual_output=x), "residual_output.dtype", "float32")
    refused(given(output=x), "output.dtype", "float8_e4m3fn")
    refused(given(output=device.zeros((ROWS, 8), "float8_e4m3fn")), "output", f"({ROWS}, {COLUMNS})")
    refused(given(scales=device.zeros((ROWS, 1), "float32")), "scales", f"({ROWS},)")
    refused(given(scales=device.zeros(ROWS, "float32"), quantisation=Q.static(1.0)), "scales", "None, as static")
    wrong = device.zeros((8, ROWS), "float32")
    refused(given(scales=wrong, quantisation=Q.per_group(layout="column")), "scales", "(8, 12)")
    wide = device.zeros(8 * 512 + 8, "float8_e8m0fnu")
    odd = df.view(wide.ptr + 8, (8 * 512,), wide.dtype, device, owner=wide)
    refused(given(scales=odd, quantisation=Q.mxfp8(layout="tiles")), "scales", "aligned to 16 bytes")
    refused(given(normed_output=device.zeros((ROWS, COLUMNS), "float32")), "normed_output.dtype", bf16)
    refused(given(normed_output=x), "normed_output", "memory of its own")


def test_wrong_options_are_refused(device, arrays, refused):
    def given(**rest):
        return lambda: op(arrays, **rest)

    refused(given(quantisation="row"), "quantisation", "a drvfuse.Quantisation or None")
    refused(given(head_columns=3), "head_columns", "divides the 1024 columns")
    for wrong in (0, -1, 1.5, True, "64"):
        refused(given(head_columns=wrong), "head_columns")
    refused(given(head_columns=8, quantisation=Q.nvfp4(1.0)), "quantisation", "a multiple of 16 columns")
    odd = {name: device.zeros(shape, "bfloat16") for name, shape in (("inputs", (2, 33)), ("gamma", 33))}
    refused(lambda: op(odd, quantisation=Q.nvfp4(1.0)), "quantisation", "rows of 33")
    refused(given(norm="group"), "norm", "'layer'")
    for wrong in (-1.0, math.nan, math.inf, "1"):
        refused(given(epsilon=wrong), "epsilon")
    refused(given(weight_offset=math.nan), "weight_offset")
    refused(given(stream="mine"), "stream")
    refused(given(pdl_level=9), "pdl_level")
    refused(given(trace=True), "trace", "bool")
    with pytest.raises(Unsupported):
        op(arrays, pdl_level=df.PDLLevel.NO_WAIT_OVERLAP_AT_END)


@pytest.mark.emulated
def test_devices_without_fp8_and_arrays_on_two_devices_are_refused(rng, refused):
    of = call(rng, (3, COLUMNS))
    with df.emu.Machine(devices=2, arch="sm_80") as machine:
        device, other = (df.device(index, driver=machine) for index in range(2))
        arrays = on_device(device, of)
        with pytest.raises(Unsupported, match=r"8\.9 for FP8"):
            op(arrays)
        found = op(arrays, quantisation=Q.none())
        wanted = expected(of._replace(rest=of.rest | {"quantisation": Q.none()}))
        assert (bits(found.output.numpy()) == bits(wanted["output"])).all()
        refused(lambda: op(arrays | {"gamma": other.array(of.arrays["gamma"])}), "gamma", "on device 0")
        refused(lambda: op(arrays, output=other.zeros((3, COLUMNS), "float8_e4m3fn")), "output", "on device 0")


def test_nothing_is_written_where_an_argument_is_wrong(device, of, arrays, refused):
    given = results(device, of)
    before = given["output"].numpy().tobytes()
    refused(lambda: op(arrays, output=given["output"], scales=device.zeros(3, "float32")), "scales")
    assert given["output"].numpy().tobytes() == before
