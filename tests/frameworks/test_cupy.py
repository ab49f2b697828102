# SPDX-License-Identifier: Apache-2.0
"""CuPy's arrays, streams and graphs with drvfuse, without a copy in either direction."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from framework_support import DELAY, RANKS, SPIN, Hosts, framework, randoms

import drvfuse as df
from drvfuse import dtypes, reference
from drvfuse.reference import bits
from drvfuse.runtime.interop import as_array
from drvfuse.runtime.stream import Stream

cupy = framework("cupy")

pytestmark = pytest.mark.filterwarnings("default")  # CuPy's own warnings fail no test

BF16 = ml_dtypes.bfloat16


def put(host: np.ndarray, index: int) -> Any:
    """An array on a device with the bits of a numpy array."""
    with cupy.cuda.Device(index):
        raw = cupy.asarray(host.view(f"u{host.itemsize}"))
        if host.dtype != BF16:
            return raw.view(host.dtype)
        try:
            return raw.view(BF16)
        except (TypeError, ValueError, NotImplementedError):
            pytest.skip("this CuPy has no bfloat16")


def numpy(array: Any) -> np.ndarray:
    with array.device:
        array.device.synchronize()
        unsigned: np.ndarray = array.view(f"u{array.dtype.itemsize}").get()
        return unsigned


def arrays(group: df.Group, hosts: Hosts) -> list[Any]:
    return [put(host, rank.device.index) for rank, host in zip(group, hosts, strict=True)]


def zeros(group: df.Group, shape: tuple[int, ...], dtype: Any = np.float32) -> list[Any]:
    return arrays(group, [np.zeros(shape, dtype)] * len(group))


def same(results: Any, expected: np.ndarray) -> bool:
    return all((numpy(result) == bits(expected)).all() for result in results)


def streams_of(group: df.Group, **options: Any) -> list[Any]:
    made = []
    for rank in group:
        with cupy.cuda.Device(rank.device.index):
            made.append(cupy.cuda.Stream(**options))
    return made


def spin(index: int, stream: Any) -> None:
    with cupy.cuda.Device(index), stream:
        cupy.RawKernel(SPIN, "spin")((1,), (1,), (DELAY,))


# Tests that need no GPU.


@pytest.mark.emulated
def test_cupy_does_not_take_emulated_memory_for_cuda_memory() -> None:
    array = df.device(0, driver="emu").zeros((4,), "float32")
    with pytest.raises(TypeError, match="12"):
        cupy.from_dlpack(array)
    assert (array.numpy() == 0).all()


# Tests that need GPUs.


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_collective_reads_and_writes_arrays(connect: Any, ranks: int, dtype: str, rng: np.random.Generator) -> None:
    kind = dtypes.get(dtype).numpy
    hosts = randoms(rng, ranks, (33, 1000), kind)
    with connect(ranks) as group:
        inputs, outputs = arrays(group, hosts), zeros(group, (33, 1000), kind)
        returned = df.allreduce(group, inputs, outputs, streams="current")
        assert all(one is other for one, other in zip(returned, outputs, strict=True))
        assert same(outputs, reference.allreduce(hosts))


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", RANKS)
def test_all_gather_and_reduce_scatter_read_arrays_and_their_results_are_read_back(
    connect: Any, ranks: int, rng: np.random.Generator
) -> None:
    hosts = randoms(rng, ranks, (8, 520))
    with connect(ranks) as group:
        inputs = arrays(group, hosts)
        gathered, scattered = df.all_gather(group, inputs).output, df.reduce_scatter(group, inputs)
        assert same([cupy.from_dlpack(array) for array in gathered], reference.all_gather(hosts))
        for array, expected in zip(scattered, reference.reduce_scatter(hosts), strict=True):
            assert same([cupy.from_dlpack(array)], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "uint8", "int64"])
def test_arrays_passed_in_either_direction_share_their_memory(group: df.Group, dtype: str) -> None:
    (rank,) = group
    kind = dtypes.get(dtype).numpy
    (theirs,) = zeros(group, (4, 6), kind)
    array, stream = as_array(theirs, driver=rank.device.driver, argument="x")
    assert (array.ptr, array.shape, str(array.dtype)) == (theirs.data.ptr, (4, 6), dtype)
    assert stream is not None and stream.foreign
    ours = rank.zeros((4, 6), dtype)
    back = cupy.from_dlpack(ours)
    assert (back.data.ptr, back.shape, back.dtype) == (ours.ptr, (4, 6), kind)
    if dtype != "bfloat16":  # the array interface has no name for it
        assert cupy.asarray(ours).data.ptr == ours.ptr
        only_interface = SimpleNamespace(__cuda_array_interface__=theirs.__cuda_array_interface__, kept=theirs)
        assert as_array(only_interface, driver=rank.device.driver, argument="x")[0].ptr == theirs.data.ptr


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", RANKS)
def test_fp8_rows_are_bytes_to_cupy(connect: Any, ranks: int, rng: np.random.Generator) -> None:
    """CuPy has no FP8 dtype, so FP8 arrays are passed to it and taken from it as bytes."""
    hosts = randoms(rng, ranks, (17, 1024), np.float16)
    gamma = rng.uniform(0.5, 1.5, 1024).astype(np.float16)
    expected = reference.allreduce_rmsnorm_fp8(hosts, gamma, epsilon=1e-6)
    with connect(ranks) as group:
        rows, scales = zeros(group, (17, 1024), np.uint8), zeros(group, (17,))
        views = [
            df.view(theirs.data.ptr, (17, 1024), "float8_e4m3fn", rank.device)
            for theirs, rank in zip(rows, group, strict=True)
        ]
        inputs, gammas = arrays(group, hosts), arrays(group, [gamma] * ranks)
        for array in inputs:
            array.device.synchronize()  # a view does not say on which stream its memory was filled
        df.allreduce_rmsnorm_fp8(group, inputs, gammas, epsilon=1e-6, outputs=views, scales=scales)
        group.synchronize()
        assert same(rows, expected.output) and same(scales, expected.scales)
        result = df.allreduce_rmsnorm_fp8(group, inputs, gammas, epsilon=1e-6)
        for mine in result.output:
            with pytest.raises(TypeError):
                cupy.from_dlpack(mine)
            as_bytes = df.view(mine.ptr, mine.shape, "uint8", mine.device, stream=mine.stream, owner=mine)
            assert same([cupy.from_dlpack(as_bytes)], expected.output)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("non_blocking", [False, True])
def test_a_call_is_ordered_between_work_of_cupys_streams(
    connect: Any, ranks: int, non_blocking: bool, rng: np.random.Generator
) -> None:
    """Before the call CuPy queues a slow write of the inputs, and directly after the call it overwrites them."""
    hosts = randoms(rng, ranks, (64, 1024))
    with connect(ranks) as group:
        sources, inputs, outputs = arrays(group, hosts), zeros(group, (64, 1024)), zeros(group, (64, 1024))
        streams = streams_of(group, non_blocking=non_blocking)
        try:
            for rank, stream, source, x in zip(group, streams, sources, inputs, strict=True):
                with cupy.cuda.Device(rank.device.index) as device:
                    device.synchronize()
                    spin(device.id, stream)
                    stream.use()
                    cupy.copyto(x, source)
            df.allreduce(group, inputs, outputs)  # on drvfuse's own streams
            for rank, x in zip(group, inputs, strict=True):
                with cupy.cuda.Device(rank.device.index):
                    x.fill(-1)
        finally:
            for rank in group:
                with cupy.cuda.Device(rank.device.index):
                    cupy.cuda.Stream.null.use()
        assert same(outputs, reference.allreduce(hosts))


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", RANKS)
def test_cupy_waits_for_results_on_its_current_stream(connect: Any, ranks: int, rng: np.random.Generator) -> None:
    hosts = randoms(rng, ranks, (64, 1024))
    with connect(ranks) as group:
        inputs = [rank.array(host) for rank, host in zip(group, hosts, strict=True)]
        for rank in group:
            index = rank.device.index
            with cupy.cuda.Device(index):
                spin(index, cupy.cuda.ExternalStream(rank.stream.handle, index))
        totals = df.allreduce(group, inputs)  # kept until CuPy is done with them
        doubled = []
        for rank, total in zip(group, totals, strict=True):
            with cupy.cuda.Device(rank.device.index):
                doubled.append(cupy.from_dlpack(total) * np.float32(2))
        assert same(doubled, reference.allreduce(hosts) * np.float32(2))


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("non_blocking", [False, True])
def test_cupys_graphs_replay_calls(connect: Any, ranks: int, non_blocking: bool, rng: np.random.Generator) -> None:
    """Each device has a CuPy graph, in which its rank's part of the call lies between kernels of CuPy."""
    two, one = np.float32(2), np.float32(1)
    with connect(ranks) as group:
        x, y, total, out = (zeros(group, (16, 1024)) for _ in range(4))
        streams = streams_of(group, non_blocking=non_blocking)
        prepared = df.allreduce.prepare(group, y, total)
        prepared.launch()
        group.synchronize()

        def step(i: int) -> None:
            cupy.multiply(x[i], two, out=y[i])
            prepared.launch(rank=group.ranks[i].index, stream=streams[i])
            cupy.add(total[i], one, out=out[i])

        for i in range(ranks):  # compiles CuPy's kernels
            with cupy.cuda.Device(group.ranks[i].device.index) as device:
                cupy.multiply(x[i], two, out=y[i])
                cupy.add(total[i], one, out=out[i])
                device.synchronize()
        graphs = []
        for i in range(ranks):
            with cupy.cuda.Device(group.ranks[i].device.index), streams[i]:
                streams[i].begin_capture()
                step(i)
                graphs.append(streams[i].end_capture())
        for _ in range(3):
            hosts = randoms(rng, ranks, (16, 1024))
            for i, host in enumerate(hosts):
                with cupy.cuda.Device(group.ranks[i].device.index) as device:
                    x[i].set(host)
                    device.synchronize()
            for i, graph in enumerate(graphs):
                with cupy.cuda.Device(group.ranks[i].device.index):
                    graph.launch(stream=streams[i])
            assert same(out, reference.allreduce([host * two for host in hosts]) + one)
        group.check()


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", RANKS)
def test_graphs_of_drvfuse_replay_cupys_kernels(connect: Any, ranks: int, rng: np.random.Generator) -> None:
    two = np.float32(2)
    with connect(ranks) as group:
        x, total, out = (zeros(group, (16, 1024)) for _ in range(3))
        streams = streams_of(group, non_blocking=True)
        ours = [Stream.wrap(rank.device, stream) for rank, stream in zip(group, streams, strict=True)]
        prepared = df.allreduce.prepare(group, x, total)
        prepared.launch(streams=ours)

        def double() -> None:
            for rank, stream, theirs, result in zip(group, streams, total, out, strict=True):
                with cupy.cuda.Device(rank.device.index), stream:
                    cupy.multiply(theirs, two, out=result)

        double()  # compiles CuPy's kernel
        group.synchronize()
        for stream in ours:
            stream.synchronize()
        with df.Graph.capture(ours) as graph:
            prepared.launch(streams=ours)
            double()
        for _ in range(3):
            hosts = randoms(rng, ranks, (16, 1024))
            for rank, theirs, host in zip(group, x, hosts, strict=True):
                with cupy.cuda.Device(rank.device.index) as device:
                    theirs.set(host)
                    device.synchronize()
            graph.launch(ours[0])
            assert same(out, reference.allreduce(hosts) * two)


