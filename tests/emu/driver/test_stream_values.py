# SPDX-License-Identifier: Apache-2.0
"""Values that streams write and wait for: conditions, progress, deadlocks, captures, races; callbacks; user objects."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as types
from driver_helpers import R, code, ok, primary
from loopback import FORMS, initialised

from drvfuse.emu import Machine

GEQ, EQ, AND, NOR, FLUSH = 0, 1, 2, 3, 1 << 30
OP = types.CUstreamBatchMemOpType

# `signal` stores data and then a flag, by a release or by a plain store; `use` adds one to data.
PTX = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry signal(.param .u64 data, .param .u64 flag, .param .u32 plain) {
  .reg .b64 %rd<3>; .reg .b32 %r<4>; .reg .pred %p<2>;
  ld.param.u64 %rd1, [data];
  ld.param.u64 %rd2, [flag];
  ld.param.u32 %r1, [plain];
  setp.ne.u32 %p1, %r1, 0;
  mov.u32 %r2, 41;
  mov.u32 %r3, 1;
  st.global.u32 [%rd1], %r2;
  @%p1 bra weak;
  st.release.sys.global.u32 [%rd2], %r3;
  ret;
weak:
  st.global.u32 [%rd2], %r3;
  ret;
}
.visible .entry use(.param .u64 data) {
  .reg .b64 %rd<2>; .reg .b32 %r<2>;
  ld.param.u64 %rd1, [data];
  ld.global.u32 %r1, [%rd1];
  add.u32 %r1, %r1, 1;
  st.global.u32 [%rd1], %r1;
  ret;
}
.visible .entry await(.param .u64 flag) {
  .reg .b64 %rd<2>; .reg .b32 %r<2>; .reg .pred %p<2>;
  ld.param.u64 %rd1, [flag];
again:
  ld.acquire.sys.global.u32 %r1, [%rd1];
  setp.eq.u32 %p1, %r1, 0;
  @%p1 bra again;
  ret;
}
"""


@pytest.fixture(params=FORMS)
def cuda(request: pytest.FixtureRequest) -> Iterator[Any]:
    with initialised(request.param, devices=2) as made:
        yield made


def _racing(race: str, seed: int = 0) -> Machine:
    machine = Machine(devices=2, race=race, seed=seed)
    machine.driver.cuInit(0)
    primary(machine.driver)
    return machine


def _words(cuda: Any, count: int = 4) -> Any:
    """Device memory that is zero."""
    pointer = ok(cuda.cuMemAlloc(8 * count))
    ok(cuda.cuMemsetD8(pointer, 0, 8 * count))
    ok(cuda.cuCtxSynchronize())
    return pointer


def _read(cuda: Any, pointer: Any, kind: Any = np.uint32) -> int:
    found = np.zeros(1, kind)
    ok(cuda.cuMemcpyDtoH(found, pointer, found.nbytes))
    return int(found[0])


def _two_streams(cuda: Any) -> tuple[Any, Any]:
    return ok(cuda.cuStreamCreate(1)), ok(cuda.cuStreamCreate(1))


def _kernels(cuda: Any) -> Any:
    module = ok(cuda.cuModuleLoadData(PTX))

    def launch(name: bytes, stream: Any, *values: int) -> None:
        kinds = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)[: len(values)]
        kernel = ok(cuda.cuModuleGetFunction(module, name))
        ok(cuda.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, (values, kinds), 0))

    return launch


def _params(kind: Any, address: int, value: int, flags: int = 0) -> Any:
    made = types.CUstreamBatchMemOpParams()
    made.operation = kind
    part = made.waitValue if "WAIT" in kind.name else made.writeValue
    part.operation, part.address, part.flags = kind, address, flags
    if kind.name.endswith("64"):
        part.value64 = types.cuuint64_t(value)
    else:
        part.value = types.cuuint32_t(value)
    return made


