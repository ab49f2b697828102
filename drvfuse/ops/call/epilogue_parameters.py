# SPDX-License-Identifier: Apache-2.0
"""An epilogue on given devices: its C++ text, and for each device a structure with its parameters."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from ...dtypes import DType
from ...errors import ArgumentError, CompileError, shown
from ...runtime import reach
from ...runtime.device import Device
from . import operands as checked
from .epilogue import Epilogue, Replicated, Scalar, explain
from .operands import Operand

_SCALARS = {"float32": ctypes.c_float, "int32": ctypes.c_int32}


@dataclass(frozen=True)
class EpilogueParameters:
    """An epilogue and its checked parameters on each device.

    `text` is C++ that defines `EpilogueParams` and `epilogue` for the kernel. It depends on the expression and the
    types of the parameters alone. `structures[i]` is the `EpilogueParams` of the device of local rank i, `operands[i]`
    the arrays that it points to.
    """

    devices: Sequence[Device]
    epilogue: Epilogue
    text: str
    structures: list[ctypes.Structure]
    operands: list[list[Operand]]

    @classmethod
    def of(cls, devices: Sequence[Device], epilogue: Epilogue) -> Self:
        """Check the parameters for `devices`, which belong to one driver, and fill a structure for each device.

        Raises ArgumentError, which names the wrong parameter.
        """
        if not isinstance(epilogue, Epilogue):
            raise ArgumentError("epilogue", shown(epilogue), "a drvfuse.Epilogue or None")
        parameters = {name: _parameter(devices, name, value) for name, value in epilogue.parameters.items()}
        kind = _structure(parameters)
        structures = [
            kind(**{name: parameter.values[position] for name, parameter in parameters.items()})
            for position in range(len(devices))
        ]
        operands = [[p.operands[i] for p in parameters.values() if p.is_array] for i in range(len(devices))]
        return cls(devices, epilogue, _text(epilogue.expression, parameters), structures, operands)

    @property
    def described(self) -> str:
        """The expression and the types of its parameters, which must be equal on all ranks."""
        parameters = self.text.partition("\n")[0].partition("{")[2].rpartition("}")[0].strip()
        return f'epilogue "{self.epilogue.expression}" with {parameters}'

    @property
    def kernel_text(self) -> str:
        """The text before a kernel that is compiled with DRVFUSE_EPILOGUE."""
        return f'#include "common/prelude.cuh"\n{self.text}\n'

    def replaced(self, algo: str, parameters: dict[str, Any]) -> Self:
        """Return a copy with some parameters replaced. Raises ArgumentError if their types differ, which would need
        another kernel."""
        new = self.of(self.devices, self.epilogue.with_(**parameters))
        if new.text != self.text:
            raise ArgumentError("parameters", "of other types", "of the types that the epilogue was made with")
        return new

    def explained(self, error: CompileError) -> CompileError:
        """Return the compile error of a kernel with this epilogue, with each place shown in the expression."""
        expression = self.epilogue.expression
        return CompileError(f"epilogue {expression!r}", explain(error.log, expression))


@dataclass(frozen=True)
class _Parameter:
    dtype: DType
    is_array: bool
    values: list[float | int]
    operands: list[Operand]

    @property
    def cxx(self) -> str:
        return f"const {self.dtype.cxx}*" if self.is_array else self.dtype.cxx


def _parameter(devices: Sequence[Device], name: str, value: Any) -> _Parameter:
    argument = f"epilogue parameter {name}"
    entries = list(value.copies) if isinstance(value, Replicated) else value if isinstance(value, list) else None
    if entries is not None and len(entries) != len(devices):
        raise ArgumentError(
            argument, f"a list of {len(entries)}", f"a list of {len(devices)}, one value per local rank"
        )
    if entries is None:
        entries = [value] * len(devices)
        names = [argument] * len(devices)
    else:
        names = [f"{argument}[{position}]" for position in range(len(devices))]
    if all(isinstance(entry, Scalar) for entry in entries):
        found, operands = [(entry.dtype, entry.value) for entry in entries], []
    else:
        operands = [_array(device, n, entry) for device, n, entry in zip(devices, names, entries, strict=True)]
        found = [(operand.dtype, operand.ptr) for operand in operands]
    dtype = found[0][0]
    for entry_name, (other, _) in zip(names, found, strict=True):
        if other != dtype:
            raise ArgumentError(entry_name, f"of dtype {other}", f"of dtype {dtype}, that of {names[0]}")
    return _Parameter(dtype, bool(operands), [number for _, number in found], operands)


def _array(device: Device, name: str, value: Any) -> Operand:
    if isinstance(value, Scalar):
        raise ArgumentError(name, shown(value), "an array, as the parameter is on the other ranks")
    operand = checked.whole(name, value, device.driver)
    if not operand.array.size:
        raise ArgumentError(name, f"of shape {operand.array.shape}", "an array of at least one element")
    if not reach.readable_by(operand.array.ptr, operand.array.nbytes, device):
        raise ArgumentError(
            name,
            f"on device {operand.array.device.index}, which device {device.index} cannot read",
            f"readable on device {device.index}: pass a list with one array per rank, or Replicated([...])",
        )
    return operand


def _structure(parameters: Mapping[str, _Parameter]) -> type[ctypes.Structure]:
    fields: list[Any] = [
        (name, ctypes.c_uint64 if p.is_array else _SCALARS[p.dtype.name]) for name, p in parameters.items()
    ]
    return type("EpilogueParams", (ctypes.Structure,), {"_fields_": fields or [("unused", ctypes.c_int32)]})


def _text(expression: str, parameters: Mapping[str, _Parameter]) -> str:
    fields = "".join(f" {p.cxx} {name};" for name, p in parameters.items()) or " int unused;"
    local = "".join(f"    const auto {name} = drvfuse_params.{name};\n" for name in parameters)
    return (
        f"struct EpilogueParams {{{fields} }};\n"
        "__device__ __forceinline__ float epilogue(float x, i64 i, i64 row, i64 col, int rank,\n"
        "                                          const EpilogueParams& drvfuse_params) {\n"
        f"{local}"
        "    return static_cast<float>(\n"
        '#line 1 "epilogue"\n'
        f"{expression}\n"
        "    );\n"
        "}"
    )
