# SPDX-License-Identifier: Apache-2.0
"""Arguments are read as cuda.bindings read them. The bindings are the oracle: they read all arguments before they look
for the driver's library, which is not on this machine, so that nothing is ever called.
"""

from __future__ import annotations

import array
import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as real

from drvfuse.emu.wire import code_inputs, host_inputs, inputs
from drvfuse.emu.wire.arguments import Address, Invalid
from drvfuse.emu.wire.coder import Coder, coder
from drvfuse.emu.wire.scalars import Enumeration
from drvfuse.emu.wire.signatures import SIGNATURES
from drvfuse.emu.wire.table import ATTRIBUTES


@pytest.fixture(scope="module", autouse=True)
def no_driver() -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    pytest.skip("a driver is installed, which would run the calls")


class Index:
    """An object that Python accepts as an integer and Cython does not."""

    def __index__(self) -> int:
        return 5


class Number(int):
    """An object that Python and Cython accept as an integer."""


class Convertible:
    def __int__(self) -> int:
        return 5


class Broken:
    def __int__(self) -> Any:
        return "five"


NUMBERS: tuple[Any, ...] = (
    *(0, 1, True, -1, 255, 256, 65536, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, -(2**31) - 1, -(2**63) - 1, 2**2000),
    *(64.0, 1.5, -0.5, float("nan"), float("inf"), 1e30, 1j),
    *(
        np.int8(-1),
        np.uint64(7),
        np.float32(64),
        np.bool_(1),
        np.array(5),
        np.array(5.5),
        np.array([5]),
        np.zeros((2, 2)),
    ),
    *(Index(), Number(3), Convertible(), Broken(), ctypes.c_int(4), ctypes.c_void_p(4)),
)
OTHERS: tuple[Any, ...] = (
    *("64", "", b"64", b"", bytearray(b"a\0b"), memoryview(b"abcd"), memoryview(b"abcd")[::2], array.array("i", [1])),
    *((), [], (1,), [1], [None], [1.5], {}, {1: 2}, set(), iter([]), object(), int, len, lambda: 0),
    *(np.zeros(3, "M8[s]"), np.zeros((4, 4))[:, 1], np.zeros((2, 3)).T, (ctypes.c_int * 3)()),
    *(real.CUdeviceptr(5), real.CUdevice(3), real.CUstream(7), real.CUevent(7), real.CUresult(1), real.CUlimit(1)),
    *([real.CUgraphNode(1)], (real.CUgraphNode(1),), [real.CUstream(1)], [real.CUpointer_attribute(1)]),
    *(real.CUmemAccessDesc(), [real.CUmemAccessDesc()], real.CUlaunchConfig(), real.cuuint64_t(9)),
)
FEW: tuple[Any, ...] = (None, -1, 1.5, "x", object())
PARAMETERS: tuple[Any, ...] = tuple(
    ((value,), (kind,))
    for value in (1, -1, 300, 2**31, 2**40, 2**63, 2**64, 1.5, True, "a", b"a", None, np.int32(1), np.float32(1), [1])
    for kind in (
        *(ctypes.c_int, ctypes.c_uint, ctypes.c_byte, ctypes.c_ubyte, ctypes.c_longlong, ctypes.c_float),
        *(ctypes.c_double, ctypes.c_char, ctypes.c_bool, ctypes.c_void_p, None, int),
    )
) + (
    *(((), ()), ((1,), ()), ((1,), (2, 3)), [[], []], ([], []), ((),)),
    *(((real.CUdeviceptr(1),), (kind,)) for kind in (None, ctypes.c_void_p)),
    *(((value,), (None,)) for value in (real.CUresult(0), real.CUuuid())),
    *(((value,), (ctypes.c_void_p,)) for value in (ctypes.c_void_p(5), np.zeros(1))),
    *(((ctypes.c_float(1),), (ctypes.c_double,)), ((ctypes.c_int(1),), (ctypes.c_uint,))),
)


def neutral(item: inputs.Input) -> Any:
    """A valid value for a parameter."""
    if isinstance(item, inputs.List):
        return []
    if isinstance(item, inputs.Struct):
        return getattr(real, item.parameter.type)()
    if isinstance(item, inputs.Text | host_inputs.Buffer):
        return b""
    if isinstance(item, inputs.Moved):
        return None
    if isinstance(item, inputs.Attribute):
        return real.cuuint64_t(1)
    if isinstance(item.scalar, Enumeration):
        members = list(item.scalar.kind)
        known = [m for m in members if any(m.name.endswith(k) for k in ATTRIBUTES.get(item.parameter.type, ()))]
        return next((m for m in known if m.name.endswith("RELEASE_THRESHOLD")), (known or members)[0])
    return 0


