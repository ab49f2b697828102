# SPDX-License-Identifier: Apache-2.0
"""cu/trace/trace.cuh: a kernel without tracing has no trace code, and records have the layout that the host reads."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

import drvfuse as df
from drvfuse import config, dtypes
from drvfuse.compiler.nvrtc import compile_source
from drvfuse.ops.call import specialisation
from drvfuse.ops.call.specialisation import CU, KernelCache
from drvfuse.ops.collectives.rows.kernel import RowsKernel
from drvfuse.ops.collectives.shared import kernel as kernels
from drvfuse.ops.collectives.sums.kernel import SumsKernel
from drvfuse.trace import layout

KERNEL = """
#include "trace/trace.cuh"
struct Pack { static constexpr int words = 2; u32 word[2]; };
extern "C" __global__ void kernel(const float* from, float* to, const u64* flag DRVFUSE_TRACE_PARAMETER) {
    Trace trace{DRVFUSE_TRACE_ARGUMENT};
    BlockTrace<32> trace_b{DRVFUSE_TRACE_ARGUMENT};
    asm volatile("griddepcontrol.wait;" ::: "memory");
    trace.start();
    trace_b.start();
    u64 seen, when = 0;
    if (threadIdx.x < 2) {
        do {
            seen = *(volatile const u64*)(flag + threadIdx.x);
            trace.stamp(when, seen != 0);
        } while (!seen);
    }
    trace.waits(0, 2, when);
    __syncthreads();
    trace.lap(TraceRole::barrier);
    float values[2] = {from[threadIdx.x], from[threadIdx.x + blockDim.x]};
    Pack packs[2] = {{{u32(values[0]), 1}}, {{u32(values[1]), 2}}};
    trace.need(values);
    trace.need(packs);
    trace.need(packs[1]);
    trace.lap(TraceRole::load);
    to[threadIdx.x] = values[0] + values[1] + packs[1].word[1];
    trace_b.lap(TraceRole::store);
    trace_b.exit();
    trace.exit();
}
"""


def ptx(source: str, on: bool = False) -> str:
    with config.override(cache=False):  # otherwise the PTX contains the path of the cache entry
        return compile_source(
            source, name="kernel.cu", arch="sm_90a", defines=layout.defines() if on else {}, include=(str(CU),)
        ).ptx


TRACED = re.compile(
    r"""//.*
    |\b(?:Trace|BlockTrace<\w+>)\ (?:trace|trace_b)\{DRVFUSE_TRACE_ARGUMENT\};
    |(?:if\ (?:constexpr\ )?\(!?\w+\)\ )?\b(?:trace_?|trace_b)\.\w+\([^;]*\);
    |,?\s*\b(?:Trace|BlockTrace<\w+>)&\ trace_?\b(?:;)?|,\ trace_\(trace\)|,\ (?:trace|trace_b)\b|^\ *trace,
    |(?<=\()trace(?=\))
    |\ DRVFUSE_TRACE_PARAMETER""",
    re.X | re.M,
)


def without_calls(source: str) -> str:
    """The source with blanks in place of comments and trace code. The include of the trace header remains."""
    source = TRACED.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), source)
    assert not re.search(r"\b(?:trace_?|trace_b)\b|TRACE|Trace", source.replace('#include "trace/trace.cuh"', ""))
    return source


def test_with_tracing_off_the_ptx_is_that_of_a_kernel_without_trace_calls():
    assert ptx(KERNEL) == ptx(without_calls(KERNEL))
    assert "globaltimer" not in ptx(KERNEL) and "globaltimer" in ptx(KERNEL, on=True)


def test_the_kernel_and_the_host_have_the_same_roles_and_parameters():
    checks = [
        f'static_assert(u32(TraceRole::{role}) == {number}, "{role}");' for number, role in enumerate(layout.ROLES)
    ]
    declared = re.search(r"enum class TraceRole : u32 \{(.*?)\};", (CU / "trace" / "trace.cuh").read_text(), re.S)
    assert declared is not None and len(re.findall(r"^    \w+,", declared[1], re.M)) == len(layout.ROLES)
    checks.append(f'static_assert(sizeof(TraceParams) == {ctypes.sizeof(layout.TraceParams)}, "size");')
    ptx(KERNEL + "\n".join(checks), on=True)


@pytest.mark.parametrize("word", ["clock64", "globaltimer", "smid"])
def test_each_trace_call_reads_its_clocks_once(word):
    """The compiled kernel reads each clock as often as its trace calls need. The calls of `trace` and `trace_b` are two
    entries, two starts, two exits, one `stamp` and three laps."""
    expected = {"clock64": 3 + 3 + 1 + 2 + 1, "globaltimer": 2 + 2, "smid": 2}
    assert len(re.findall(rf"mov\.u(?:32|64) \S+, %{word};", ptx(KERNEL, on=True))) == expected[word]


def plain_sources(folder: Path) -> None:
    """Write a copy of the kernels' sources, without the calls that record traces, to `folder`."""
    for path in CU.rglob("*.cu*"):
        text = path.read_text()
        if path.name != "trace.cuh":
            text = without_calls(text)
        copy = folder / path.relative_to(CU)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text)


