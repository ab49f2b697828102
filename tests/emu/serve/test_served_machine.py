# SPDX-License-Identifier: Apache-2.0
"""One machine, several processes: memory, descriptors, host functions, threads, death."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import signal
import socket
import threading
import time
from typing import Any

import numpy as np
import pytest
from driver_helpers import code, function, ok, primary
from graph_helpers import BYTES, DEVICE, HOST, WORDS, Graphs, allocation, copy
from process_pool import Died, RankFailed

import drvfuse as df
from drvfuse.emu.bindings import R, T

pytestmark = pytest.mark.emulated

KERNELS = """
extern "C" __global__ void add(unsigned* words, unsigned value, unsigned count) {
  for (unsigned i = threadIdx.x; i < count; i += blockDim.x) words[i] += value;
}
extern "C" __global__ void busy(unsigned* words, unsigned value, unsigned count) {
  for (unsigned i = 0; i < count; i++) atomicAdd(words, value);
}
extern "C" __global__ void await(volatile unsigned* word) { while (*word == 0) {} }
"""
SIZE = 2 << 20


def attached() -> Any:
    cuda = df.emu.default_machine().driver
    ok(cuda.cuInit(0))
    primary(cuda)
    return cuda


def launch(cuda: Any, name: str, *values: int) -> None:
    kinds = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint][: len(values)]
    kernel = function(cuda, KERNELS, name)
    ok(cuda.cuLaunchKernel(kernel, 1, 1, 1, 64, 1, 1, 0, 0, (tuple(values), tuple(kinds)), 0))


def words(address: int, count: int) -> np.ndarray:
    """Return a view of `count` 32-bit words of this process's memory."""
    return np.ctypeslib.as_array((ctypes.c_uint32 * count).from_address(address))


def meet(rank: int) -> socket.socket:
    """A connection between the two ranks of a run."""
    name = "\0" + os.environ["TORCHELASTIC_RUN_ID"]
    if rank == 0:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(name)
            listening.listen()
            return listening.accept()[0]
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    while True:
        try:
            made.connect(name)
            return made
        except ConnectionRefusedError:
            time.sleep(0.005)


# Groups and reports -------------------------------------------------------------------------------------------------


def run_a_group(rank: int, size: int, seed: int) -> bool:
    rng = np.random.default_rng(seed + rank)
    host = [rng.standard_normal((5, 96), np.float32) for _ in range(2)]
    with df.Group.local([2 * rank, 2 * rank + 1]) as group:
        xs = [member.array(a) for member, a in zip(group, host, strict=True)]
        return all((y.numpy() == host[0] + host[1]).all() for y in df.allreduce(group, xs))


def test_each_client_process_runs_its_own_group(pool):
    assert pool.run(2, run_a_group, 7, machine={"race": True}) == [True, True]
    assert not pool.machine.reports
    assert pool.machine.held()["device_bytes"] == 0


def read_far_behind(rank: int, size: int) -> tuple[str, int]:
    device = df.device(0)
    array = device.array(np.arange(64, dtype=np.uint32))
    kernel = df.compile(KERNELS, driver=device.driver, arch=device.arch)["add"]
    with pytest.raises(df.errors.DriverError) as caught:
        kernel.prepare(1, 64, array, np.uint32(1), np.uint32(65))(device.stream)
        device.synchronize()
    machine = df.emu.default_machine()
    assert machine.finding(0) is not None
    return str(caught.value), len(machine.reports)


def test_a_client_receives_the_findings_of_the_machine(pool):
    ((text, reports),) = pool.run(1, read_far_behind)
    assert "4 bytes" in text and "past the end of" in text and reports == 1
    assert [report.kind for report in pool.machine.reports] == ["out_of_bounds"]


