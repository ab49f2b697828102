# SPDX-License-Identifier: Apache-2.0
"""Functions by which clients share memory with the machine and with each other, and callbacks of the machine."""

from __future__ import annotations

import array
import ctypes
import os
import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driver_helpers import code, ok, primary

import drvfuse as df
from drvfuse.emu.bindings import R, T

pytestmark = pytest.mark.emulated

MANAGED = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .global .attribute(.managed) .align 4 .u32 counter = 5;
.visible .entry bump(.param .u64 where) {
  .reg .b64 %rd<2>; .reg .b32 %r<2>;
  ld.param.u64 %rd0, [where];
  ld.global.u32 %r0, [%rd0];
  add.u32 %r0, %r0, 1;
  st.global.u32 [%rd0], %r0;
  mov.u64 %rd0, counter;
  st.global.u32 [%rd0], %r0;
  ret;
}
"""
BAD = MANAGED.replace(b"add.u32", b"whatever.u32")
DESCRIPTOR = T.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def attached() -> Any:
    cuda = df.emu.default_machine().driver
    ok(cuda.cuInit(0))
    primary(cuda)
    return cuda


def words(address: Any, count: int) -> np.ndarray:
    """Return a view of `count` 32-bit words of this process's memory."""
    return np.ctypeslib.as_array((ctypes.c_uint32 * count).from_address(int(address)))


def use_host_memory_and_host_functions(rank: int, size: int, path: str) -> dict[str, Any]:
    cuda, found = attached(), {}
    pointer = ok(cuda.cuMemAllocManaged(4096, 1))
    memory = words(pointer, 1024)
    memory[:] = 41
    module = ok(cuda.cuModuleLoadData(MANAGED))
    counter = words(ok(cuda.cuModuleGetGlobal(module, b"counter"))[0], 1)
    found["counter"] = int(counter[0])
    bump = ok(cuda.cuModuleGetFunction(module, b"bump"))
    ok(cuda.cuLaunchKernel(bump, 1, 1, 1, 1, 1, 1, 0, 0, ((int(pointer),), (ctypes.c_void_p,)), 0))
    ok(cuda.cuCtxSynchronize())
    found["bumped"] = int(memory[0]), int(counter[0]), int(memory[1])
    stream, calls = ok(cuda.cuStreamCreate(1)), []
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    callback = kind(lambda stream, status, data: calls.append((stream, status, data)))
    destroy = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda data: calls.append(data))
    addresses = [ctypes.cast(f, ctypes.c_void_p).value for f in (callback, destroy)]
    ok(cuda.cuStreamWaitValue32(stream, int(pointer) + 8, 7, 1))
    ok(cuda.cuStreamAddCallback(stream, addresses[0], 5, 0))
    waiting = threading.Thread(target=lambda: found.update(waited=code(cuda.cuStreamSynchronize(stream))))
    waiting.start()
    threading.Event().wait(0.05)
    memory[2] = 7
    waiting.join()
    ok(cuda.cuUserObjectRelease(ok(cuda.cuUserObjectCreate(6, addresses[1], 1, 1)), 1))
    found["calls"] = calls == [(int(stream), 0, 5), 6]
    log = bytearray(100)
    options, jit = (
        [T.CUjit_option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES, T.CUjit_option.CU_JIT_ERROR_LOG_BUFFER],
        T.CUjitInputType(1),
    )
    found["refused"] = code(cuda.cuModuleLoadDataEx(BAD, 2, options, [100, log]))
    found["log"] = bytes(log).split(b"\0")[0]
    state = ok(cuda.cuLinkCreate(2, options, [100, log]))
    Path(path).write_bytes(MANAGED)
    ok(cuda.cuLinkAddFile(state, jit, path.encode(), 0, [], []))
    ok(cuda.cuLinkAddData(state, jit, MANAGED, len(MANAGED), b"again", 0, [], []))
    found["twice"] = code(cuda.cuLinkComplete(state)), bytes(log).split(b"'")[1]
    state = ok(cuda.cuLinkCreate(0, [], []))
    ok(cuda.cuLinkAddData(state, jit, MANAGED, len(MANAGED), b"once", 0, [], []))
    image, nbytes = ok(cuda.cuLinkComplete(state))
    found["linked"] = ok(cuda.cuModuleGetFunctionCount(ok(cuda.cuModuleLoadData(image)))), nbytes
    ok(cuda.cuLinkDestroy(state))
    ok(cuda.cuMemFree(pointer))
    return found


