# SPDX-License-Identifier: Apache-2.0
"""The rules of array libraries that ops must keep, tested with stand-ins: one behaves like torch, and one like a
library that has no current streams."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import drvfuse as df
from drvfuse import emu, reference
from drvfuse.errors import CaptureError, DriverError
from drvfuse.reference import bits
from drvfuse.runtime import dlpack, held
from drvfuse.runtime.array import Array
from drvfuse.runtime.lifetime import flush
from drvfuse.runtime.pinned import PinnedBuffer
from drvfuse.runtime.stream import LEGACY, Event, Stream


class Immutable:
    """An array of a library that has DLPack but no current stream, such as JAX."""

    def __init__(self, array: Array, refusal: Exception | None = None) -> None:
        self.array, self.refusal = array, refusal

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, *, stream: int | None = None, **more: Any) -> Any:
        if self.refusal is not None:
            raise self.refusal
        return self.array.__dlpack__(stream=stream, **more)


GATE = """
extern "C" __global__ void gate(const volatile unsigned* open) {
    for (int polls = 0; !*open && POLLS_LEFT; ++polls) __nanosleep(1000);
}
"""

WILD = 'extern "C" __global__ void wild(int* x) { *x = 1; }'


@contextmanager
def blocked(stream: Stream) -> Iterator[None]:
    """Work that is queued on `stream` inside the `with` block does not run before the block ends.

    On a GPU the kernel that holds this work back gives up after some seconds. Code in the block must not load a kernel,
    as loading one may wait for running kernels.
    """
    driver = stream.device.driver
    flag = PinnedBuffer(driver, 4)
    source = GATE.replace("POLLS_LEFT", "true" if driver.name == "emu" else "polls < 5000000")
    df.compile(source, driver=driver)["gate"].prepare(1, 1, df.view(flag.ptr, 1, "uint32", stream.device))(stream)
    try:
        yield
    finally:
        flag.view(np.uint32)[0] = 1
        stream.synchronize()


@pytest.fixture
def group(driver: str) -> Iterator[df.Group]:
    with df.Group.local(1, driver=driver, max_blocks=4) as group:
        yield group


def test_memory_of_a_library_without_a_stream_api_lives_until_the_launch_is_complete(
    group: df.Group, rng: np.random.Generator
) -> None:
    (rank,) = group
    values = rng.standard_normal((3, 512)).astype(np.float32)
    output = rank.empty(values.shape, "float32")
    foreign = Immutable(rank.array(values))
    gone = weakref.ref(foreign)
    df.allreduce(group, [rank.zeros(values.shape, "float32")], output)  # loads the kernel
    group.synchronize()
    with blocked(rank.stream):
        df.allreduce(group, foreign, output)
        del foreign
        gc.collect()
        rank.device.empty(16, "float32")  # an allocation first frees memory that no work uses
        assert gone() is not None
    rank.stream.synchronize()
    gc.collect()
    assert gone() is None
    assert (bits(output.numpy()) == bits(values)).all()


def test_calls_that_neither_allocate_nor_wait_keep_a_bounded_number_of_foreign_arrays(group: df.Group) -> None:
    (rank,) = group
    output, alive = rank.empty((2, 256), "float32"), weakref.WeakSet[Immutable]()
    for _ in range(20):
        foreign = Immutable(rank.zeros((2, 256), "float32"))
        alive.add(foreign)
        df.allreduce(group, foreign, output)
        with rank.device.use():
            rank.device.driver.cuStreamSynchronize(rank.stream.handle)
    del foreign
    gc.collect()
    assert len(alive) <= 2


def test_memory_of_a_closed_graph_lives_until_its_last_launch_is_complete(group: df.Group) -> None:
    (rank,) = group
    output = rank.zeros((2, 256), "float32")
    foreign = Immutable(rank.array(np.full((2, 256), 3, np.float32)))
    prepared = df.allreduce.prepare(group, foreign, output)
    with df.Graph.capture([rank.stream]) as graph:
        prepared.launch()
    gone = weakref.ref(foreign)
    del prepared, foreign
    graph.launch(rank.stream)  # loads the graph
    rank.stream.synchronize()
    with blocked(rank.stream):
        graph.launch(rank.stream)
        graph.close()
        gc.collect()
        assert gone() is not None
    gc.collect()
    assert gone() is None
    assert (output.numpy() == 3).all()


def test_calls_that_are_queued_ahead_make_a_bounded_number_of_queries(group: df.Group) -> None:
    (rank,) = group
    output, foreign = rank.empty((2, 256), "float32"), Immutable(rank.zeros((2, 256), "float32"))
    prepared = df.allreduce.prepare(group, foreign, output)
    prepared.launch()  # loads the kernel
    rank.stream.synchronize()
    queries, query = [], Event.query
    with pytest.MonkeyPatch.context() as patch, blocked(rank.stream):
        patch.setattr(Event, "query", lambda event: queries.append(event) or query(event))
        for _ in range(20):
            prepared.launch()
        assert len(queries) <= 20


class Streamed:
    """An array of a library that names the stream on which it works, as torch and CuPy."""

    def __init__(self, array: Array, stream: Stream) -> None:
        self.array = array
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, "stream": stream.handle}


@pytest.mark.parametrize("joint", [True, False])
def test_launches_of_a_graph_come_between_work_of_the_libraries_that_own_its_arrays(
    group: df.Group, joint: bool, rng: np.random.Generator
) -> None:
    (rank,) = group
    values = rng.standard_normal((2, 256)).astype(np.float32)
    source, x, result = rank.array(values), rank.zeros(values.shape, "float32"), rank.zeros(values.shape, "float32")
    theirs = Stream(rank.device)
    prepared = df.allreduce.prepare(group, Streamed(x, theirs), Streamed(result, theirs))
    if joint:
        with df.Graph.capture([rank.stream]) as graph:
            prepared.launch()
    else:
        with group.capture() as graphs:
            prepared.launch()
        (graph,) = graphs.graphs
    graph.launch(rank.stream)  # loads the graph
    group.synchronize()
    with blocked(theirs):
        with rank.device.use():
            rank.device.driver.cuMemcpyDtoDAsync(x.ptr, source.ptr, x.nbytes, theirs.handle)
        graph.launch(rank.stream)
        assert not rank.stream.query()
    group.synchronize()
    assert (bits(result.numpy()) == bits(values)).all()
    with blocked(rank.stream):
        graph.launch(rank.stream)
        graph.close()
        assert not theirs.query()
    theirs.synchronize()


def test_a_graph_keeps_the_streams_of_a_library_that_destroys_them(
    group: df.Group, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CuPy destroys a stream with the last reference to it. A real driver may crash when it gets the handle later."""
    (rank,), theirs = group, [Stream(group[0].device)]
    cuda = SimpleNamespace(get_current_stream=lambda index: theirs[0])
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))

    class Exported:
        def __init__(self, array: Array) -> None:
            self.array = array

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.array.__dlpack_device__()

        def __dlpack__(self, **options: Any) -> Any:
            return self.array.__dlpack__(**options)

    Exported.__module__ = "cupy"
    values = rng.standard_normal((2, 256)).astype(np.float32)
    result = rank.zeros(values.shape, "float32")
    prepared = df.allreduce.prepare(group, Exported(rank.array(values)), Exported(result))
    with df.Graph.capture([rank.stream]) as graph:
        prepared.launch()
    monkeypatch.undo()
    gone = weakref.ref(theirs.pop())
    del prepared
    gc.collect()
    assert gone() is not None
    graph.launch(rank.stream)
    group.synchronize()
    assert (bits(result.numpy()) == bits(values)).all()


