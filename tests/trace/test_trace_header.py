# SPDX-License-Identifier: Apache-2.0
"""cu/trace.cuh without any driver: nothing when off, and the same layout as the host's when on."""

from __future__ import annotations

import ctypes
import re

import pytest

from drvfuse import config
from drvfuse.ops.kernels import CU
from drvfuse.runtime.nvrtc import compile_source
from drvfuse.trace import layout

KERNEL = """
#include "trace.cuh"
struct Pack { static constexpr int words = 2; u32 word[2]; };
extern "C" __global__ void kernel(const float* from, float* to, const u64* flag DRVFUSE_TRACE_PARAMETER) {
    Trace trace{DRVFUSE_TRACE_ARGUMENT};
    BlockTrace<32> other{DRVFUSE_TRACE_ARGUMENT};
    asm volatile("griddepcontrol.wait;" ::: "memory");
    trace.start();
    other.start();
    u64 seen, when = 0;
    if (threadIdx.x < 2) {
        do {
            seen = *(volatile const u64*)(flag + threadIdx.x);
            trace.stamp(when, seen != 0);
        } while (!seen);
    }
    trace.waits(2, when);
    __syncthreads();
    trace.lap(TraceRole::barrier);
    float values[2] = {from[threadIdx.x], from[threadIdx.x + blockDim.x]};
    Pack packs[2] = {{{u32(values[0]), 1}}, {{u32(values[1]), 2}}};
    trace.need(values);
    trace.need(packs);
    trace.need(packs[1]);
    trace.lap(TraceRole::load);
    to[threadIdx.x] = values[0] + values[1] + packs[1].word[1];
    other.lap(TraceRole::store);
    other.exit();
    trace.exit();
}
"""


def ptx(source: str, on: bool = False) -> str:
    with config.override(cache=False):  # or the PTX would have the path of the cache entry
        return compile_source(
            source, name="kernel.cu", arch="sm_90a", defines=layout.defines() if on else {}, include=(str(CU),)
        ).ptx


def without_calls(source: str) -> str:
    """The same lines with nothing of the trace in them but the header."""
    source = re.sub(r"\b(?:Trace|BlockTrace<\d+>) (?:trace|other)\{DRVFUSE_TRACE_ARGUMENT\};", "", source)
    source = re.sub(r"\b(?:trace|other)\.\w+\([^;]*\);", "", source).replace(" DRVFUSE_TRACE_PARAMETER", "")
    assert not re.search(r"\b(?:trace|other)\b\.?(?!cuh)|TRACE", source.replace('#include "trace.cuh"', ""))
    return source


def test_off_the_ptx_is_that_of_a_kernel_without_calls():
    assert ptx(KERNEL) == ptx(without_calls(KERNEL))
    assert "globaltimer" not in ptx(KERNEL) and "globaltimer" in ptx(KERNEL, on=True)


def test_roles_and_parameters_are_those_of_the_host():
    checks = [
        f'static_assert(u32(TraceRole::{role}) == {number}, "{role}");' for number, role in enumerate(layout.ROLES)
    ]
    declared = re.search(r"enum class TraceRole : u32 \{(.*?)\};", (CU / "trace.cuh").read_text(), re.S)
    assert declared is not None and len(re.findall(r"^    \w+,", declared[1], re.M)) == len(layout.ROLES)
    checks.append(f'static_assert(sizeof(TraceParams) == {ctypes.sizeof(layout.TraceParams)}, "size");')
    ptx(KERNEL + "\n".join(checks), on=True)


@pytest.mark.parametrize("word", ["clock64", "globaltimer", "smid"])
def test_a_reading_is_made_once_for_each_place(word):
    """Two writers: an entry, a start and an exit each; one stamp, and laps: two of `trace`, one of `other`."""
    expected = {"clock64": 3 + 3 + 1 + 2 + 1, "globaltimer": 4, "smid": 2}
    assert len(re.findall(rf"mov\.u(?:32|64) \S+, %{word};", ptx(KERNEL, on=True))) == expected[word]
