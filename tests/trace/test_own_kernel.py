# SPDX-License-Identifier: Apache-2.0
"""A kernel of one's own, traced with cu/trace/trace.cuh on one device."""

from __future__ import annotations

import numpy as np
import pytest

import drvfuse as df
from drvfuse.errors import DrvfuseError
from drvfuse.ops.call.specialisation import CU
from drvfuse.trace import layout

KERNEL = r"""
#include "trace/trace.cuh"
extern "C" __global__ void add(float* x, int laps DRVFUSE_TRACE_PARAMETER) {
    BlockTrace<40> trace{DRVFUSE_TRACE_ARGUMENT};
    trace.start();
    const int i = (blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x;
    float value = x[i];
    trace.need(value);
    for (int n = 0; n < laps; ++n) {
        trace.lap(TraceRole::load);
        for (long long begun = clock64(); clock64() - begun < 1000;) {}
    }
    x[i] = value + 1;
    trace.lap(TraceRole::store);
    trace.exit();
}
"""


def launched(device, laps, expected, capacity=None):
    """The records of one launch with 2 x 3 blocks, and its output."""
    trace = df.Trace(device)
    (section,) = trace.sections([device], "add", 6, expected)
    defines = layout.defines(capacity or section.capacity)
    kernel = df.compile(KERNEL, driver=device.driver, defines=defines, include=[CU])["add"]
    x = device.array(np.arange(6 * 64, dtype=np.float32))
    kernel.prepare((2, 3), 64, x, laps, section.parameters)(device.stream)
    device.stream.synchronize()
    return trace, x.numpy()


@pytest.fixture
def device(driver):
    return df.device(0, driver=driver)


@pytest.mark.parametrize("laps", [3, 100])
def test_every_block_of_a_grid_has_its_records(device, laps):
    trace, result = launched(device, laps, laps + 3)
    assert (result == np.arange(6 * 64) + 1).all()
    records = trace.records()
    assert len(records) == 6 * (laps + 4) and set(records["rank"]) == {0} and set(records["peer"]) == {-1}
    for block in range(6):
        own = records[records["block"] == block]
        assert own["role"].tolist() == ["block", "producer", *["load"] * laps, "store", "finish"]
        phases = own[1:]
        assert (phases["start"][1:] == phases["end"][:-1]).all() and (np.diff(phases["end"]) >= 0).all()
        assert ((phases["end"] - phases["start"])[2 : laps + 1] >= 1000).all()
        assert own["end_ns"][0] - own["start_ns"][0] == pytest.approx((phases["end_ns"] - phases["start_ns"]).sum())


@pytest.mark.parametrize("expected", [5, 59])  # for 59 phases a block needs LEAST_WORDS words
def test_phases_beyond_the_expected_number_write_no_other_memory(device, expected):
    trace, result = launched(device, 90, expected)
    assert (result == np.arange(6 * 64) + 1).all()
    with pytest.raises(
        DrvfuseError, match=rf"add recorded \d+ phases or more in a block where {expected} were expected"
    ):
        trace.records()
    assert not trace.buffer(device).numpy()[6 * layout.block_words(expected, 0) :].any()
