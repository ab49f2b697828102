# SPDX-License-Identifier: Apache-2.0
"""Initialisation, the version, and the names and texts of errors."""

from __future__ import annotations

from typing import Any

from ..bindings import MAJOR, R, T
from ..machine.process.failure import Failure
from ..machine.process.process import Process
from .entry import ENTRIES, check, entry, text

DRIVER_VERSION = 12090 if MAJOR == 12 else 13000
NEWEST_PTX = (9, 99)
"""The newest PTX version that is accepted. It does not depend on the installed bindings, as compilers may be newer."""

TEXTS = {
    "CUDA_SUCCESS": "no error",
    "CUDA_ERROR_INVALID_VALUE": "invalid argument",
    "CUDA_ERROR_OUT_OF_MEMORY": "out of memory",
    "CUDA_ERROR_NOT_INITIALIZED": "initialization error",
    "CUDA_ERROR_DEINITIALIZED": "driver shutting down: the emulated machine was closed",
    "CUDA_ERROR_NO_DEVICE": "no CUDA-capable device is detected",
    "CUDA_ERROR_INVALID_DEVICE": "invalid device ordinal",
    "CUDA_ERROR_INVALID_IMAGE": "device kernel image is invalid",
    "CUDA_ERROR_INVALID_CONTEXT": "invalid device context",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "no kernel image is available for execution on the device",
    "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED": "peer access is not supported between these two devices",
    "CUDA_ERROR_INVALID_PTX": "a PTX JIT compilation failed",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "the provided PTX was compiled with an unsupported toolchain",
    "CUDA_ERROR_FILE_NOT_FOUND": "file not found",
    "CUDA_ERROR_INVALID_HANDLE": "invalid resource handle",
    "CUDA_ERROR_NOT_FOUND": "named symbol not found",
    "CUDA_ERROR_NOT_READY": "device not ready",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "an illegal memory access was encountered",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION": "an illegal instruction was encountered",
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": "too many resources requested for launch",
    "CUDA_ERROR_LAUNCH_TIMEOUT": "the launch timed out and was terminated",
    "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED": "peer access is already enabled",
    "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED": "peer access has not been enabled",
    "CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE": "cannot set while device is active in this process",
    "CUDA_ERROR_CONTEXT_IS_DESTROYED": "context is destroyed",
    "CUDA_ERROR_ASSERT": "device-side assert triggered",
    "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED": "part or all of the requested memory range is already mapped",
    "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED": "pointer does not correspond to a registered memory region",
    "CUDA_ERROR_MISALIGNED_ADDRESS": "misaligned address",
    "CUDA_ERROR_LAUNCH_FAILED": "unspecified launch failure",
    "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE": "too many blocks in cooperative launch",
    "CUDA_ERROR_NOT_PERMITTED": "operation not permitted",
    "CUDA_ERROR_NOT_SUPPORTED": "operation not supported",
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": "operation not permitted when stream is capturing",
    "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED": "operation failed due to a previous error during capture",
    "CUDA_ERROR_STREAM_CAPTURE_MERGE": "operation would result in a merge of separate capture sequences",
    "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED": "capture was not ended in the same stream as it began",
    "CUDA_ERROR_STREAM_CAPTURE_UNJOINED": "capturing stream has unjoined work",
    "CUDA_ERROR_STREAM_CAPTURE_ISOLATION": "dependency created on uncaptured work in another stream",
    "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT": "operation would make the legacy stream wait for a capturing blocking stream",
    "CUDA_ERROR_CAPTURED_EVENT": "operation not permitted on an event last recorded in a capturing stream",
    "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD": "attempt to end a thread-local capture sequence from another thread",
    "CUDA_ERROR_UNKNOWN": "unknown error",
}


@entry(before_init=True)
def cuInit(proc: Process, Flags: int) -> None:
    check(Flags == 0)
    proc.initialised = True


@entry(1, without_machine=True)
def cuDriverGetVersion(proc: Process) -> int:
    return DRIVER_VERSION


@entry(1, without_machine=True)
def cuGetErrorName(proc: Process, error: Any) -> bytes:
    name: str = error.name
    return name.encode()


@entry(1, without_machine=True)
def cuGetErrorString(proc: Process, error: Any) -> bytes:
    fallback = error.name.removeprefix("CUDA_ERROR_").replace("_", " ").lower()
    return TEXTS.get(error.name, fallback).encode()


@entry(2)
def cuGetProcAddress(proc: Process, symbol: bytes, cudaVersion: int, flags: int) -> tuple[int, Any]:
    """Finds no address, as the emulated functions have no machine code. The status is VERSION_NOT_SUFFICIENT for an
    emulated function in a version newer than the driver, else SYMBOL_NOT_FOUND.
    """
    check(cudaVersion >= 0 and flags in (0, 1, 2))
    status = T.CUdriverProcAddressQueryResult
    if text(symbol) in ENTRIES and cudaVersion > DRIVER_VERSION:
        return 0, status.CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
    return 0, status.CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND


@entry(1)
def cuGetExportTable(proc: Process, pExportTableId: Any) -> int:
    """Finds no table, as the emulated driver has no unpublished interfaces."""
    check(pExportTableId is not None)
    raise Failure(R.CUDA_ERROR_NOT_FOUND)


@entry(name="cuProfilerStop")
@entry()
def cuProfilerStart(proc: Process) -> None:
    proc.current()