@pytest.mark.gpu
def test_a_dropped_input_is_reused_only_after_the_call(group: df.Group, rng: np.random.Generator) -> None:
    """CuPy gives the memory of a dropped array to the next one at once, while the call still waits to run."""
    (rank,) = group
    own = cupy.cuda.ExternalStream(rank.stream.handle, rank.device.index)
    for _ in range(3):
        host = rng.standard_normal((64, 1024)).astype(np.float32)
        x = cupy.asarray(host)
        output, address = rank.empty((64, 1024), "float32"), x.data.ptr
        spin(rank.device.index, own)
        df.allreduce(group, x, output)
        del x
        gc.collect()
        others = [cupy.full((64, 1024), -1, cupy.float32) for _ in range(16)]
        assert address in {other.data.ptr for other in others}
        assert (bits(output.numpy()) == bits(host)).all()


@pytest.mark.gpu
def test_an_array_keeps_the_memory_of_a_dropped_result(group: df.Group, rng: np.random.Generator) -> None:
    (rank,) = group
    host = rng.standard_normal((64, 1024)).astype(np.float32)
    total = cupy.from_dlpack(df.allreduce(group, rank.array(host)))
    gc.collect()
    others = [rank.array(np.full((64, 1024), -1, np.float32)) for _ in range(8)]
    rank.stream.synchronize()
    assert all(other.ptr != total.data.ptr for other in others)
    assert same([total], host)