def launch_after_a_pause(rank: int, size: int) -> int:
    """Make some launches after a random pause. Returns the machine's clock at the end. The order in which the ranks
    launch varies from run to run, except in a replay."""
    cuda, peer = attached(), meet(rank)
    word = ok(cuda.cuMemAlloc(4))
    ok(cuda.cuMemsetD32(word, 0, 1))
    time.sleep(0.01 * np.random.default_rng().integers(3))
    for _ in range(5):
        launch(cuda, "add", int(word), 1 + rank, 1)
        ok(cuda.cuCtxSynchronize())
    peer.send(b".")
    peer.recv(1)
    return df.emu.default_machine().clock()


def test_a_recorded_run_can_be_repeated(pool, tmp_path):
    record = str(tmp_path / "record")
    runs = []
    for options in ({"record": record}, {"replay": record}, {"replay": record}):
        clocks = pool.run(2, launch_after_a_pause, machine={"seed": 5, "race": True, **options})
        runs.append((clocks, [(r.kernel, r.device) for r in pool.machine.launches], len(pool.machine.reports)))
    assert runs[0] == runs[1] == runs[2]
    assert len(runs[0][1]) == 10 and runs[0][2] == 0


# Memory -------------------------------------------------------------------------------------------------------------


def use_pinned_memory(rank: int, size: int) -> bool:
    cuda = attached()
    address = ok(cuda.cuMemHostAlloc(1000, 0))
    assert int(ok(cuda.cuMemHostGetDevicePointer(address, 0))) == address
    own = words(address, 250)
    own[:] = np.arange(250)
    launch(cuda, "add", address, 10 + rank, 250)
    ok(cuda.cuCtxSynchronize())
    assert (own == np.arange(250) + 10 + rank).all()
    if size > 1:
        return True
    pointer = ok(cuda.cuMemAlloc(1000))
    ok(cuda.cuMemcpyAsync(pointer, address, 1000, 0))
    own[:] = 5  # an asynchronous copy reads pinned memory when it runs, here during the wait
    ok(cuda.cuCtxSynchronize())
    back = np.zeros(250, np.uint32)
    ok(cuda.cuMemcpyDtoH(back, pointer, 1000))
    ok(cuda.cuMemFreeHost(address))
    return bool((back == 5).all())


def test_pinned_memory_has_one_address_on_the_host_and_on_devices(pool):
    for size in (1, 2):
        assert pool.run(size, use_pinned_memory) == [True] * size
        assert not pool.machine.reports


def register_a_file(rank: int, size: int) -> bool:
    cuda = attached()
    file = os.memfd_create("shared")
    os.ftruncate(file, 8192)
    memory = mmap.mmap(file, 8192)
    own = np.frombuffer(memory, np.uint32)
    address = int(own.ctypes.data)
    own[:] = np.arange(2048)
    ok(cuda.cuMemHostRegister(address, 8192, 2))
    os.close(file)
    pointer = ok(cuda.cuMemHostGetDevicePointer(address, 0))
    launch(cuda, "add", int(pointer), 100, 2048)
    ok(cuda.cuCtxSynchronize())
    assert (own == np.arange(2048) + 100).all()
    device = ok(cuda.cuMemAlloc(8192))
    ok(cuda.cuMemcpyHtoDAsync(device, address, 8192, 0))
    ok(cuda.cuMemsetD32(device, 3, 1024))
    ok(cuda.cuMemcpyDtoH(address, device, 8192))
    ok(cuda.cuMemHostUnregister(address))
    assert (own[:1024] == 3).all()
    return bool((own[1024:] == np.arange(1024, 2048) + 100).all())


def test_shared_memory_of_a_file_can_be_registered(pool):
    assert pool.run(1, register_a_file) == [True]


