# SPDX-License-Identifier: Apache-2.0
"""Images of code: PTX, alone or in a fat binary; images that are refused; and the buffers for error logs."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from ...ptx import fatbin
from ...ptx.text import head
from ..bindings import R
from ..findings.reports import Report
from ..machine.process.failure import Failure
from ..machine.process.process import Process
from ..wire.jit_options import ErrorLog
from .entry import present, text, unsupported

_ELF = b"\x7fELF"
_WRAPPER = b"\xb1\x43\x62\x46"  # the magic number of nvcc's wrapper around a fat binary
_EM_CUDA = 190


def ptx_of(proc: Process, image: bytes | None) -> str:
    """The PTX of an image. If the image is a fat binary with several PTX texts: the PTX for the newest target that the
    devices can run.
    """
    data = present(image)
    if data[:4] == fatbin.MAGIC:
        data = _newest(proc, data)
    if data[:4] == _WRAPPER:
        raise refused(R.CUDA_ERROR_INVALID_IMAGE, "the image points to memory that holds no fat binary")
    if data[:4] == _ELF:
        raise _machine_code(data)
    data = data.split(b"\0", 1)[0]
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        if b".version" not in data:
            raise refused(R.CUDA_ERROR_INVALID_IMAGE, "the image is not PTX text") from None
        line = data[: error.start].count(b"\n") + 1
        raise refused(R.CUDA_ERROR_INVALID_PTX, f"PTX line {line} is not UTF-8") from None


def _newest(proc: Process, image: bytes) -> bytes:
    """The PTX of a fat binary for the newest target that the devices can run. If they can run none, the PTX for the
    oldest target.
    """
    try:
        found = fatbin.entries(image)
        texts = [entry.text() for entry in found if entry.ptx]
    except fatbin.FatbinError as error:
        raise refused(R.CUDA_ERROR_INVALID_IMAGE, f"the image cannot be read as a fat binary: {error}") from None
    if not texts:
        targets = ", ".join(f"sm_{entry.arch}" for entry in found) or "nothing"
        words = f"the emulated driver runs PTX, and the image is a fat binary without any (it has code for {targets})"
        raise unsupported(f"{words}; compile with -gencode arch=compute_XX,code=compute_XX")
    texts.sort(key=_needs)
    return [texts[0], *(t for t in texts if suits(proc, _target(t)))][-1]


def _target(ptx: bytes) -> str:
    return head(ptx.decode(errors="replace"))[1]


def _needs(ptx: bytes) -> tuple[int, int]:
    """A pair: the compute capability that a PTX text needs, as one number, and 1 if the text runs only on that
    capability or its family, else 0.
    """
    match = re.fullmatch(r"sm_(\d{1,3})([af]?)", _target(ptx))
    return (int(match[1]), len(match[2])) if match else (0, 0)


def suits(proc: Process, target: str) -> bool:
    """Whether PTX for a target (`sm_90a`) runs on the devices of the machine."""
    match = re.fullmatch(r"sm_(\d{1,2})(\d)([af]?)", target)
    if match is None:
        return False
    needs, capability = (int(match[1]), int(match[2])), proc.machine.capability
    family = match[3] == "f" and needs[0] == capability[0]
    return needs <= capability and (not match[3] or family or target == proc.machine.arch)


def _machine_code(data: bytes) -> Failure:
    """The failure for an image of machine code, which the emulated driver cannot run."""
    if int.from_bytes(data[18:20], "little") != _EM_CUDA:
        return refused(R.CUDA_ERROR_INVALID_IMAGE, "the image is an ELF file without CUDA code")
    flags = int.from_bytes(data[48:52], "little")
    newer = data[8] >= 8  # the version of the ABI, which decides where `flags` hold the target
    number, accelerated = (flags >> 8 & 0xFF, flags & 8) if newer else (flags & 0xFF, flags & 0x800)
    target = f"{number}{'a' if accelerated else ''}"
    what = f"a cubin (ELF) for sm_{target}; compile to PTX instead (compute_{target}, nvcc -ptx, nvrtcGetPTX), as "
    what += "`drvfuse emu run` does for nvrtcGetCUBIN of cuda.bindings"
    return unsupported(f"the emulated driver runs PTX, and the image is {what}")


def refused(code: object, message: str) -> Failure:
    """The failure of a call with an image that cannot be used."""
    return Failure(code, Report("module", message))


def file_content(name: bytes) -> bytes:
    """The bytes of a file."""
    try:
        return Path(text(name)).read_bytes()
    except (OSError, ValueError):
        raise Failure(R.CUDA_ERROR_FILE_NOT_FOUND) from None


@contextlib.contextmanager
def errors_logged(*logs: ErrorLog | None) -> Iterator[None]:
    """Context manager: if the body of the `with` statement raises Failure, write its report to the first of `logs` that
    is not None.
    """
    try:
        yield
    except Failure as failure:
        log = next((log for log in logs if log is not None), None)
        if log is not None and failure.report is not None:
            log.write(failure.report.message)
        raise