@pytest.mark.gpu
def test_arrays_that_an_op_cannot_use_are_refused_by_argument_name(group: df.Group, refused: Any) -> None:
    x = cupy.zeros((8, 512), cupy.float32)
    refused(lambda: df.allreduce(group, x.T), "inputs", "with strides (1, 512)")
    refused(lambda: df.allreduce(group, x[:, ::2]), "inputs", "with strides (512, 2)")
    refused(lambda: df.allreduce(group, cupy.broadcast_to(x, (2, 8, 512))), "inputs", "with strides")
    refused(lambda: df.allreduce(group, x, cupy.zeros((8, 511), cupy.float32)), "outputs", "of shape (8, 511)")
    refused(lambda: df.allreduce(group, x, x.astype(cupy.float16)), "outputs", "float16")
    refused(lambda: df.allreduce(group, x.astype(cupy.complex64)), "inputs.dtype", "(5, 64, 1)")
    refused(lambda: df.allreduce(group, x.ravel()[1:513]), "inputs", "at address")
    refused(lambda: df.allreduce(group, x.get()), "inputs", "host memory")


@pytest.mark.gpu
@pytest.mark.gpus(2)
def test_an_array_on_another_device_is_named(group: df.Group, refused: Any) -> None:
    refused(lambda: df.allreduce(group, put(np.zeros((8, 512), np.float32), 1)), "inputs", "on device 1")