@pytest.mark.parametrize(
    ("bits", "held", "value", "flags", "goes_on"),
    [
        (32, 5, 5, EQ, True),
        (32, 5, 6, EQ, False),
        (32, 5, 5, GEQ, True),
        (32, 4, 5, GEQ, False),
        (32, 3, 2**32 - 3, GEQ, True),
        (32, 2**32 - 3, 3, GEQ, False),
        (32, 6, 2, AND, True),
        (32, 4, 3, AND, False),
        (32, 5, 2, NOR, True),
        (32, 2**32 - 5, 4, NOR, False),
        (64, 1 << 40, 1 << 40, EQ, True),
        (64, 1, (1 << 40) + 1, EQ, False),
        (64, 3, 2**64 - 3, GEQ, True),
        (64, 1 << 63, 1 << 63, AND, True),
        (64, 2**64 - 5, 4, NOR, False),
    ],
)
def test_a_wait_ends_when_its_condition_holds(
    cuda: Any, bits: int, held: int, value: int, flags: int, goes_on: bool
) -> None:
    word, (first, second) = _words(cuda), _two_streams(cuda)
    ok(getattr(cuda, f"cuStreamWriteValue{bits}")(first, word, held, 0))
    ok(cuda.cuStreamSynchronize(first))
    ok(getattr(cuda, f"cuStreamWaitValue{bits}")(second, word, value, flags))
    assert (code(cuda.cuStreamQuery(second)) == R.CUDA_SUCCESS) == goes_on


def test_a_stream_waits_for_a_write_of_another_stream(cuda: Any) -> None:
    words, (first, second) = _words(cuda), _two_streams(cuda)
    ok(cuda.cuStreamWaitValue32(first, words, 7, EQ))
    ok(cuda.cuMemsetD32Async(int(words) + 8, 9, 1, first))
    assert code(cuda.cuStreamQuery(first)) == R.CUDA_ERROR_NOT_READY
    assert _read(cuda, int(words) + 8) == 0
    ok(cuda.cuStreamWriteValue32(second, words, 7, 0))
    ok(cuda.cuStreamSynchronize(first))
    assert _read(cuda, int(words) + 8) == 9


def test_a_stream_waits_for_a_kernel_and_a_kernel_for_a_stream(cuda: Any) -> None:
    words, (first, second), launch = _words(cuda), _two_streams(cuda), _kernels(cuda)
    data, there, back = (int(words) + 8 * i for i in range(3))
    launch(b"await", first, back)
    ok(cuda.cuStreamWaitValue32(second, there, 1, EQ))
    launch(b"use", second, data)
    ok(cuda.cuStreamWriteValue32(second, back, 1, 0))
    third = ok(cuda.cuStreamCreate(1))
    launch(b"signal", third, data, there, 0)
    ok(cuda.cuCtxSynchronize())
    assert _read(cuda, data) == 42


def test_a_thread_of_the_host_ends_a_wait(cuda: Any) -> None:
    pinned, stream = ok(cuda.cuMemHostAlloc(4, 0)), ok(cuda.cuStreamCreate(1))
    word = (ctypes.c_uint32 * 1).from_address(pinned)
    word[0] = 0
    ok(cuda.cuStreamWaitValue32(stream, pinned, 3, EQ))
    writer = threading.Timer(0.05, lambda: word.__setitem__(0, 3))
    writer.start()
    ok(cuda.cuStreamSynchronize(stream))
    writer.join()


def test_a_wait_that_nothing_can_end_is_a_deadlock() -> None:
    with Machine(devices=2) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        primary(cuda)
        word, stream = _words(cuda), ok(cuda.cuStreamCreate(1))
        ok(cuda.cuStreamWriteValue32(stream, word, 5, 0))
        ok(cuda.cuStreamWaitValue32(stream, word, 3, EQ))
        assert code(cuda.cuStreamSynchronize(stream)) == R.CUDA_ERROR_LAUNCH_TIMEOUT
        (report,) = machine.reports
        assert report.kind == "deadlock"
        assert f"device 0, a stream: waits for a word at 0x{int(word):x} to be 0x3; it is 0x5" in report.message


