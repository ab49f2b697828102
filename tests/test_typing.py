# SPDX-License-Identifier: Apache-2.0
"""Type checks of the public API: mypy knows every name, accepts correct programs in strict mode, and reports misuse."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import drvfuse as df

pytest.importorskip("mypy", reason="mypy comes with the extra `lint`, which CI installs")

ROOT = Path(df.__file__).parent.parent

USE = """
import ctypes
from typing import assert_type

import ml_dtypes
import numpy as np

import drvfuse as df
from drvfuse import coat
from drvfuse.emu import Machine, Report

machine = df.emu.Machine(devices=2, race=True)
assert_type(machine.reports, list[Report])
with df.Group.local(2, driver=machine) as group:
    assert_type(group[0], df.Rank)
    device: df.Device = group[0].device
    inputs = [rank.array(np.zeros((4, 32), ml_dtypes.bfloat16)) for rank in group]
    assert_type(inputs, list[df.Array])
    assert_type(df.allreduce(group, inputs), list[df.Array])
    assert_type(df.allreduce.prepare(group, inputs).launch(), list[df.Array])
    assert_type(df.broadcast(group, inputs, root=1), list[df.Array])
    assert_type(df.all_to_all.prepare(group, inputs, inputs, algo="put").launch(), list[df.Array])
    gathered = df.all_gather(group, inputs, scales=inputs)
    assert_type(gathered, df.Gathered)
    assert_type(gathered.output, list[df.Array])
    assert_type(gathered.scales, list[df.Array] | None)
    with group.symmetric(64, multicast=True) as buffer:
        assert_type(buffer.multicast_ptr, int | None)
    assert_type(df.Multicast.granularity([rank.device for rank in group]), int)
    result = df.allreduce_rmsnorm_fp8(group, inputs, inputs, epsilon=1e-6)
    assert_type(result.output, list[df.Array])
    assert_type(result.scales, list[df.Array] | None)
    array = inputs[0][1:3].reshape((-1, 8))[0]
    assert_type(array, df.Array)
    array.copy_from(np.zeros(8, np.float32))
    array.copy_from(inputs[1])
    with group.symmetric(4096) as buffer:
        assert_type(buffer.arrays((8, 8), "float32", offset=256), list[df.Array])
    table: str = df.Trace(group).summary()
same: bool = array.dtype == "float32"
assert_type(df.view(array.ptr, (8, 8), np.dtype("float32"), device, owner=array), df.Array)
assert_type(df.compile("", driver="emu"), df.Module)
launch = df.compile("", driver=machine)["name"].prepare(1, (32, 1), array, 3, 0.5, ctypes.Structure(), np.int32(3), b"")
assert_type(launch, df.Launch)
launch(1)
launch(device.stream)
assert_type(df.Stream(device, priority=-1).record(), df.Event)
with df.Graph.capture([device.stream]) as graph:
    assert_type(graph, df.Graph)
assert_type(df.last_calls(4), list[str])
machine.declare_polled(array)


class Foreign:
    def __dlpack__(self, *, stream: int | None = None) -> object: ...

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


def divide(x: df.ArrayLike) -> None:
    coat.fp8_division(x, 16, "E4M3")
    array.copy_from(x)


normed, unnormed = df.gemv_partial_norm(array, array, Foreign(), n_normed=8, epsilon=1e-6)
assert_type(normed, df.Array)
rows = df.rmsnorm_fp8(array, Foreign(), epsilon=1e-6, quantisation=df.Quantisation.mxfp8(layout="tiles"))
assert_type((rows.output, rows.scales), tuple[df.Array, df.Array | None])
qy, s_y, qy_t, (_, rstd, num_warps) = coat.fp8_rmsnorm_forward(array, array, Foreign(), 16, 1e-5)
assert_type((qy, s_y, qy_t, rstd, num_warps), tuple[df.Array, df.Array, df.Array, df.Array, int])
divide(array)
divide(Foreign())
"""
MISUSE = """
import drvfuse as df
from drvfuse import coat

df.no_such_name
df.fp8_division
coat.no_such_name
df.emu.no_such_name
df.device(0).empty((3,), 5)
df.device(0).empty("shape", "float32")
df.device(0, driver=5)
df.device(0).zeros(3, "float32").copy_from(object())
df.compile("")["name"].prepare(1, 1, object())
df.Stream.wrap(df.device(0), None)
"""


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """The lines of each program that mypy refuses; one run for all, as most of its time goes into reading drvfuse."""
    folder = tmp_path_factory.mktemp("programs")
    names = [f"{module.__name__}.{name}" for module in (df, df.emu, df.coat) for name in dir(module)]
    names = [name for name in names if "__" not in name]
    programs = {"use": USE, "misuse": MISUSE, "names": "import drvfuse\n" + "\n".join(names)}
    for name, text in programs.items():
        (folder / f"{name}.py").write_text(text)
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", f"--cache-dir={folder}/cache"]
    command += [f"{folder}/{name}.py" for name in programs]
    result = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "MYPYPATH": str(ROOT)}, capture_output=True, text=True
    )
    found: dict[str, list[int]] = {name: [] for name in programs}
    for line in result.stdout.splitlines():
        if ": error: " in line:
            path, number, _ = line.split(":", 2)
            found[Path(path).stem].append(int(number))
    return found


@pytest.mark.parametrize("name", ["use", "names"])
def test_a_correct_program_passes_strict_type_checks(complaints: dict[str, list[int]], name: str) -> None:
    assert complaints[name] == []


def test_type_checkers_report_every_misuse(complaints: dict[str, list[int]]) -> None:
    lines = MISUSE.splitlines()
    assert complaints["misuse"] == [n for n, line in enumerate(lines, 1) if line.startswith(("df.", "coat."))]