def comparable(ptx: str, folder: Path) -> str:
    """The PTX of sources in a folder in a form that can be compared: without the folder's name, lines for debuggers and
    names of inlined functions, and with registers numbered by their first appearance.

    `.loc` lines go, because the compiler puts some of them before an instruction and some after it. The table of names
    at the end goes, because its names contain the types of arguments, and one of them is Trace. Registers are numbered
    anew, because the compiler also counts those that it has removed.
    """
    code, table, _ = ptx.replace(str(folder), "").partition("\t.section\t.debug_str")
    assert table
    code = re.sub(r"^\t\.loc\t.*\n", "", code, flags=re.MULTILINE)
    numbers: dict[str, int] = {}
    code = re.sub(r"%[a-z]+\d+(?=[,;\s)}\]+])", lambda found: f"%r{numbers.setdefault(found[0], len(numbers))}", code)
    return re.sub(r"\$L__info_string\d+", "name", code)


BF16, E4M3 = dtypes.get("bfloat16"), dtypes.get("float8_e4m3fn")


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("algo", kernels.ALGOS)
@pytest.mark.parametrize("op", ["allreduce", "allreduce_rmsnorm_fp8"])
def test_untraced_collectives_have_no_trace_code(op, algo, staged, tmp_path, monkeypatch):
    plain_sources(tmp_path)
    fused = {"packs": 2, "residual": staged, "gamma_dtype": BF16} if op != "allreduce" else {"packs": 2}

    def code(folder: Path) -> str:
        out = BF16 if op == "allreduce" else E4M3
        monkeypatch.setattr(specialisation, "CU", folder)
        kind = SumsKernel if op == "allreduce" else RowsKernel
        kernel = kind(op, algo, BF16, 4, out, staged=staged, **fused)
        with config.override(cache=False):
            return comparable(kernel.specialisation.compile("sm_90a", cubin=False).ptx, folder)

    assert code(CU) == code(tmp_path)


@pytest.mark.emulated
@pytest.mark.parametrize("m", [1, 3])
def test_an_untraced_gemv_has_no_trace_code(m, tmp_path, monkeypatch):
    plain_sources(tmp_path)

    def code(folder: Path) -> str:
        monkeypatch.setattr(specialisation, "CU", folder)
        with df.emu.Machine(devices=1) as machine, config.override(cache=False):
            device = df.device(0, driver=machine)
            act, weight, gamma = (device.zeros(shape, "bfloat16") for shape in ((m, 264), (9, 264), (5,)))
            df.gemv_partial_norm(act, weight, gamma, n_normed=5, epsilon=1e-6)
            (kernel,) = device.driver.part(KernelCache).kernels.values()
            return comparable(kernel.module.image.ptx, folder)

    assert code(CU) == code(tmp_path)