def test_freeing_memory_that_a_stream_waits_on_is_reported() -> None:
    with Machine(devices=1) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        primary(cuda)
        word, stream = ok(cuda.cuMemAllocAsync(8, 0)), ok(cuda.cuStreamCreate(1))
        ok(cuda.cuMemsetD8(word, 0, 8))
        ok(cuda.cuCtxSynchronize())
        ok(cuda.cuStreamWaitValue32(stream, word, 3, EQ))
        ok(cuda.cuMemFreeAsync(word, 0))
        assert code(cuda.cuStreamSynchronize(stream)) == R.CUDA_ERROR_ILLEGAL_ADDRESS
        assert [r.kind for r in machine.reports] == ["use_after_free"]
        assert "a queued stream wait reads 4 bytes" in machine.reports[0].message


def test_operations_of_a_batch_run_in_order(cuda: Any) -> None:
    words, (first, second) = _words(cuda), _two_streams(cuda)
    a, b, c = (int(words) + 8 * i for i in range(3))
    barrier = types.CUstreamBatchMemOpParams()
    barrier.operation = barrier.memoryBarrier.operation = OP.CU_STREAM_MEM_OP_BARRIER
    batch = [
        _params(OP.CU_STREAM_MEM_OP_WRITE_VALUE_32, a, 1),
        barrier,
        _params(OP.CU_STREAM_MEM_OP_WAIT_VALUE_64, b, 1 << 33, EQ),
        _params(OP.CU_STREAM_MEM_OP_WRITE_VALUE_64, c, 1 << 34),
    ]
    ok(cuda.cuStreamBatchMemOp(first, 4, batch, 0))
    assert code(cuda.cuStreamQuery(first)) == R.CUDA_ERROR_NOT_READY
    assert [_read(cuda, w, np.uint64) for w in (a, b, c)] == [1, 0, 0]
    ok(cuda.cuStreamWriteValue64(second, b, 1 << 33, 0))
    ok(cuda.cuStreamSynchronize(first))
    assert _read(cuda, c, np.uint64) == 1 << 34


def test_a_graph_writes_and_waits_again_at_each_launch(cuda: Any) -> None:
    words, (first, second) = _words(cuda), _two_streams(cuda)
    ok(cuda.cuStreamBeginCapture(first, types.CUstreamCaptureMode(2)))
    ok(cuda.cuStreamWaitValue32(first, words, 1, EQ))
    ok(cuda.cuStreamWriteValue32(first, words, 2, 0))
    graph = ok(cuda.cuStreamEndCapture(first))
    nodes, _ = ok(cuda.cuGraphGetNodes(graph, 2))
    kinds = {ok(cuda.cuGraphNodeGetType(node)) for node in nodes}
    assert kinds == {types.CUgraphNodeType.CU_GRAPH_NODE_TYPE_BATCH_MEM_OP}
    executable = ok(cuda.cuGraphInstantiate(graph, 0))
    for _ in range(2):
        ok(cuda.cuGraphLaunch(executable, first))
        assert code(cuda.cuStreamQuery(first)) == R.CUDA_ERROR_NOT_READY
        ok(cuda.cuStreamWriteValue32(second, words, 1, 0))
        ok(cuda.cuStreamSynchronize(first))
        assert _read(cuda, words) == 2


