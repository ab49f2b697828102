# SPDX-License-Identifier: Apache-2.0
"""Kernels in Triton on drvfuse's arrays and streams, between collectives, and under the race detector.

The emulated driver takes the PTX that Triton's compiler made, which is recorded in `triton_kernels.json` so that these
tests run where Triton is missing; where it is installed they compile the kernels again. On GPUs the tests run the
cubins of Triton's compiler.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
import re
import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import drvfuse as df
from drvfuse import reference
from drvfuse.reference import bits
from drvfuse.runtime.stream import Stream

HERE = Path(__file__).parent
INSTALLED = importlib.util.find_spec("triton") is not None
BF16 = ml_dtypes.bfloat16
KINDS: dict[type, Any] = {df.Array: ctypes.c_void_p, int: ctypes.c_int, float: ctypes.c_float}

needs_triton = pytest.mark.skipif(not INSTALLED, reason="needs triton")
images = pytest.mark.parametrize("kept", ["recorded", pytest.param("compiled", marks=needs_triton)])


@functools.cache
def kernels(kept: str, capability: int) -> dict[str, dict[str, Any]]:
    if kept == "recorded":
        recorded: dict[str, dict[str, Any]] = json.loads((HERE / "triton_kernels.json").read_text())["kernels"]
        return recorded
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Triton itself warns
        import triton_kernels

        return triton_kernels.compiled(capability)


class Kernel:
    """A kernel that Triton compiled, loaded on one device."""

    def __init__(self, device: df.Device, name: str, kept: str) -> None:
        if device.driver.name == "cuda" and kept == "recorded":
            pytest.skip("the recorded PTX is for the emulated driver")
        capability = 10 * device.attribute("COMPUTE_CAPABILITY_MAJOR") + device.attribute("COMPUTE_CAPABILITY_MINOR")
        made = kernels(kept, capability)[name]
        self.device, self.block, self.threads, self.shared = device, made["block"], made["threads"], made["shared"]
        api = device.driver
        with device.use():
            image = made["cubin"] if api.takes_cubins else made["ptx"].encode() + b"\0"
            self.function = api.cuModuleGetFunction(api.cuModuleLoadData(image), name.encode())
        entry = made["ptx"].partition(".entry")[2].partition(")")[0]
        self.parameters = len(re.findall(r"\.param", entry))  # Triton adds pointers to scratch memory, null here

    def __call__(self, stream: Stream, grid: int, *args: df.Array | int | float) -> None:
        values = [arg.ptr if isinstance(arg, df.Array) else arg for arg in args]
        kinds = [KINDS[type(arg)] for arg in args]
        spare = self.parameters - len(args)
        arguments = (*values, *[0] * spare), (*kinds, *[ctypes.c_void_p] * spare)
        with self.device.use():
            self.device.driver.cuLaunchKernel(
                self.function, grid, 1, 1, self.threads, 1, 1, self.shared, stream.handle, arguments, 0
            )


def scaled_sum(x: np.ndarray, y: np.ndarray, factor: float) -> np.ndarray:
    """What `scale_add` computes, with each of its roundings."""
    return (x.astype(np.float32) * np.float32(factor) + y.astype(np.float32)).astype(BF16)


@images
def test_rows_are_reduced_by_shuffles_and_shared_memory(driver: str, kept: str, rng: np.random.Generator) -> None:
    device = df.device(0, driver=driver)
    values = rng.integers(-999, 999, (7, 1000)).astype(np.float32)  # values whose sums are exact in any order
    sums, peaks = device.empty(7, "float32"), device.empty(7, "float32")
    Kernel(device, "row_stats", kept)(device.stream, 7, device.array(values), sums, peaks, 1000)
    assert (sums.numpy() == values.sum(1)).all() and (peaks.numpy() == np.abs(values).max(1)).all()


@images
@pytest.mark.parametrize("ranks", [1, pytest.param(4, marks=pytest.mark.gpus(4))])
def test_a_triton_kernel_runs_between_two_collectives(
    driver: str, kept: str, ranks: int, rng: np.random.Generator
) -> None:
    hosts = [rng.standard_normal((5, 1000)).astype(BF16) for _ in range(ranks)]
    others = [rng.standard_normal((5, 1000)).astype(BF16) for _ in range(ranks)]
    with df.Group.local(ranks, driver=driver, max_blocks=4) as group:
        sums = df.allreduce(group, [rank.array(host) for rank, host in zip(group, hosts, strict=True)])
        outputs = [rank.empty((5, 1000), "bfloat16") for rank in group]
        for rank, x, y, out in zip(group, sums, others, outputs, strict=True):
            scale_add = Kernel(rank.device, "scale_add", kept)
            scale_add(rank.stream, -(-5000 // scale_add.block), x, rank.array(y), out, 5000, 0.37)
        totals = df.allreduce(group, outputs)
        group.synchronize()
        first = reference.allreduce(hosts)
        scaled = [scaled_sum(first, other, 0.37) for other in others]
        for out, total, expected in zip(outputs, totals, scaled, strict=True):
            assert (bits(out.numpy()) == bits(expected)).all()
            assert (bits(total.numpy()) == bits(reference.allreduce(scaled))).all()


@images
def test_a_graph_replays_a_kernel_after_a_collective(driver: str, kept: str, rng: np.random.Generator) -> None:
    with df.Group.local(1, driver=driver, max_blocks=4) as group:
        (rank,) = group
        x, y, total, out = (rank.zeros((3, 1000), "bfloat16") for _ in range(4))
        scale_add = Kernel(rank.device, "scale_add", kept)
        prepared = df.allreduce.prepare(group, x, total)
        with df.Graph.capture([rank.stream]) as graph:
            prepared.launch()
            scale_add(rank.stream, -(-3000 // scale_add.block), total, y, out, 3000, -1.625)
        for _ in range(2):
            hosts = [rng.standard_normal((3, 1000)).astype(BF16) for _ in range(2)]
            x.copy_from(hosts[0])
            y.copy_from(hosts[1])
            graph.launch(rank.stream)
            assert (bits(out.numpy()) == bits(scaled_sum(*hosts, -1.625))).all()


@pytest.mark.emulated
@images
@pytest.mark.parametrize("name", ["count_atomic", "count_racing"])
def test_the_race_detector_finds_counters_that_are_not_atomic(kept: str, name: str, rng: np.random.Generator) -> None:
    machine = df.emu.Machine(devices=1, race=True)
    device = df.device(0, driver=machine)
    values = rng.integers(0, 4, 500).astype(np.int32)
    counts = device.zeros(4, "int32")
    Kernel(device, name, kept)(device.stream, 4, device.array(values), counts, 500)
    device.synchronize()
    if name == "count_atomic":
        assert not machine.reports and (counts.numpy() == np.bincount(values)).all()
    else:
        assert {report.kind for report in machine.reports} == {"race"}
        assert {report.kernel for report in machine.reports} == {"count_racing"}


@pytest.mark.gpu
@needs_triton
@pytest.mark.filterwarnings("default")  # warnings of torch and Triton are not errors here
@pytest.mark.parametrize("ranks", [1, pytest.param(4, marks=pytest.mark.gpus(4))])
def test_triton_launches_on_torch_tensors_in_turn_with_collectives(ranks: int, rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    import triton_kernels

    hosts = [rng.standard_normal((64, 1000)).astype(np.float32) for _ in range(ranks)]
    with df.Group.local(ranks, driver="cuda", max_blocks=16) as group:
        places = [torch.device("cuda", rank.device.index) for rank in group]
        x = [torch.from_numpy(host).to(place).bfloat16() for host, place in zip(hosts, places, strict=True)]
        doubled, totals = [torch.empty_like(t) for t in x], [torch.empty_like(t) for t in x]
        streams = [torch.cuda.Stream(place) for place in places]
        for stream, place in zip(streams, places, strict=True):
            stream.wait_stream(torch.cuda.current_stream(place))

        def add(a: Any, b: Any, out: Any) -> None:
            for stream, p, q, r in zip(streams, a, b, out, strict=True):
                with torch.cuda.stream(stream):
                    triton_kernels.scale_add[(250,)](p, q, r, p.numel(), 1.0, BLOCK=256, enable_fp_fusion=False)

        add(x, x, doubled)
        df.allreduce(group, doubled, totals, streams=streams)
        add(totals, x, doubled)
        for place in places:
            torch.cuda.synchronize(place)
        rounded = [host.astype(BF16) for host in hosts]
        total = reference.allreduce([scaled_sum(host, host, 1.0) for host in rounded])
        for tensor, host in zip(doubled, rounded, strict=True):
            assert (tensor.view(torch.uint16).cpu().numpy() == bits(scaled_sum(total, host, 1.0))).all()


@needs_triton
def test_the_recorded_kernels_have_the_sizes_of_the_source() -> None:
    recorded = kernels("recorded", 90)
    for name, made in kernels("compiled", 90).items():
        assert (made["threads"], made["block"]) == (recorded[name]["threads"], recorded[name]["block"])
