# SPDX-License-Identifier: Apache-2.0
"""The structures and numbers that Python and C++ share are the same in both; a kernel computes those of C++."""

from __future__ import annotations

import ctypes
from enum import IntEnum

import numpy as np
import pytest
from cuda.bindings import nvrtc
from engine_harness import Rig

from drvfuse.emu import abi
from drvfuse.emu.abi import layout, race_structs, structs
from drvfuse.emu.abi.header import CONSTANTS, header
from drvfuse.emu.abi.layout import ENUMS
from drvfuse.emu.machine.run.engine_launch import EngineLaunch
from drvfuse.emu.native import loader

STRUCTURES = {name: getattr(structs, name, None) or getattr(race_structs, name) for name in layout.DECLARATIONS}


def values_in_cpp(expressions: list[str]) -> list[int]:
    """The values of C++ expressions that use names of the header, as a kernel computes them."""
    rig = Rig()
    source = f'{header()}\nextern "C" __global__ void k(u64* out) {{\n' + "".join(
        f"    out[{i}] = (u64)({expression});\n" for i, expression in enumerate(expressions)
    )
    _, program = nvrtc.nvrtcCreateProgram((source + "}").encode(), b"abi.cu", 0, [], [])
    options = [b"-arch=compute_90a", b"-std=c++17", b"--device-as-default-execution-space"]
    (code,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    assert code == nvrtc.nvrtcResult.NVRTC_SUCCESS
    _, size = nvrtc.nvrtcGetPTXSize(program)
    text = bytearray(size)
    nvrtc.nvrtcGetPTX(program, text)
    nvrtc.nvrtcDestroyProgram(program)
    module = rig.engine.load(text.rstrip(b"\0").decode())
    out = rig.empty(8 * len(expressions))
    blob = rig.window.alloc(max(module.globals_bytes, 1), 0, 0xFF, 0xFF, initialised=True)
    launch = EngineLaunch(
        rig.engine, module, "k", device=0, grid=(1, 1, 1), block=(1, 1, 1), smem=0,
        params=out.to_bytes(8, "little"), globals_addr=blob, max_resident=1,
    )  # fmt: skip
    assert rig.finish(launch) and launch.fault is None
    values = rig.read(out, np.uint64, len(expressions)).tolist()
    rig.close()
    return values


def test_structures_are_the_same_in_python_and_in_cpp() -> None:
    """The size of each structure, and the offset and size of each member."""
    mine = {}
    for name, structure in STRUCTURES.items():
        mine[f"sizeof({name})"] = ctypes.sizeof(structure)
        assert structure._fields_, name
        for member, _ in structure._fields_:
            field = getattr(structure, member)
            mine[f"&(({name}*)0)->{member}"] = field.offset
            mine[f"sizeof((({name}*)0)->{member})"] = field.size
    assert dict(zip(mine, values_in_cpp(list(mine)), strict=True)) == mine


def test_the_numbers_are_the_same_in_python_and_in_cpp() -> None:
    numbers = {f"{prefix}{member.name}": int(member) for enum, prefix in ENUMS.items() for member in enum}
    numbers |= {name: getattr(abi, name) for names in CONSTANTS.values() for name in names}
    assert dict(zip(numbers, values_in_cpp(list(numbers)), strict=True)) == numbers


def test_every_enum_but_clock_is_in_the_header_of_the_native_runtime() -> None:
    enums = {value for value in vars(abi).values() if isinstance(value, type) and issubclass(value, IntEnum)}
    assert enums - {IntEnum, *ENUMS} == {abi.Clock}


def test_elements_of_arrays_have_offsets() -> None:
    assert layout.offset(structs.Thread, "tid", 2) == structs.Thread.tid.offset + 8  # type: ignore[attr-defined]
    assert layout.offset(structs.Block, "barrier", 3) == layout.offset(structs.Block, "barrier") + 3 * 40
    with pytest.raises(AttributeError):
        layout.offset(structs.Thread, "no_such_member")


def test_the_runtime_is_compiled_with_the_header_and_has_no_layout_of_its_own() -> None:
    """No file of the runtime defines a structure of `layout.DECLARATIONS` a second time, by hand."""
    for path in loader._HERE.glob("*.cu*"):
        for name in layout.DECLARATIONS:
            assert f"struct {name} {{" not in path.read_text(), f"{path.name} defines {name}"
