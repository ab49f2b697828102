# SPDX-License-Identifier: Apache-2.0
"""The emulated functions have the names, arguments and results of cuda.bindings.driver."""

from __future__ import annotations

import inspect
import re

import pytest
from cuda.bindings import driver as real

from drvfuse.emu import Machine
from drvfuse.emu import driver as emulated
from drvfuse.emu.driver import ENTRIES

# These functions return (CUresult, value); some releases of the bindings document only the CUresult, or document both
# results separately.
HALF_DOCUMENTED = ("cuMemPoolGetAccess", "cuMemPoolGetAttribute", "cuGetExportTable")


def _real_parameters(name: str) -> list[str] | None:
    """Argument names from the first line of the binding's docstring; None where it has none."""
    line = (getattr(real, name).__doc__ or "").split("\n")[0]
    found = re.fullmatch(rf"{name}\((.*)\)", line)
    if found is None:
        return None
    flat = re.sub(r"\[[^][]*\]", "", re.sub(r"\[[^][]*\]", "", found[1]))
    arguments = [a.split(":")[0].split("=")[0].strip() for a in flat.split(",") if a.strip()]
    return [a.split(" ")[-1].lstrip("*") for a in arguments]


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_arguments_are_those_of_the_bindings(name: str) -> None:
    expected = _real_parameters(name)
    if expected is None:
        pytest.skip(f"the installed bindings have no signature of {name}")
    own = list(inspect.signature(ENTRIES[name].function).parameters)[1:]
    assert own == expected


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_functions_return_as_many_results_as_the_bindings(name: str) -> None:
    text = getattr(real, name).__doc__ or ""
    returns = re.search(r"Returns\n-+\n(.*?)(\n\n|$)", text, re.DOTALL)
    if returns is None or name in HALF_DOCUMENTED:
        pytest.skip(f"the installed bindings do not document the results of {name}")
    listed = [line for line in returns[1].split("\n") if not line.startswith(" ")]
    assert len(listed) == ENTRIES[name].outputs + 1, listed


def test_enums_and_structs_are_the_bindings_own() -> None:
    assert emulated.CUresult is real.CUresult
    assert emulated.CUdevice_attribute is real.CUdevice_attribute
    assert emulated.CUdeviceptr is real.CUdeviceptr
    assert emulated.CU_STREAM_LEGACY is real.CU_STREAM_LEGACY


def test_a_function_that_is_not_emulated_says_so_when_called() -> None:
    assert emulated.cuTexObjectDestroy(0) == (real.CUresult.CUDA_ERROR_NOT_SUPPORTED,)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError):
        emulated.cuNoSuchThing  # noqa: B018


def test_nothing_works_before_cuInit() -> None:
    with Machine(devices=2) as machine:
        cuda = machine.driver
        assert cuda.cuDeviceGetCount() == (real.CUresult.CUDA_ERROR_NOT_INITIALIZED, None)
        assert cuda.cuInit(0) == (real.CUresult.CUDA_SUCCESS,)
        assert cuda.cuDeviceGetCount() == (real.CUresult.CUDA_SUCCESS, 2)


def test_an_enum_argument_may_be_a_number_but_not_none() -> None:
    emulated.cuInit(0)
    count = real.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    assert emulated.cuDeviceGetAttribute(int(count), 0) == emulated.cuDeviceGetAttribute(count, 0)
    assert emulated.cuDeviceGetAttribute(9999, 0) == (real.CUresult.CUDA_ERROR_INVALID_VALUE, None)
    with pytest.raises(TypeError, match="'attrib' must not be None"):
        emulated.cuDeviceGetAttribute(None, 0)


def test_every_result_has_a_name_and_a_text() -> None:
    for code in real.CUresult:
        assert emulated.cuGetErrorName(code) == (real.CUresult.CUDA_SUCCESS, code.name.encode())
        assert emulated.cuGetErrorString(code)[1]