def test_wrong_words_and_flags_are_refused(cuda: Any) -> None:
    word, wrong = int(_words(cuda, 2)), R.CUDA_ERROR_INVALID_VALUE
    for address, flags in ((word + 2, 0), (word + 16, 0), (0, 0), (word, 2), (word, 4)):
        assert code(cuda.cuStreamWriteValue32(0, address, 1, flags)) == wrong
    for address, flags in ((word + 4, EQ), (word + 12, EQ), (word, 4), (1 << 40, EQ)):
        assert code(cuda.cuStreamWaitValue64(0, address, 1, flags)) == wrong
    assert code(cuda.cuStreamWaitValue32(0, word, 1, EQ | FLUSH)) == R.CUDA_ERROR_NOT_SUPPORTED
    with pytest.raises(OverflowError):
        cuda.cuStreamWriteValue32(0, word, 1 << 32, 0)
    assert code(cuda.cuStreamBatchMemOp(0, 0, [], 0)) == wrong
    good = _params(OP.CU_STREAM_MEM_OP_WRITE_VALUE_32, word, 1)
    assert code(cuda.cuStreamBatchMemOp(0, 1, [good], 1)) == wrong
    assert code(cuda.cuStreamBatchMemOp(0, 1, [types.CUstreamBatchMemOpParams()], 0)) == wrong
    bad = _params(OP.CU_STREAM_MEM_OP_WRITE_VALUE_32, word + 1, 1)
    assert code(cuda.cuStreamBatchMemOp(0, 2, [good, bad], 0)) == wrong
    flush = types.CUstreamBatchMemOpParams()
    flush.operation = OP.CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES
    assert code(cuda.cuStreamBatchMemOp(0, 1, [flush], 0)) == R.CUDA_ERROR_NOT_SUPPORTED
    with pytest.raises(RuntimeError, match="too small"):
        cuda.cuStreamBatchMemOp(0, 2, [good], 0)
    ok(cuda.cuCtxSynchronize())
    assert _read(cuda, word) == 0


def test_waits_and_writes_of_peer_memory_need_access() -> None:
    with Machine(devices=2) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        there = primary(cuda, 1)
        word = _words(cuda)
        primary(cuda, 0)
        assert code(cuda.cuStreamWriteValue32(0, word, 1, 0)) == R.CUDA_ERROR_INVALID_VALUE
        ok(cuda.cuCtxEnablePeerAccess(there, 0))
        ok(cuda.cuStreamWriteValue32(0, word, 1, 0))


# Races --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("race", ["hardware", "strict"])
@pytest.mark.parametrize("seed", range(7))
def test_writes_release_and_waits_acquire(race: str, seed: int) -> None:
    with _racing(race, seed) as machine:
        cuda = machine.driver
        words, (first, second), launch = _words(cuda), _two_streams(cuda), _kernels(cuda)
        data, there, back = (int(words) + 8 * i for i in range(3))
        ok(cuda.cuStreamWaitValue32(second, there, 1, EQ))
        launch(b"use", second, data)
        ok(cuda.cuStreamWriteValue32(second, back, 1, 0))
        launch(b"signal", first, data, there, 0)
        ok(cuda.cuStreamWaitValue32(first, back, 1, EQ))
        launch(b"use", first, data)
        ok(cuda.cuCtxSynchronize())
        assert _read(cuda, data) == 43
        assert not machine.reports


def test_a_write_without_its_memory_barrier_orders_nothing() -> None:
    for flags, kinds in ((0, []), (1, ["race"] * 2)):  # flags 1: no barrier, so load and store of the kernel race
        with _racing("hardware") as machine:
            cuda = machine.driver
            words, (first, second), launch = _words(cuda), _two_streams(cuda), _kernels(cuda)
            data, there = int(words), int(words) + 8
            ok(cuda.cuStreamWaitValue32(second, there, 1, EQ))
            launch(b"use", second, data)
            ok(cuda.cuMemsetD32Async(data, 5, 1, first))
            ok(cuda.cuStreamWriteValue32(first, there, 1, flags))
            ok(cuda.cuCtxSynchronize())
            assert [r.kind for r in machine.reports] == kinds