@pytest.mark.emulated
def test_a_graph_that_holds_the_launch_of_a_graph_is_ordered_with_the_same_streams(counted_calls: Any) -> None:
    with emu.Machine(devices=1) as machine, df.Group.local(1, driver=machine, max_blocks=4) as group:
        (rank,), theirs = group, Stream(group[0].device)
        arrays = [Streamed(rank.zeros((2, 256), "float32"), theirs) for _ in range(2)]
        prepared = df.allreduce.prepare(group, *arrays)
        with df.Graph.capture([rank.stream]) as inner:
            prepared.launch()
        with df.Graph.capture([rank.stream]) as outer:
            inner.launch(rank.stream)
        calls = counted_calls(rank.device.driver, lambda: outer.launch(rank.stream))
        before, after = calls[: calls.index("cuGraphLaunch")], calls[calls.index("cuGraphLaunch") :]
        assert before.count("cuStreamWaitEvent") == after.count("cuStreamWaitEvent") == 1
        group.synchronize()


@pytest.mark.emulated  # what a real driver does with the handle of a destroyed stream is undefined
def test_a_stream_that_its_library_has_destroyed_does_not_order_launches_of_a_graph(rng: np.random.Generator) -> None:
    with emu.Machine(devices=1) as machine, df.Group.local(1, driver=machine, max_blocks=4) as group:
        (rank,), values = group, rng.standard_normal((2, 256)).astype(np.float32)
        x, result = rank.array(values), rank.zeros(values.shape, "float32")
        streams = [Stream(rank.device) for _ in range(2)]
        prepared = df.allreduce.prepare(group, *map(Streamed, (x, result), streams))
        with df.Graph.capture([rank.stream]) as graph:
            prepared.launch()
        streams[0].close()
        graph.launch(rank.stream)
        with blocked(rank.stream):
            graph.launch(rank.stream)
            assert not streams[1].query()  # the stream that was not destroyed still waits for the launch
        group.synchronize()
        assert (bits(result.numpy()) == bits(values)).all()