def share_memory(rank: int, size: int) -> bool:
    cuda, peer = attached(), meet(rank)
    prop = T.CUmemAllocationProp()
    prop.type = T.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = T.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    kind = T.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    prop.requestedHandleTypes = kind
    if rank == 0:
        handle = ok(cuda.cuMemCreate(SIZE, prop, 0))
        descriptor = ok(cuda.cuMemExportToShareableHandle(handle, kind, 0))
    else:
        _, (descriptor,), _, _ = socket.recv_fds(peer, 1, 1)
        handle = ok(cuda.cuMemImportFromShareableHandle(descriptor, kind))
    access = T.CUmemAccessDesc()
    access.location, access.flags = prop.location, T.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    address = ok(cuda.cuMemAddressReserve(SIZE, 0, 0, 0))
    ok(cuda.cuMemMap(address, SIZE, 0, handle, 0))
    ok(cuda.cuMemSetAccess(address, SIZE, [access], 1))
    ok(cuda.cuMemRelease(handle))
    if rank == 0:
        ok(cuda.cuMemsetD32(address, 40, 1000))
        ok(cuda.cuCtxSynchronize())
        socket.send_fds(peer, [str(int(address)).encode()], [descriptor])
        os.close(descriptor)
        peer.recv(1)
        back = np.zeros(1000, np.uint32)
        ok(cuda.cuMemcpyDtoH(back, address, 4000))
        return bool((back == 42).all())
    os.close(descriptor)
    launch(cuda, "add", int(address), 2, 1000)
    ok(cuda.cuCtxSynchronize())
    peer.send(b".")
    return True


def test_memory_is_shared_between_processes_by_descriptors(pool):
    assert pool.run(2, share_memory) == [True, True]
    assert not pool.machine.reports
    assert pool.machine.held() == dict.fromkeys(pool.machine.held(), 0)


def use_a_foreign_pointer(rank: int, size: int) -> Any:
    cuda, peer = attached(), meet(rank)
    if rank == 0:
        pointer = ok(cuda.cuMemAlloc(4096))
        ok(cuda.cuMemsetD32(pointer, 1, 1024))
        ok(cuda.cuCtxSynchronize())
        peer.send(str(int(pointer)).encode())
        peer.recv(1)
        launch(cuda, "add", int(pointer), 1, 1024)
        return int(cuda.cuCtxSynchronize()[0])
    foreign = int(peer.recv(64))
    copied = code(cuda.cuMemcpyDtoD(foreign, foreign, 16))
    launch(cuda, "add", foreign, 1, 1024)
    found = code(cuda.cuCtxSynchronize())
    peer.send(b".")
    return int(copied), int(found)


def test_a_pointer_of_another_process_is_invalid(pool):
    expected = int(R.CUDA_ERROR_INVALID_VALUE), int(R.CUDA_ERROR_ILLEGAL_ADDRESS)
    assert pool.run(2, use_a_foreign_pointer) == [0, expected]


# Code of the client -------------------------------------------------------------------------------------------------


def launch_host_functions(rank: int, size: int) -> Any:
    cuda = attached()
    seen: list[Any] = []

    def note(argument: int) -> None:
        seen.append((argument, os.getpid() == pid, code(cuda.cuCtxSynchronize())))

    pid, made = os.getpid(), ctypes.CFUNCTYPE(None, ctypes.c_void_p)(note)
    address = ctypes.cast(made, ctypes.c_void_p).value
    for number in (1, 2, 3):
        ok(cuda.cuLaunchHostFunc(0, T.CUhostFn(address), number))
    ok(cuda.cuCtxSynchronize())
    return [(number, here, int(result)) for number, here, result in seen]


def test_host_functions_run_in_their_process_and_may_not_call_the_driver(pool):
    refused = int(R.CUDA_ERROR_NOT_PERMITTED)
    expected = [(number, True, refused) for number in (1, 2, 3)]
    assert pool.run(2, launch_host_functions) == [expected, expected]


