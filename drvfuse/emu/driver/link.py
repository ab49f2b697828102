# SPDX-License-Identifier: Apache-2.0
"""Linking of PTX into one module (`ptx.linker`). The resulting image is PTX, which all functions for loading accept."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

from ...ptx.ir import PtxError
from ...ptx.linker import LinkError, Unit, link
from ...ptx.parser import parse
from ...ptx.text import head
from ..bindings import R, T
from ..findings.reports import Report
from ..machine.objects import Object
from ..machine.process.failure import Failure
from ..machine.process.process import Process
from ..space import mapped
from ..wire.arguments import Address
from ..wire.jit_options import ErrorLog
from .entry import check, entry, present, text, unsupported
from .image import errors_logged, file_content, ptx_of, refused, suits
from .module import load

_IN = T.CUjitInputType
_PTX = (_IN.CU_JIT_INPUT_PTX, _IN.CU_JIT_INPUT_FATBINARY)
_CODE = (_IN.CU_JIT_INPUT_CUBIN, _IN.CU_JIT_INPUT_OBJECT)
"""Types of inputs that are accepted because they may be PTX in a program that runs on the emulated driver
(`emu.program`).
"""


def _state(proc: Process, value: Any) -> Link:
    return proc.get(value, Link)


@entry(1, unsafe=True)
def cuLinkCreate(proc: Process, numOptions: int, options: Any, optionValues: Any) -> Any:
    """Makes a linker. Later calls for it write their failures to the error buffer of the options; this buffer must live
    as long as the linker. The info buffer is not written, as no assembler runs here. Other options have no effect.
    """
    proc.current()
    return T.CUlinkState(proc.add(Link(ErrorLog.of(options, optionValues))).handle)


@entry(unsafe=True)
def cuLinkAddData(
    proc: Process,
    state: Any,
    typename: Any,
    data: Any,
    size: int,
    name: bytes,
    numOptions: int,
    options: Any,
    optionValues: Any,
) -> None:
    """Adds PTX, or a fat binary that contains PTX. Other inputs are refused with NOT_SUPPORTED. Invalid PTX is refused
    too.
    """
    found = _state(proc, state)
    with errors_logged(ErrorLog.of(options, optionValues), found.log):
        _add(proc, found, typename, present(mapped.copied(data, size)), text(name) or f"input {len(found.units) + 1}")


@entry(unsafe=True)
def cuLinkAddFile(
    proc: Process, state: Any, typename: Any, path: bytes, numOptions: int, options: Any, optionValues: Any
) -> None:
    found = _state(proc, state)
    with errors_logged(ErrorLog.of(options, optionValues), found.log):
        _add(proc, found, typename, file_content(path), text(path))


def _add(proc: Process, state: Link, kind: Any, content: bytes, name: str) -> None:
    check(state.image is None)
    code = kind in _CODE and head(content.split(b"\0", 1)[0].decode(errors="replace"))[1]
    if kind not in _PTX and not code:
        what = kind.name.removeprefix("CU_JIT_INPUT_").lower()
        message = f"{name} is an input of the type {what}: the emulated driver links PTX, alone or in fat binaries"
        raise unsupported(message)
    ptx = ptx_of(proc, content)
    try:
        parse(ptx)
        unit = Unit.of(name, ptx)
    except PtxError as error:
        file, line = error.source or (name, error.line)
        raise Failure(R.CUDA_ERROR_INVALID_PTX, Report("module", f"{name}: {error}", file=file, line=line)) from None
    if not suits(proc, unit.target):
        words = f"{name} is PTX for {unit.target or 'no device'}, and the devices are {proc.machine.arch}"
        raise refused(R.CUDA_ERROR_INVALID_PTX, words)
    state.units.append(unit)


@entry(2, unsafe=True)
def cuLinkComplete(proc: Process, state: Any) -> tuple[Address, int]:
    """Returns (address, bytes) of the image, which the linker owns. The image is PTX that ends with a NUL; `bytes` does
    not count the NUL. CUDA_ERROR_INVALID_IMAGE if symbols are missing or defined twice; the report names them.
    """
    found = _state(proc, state)
    with errors_logged(found.log):
        check(found.image is None)
        if not found.units:
            raise refused(R.CUDA_ERROR_INVALID_IMAGE, "nothing was added to the linker")
        try:
            linked = link(found.units).encode()
        except LinkError as error:
            raise refused(R.CUDA_ERROR_INVALID_IMAGE, str(error)) from None
        load(proc, linked)
    found.image = ctypes.create_string_buffer(linked)
    return Address.of(ctypes.addressof(found.image), memoryview(linked)), len(linked)


@entry()
def cuLinkDestroy(proc: Process, state: Any) -> None:
    """Destroys the linker and its image. Modules that were loaded from the image stay."""
    proc.remove(_state(proc, state))


@dataclass(eq=False)
class Link(Object):
    """The state of a linker (CUlinkState). `units` are the modules that were added, and `log` is the buffer for its
    errors. `image` is the result, which lives as long as this object.
    """

    log: Any
    units: list[Unit] = field(default_factory=list)
    image: ctypes.Array[ctypes.c_char] | None = None
