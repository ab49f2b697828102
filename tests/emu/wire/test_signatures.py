# SPDX-License-Identifier: Apache-2.0
"""The table of prototypes against the emulated functions and against cuda.bindings."""

from __future__ import annotations

import ctypes
import inspect
import re
from pathlib import Path
from typing import Any

import cuda.bindings
import pytest
from cuda.bindings import driver as real

from drvfuse.emu.bindings import MAJOR
from drvfuse.emu.driver import ENTRIES
from drvfuse.emu.wire import structs
from drvfuse.emu.wire.coder import coder
from drvfuse.emu.wire.signatures import ALL, SIGNATURES, read
from drvfuse.emu.wire.table import ATTRIBUTES


def _declared() -> dict[str, list[str]]:
    """C types of the parameters of all functions, from the declarations that the wheel of cuda.bindings has."""
    path = Path(cuda.bindings.__file__).with_name("cydriver.pxd")
    if not path.exists():
        pytest.skip("these bindings come without their declarations")
    found = {}
    for name, text in re.findall(r"^cdef CUresult (cu\w+)\((.*?)\) except", path.read_text(), re.MULTILINE):
        found[name] = [re.sub(r" \w+$", "", p) for p in text.split(", ") if p]
    return found


def test_every_emulated_function_is_in_the_table_and_no_other() -> None:
    missing = set(SIGNATURES) - set(ENTRIES)
    assert set(ENTRIES) <= set(SIGNATURES)
    assert all(not hasattr(real, name) for name in missing)  # some releases of the bindings lack them


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_arguments_and_results_are_those_of_the_emulated_function(name: str) -> None:
    signature = SIGNATURES[name]
    assert [p.name for p in signature.given] == list(inspect.signature(ENTRIES[name].function).parameters)[1:]
    assert len(signature.returned) == ENTRIES[name].outputs


def test_the_c_types_are_those_of_the_header() -> None:
    declared = _declared()
    known = [name for name in ENTRIES if name in declared]  # bindings 13.0 lack a function that 13.5 have
    assert len(known) > 150
    for name in known:
        assert [p.c for p in SIGNATURES[name].parameters] == declared[name], name


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_every_kind_of_argument_can_be_encoded(name: str) -> None:
    made = coder(name)
    assert len(made.inputs) == len(made.signature.given)
    assert len(made.outputs) == len(made.signature.returned)


def test_extents_refer_to_parameters() -> None:
    for signature in ALL:
        names = {p.name for p in signature.parameters}
        assert all(p.extent in names for p in signature.parameters if p.extent), signature.name


def test_both_major_versions_have_one_form_of_each_function() -> None:
    for major in (12, 13):
        names = [s.name for s in ALL if major in s.majors]
        assert len(names) == len(set(names))
    assert MAJOR in (12, 13)


def test_attribute_types_are_those_of_the_bindings() -> None:
    for enum, kinds in ATTRIBUTES.items():
        known = [member.name for member in getattr(real, enum)]
        for attribute in kinds:
            assert sum(name.endswith(f"_{attribute}") for name in known) == 1, attribute


_PLAIN = [field for field, kind in structs.CUdevprop._fields_ if kind is ctypes.c_int]
_NUMBERS = (ctypes.c_uint8, ctypes.c_uint16, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_size_t)


def _same_places(value: Any, place: Any) -> int:
    """Check that the fields of a structure of the bindings have the offsets of the table. Returns their number."""
    checked = 0
    for field, kind in place._fields_:
        if isinstance(kind, type) and issubclass(kind, ctypes.Structure):
            checked += _same_places(getattr(value, field), getattr(place, field))
        elif kind in _NUMBERS or field in ("id", "numExecAffinityParams", *_PLAIN):
            number = 7 + checked
            setattr(value, field, number)
            assert int(getattr(place, field)) == number, field
            checked += 1
    return checked


_MERE_BYTES = {
    *("CUlaunchAttribute", "CUuuid", "CUexecAffinityParam", "CUstreamBatchMemOpParams", "CUkernelNodeAttrValue"),
    *("CUgraphNodeParams", "CUDA_HOST_NODE_PARAMS", "CUgraphExecUpdateResultInfo"),  # compared in the test below
    *("CUstreamAttrValue", "CUipcMemHandle", "CUipcEventHandle", "CUmemPoolPtrExportData"),
}


@pytest.mark.parametrize("name", sorted(set(structs.STRUCTS) - _MERE_BYTES))
def test_structures_have_the_layout_of_the_bindings(name: str) -> None:
    value = getattr(real, name)()
    assert _same_places(value, structs.STRUCTS[name].from_address(int(value.getPtr())))


def test_node_parameters_have_the_layout_of_the_bindings() -> None:
    value = real.CUgraphNodeParams()
    plain = structs.CUgraphNodeParams.from_address(int(value.getPtr()))
    value.type = real.CUgraphNodeType.CU_GRAPH_NODE_TYPE_HOST
    value.kernel.sharedMemBytes, value.kernel.kernelParams = 3, 4
    assert (plain.type, plain.of.kernel.sharedMemBytes, plain.of.kernel.kernelParams) == (3, 3, 4)
    value.memcpy.copyParams.Depth = 5
    assert plain.of.memcpy.copyParams.Depth == 5
    value.alloc.bytesize, value.alloc.dptr = 6, real.CUdeviceptr(7)
    assert (plain.of.alloc.bytesize, plain.of.alloc.dptr) == (6, 7)
    value.memOp.count = 8
    assert plain.of.memOp.count == 8
    value.host.userData = 9  # the member is at the same offset in the binding's structure
    assert plain.of.host.userData == 9
    info = real.CUgraphExecUpdateResultInfo()
    info.errorNode, info.errorFromNode = real.CUgraphNode(10), real.CUgraphNode(11)
    found = structs.CUgraphExecUpdateResultInfo.from_address(int(info.getPtr()))
    assert (found.errorNode, found.errorFromNode) == (10, 11)


def test_a_prototype_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(ValueError, match="a prototype"):
        read("nonsense;")
    with pytest.raises(ValueError, match="a parameter"):
        read("cuNothing(int);")


def test_arguments_are_bound_by_position_and_by_name() -> None:
    memset = SIGNATURES["cuMemsetD8"]
    assert memset.bind((1, 2), {"N": 3}) == (1, 2, 3)
    assert SIGNATURES["cuGraphGetNodes"].bind((1,), {}) == (1, 0)
    for args, kwargs, text in (
        ((1, 2, 3, 4), {}, "takes exactly 3"),
        ((1, 2), {"n": 3}, "unexpected"),
        ((1, 2, 3), {"N": 3}, "multiple values for keyword"),
        ((1, 2), {}, "takes exactly 3 positional arguments .2 given"),
    ):
        with pytest.raises(TypeError, match=text):
            memset.bind(args, kwargs)