def run_a_graph(rank: int, size: int) -> Any:
    """Run two graphs: one made node by node, and one captured. Both copy pageable memory to the device and back; the
    first also has a host function and memory nodes.
    """
    g = Graphs(attached())
    cuda, rng = g.cuda, np.random.default_rng(rank)
    source, result = np.zeros(WORDS, np.uint32), np.zeros((2, WORDS), np.uint32)
    seen: list[int] = []
    note = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda data: seen.append(os.getpid()))
    host = T.CUDA_HOST_NODE_PARAMS()
    host.fn = T.CUhostFn(ctypes.cast(note, ctypes.c_void_p).value)
    p = allocation(BYTES)
    node = ok(cuda.cuGraphAddMemAllocNode(g.graph, None, 0, p))
    up = copy(p.dptr, DEVICE, source, HOST, BYTES)
    node = ok(cuda.cuGraphAddMemcpyNode(g.graph, [node], 1, up, g.context))
    assert int(ok(cuda.cuGraphMemcpyNodeGetParams(node)).srcHost) == source.ctypes.data
    node = g.launch(g.add, 7, node, words=p.dptr)
    assert ok(cuda.cuGraphKernelNodeGetParams(node)).blockDimX == WORDS
    down = copy(result[0], HOST, p.dptr, DEVICE, BYTES)
    node = ok(cuda.cuGraphAddMemcpyNode(g.graph, [node], 1, down, g.context))
    ok(cuda.cuGraphAddHostNode(g.graph, [node], 1, host))
    ok(cuda.cuGraphAddMemFreeNode(g.graph, [node], 1, p.dptr))
    ok(cuda.cuStreamBeginCapture(g.stream, T.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
    ok(cuda.cuMemcpyHtoDAsync(g.words, source, BYTES, g.stream))
    g.queue(g.add, 9)
    ok(cuda.cuMemcpyDtoHAsync(result[1], g.words, BYTES, g.stream))
    captured = ok(cuda.cuStreamEndCapture(g.stream))
    executables, same = (g.instantiate(), g.instantiate(captured)), []
    for _ in range(2):
        source[:] = rng.integers(0, 2**32, WORDS, np.uint32)
        for executable in executables:
            g.run(executable)
        same.append(bool((result == source + np.array([[7], [9]], np.uint32)).all()))
    gone = mmap.mmap(-1, 1 << 16)
    there = ctypes.addressof(ctypes.c_char.from_buffer(gone))
    graph = ok(cuda.cuGraphCreate(0))
    ok(cuda.cuGraphAddMemcpyNode(graph, None, 0, copy(there, HOST, g.words, DEVICE, BYTES), g.context))
    gc.collect()  # the mapping can be closed only if no ctypes object refers to it
    gone.close()
    ok(cuda.cuGraphLaunch(g.instantiate(graph), g.stream))
    return same, seen == [os.getpid()] * 2, int(code(cuda.cuStreamSynchronize(g.stream)))


def test_graphs_copy_the_memory_of_their_process_when_they_run(pool):
    lost = int(R.CUDA_ERROR_ILLEGAL_ADDRESS)
    assert pool.run(2, run_a_graph) == [([True, True], True, lost)] * 2


def ask_for_a_block_size(rank: int, size: int) -> Any:
    cuda = attached()
    asked: list[int] = []

    def shared_memory(threads: int) -> int:
        asked.append(threads)
        return 200 << 10 if threads > 256 else 0

    made = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_int)(shared_memory)
    callback = T.CUoccupancyB2DSize(ctypes.cast(made, ctypes.c_void_p).value)
    found = ok(cuda.cuOccupancyMaxPotentialBlockSize(function(cuda, KERNELS, "add"), callback, 0, 0))
    return tuple(found), 1024 in asked


def test_callbacks_of_a_call_run_in_its_process(pool):
    (((blocks, threads), asked),) = pool.run(1, ask_for_a_block_size)
    assert (blocks, threads, asked) == (132 * 8, 256, True)


def call_the_machine_meanwhile(rank: int, size: int) -> Any:
    """Call the driver from a callback of rank 0, and from rank 1 during that callback."""
    cuda, peer = attached(), meet(rank)
    if rank == 1:
        peer.recv(1)
        word = ok(cuda.cuMemAlloc(4))
        peer.send(b".")
        return word is not None
    asked: list[bytes] = []
    peer.settimeout(20)

    def smem(block: int) -> int:
        if not asked:
            peer.send(b".")
            asked.append(peer.recv(1))
            ok(cuda.cuDeviceGetCount())
        return 0

    made = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_int)(smem)
    callback = T.CUoccupancyB2DSize(ctypes.cast(made, ctypes.c_void_p).value)
    ok(cuda.cuOccupancyMaxPotentialBlockSize(function(cuda, KERNELS, "add"), callback, 0, 0))
    return asked, int(ok(cuda.cuCtxGetDevice()))