@pytest.mark.emulated
def test_a_launch_of_a_graph_orders_no_stream_for_own_arrays_or_on_the_stream_of_the_library(
    counted_calls: Any,
) -> None:
    with emu.Machine(devices=1) as machine, df.Group.local(1, driver=machine, max_blocks=4) as group:
        (rank,), stream = group, Stream(group[0].device)
        theirs = Stream.wrap(rank.device, stream.handle)
        x, result = rank.zeros((2, 256), "float32"), rank.empty((2, 256), "float32")
        foreign = Streamed(x, theirs), Streamed(result, theirs)
        for arrays, on, waits in (
            ((x, result), rank.stream, 0),
            (foreign, rank.stream, 2),  # one wait before and one after the launch
            (foreign, theirs, 2),  # the waits of `RankOrder` and `Stream.mark`, as for any call on a foreign stream
        ):
            prepared = df.allreduce.prepare(group, *arrays)
            with df.Graph.capture([rank.stream]) as graph:
                prepared.launch()
            for _ in range(2):  # counts the second launch, which follows one on the same stream
                calls = counted_calls(rank.device.driver, lambda graph=graph, on=on: graph.launch(on))
            assert calls.count("cuStreamWaitEvent") == waits
            if not waits:
                assert calls == ["cuCtxPushCurrent", "cuGraphLaunch", "cuCtxPopCurrent", "cuStreamIsCapturing"]
            group.synchronize()


@pytest.fixture
def failing() -> Iterator[tuple[emu.Machine, df.Group]]:
    """A machine, on which a test makes a launch fail, and a group of two of its devices."""
    with emu.Machine(devices=2) as machine, df.Group.local(2, driver=machine, max_blocks=4) as group:
        yield machine, group


OUT_OF_MEMORY = emu.driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
FAILURES = {
    "rank 1 is not launched": ("one_stage", "cuLaunchKernelEx", 1, 0),
    "no rank is launched after the copies": ("naive", "cuLaunchKernelEx", 0, 1),
    "the streams do not meet after the copies": ("naive", "cuEventRecord", 4, 1),
}
"""For each failure the algorithm, the driver function that fails, how many calls of it succeed before, and the rank
whose stream then has work that uses the memory of rank 0."""


@pytest.mark.emulated
@pytest.mark.parametrize("algo,function,after,used_by", FAILURES.values(), ids=FAILURES)
def test_a_launch_that_fails_half_way_keeps_arrays_for_what_was_queued_and_orders_their_owner(
    failing: tuple[emu.Machine, df.Group], algo: str, function: str, after: int, used_by: int
) -> None:
    machine, group = failing
    theirs = [Stream(rank.device) for rank in group]
    outputs = [rank.empty((2, 256), "float32") for rank in group]
    df.allreduce(group, [rank.zeros((2, 256), "float32") for rank in group], outputs, algo=algo)  # loads the kernels
    group.synchronize()
    inputs = [Immutable(rank.zeros((2, 256), "float32")) for rank in group]
    results = [Streamed(output, stream) for output, stream in zip(outputs, theirs, strict=True)]
    prepared = df.allreduce.prepare(group, inputs, results, algo=algo)
    gone = weakref.ref(inputs[0])
    with blocked(group[used_by].stream):
        machine.inject(function, OUT_OF_MEMORY, after=after)
        with pytest.raises(DriverError, match=function):
            prepared.launch()
        del prepared, inputs
        gc.collect()
        group[0].empty(16, "float32")  # an allocation first frees memory that no work uses
        assert gone() is not None and not theirs[0].query()
    group.reset()
    gc.collect()
    assert gone() is None
    theirs[0].synchronize()
    ones = [rank.array(np.ones((2, 256), np.float32)) for rank in group]
    assert all((total.numpy() == 2).all() for total in df.allreduce(group, ones, algo=algo))