def test_a_client_shares_managed_memory_and_has_its_host_functions_called(pool, tmp_path):
    (found,) = pool.run(1, use_host_memory_and_host_functions, str(tmp_path / "module.ptx"))
    assert found["counter"] == 5 and found["waited"] == 0 and found["bumped"] == (42, 42, 41) and found["calls"]
    assert found["refused"] == R.CUDA_ERROR_INVALID_PTX and found["log"].startswith(b"error: PTX line 10")
    assert found["twice"] == (R.CUDA_ERROR_INVALID_IMAGE, b"counter")
    assert found["linked"][0] == 1 and found["linked"][1] > 300
    assert pool.machine.held()["allocations"] == 0


def meet(rank: int) -> socket.socket:
    """A connection between the two ranks of a run."""
    name = "\0functions" + os.environ["TORCHELASTIC_RUN_ID"]
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if rank == 0:
        made.bind(name)
        made.listen()
        return made.accept()[0]
    while True:
        try:
            made.connect(name)
            return made
        except ConnectionRefusedError:
            threading.Event().wait(0.005)


def content(handle: Any) -> bytes:
    return ctypes.string_at(int(handle.getPtr()), 64)


def made_of(kind: Any, received: bytes) -> Any:
    handle = kind()
    ctypes.memmove(int(handle.getPtr()), received, 64)
    return handle


def pass_memory(rank: int, size: int) -> list[int]:
    cuda, peer = attached(), meet(rank)
    out = np.zeros(64, np.uint8)
    if rank == 0:
        props = T.CUmemPoolProps()
        props.allocType, props.handleTypes = T.CUmemAllocationType(1), DESCRIPTOR
        props.location.type = T.CUmemLocationType(1)
        pool = ok(cuda.cuMemPoolCreate(props))
        plain, pooled = ok(cuda.cuMemAlloc(64)), ok(cuda.cuMemAllocFromPoolAsync(64, pool, 0))
        event = ok(cuda.cuEventCreate(6))
        handles = (
            ok(cuda.cuIpcGetMemHandle(plain)),
            ok(cuda.cuMemPoolExportPointer(pooled)),
            ok(cuda.cuIpcGetEventHandle(event)),
        )
        ok(cuda.cuMemsetD8(plain, 3, 64))
        ok(cuda.cuMemsetD8(pooled, 4, 64))
        ok(cuda.cuEventRecord(event, 0))
        descriptor = ok(cuda.cuMemPoolExportToShareableHandle(pool, DESCRIPTOR, 0))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
        peer.sendmsg([b"".join(content(handle) for handle in handles)], rights)
        peer.recv(1)
        ok(cuda.cuMemcpyDtoH(out, plain, 64))
        return [int(out[0]), int(out[63])]
    received, rights, _, _ = peer.recvmsg(192, socket.CMSG_SPACE(4))
    descriptor = array.array("i", rights[0][2])[0]
    imported = ok(cuda.cuMemPoolImportFromShareableHandle(descriptor, DESCRIPTOR, 0))
    plain = ok(cuda.cuIpcOpenMemHandle(made_of(T.CUipcMemHandle, received[:64]), 1))
    pooled = ok(cuda.cuMemPoolImportPointer(imported, made_of(T.CUmemPoolPtrExportData, received[64:128])))
    event = ok(cuda.cuIpcOpenEventHandle(made_of(T.CUipcEventHandle, received[128:])))
    ok(cuda.cuStreamWaitEvent(0, event, 0))
    found = []
    for pointer in (plain, pooled):
        ok(cuda.cuMemcpyDtoH(out, pointer, 64))
        found += [int(out[0]), int(out[63])]
    ok(cuda.cuMemsetD8(plain, 9, 32))
    ok(cuda.cuCtxSynchronize())
    ok(cuda.cuIpcCloseMemHandle(plain))
    ok(cuda.cuMemFreeAsync(pooled, 0))
    peer.send(b".")
    return found


def test_clients_can_open_memory_and_events_of_each_other(pool):
    assert pool.run(2, pass_memory, machine={"race": True}) == [[9, 3], [3, 3, 4, 4]]
    assert not pool.machine.reports
