# SPDX-License-Identifier: Apache-2.0
"""The driver's log of errors can be read by an iterator, as a file, in memory and by a callback."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
from driver_helpers import R, code, ok, primary
from loopback import LoopbackDriver

from drvfuse.emu import Machine
from drvfuse.emu.bindings import T

FREE = b"out_of_bounds: cuMemFree needs an address that an allocation returned: "
FREE += b"0x%x is outside of device memory: a null pointer, or close to one\n"


@pytest.fixture(params=["here", "as bytes"])
def either(request: pytest.FixtureRequest, machine: Machine) -> Any:
    made = machine.driver if request.param == "here" else LoopbackDriver(machine)
    primary(made)
    return made


def test_an_iterator_reads_the_log_from_its_position(either: Any, tmp_path: Path) -> None:
    path, buffer = tmp_path / "log", bytearray(1000)
    assert int(ok(either.cuLogsCurrent(0))) == 0
    assert code(either.cuLogsCurrent(1)) == R.CUDA_ERROR_INVALID_VALUE
    either.cuMemFree(16)
    moving = ok(either.cuLogsCurrent(0))
    either.cuMemFree(17)
    assert ok(either.cuLogsDumpToFile(moving, bytes(path), 0)) is moving
    assert path.read_bytes() == FREE % 17 and int(moving) == 2
    either.cuMemFree(18)
    back, size = ok(either.cuLogsDumpToMemory(moving, buffer, 1000, 0))
    assert back is moving and bytes(buffer[: size + 1]) == FREE % 18 + b"\0"
    assert ok(either.cuLogsDumpToMemory(moving, buffer, 1000, 0))[1] == 0
    _, size = ok(either.cuLogsDumpToMemory(None, buffer, 1000, 0))
    assert bytes(buffer[:size]) == FREE % 16 + FREE % 17 + FREE % 18


def test_a_truncated_log_keeps_its_last_messages(either: Any) -> None:
    for address in (16, 17):
        either.cuMemFree(address)
    line = len(FREE % 16)
    for size, room in ((line, 1000), (1000, line), (0, 1000)):
        assert code(either.cuLogsDumpToMemory(None, bytearray(room), size, 0)) == R.CUDA_ERROR_INVALID_VALUE
    buffer = bytearray(line + 10)
    assert ok(either.cuLogsDumpToMemory(None, buffer, 2000, 0))[1] == line
    assert bytes(buffer[:line]) == FREE % 17
    assert code(either.cuLogsDumpToFile(None, b"/no/such/folder/log", 0)) == R.CUDA_ERROR_INVALID_VALUE


def test_a_callback_receives_failed_calls(cuda: Any) -> None:
    primary(cuda)
    received: list[Any] = []
    signature = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
    function = signature(lambda *arguments: received.append(arguments))
    handle = ok(cuda.cuLogsRegisterCallback(ctypes.cast(function, ctypes.c_void_p).value, 7))
    assert type(handle) is T.CUlogsCallbackHandle
    cuda.cuMemFree(16)
    ok(cuda.cuCtxSynchronize())
    line = (FREE % 16).rstrip()
    assert received == [(7, int(T.CUlogLevel.CU_LOG_LEVEL_ERROR), line, len(line))]
    ok(cuda.cuLogsUnregisterCallback(handle))
    cuda.cuMemFree(17)
    assert len(received) == 1
    assert code(cuda.cuLogsUnregisterCallback(handle)) == R.CUDA_ERROR_INVALID_VALUE
    assert code(cuda.cuLogsRegisterCallback(0, 7)) == R.CUDA_ERROR_INVALID_VALUE


def test_names_that_are_not_utf_8_are_logged_as_they_were_given(
    either: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    received: list[bytes] = []
    signature = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
    function = signature(lambda data, level, line, size: received.append(line))
    if not isinstance(either, LoopbackDriver):
        ok(either.cuLogsRegisterCallback(ctypes.cast(function, ctypes.c_void_p).value, 0))
    state, bad = ok(either.cuLinkCreate(0, [], [])), b".version 8.0\n.target sm_90\n.nonsense"
    kind = T.CUjitInputType.CU_JIT_INPUT_PTX
    assert code(either.cuLinkAddData(state, kind, bad, len(bad), b"a\xff\xfe.ptx", 0, [], [])) != R.CUDA_SUCCESS
    buffer, path = bytearray(4000), tmp_path / "log"
    _, size = ok(either.cuLogsDumpToMemory(None, buffer, 4000, 0))
    ok(either.cuLogsDumpToFile(None, bytes(path), 0))
    assert bytes(buffer[:size]) == path.read_bytes() and b"\xff\xfe" in path.read_bytes()
    assert "\\udcff\\udcfe" in caplog.text  # Python's loggers get text that can be encoded
    assert isinstance(either, LoopbackDriver) or b"".join(received) + b"\n" == path.read_bytes()