def test_a_wait_for_a_plain_store_of_a_kernel_that_runs_is_a_race() -> None:
    with _racing("hardware") as machine:
        cuda = machine.driver
        words, (first, second), launch = _words(cuda), _two_streams(cuda), _kernels(cuda)
        ok(cuda.cuStreamWaitValue32(second, int(words) + 8, 1, EQ))
        launch(b"signal", first, int(words), int(words) + 8, 1)
        ok(cuda.cuCtxSynchronize())
        (report,) = machine.reports
        assert report.kind == "race" and "stream wait" in str(report) and "signal" in str(report)


def test_a_wait_for_the_write_of_a_copy_is_clean_in_the_hardware_profile_only() -> None:
    for race, kinds in (("hardware", []), ("strict", ["race"] * 3)):  # races of the wait, of the load and of the store
        with _racing(race) as machine:
            cuda = machine.driver
            words, (first, second), launch = _words(cuda), _two_streams(cuda), _kernels(cuda)
            ok(cuda.cuStreamWaitValue32(second, int(words) + 8, 5, EQ))
            launch(b"use", second, int(words))
            launch(b"use", first, int(words))
            ok(cuda.cuMemsetD32Async(int(words) + 8, 5, 1, first))
            ok(cuda.cuCtxSynchronize())
            assert [r.kind for r in machine.reports] == kinds, race


# Callbacks and user objects -----------------------------------------------------------------------------------------


def test_a_callback_runs_in_stream_order_and_receives_stream_and_status(cuda: Any) -> None:
    calls: list[tuple[int, int, int]] = []
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    function = kind(lambda stream, status, data: calls.append((stream or 0, status, data or 0)))
    address = ctypes.cast(function, ctypes.c_void_p).value
    word, (first, second) = _words(cuda), _two_streams(cuda)
    ok(cuda.cuStreamWaitValue32(first, word, 1, EQ))
    ok(cuda.cuStreamAddCallback(first, types.CUstreamCallback(address), 77, 0))
    assert code(cuda.cuStreamQuery(first)) == R.CUDA_ERROR_NOT_READY and not calls
    ok(cuda.cuStreamWriteValue32(second, word, 1, 0))
    ok(cuda.cuStreamSynchronize(first))
    assert calls == [(int(first), 0, 77)]
    assert code(cuda.cuStreamAddCallback(first, address, 0, 1)) == R.CUDA_ERROR_INVALID_VALUE
    assert code(cuda.cuStreamAddCallback(first, 0, 0, 0)) == R.CUDA_ERROR_INVALID_VALUE
    ok(cuda.cuStreamWaitValue32(first, word, 2, EQ))
    ok(cuda.cuStreamAddCallback(first, address, 78, 0))
    assert code(cuda.cuStreamSynchronize(first)) == R.CUDA_ERROR_LAUNCH_TIMEOUT
    assert calls[1:] == [(int(first), int(R.CUDA_ERROR_LAUNCH_TIMEOUT), 78)]


def test_a_user_object_is_destroyed_with_its_last_reference(cuda: Any) -> None:
    calls: list[Any] = []
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(
        lambda pointer: calls.append((pointer, cuda.cuDeviceGetCount()[0]))
    )
    address = ctypes.cast(function, ctypes.c_void_p).value
    made = ok(cuda.cuUserObjectCreate(123, types.CUhostFn(address), 2, 1))
    ok(cuda.cuUserObjectRetain(made, 3))
    ok(cuda.cuUserObjectRelease(made, 4))
    wrong = R.CUDA_ERROR_INVALID_VALUE
    assert code(cuda.cuUserObjectRelease(made, 2)) == wrong
    assert code(cuda.cuUserObjectRetain(made, 0)) == wrong
    assert not calls
    ok(cuda.cuUserObjectRelease(made, 1))
    assert calls == [(123, R.CUDA_ERROR_NOT_PERMITTED)]
    assert code(cuda.cuUserObjectRelease(made, 1)) == wrong
    for function_address, count, flags in ((0, 1, 1), (address, 0, 1), (address, 1, 0)):
        assert code(cuda.cuUserObjectCreate(1, function_address, count, flags)) == wrong
