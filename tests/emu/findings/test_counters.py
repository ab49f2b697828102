# SPDX-License-Identifier: Apache-2.0
"""Counts of accesses, bytes and barriers by kernel and source line, as a table and as plain data."""

from __future__ import annotations

import ctypes
import json
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from driver_helpers import function, ok, primary

from drvfuse.emu import Machine
from drvfuse.emu.abi import structs
from drvfuse.emu.findings.counters import Count, Counters, Summary

SOURCE = """
extern "C" __global__ void gather(const unsigned* near, const unsigned* far, unsigned* out, unsigned n) {
  __shared__ unsigned part[64];
  unsigned i = blockIdx.x * 64 + threadIdx.x;
  part[threadIdx.x] = i < n ? near[i] : 0;
  __syncthreads();
  if (i < n) out[i] = part[63 - threadIdx.x] + far[i] * __shfl_sync(~0u, threadIdx.x, 0);
}
extern "C" __global__ void bump(unsigned* p) { atomicAdd(p, 1u); }
"""
LINE = {name: next(i for i, text in enumerate(SOURCE.split("\n"), 1) if name in text) for name in ("near[", "far[")}


def launch(cuda: Any, f: Any, blocks: int, threads: int, values: tuple[Any, ...], kinds: tuple[Any, ...]) -> None:
    ok(cuda.cuLaunchKernel(f, blocks, 1, 1, threads, 1, 1, 0, 0, (values, kinds), 0))


@pytest.fixture
def counted(machine: Machine, cuda: Any) -> Machine:
    """A machine that has run `gather` twice and `bump` once. `gather` runs in three blocks on 150 elements, and reads
    one of its two inputs from device 1."""
    n = 150
    peer = primary(cuda, 1)
    far = ok(cuda.cuMemAlloc(4 * n))
    ok(cuda.cuMemsetD32(far, 3, n))
    primary(cuda, 0)
    ok(cuda.cuCtxEnablePeerAccess(peer, 0))
    near, out = ok(cuda.cuMemAlloc(4 * n)), ok(cuda.cuMemAlloc(4 * n))
    ok(cuda.cuMemsetD32(near, 5, n))
    ok(cuda.cuMemsetD32(out, 0, n))
    kernel = function(cuda, SOURCE.replace("* __shfl_sync", "+ __shfl_sync"), "gather")
    for _ in range(2):
        launch(cuda, kernel, 3, 64, (near, far, out, n), (None, None, None, ctypes.c_uint))
    launch(cuda, function(cuda, SOURCE, "bump"), 2, 32, (out,), (None,))
    ok(cuda.cuCtxSynchronize())
    assert machine.reports == []
    return machine


def test_counts_are_summed_by_kernel_and_line(counted: Machine) -> None:
    summary = counted.counters()
    assert list(summary.kernels) == ["gather", "bump"]
    gather, bump = summary.kernels.values()
    assert (gather.launches, bump.launches) == (2, 1)
    lines = {line: count for (file, line), count in gather.lines.items() if file.endswith("test.cu")}
    assert lines.keys() == set(LINE.values())
    assert lines[LINE["near["]] == Count(2 * (150 + 192), local_read=2 * 600, shared_written=2 * 768)
    assert lines[LINE["far["]] == Count(2 * 450, 0, 2 * 600, 2 * 600, shared_read=2 * 600)
    assert gather.barriers == 2 * 3
    assert bump.total == Count(64, 256, 256)
    ((_, opcodes),) = bump.opcodes.items()
    assert len(opcodes) == 1 and opcodes[0].startswith(("red.", "atom."))
    one = counted.launches[0].counters
    assert gather.total == one.total + one.total and gather.warp_ops == 2 * one.warp_ops


def test_the_json_has_the_counts(counted: Machine) -> None:
    summary = counted.counters()
    data = json.loads(json.dumps(summary.json()))
    assert [k["kernel"] for k in data["kernels"]] == ["gather", "bump"]
    for described, kernel in zip(data["kernels"], summary.kernels.values(), strict=True):
        assert described["total"] == asdict(kernel.total)
        assert [(x["file"], x["line"]) for x in described["lines"]] == sorted(kernel.lines)
        for name in asdict(Count()):
            assert sum(x[name] for x in described["lines"]) == described["total"][name]
        assert all(x["opcodes"] for x in described["lines"])
    one = counted.launches[0].counters
    assert one.json()["total"] == asdict(one.total) and "kernel" not in one.json()


def test_the_table_has_a_row_per_line_and_the_sums(counted: Machine) -> None:
    head, columns, *rows, total = counted.counters().table().split("\n\n")[0].splitlines()
    assert head == "gather: 2 launches, bytes"
    assert " ".join(columns.split()) == "line opcodes accesses local r local w remote r smem r smem w"
    assert [row.split()[0] for row in rows] == [f"test.cu:{line}" for line in sorted(LINE.values())]
    assert "ld.global" in rows[0] and "st.shared" in rows[0]
    assert rows[0].split()[-6:] == ["684", "1200", "0", "0", "0", "1536"]
    assert total.startswith("total   6 barriers,".replace("   ", " " * (total.index("6") - 5)))
    assert total.split()[-6:] == ["1584", "1200", "1200", "1200", "1200", "1536"]
    assert counted.launches[0].counters.table().splitlines()[0].split()[:2] == ["line", "opcodes"]


def test_a_table_of_everything_fits_120_columns() -> None:
    sites = [
        SimpleNamespace(file="/a/b/barrier_of_all.cuh", line=1000 + i, opcode="ld.acquire.sys" * 3) for i in range(4)
    ]
    rows = np.array([(10**9, [10**9] * 5, [10**9] * 5, 0)] * 4, np.dtype(structs.Site))
    counters = Counters(rows, sites, 10**9, 10**9, 0)  # type: ignore[arg-type]
    text = Summary([("k", counters)]).table()
    assert max(map(len, text.splitlines())) == 120
    assert "1000 P" in text and "ld.acq" in text


def test_without_launches_the_summary_is_empty(machine: Machine) -> None:
    assert machine.counters().json() == {"kernels": []} and machine.counters().table() == ""