@pytest.mark.emulated
def test_objects_that_are_kept_for_work_of_a_closed_device_are_dropped() -> None:
    with emu.Machine(devices=1) as machine:
        device, kept = df.device(0, driver=machine), np.zeros(1)
        gone = weakref.ref(kept)
        held.keep(device.stream, [kept])
        del kept
        device.close()
        df.device(0, driver=machine).synchronize()
        gc.collect()
        assert gone() is None


@pytest.mark.emulated
def test_objects_that_are_kept_after_a_fault_are_dropped() -> None:
    with emu.Machine(devices=1) as machine:
        device, kept = df.device(0, driver=machine), np.zeros(1)
        gone = weakref.ref(kept)
        df.compile(WILD, driver=machine)["wild"].prepare(1, 1, 64, device=device)(device.stream)
        held.keep(device.stream, [kept])
        del kept
        with pytest.raises(DriverError):
            device.stream.synchronize()
        for _ in range(2):
            flush(device.driver)
        gc.collect()
        assert gone() is None


def test_arrays_of_a_library_without_a_stream_api_are_not_exported_during_a_capture(group: df.Group) -> None:
    (rank,) = group
    foreign, output = Immutable(rank.array(np.full((2, 256), 3, np.float32))), rank.zeros((2, 256), "float32")
    prepared = df.allreduce.prepare(group, foreign, output)
    with pytest.raises(CaptureError, match=r"would have to wait for inputs, .*\. Prepare the call before"):  # noqa: SIM117
        with df.Graph.capture([rank.stream]):
            df.allreduce(group, foreign, output)
    with df.Graph.capture([rank.stream]) as graph:
        prepared.launch()
    gone = weakref.ref(foreign)
    del prepared, foreign
    gc.collect()
    assert gone() is not None  # the graph keeps the array alive
    graph.launch(rank.stream)
    assert (output.numpy() == 3).all()


def test_arrays_of_the_legacy_stream_are_used_in_a_capture_of_a_stream_that_it_orders(group: df.Group) -> None:
    """CuPy's streams are ordered with the legacy default stream, and CuPy's arrays name that stream by default."""
    (rank,) = group
    with rank.device.use():
        ordered = Stream.wrap(rank.device, int(group.driver.cuStreamCreate(0)))

    def theirs(array: Array) -> Any:
        return SimpleNamespace(kept=array, __cuda_array_interface__=array.__cuda_array_interface__ | {"stream": LEGACY})

    x, y = rank.array(np.full((2, 256), 5, np.float32)), rank.zeros((2, 256), "float32")
    prepared = df.allreduce.prepare(group, theirs(x), theirs(y), streams=ordered)
    with df.Graph.capture([ordered]) as graph:
        prepared.launch()
    assert (y.numpy() == 0).all()
    graph.launch(ordered)
    ordered.synchronize()
    assert (y.numpy() == 5).all()


@pytest.mark.gpus(4)
@pytest.mark.parametrize("flags", [0, 1], ids=["blocking", "non_blocking"])
def test_another_library_captures_each_ranks_part_in_a_graph_of_its_own(
    driver: str, flags: int, rng: np.random.Generator
) -> None:
    """torch and CuPy capture in this way: in the capture mode "global", in one graph per device, with arrays on the
    legacy default stream."""
    with df.Group.local(4, driver=driver, max_blocks=4) as group:
        api = group.driver

        def theirs(array: Array) -> Any:
            interface = array.__cuda_array_interface__ | {"stream": LEGACY}
            return SimpleNamespace(kept=array, __cuda_array_interface__=interface)

        x, y = ([rank.zeros((16, 264), "float32") for rank in group] for _ in range(2))
        prepared = df.allreduce.prepare(group, [theirs(a) for a in x], [theirs(a) for a in y])
        prepared.launch()
        group.synchronize()
        graphs = []
        for rank in group:
            with rank.device.use():
                stream = int(api.cuStreamCreate(flags))
                api.cuStreamBeginCapture(stream, api.types.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)
                prepared.launch(rank=rank.index, stream=stream)
                graphs.append((rank, stream, api.cuGraphInstantiate(api.cuStreamEndCapture(stream), 0)))
        hosts = [rng.standard_normal((16, 264)).astype(np.float32) for _ in group]
        for array, host in zip(x, hosts, strict=True):
            array.copy_from(host)
        for rank, stream, graph in graphs:
            with rank.device.use():
                api.cuGraphLaunch(graph, stream)
        for rank, stream, graph in graphs:
            with rank.device.use():
                api.cuStreamSynchronize(stream)
                api.cuGraphExecDestroy(graph)
                api.cuStreamDestroy(stream)
        assert all((bits(array.numpy()) == bits(reference.allreduce(hosts))).all() for array in y)