def test_a_callback_does_not_block_other_clients(pool):
    first, second = pool.run(2, call_the_machine_meanwhile)
    assert first == ([b"."], 0)
    assert second


def copy_in_a_signal_handler(rank: int, size: int) -> Any:
    """A signal arrives while a call waits, and its handler calls the driver. Rank 1 makes no call meanwhile, so the
    wait is not a deadlock."""
    cuda, peer = attached(), meet(rank)
    if rank == 1:
        return peer.recv(1) == b"."
    data = np.arange(1000, dtype=np.uint32)
    inner: list[int] = []

    def handler(number: int, frame: Any) -> None:
        inner.append(int(ok(cuda.cuDeviceGetCount())))
        words(word, 1)[:] = 1

    word = ok(cuda.cuMemHostAlloc(4, 0))
    words(word, 1)[:] = 0
    pointer = ok(cuda.cuMemAlloc(4000))
    ok(cuda.cuMemcpyHtoD(pointer, data, 4000))
    signal.signal(signal.SIGUSR1, handler)
    launch(cuda, "await", word)
    timer = threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGUSR1])
    timer.start()
    back = np.zeros_like(data)
    ok(cuda.cuMemcpyDtoHAsync(back, pointer, 4000, 0))
    timer.join()
    peer.send(b".")
    return inner, bool((back == data).all())


def test_a_nested_call_does_not_receive_the_answer_of_the_outer_one(pool):
    assert pool.run(2, copy_in_a_signal_handler) == [([8], True), True]


def reset_with_registered_memory(rank: int, size: int) -> bool:
    cuda = attached()
    file = os.memfd_create("shared")
    os.ftruncate(file, 4096)
    memory = mmap.mmap(file, 4096)
    own = np.frombuffer(memory, np.uint32)
    own[:] = np.arange(1024)
    ok(cuda.cuMemHostRegister(int(own.ctypes.data), 4096, 2))
    ok(cuda.cuDevicePrimaryCtxReset(0))
    primary(cuda)
    device = ok(cuda.cuMemAlloc(4096))
    back = np.zeros_like(own)
    ok(cuda.cuMemcpyHtoD(device, own, 4096))
    ok(cuda.cuMemcpyDtoH(back, device, 4096))
    return bool((back == np.arange(1024)).all())


def test_registered_memory_is_pageable_after_its_context_is_destroyed(pool):
    assert pool.run(1, reset_with_registered_memory) == [True]


def use_threads(rank: int, size: int) -> Any:
    cuda = attached()
    found: list[Any] = []

    def work(device: int) -> None:
        found.append(int(ok(cuda.cuCtxGetCurrent())))
        primary(cuda, device)
        found.append(int(ok(cuda.cuCtxGetDevice())))

    for device in (1, 2):
        thread = threading.Thread(target=work, args=(device,))
        thread.start()
        thread.join()
    return found, int(ok(cuda.cuCtxGetDevice()))


def test_threads_of_a_client_have_their_own_contexts_and_may_end(pool):
    assert pool.run(1, use_threads) == [([0, 1, 0, 2], 0)]


# The ends of clients and of the machine -----------------------------------------------------------------------------