def outcome(call: Any) -> tuple[type, str] | None:
    """The type and message of the exception that the call raises; None if it accepts its arguments."""
    try:
        call()
    except Invalid:
        return None
    except Exception as error:
        if "NVIDIA driver library" in str(error) or "libcuda" in str(error):
            return None
        return type(error), str(error).split(" but expected")[0]
    return None


WORDLESS = (inputs.Kind, code_inputs.Parameters, inputs.Attribute, code_inputs.Options)


def cases(made: Coder, at: int, values: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    name = made.inputs[at].name
    counted = any(p.extent == name for p in made.signature.returned)  # the bindings allocate an array of this length
    for value in values:
        if counted and isinstance(value, int | float | np.number) and not abs(value) < 1 << 16:
            continue
        arguments = [neutral(item) for item in made.inputs]
        arguments[at] = value
        yield tuple(arguments)


def compare(made: Coder, at: int, values: tuple[Any, ...]) -> int:
    """Check that the bindings and drvfuse accept the same values and raise the same errors.

    Returns the number of values. The texts of errors are not compared, and for some kinds of arguments their types are
    not either, as releases of the bindings differ.
    """
    function, item = getattr(real, made.signature.name), made.inputs[at]
    wordless = isinstance(item.scalar, Enumeration) or isinstance(item, WORDLESS)
    count = 0
    for arguments in cases(made, at, values):
        theirs, ours = (outcome(lambda f=f, a=arguments: f(*a)) for f in (function, lambda *a: made.read(a, {})))
        if theirs is not None and ours is not None and wordless:
            theirs, ours = ((Exception if isinstance(item, inputs.Kind) else e[0], "") for e in (theirs, ours))
        assert ours == theirs, (made.signature.name, item.name, arguments[at])
        count += 1
    return count


REFUSED = {"cuMulticastCreate"}  # the test suite refuses to call it on a CUDA driver (tests/multicast_refusal.py)
KNOWN = sorted(name for name in SIGNATURES if hasattr(real, name) and name not in REFUSED)


@pytest.mark.filterwarnings("ignore")
def test_every_kind_of_argument_is_read_as_the_bindings_read_it() -> None:
    """Each kind of argument is tried with many values on one function."""
    seen: set[Any] = set()
    count = 0
    for name in KNOWN:
        made = coder(name)
        for at, item in enumerate(made.inputs):
            p = item.parameter
            values = item.name == "kernelParams"
            kind = (type(item), p.type if isinstance(item, inputs.List) else item.scalar.c, p.stars, values)
            if kind not in seen:
                seen.add(kind)
                count += compare(made, at, (*NUMBERS, *OTHERS, *(PARAMETERS if values else ())))
    assert len(seen) > 40 and count > 3000


@pytest.mark.filterwarnings("ignore")
def test_every_argument_of_every_function_is_read_as_the_bindings_read_it() -> None:
    assert sum(compare(coder(name), at, FEW) for name in KNOWN for at in range(len(coder(name).inputs))) > 1500


@pytest.mark.parametrize("name", ["cuCtxGetCurrent", "cuMemAlloc", "cuMemcpyHtoD", "cuGraphGetNodes", "cuCtxSetLimit"])
def test_arguments_are_counted_and_named_as_by_the_bindings(name: str) -> None:
    made = coder(name)
    names, function = [p.name for p in made.signature.given], getattr(real, name)
    for count in range(len(names) + 3):
        for kwargs in ({}, dict.fromkeys(names[-1:], 0), {"nothing": 0}, dict.fromkeys(names, 0)):
            args = (0,) * count
            theirs = outcome(lambda a=args, k=kwargs: function(*a, **k))
            assert outcome(lambda a=args, k=kwargs: made.read(a, k)) == theirs, (args, kwargs)


def test_the_emulated_function_gets_converted_arguments() -> None:
    rows = np.arange(6, dtype=np.uint16)
    read = coder("cuMemcpyHtoD").read((real.CUdeviceptr(64), rows, 12.0), {})
    assert read == [64, rows.ctypes.data, 12] and type(read[1]) is Address and read[1].keep is rows
    assert [type(value) for value in coder("cuMemcpyHtoD").read((np.int64(3), None, np.uint8(2)), {})] == [int] * 3
    limit = real.CUlimit.CU_LIMIT_STACK_SIZE
    assert coder("cuCtxSetLimit").read((0, 3), {}) == [limit, 3]
    assert type(coder("cuCtxSetLimit").read((0, 3), {})[0]) is real.CUlimit
    assert coder("cuModuleGetFunction").read((real.CUmodule(5), bytearray(b"ab\0c")), {}) == [5, b"ab"]
    assert coder("cuModuleLoadData").read((rows,), {}) == [bytes(rows)]
    assert coder("cuGraphGetNodes").read((1,), {}) == [1, 0]
    with pytest.raises(Invalid):
        coder("cuCtxSetLimit").read((77, 3), {})