def test_arrays_of_jax_are_refused_as_outputs(group: df.Group, refused: Any) -> None:
    class ArrayImpl(Immutable):
        __module__ = "jaxlib._jax"

    x = ArrayImpl(group.ranks[0].zeros((2, 256), "float32"))
    refused(lambda: df.allreduce(group, x, x), "outputs", "read-only")
    assert (df.allreduce(group, x).numpy() == 0).all()


def test_a_dtype_that_ops_do_not_know_names_the_argument(group: df.Group, refused: Any) -> None:
    class Complex(Immutable):
        def __dlpack__(self, **options: Any) -> Any:
            capsule = super().__dlpack__(**options)
            managed = dlpack._ManagedVersioned.from_address(dlpack._get_pointer(capsule, b"dltensor_versioned"))
            managed.tensor.dtype.code = 5
            return capsule

    x = Complex(group.ranks[0].zeros((2, 256), "int64"))
    refused(lambda: df.allreduce(group, x), "inputs.dtype", "(code, bits, lanes) (5, 64, 1)")


@pytest.mark.parametrize("kind", [BufferError, RuntimeError, ValueError])
def test_a_refusal_of_a_library_names_the_argument(group: df.Group, kind: type[Exception], refused: Any) -> None:
    (rank,) = group
    array = rank.zeros((2, 256), "float32")
    refusing = Immutable(array, kind("Can't export tensors that require gradient"))
    call = "refused by its library (Can't export tensors that require gradient)"
    refused(lambda: df.allreduce(group, refusing), "inputs", call)
    refused(lambda: df.allreduce(group, array, refusing), "outputs", call)


def test_a_refusal_to_tell_the_device_names_the_argument(group: df.Group, refused: Any) -> None:
    class Sharded:
        def __dlpack__(self, **options: Any) -> Any:
            raise AssertionError

        def __dlpack_device__(self) -> tuple[int, int]:
            raise BufferError("__dlpack__ only supported for unsharded arrays.")

    refused(lambda: df.allreduce(group, Sharded()), "inputs", "only supported for unsharded arrays")


class Torch:
    """A stand-in for torch: what drvfuse uses of it, with torch's rule for exporting a tensor."""

    def __init__(self) -> None:
        self.device, self.streams = 0, dict[int, int]()
        self.cuda = SimpleNamespace(current_stream=self._current_stream, device=self._device)

    def _current_stream(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(cuda_stream=self.streams.get(index, 0))

    @contextmanager
    def _device(self, index: int) -> Iterator[None]:
        before, self.device = self.device, index
        yield
        self.device = before

    def tensor(self, array: Array) -> Any:
        torch = self

        class Tensor:
            def __dlpack_device__(self) -> tuple[int, int]:
                return array.__dlpack_device__()

            def __dlpack__(self, *, stream: int | None = None, **more: Any) -> Any:
                if array.device.index != torch.device:
                    raise BufferError("Can't export tensors on a different CUDA device index.")
                return array.__dlpack__(stream=stream, **more)

        Tensor.__module__ = "torch"
        return Tensor()


@pytest.mark.gpus(2)
def test_torch_tensors_of_every_device_are_taken_on_its_own_streams(
    driver: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = Torch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    hosts = [rng.standard_normal((5, 264)).astype(np.float32) for _ in range(2)]
    with df.Group.local(2, driver=driver, max_blocks=4) as group:
        theirs = [Stream(rank.device) for rank in group]
        torch.streams = {rank.device.index: stream.handle for rank, stream in zip(group, theirs, strict=True)}
        arrays = [rank.array(host) for rank, host in zip(group, hosts, strict=True)]
        group.synchronize()
        results = df.allreduce(group, [torch.tensor(array) for array in arrays], streams="current")
        assert [result.stream.handle for result in results] == [stream.handle for stream in theirs]
        for result in results:
            assert (bits(result.numpy()) == bits(reference.allreduce(hosts))).all()
        del result, results
        group.synchronize()
        group[0].device.synchronize()  # frees the results: a foreign stream must outlive what is allocated on it
    assert torch.device == 0


@pytest.mark.gpus(2)
def test_a_foreign_array_of_another_device_is_refused(driver: str, refused: Any) -> None:
    other = df.device(1, driver=driver).zeros((2, 256), "float32")
    with df.Group.local([0], driver=driver, max_blocks=4) as group:
        refused(lambda: df.allreduce(group, Immutable(other)), "inputs", "on device 1")