def spin(rank: int, size: int) -> Any:
    cuda, peer = attached(), meet(rank)
    word = ok(cuda.cuMemHostAlloc(4, 0))
    words(word, 1)[:] = 0
    if rank == 1:
        launch(cuda, "await", word)
        peer.send(str(os.getpid()).encode())
        cuda.cuCtxSynchronize()
        return "not killed"
    victim = int(peer.recv(32))
    time.sleep(0.2)  # by now the client waits
    os.kill(victim, signal.SIGKILL)
    assert peer.recv(1) == b""
    launch(cuda, "add", word, 7, 1)
    ok(cuda.cuCtxSynchronize())
    return int(words(word, 1)[0]), run_a_group(1, 2, 3)


def test_a_process_killed_during_a_call_leaves_nothing(pool):
    with pool.job(2, spin) as job:
        assert job.outcomes() == [(7, True), Died(-signal.SIGKILL)]
    deadline = time.monotonic() + 5
    while any(pool.machine.held().values()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert pool.machine.held() == dict.fromkeys(pool.machine.held(), 0)
    assert len(pool.machine.processes) == 1


def fork_after_attaching(rank: int, size: int) -> Any:
    cuda = attached()
    child = os.fork()
    if child == 0:
        os._exit(int(cuda.cuCtxSynchronize()[0]))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status, int(cuda.cuCtxSynchronize()[0])


def test_a_forked_child_has_no_machine_and_leaves_that_of_its_parent(pool):
    assert pool.run(1, fork_after_attaching) == [(int(R.CUDA_ERROR_NOT_INITIALIZED), 0)]


def interrupt(rank: int, size: int) -> Any:
    cuda, peer = attached(), meet(rank)
    if rank == 0:  # Ctrl-C in the other process does not end kernels of this one
        word = ok(cuda.cuMemHostAlloc(4, 0))
        words(word, 1)[:] = 0
        launch(cuda, "await", word)
        code(cuda.cuStreamQuery(0))
        peer.send(b".")
        peer.recv(1)
        words(word, 1)[:] = 1
        return int(cuda.cuCtxSynchronize()[0])
    peer.recv(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # SIGINT may be ignored, as under nohup
    launch(cuda, "busy", ok(cuda.cuMemHostAlloc(4, 0)), 1, 1 << 31)
    timer = threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        cuda.cuCtxSynchronize()
    timer.join()
    peer.send(b".")
    return int(cuda.cuCtxSynchronize()[0])


def test_ctrl_c_ends_a_wait_and_the_kernels_of_its_process(pool):
    assert pool.run(2, interrupt) == [0, int(R.CUDA_ERROR_LAUNCH_TIMEOUT)]
    assert [report.kind for report in pool.machine.reports] == ["interrupted"]


def outlive_the_machine(rank: int, size: int, name: str) -> Any:
    device = df.device(0)
    array = device.zeros(16, "float32")
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(name)
        assert peer.recv(1) == b""
    with pytest.raises(df.errors.ClosedError, match="closed"):
        array.numpy()
    machine = df.emu.default_machine
    with pytest.raises(df.errors.DriverUnavailable, match="no emulated machine is served"):
        machine()
    return int(device.driver.machine.driver.cuCtxSynchronize()[0])


def test_clients_notice_the_end_of_the_machine(pool):
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("")
        listening.listen()
        listening.settimeout(30)
        with pool.job(1, outlive_the_machine, listening.getsockname()) as job:
            connection, _ = listening.accept()
            pool.close_machine()
            connection.close()
            assert job.outcomes() == [int(R.CUDA_ERROR_DEINITIALIZED)]


def fail_in_rank_one(rank: int, size: int) -> int:
    if rank == 1:
        raise ValueError("as planned")
    return rank


def test_the_process_pool_names_the_rank_that_failed(pool):
    with pytest.raises(RankFailed, match=r"ranks \[1\] of 2 failed; rank 1: ValueError: as planned") as caught:
        pool.run(2, fail_in_rank_one)
    assert caught.value.outcomes[0] == 0
