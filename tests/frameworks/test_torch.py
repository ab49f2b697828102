# SPDX-License-Identifier: Apache-2.0
"""torch's tensors, streams and graphs with drvfuse, without a copy in either direction."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from framework_support import DELAY, RANKS, Hosts, framework, randoms

import drvfuse as df
from drvfuse import dtypes, reference
from drvfuse.reference import bits
from drvfuse.runtime.interop import as_array
from drvfuse.runtime.stream import Stream

torch = framework("torch")

pytestmark = pytest.mark.filterwarnings("default")  # torch's own warnings fail no test

BF16 = ml_dtypes.bfloat16


def tensor(host: np.ndarray, device: Any) -> Any:
    """A tensor on a device with the bits of a numpy array of any dtype."""
    kind = getattr(torch, host.dtype.name)
    return torch.from_numpy(host.view(f"i{host.itemsize}")).to(device).view(kind)


def numpy(result: Any) -> np.ndarray:
    """The bits of a tensor as a numpy array of its dtype."""
    size = result.element_size()
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}[size]
    return result.view(integers).cpu().numpy().view(dtypes.get(str(result.dtype).removeprefix("torch.")).numpy)


def places(group: df.Group) -> list[Any]:
    return [torch.device("cuda", rank.device.index) for rank in group]


def tensors(group: df.Group, hosts: Hosts) -> list[Any]:
    return [tensor(host, place) for host, place in zip(hosts, places(group), strict=True)]


def empty(group: df.Group, shape: tuple[int, ...], dtype: str) -> list[Any]:
    return [torch.empty(shape, dtype=getattr(torch, dtype), device=place) for place in places(group)]


def wait() -> None:
    """Wait for the work of all devices."""
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)


def same(results: Any, expected: np.ndarray) -> bool:
    """Whether all tensors have these bits, once the work of all devices is complete."""
    wait()
    return all((bits(numpy(result)) == bits(expected)).all() for result in results)


# Tests that need no GPU.


def test_tensors_in_host_memory_are_refused(driver: str, refused: Any) -> None:
    with df.Group.local(1, driver=driver, max_blocks=4) as group:
        refused(lambda: df.allreduce(group, torch.zeros(4, 256)), "inputs", "host memory")


@pytest.mark.emulated
def test_torch_does_not_take_emulated_memory_for_cuda_memory() -> None:
    array = df.device(0, driver="emu").zeros((4,), "float32")
    with pytest.raises(BufferError, match="emulated device"):
        torch.from_dlpack(array)
    assert (array.numpy() == 0).all()


# Tests that need GPUs.


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_collective_reads_and_writes_tensors(connect: Any, ranks: int, dtype: str, rng: np.random.Generator) -> None:
    hosts = randoms(rng, ranks, (33, 1000), dtypes.get(dtype).numpy)
    with connect(ranks) as group:
        inputs, outputs = tensors(group, hosts), empty(group, (33, 1000), dtype)
        torch.cuda.set_device(0)  # the inputs of other ranks are on other devices than torch's current one
        returned = df.allreduce(group, inputs, outputs, streams="current")
        assert all(one is other for one, other in zip(returned, outputs, strict=True))
        assert same(outputs, reference.allreduce(hosts))
        assert torch.cuda.current_device() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", RANKS)
def test_all_gather_and_reduce_scatter_read_tensors_and_their_results_are_read_back(
    connect: Any, ranks: int, rng: np.random.Generator
) -> None:
    hosts = randoms(rng, ranks, (8, 520), BF16)
    with connect(ranks) as group:
        inputs = tensors(group, hosts)
        gathered = [torch.from_dlpack(a) for a in df.all_gather(group, inputs, streams="current").output]
        assert same(gathered, reference.all_gather(hosts))
        scattered = [torch.from_dlpack(a) for a in df.reduce_scatter(group, inputs, streams="current")]
        wait()
        for mine, expected in zip(scattered, reference.reduce_scatter(hosts), strict=True):
            assert (bits(numpy(mine)) == bits(expected)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "uint8", "int64"])
def test_tensors_passed_in_either_direction_share_their_memory(group: df.Group, dtype: str) -> None:
    (rank,) = group
    theirs = torch.zeros((4, 6), dtype=getattr(torch, dtype), device=places(group)[0])
    array, stream = as_array(theirs, driver=rank.device.driver, argument="x")
    assert (array.ptr, array.shape, str(array.dtype)) == (theirs.data_ptr(), (4, 6), dtype)
    assert stream is not None and stream.foreign
    ours = rank.zeros((4, 6), dtype)
    back = torch.from_dlpack(ours)
    assert (back.data_ptr(), tuple(back.shape), back.dtype) == (ours.ptr, (4, 6), theirs.dtype)
    if dtype != "bfloat16":  # the array interface has no name for bfloat16
        assert torch.as_tensor(ours, device=back.device).data_ptr() == ours.ptr
        only_interface = SimpleNamespace(__cuda_array_interface__=theirs.__cuda_array_interface__, kept=theirs)
        assert as_array(only_interface, driver=rank.device.driver, argument="x")[0].ptr == theirs.data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_tensors_share_their_memory_or_are_refused_by_name(group: df.Group, dtype: str, refused: Any) -> None:
    (rank,) = group
    kind = getattr(torch, dtype)
    theirs = torch.arange(256, dtype=torch.uint8, device=places(group)[0]).view(kind)
    try:
        theirs.__dlpack__()
    except BufferError:  # torch has exported FP8 since 2.10 or so
        refused(lambda: as_array(theirs, driver=rank.device.driver, argument="x"), "x", "drvfuse.view")
        array = df.view(theirs.data_ptr(), (256,), dtype, rank.device, owner=theirs)
    else:
        array, _ = as_array(theirs, driver=rank.device.driver, argument="x")
        assert torch.from_dlpack(array).dtype == kind
        assert torch.from_dlpack(array).data_ptr() == theirs.data_ptr()
    wait()
    assert (array.ptr, str(array.dtype)) == (theirs.data_ptr(), dtype)
    assert (bits(array.numpy()) == np.arange(256)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", RANKS)
def test_fused_fp8_rows_are_written_into_tensors(connect: Any, ranks: int, rng: np.random.Generator) -> None:
    hosts = randoms(rng, ranks, (17, 1024), BF16)
    gamma = rng.uniform(0.5, 1.5, 1024).astype(BF16)
    with connect(ranks) as group:
        rows = empty(group, (17, 1024), "uint8")
        scales = empty(group, (17,), "float32")
        views = [
            df.view(r.data_ptr(), r.shape, "float8_e4m3fn", rank.device) for r, rank in zip(rows, group, strict=True)
        ]
        gammas = tensors(group, [gamma] * ranks)
        df.allreduce_rmsnorm_fp8(
            group, tensors(group, hosts), gammas, epsilon=1e-6, outputs=views, scales=scales, streams="current"
        )
        expected = reference.allreduce_rmsnorm_fp8(hosts, gamma, epsilon=1e-6)
        assert same(rows, bits(expected.output)) and same(scales, expected.scales)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", RANKS)
def test_a_call_is_ordered_between_work_of_torchs_streams(connect: Any, ranks: int, rng: np.random.Generator) -> None:
    """Before the call torch queues a slow write of the inputs, and directly after the call it overwrites them."""
    hosts = randoms(rng, ranks, (64, 1024), BF16)
    with connect(ranks) as group:
        sources, inputs = tensors(group, hosts), empty(group, (64, 1024), "bfloat16")
        streams = [torch.cuda.Stream(place) for place in places(group)]
        wait()
        outputs = empty(group, (64, 1024), "bfloat16")
        for stream, source, x in zip(streams, sources, inputs, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(DELAY)
                x.copy_(source)
        # The tensors are exported while each rank's stream of `streams` is torch's current stream on the rank's device.
        contexts = [torch.cuda.stream(stream) for stream in streams]
        for context in contexts:
            context.__enter__()
        try:
            df.allreduce(group, inputs, outputs)  # this call runs on drvfuse's own streams
            for stream, x in zip(streams, inputs, strict=True):
                with torch.cuda.stream(stream):
                    x.fill_(-1)
        finally:
            for context in reversed(contexts):
                context.__exit__(None, None, None)
        assert same(outputs, reference.allreduce(hosts))


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", RANKS)
def test_torch_waits_for_results_on_its_current_stream(connect: Any, ranks: int, rng: np.random.Generator) -> None:
    hosts = randoms(rng, ranks, (64, 1024), np.float32)
    with connect(ranks) as group:
        inputs = [rank.array(host) for rank, host in zip(group, hosts, strict=True)]
        for rank, place in zip(group, places(group), strict=True):
            with torch.cuda.stream(torch.cuda.ExternalStream(rank.stream.handle, device=place)):
                torch.cuda._sleep(DELAY)
        totals = df.allreduce(group, inputs)  # kept until torch is done with them
        doubled = [torch.from_dlpack(total) * 2 for total in totals]
        assert same(doubled, reference.allreduce(hosts) * np.float32(2))


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", RANKS)
def test_torchs_graphs_replay_calls(connect: Any, ranks: int, rng: np.random.Generator) -> None:
    """Each device has a torch graph, in which its rank's part of the call lies between kernels of torch."""
    with connect(ranks) as group:
        x, y, total, out = (empty(group, (16, 1024), "float32") for _ in range(4))
        prepared = df.allreduce.prepare(group, y, total)
        for theirs, doubled, summed, result in zip(x, y, total, out, strict=True):  # loads kernels before the capture
            torch.mul(theirs, 2, out=doubled)
            torch.add(summed, 1, out=result)
        prepared.launch()
        group.synchronize()
        graphs = []
        for i, (rank, place) in enumerate(zip(group, places(group), strict=True)):
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.device(place), torch.cuda.graph(graphs[-1], stream=torch.cuda.Stream(place)):
                torch.mul(x[i], 2, out=y[i])
                prepared.launch(rank=rank.index, stream=torch.cuda.current_stream())
                torch.add(total[i], 1, out=out[i])
        for _ in range(3):
            hosts = randoms(rng, ranks, (16, 1024), np.float32)
            for theirs, host in zip(x, hosts, strict=True):
                theirs.copy_(torch.from_numpy(host))
            wait()
            for graph, place in zip(graphs, places(group), strict=True):
                with torch.cuda.device(place):
                    graph.replay()
            expected = reference.allreduce([host * np.float32(2) for host in hosts]) + np.float32(1)
            assert same(out, expected)
        group.check()
        for graph in graphs:
            graph.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", RANKS)
def test_graphs_of_drvfuse_replay_torchs_kernels(connect: Any, ranks: int, rng: np.random.Generator) -> None:
    with connect(ranks) as group:
        x, total, out = (empty(group, (16, 1024), "float32") for _ in range(3))
        streams = [torch.cuda.Stream(place) for place in places(group)]
        ours = [Stream.wrap(rank.device, stream) for rank, stream in zip(group, streams, strict=True)]
        prepared = df.allreduce.prepare(group, x, total, streams=streams)
        prepared.launch()
        for theirs, stream, result in zip(total, streams, out, strict=True):
            with torch.cuda.stream(stream):
                torch.mul(theirs, 2, out=result)  # loads the kernel before the capture
        wait()
        group.synchronize()
        with df.Graph.capture(ours) as graph:
            prepared.launch(streams=ours)
            for theirs, stream, result in zip(total, streams, out, strict=True):
                with torch.cuda.stream(stream):
                    torch.mul(theirs, 2, out=result)
        for _ in range(3):
            hosts = randoms(rng, ranks, (16, 1024), np.float32)
            for theirs, host in zip(x, hosts, strict=True):
                theirs.copy_(torch.from_numpy(host))
            wait()
            graph.launch(ours[0])
            assert same(out, reference.allreduce(hosts) * np.float32(2))


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", RANKS)
def test_launches_of_drvfuses_graphs_come_between_work_of_torchs_streams(
    connect: Any, ranks: int, rng: np.random.Generator
) -> None:
    """On its current streams, torch queues a slow write of the inputs before each launch. Directly after the launch it
    reads the results and overwrites the inputs."""
    with connect(ranks) as group:
        x, total = (empty(group, (64, 1024), "float32") for _ in range(2))
        prepared = df.allreduce.prepare(group, x, total)
        with group.capture() as graphs:
            prepared.launch()
        for _ in range(3):
            hosts = randoms(rng, ranks, (64, 1024), np.float32)
            sources = tensors(group, hosts)
            wait()
            for place, theirs, source in zip(places(group), x, sources, strict=True):
                with torch.cuda.device(place):
                    torch.cuda._sleep(DELAY)
                    theirs.copy_(source)
            graphs.launch()
            copies = [theirs.clone() for theirs in total]
            for theirs in x:
                theirs.fill_(-1)
            assert same(copies, reference.allreduce(hosts))
        graphs.close()


@pytest.mark.gpu
def test_a_dropped_input_is_reused_only_after_the_call(group: df.Group, rng: np.random.Generator) -> None:
    """torch gives the memory of a dropped tensor to the next one at once, while the call still waits to run."""
    (rank,), (place,) = group, places(group)
    for _ in range(3):
        host = rng.standard_normal((64, 1024)).astype(np.float32)
        x = torch.from_numpy(host).to(place)
        output, address = rank.empty((64, 1024), "float32"), x.data_ptr()
        with torch.cuda.stream(torch.cuda.ExternalStream(rank.stream.handle, device=place)):
            torch.cuda._sleep(DELAY)
        df.allreduce(group, x, output)
        del x
        gc.collect()
        others = [torch.full((64, 1024), -1.0, device=place) for _ in range(16)]
        assert address in {other.data_ptr() for other in others}
        assert (bits(output.numpy()) == bits(host)).all()


@pytest.mark.gpu
def test_a_tensor_keeps_the_memory_of_a_dropped_result(group: df.Group, rng: np.random.Generator) -> None:
    (rank,) = group
    host = rng.standard_normal((64, 1024)).astype(np.float32)
    total = torch.from_dlpack(df.allreduce(group, rank.array(host)))
    gc.collect()
    others = [rank.array(np.full((64, 1024), -1, np.float32)) for _ in range(8)]
    rank.stream.synchronize()
    assert all(other.ptr != total.data_ptr() for other in others)
    assert same([total], host)


@pytest.mark.gpu
def test_tensors_that_an_op_cannot_use_are_refused_by_argument_name(group: df.Group, refused: Any) -> None:
    (place,) = places(group)
    x = torch.zeros((8, 512), device=place)
    refused(lambda: df.allreduce(group, x.T), "inputs", "with strides (1, 512)")
    refused(lambda: df.allreduce(group, x[:, ::2]), "inputs", "with strides (512, 2)")
    refused(lambda: df.allreduce(group, x.expand(2, 8, 512)), "inputs", "with strides")
    refused(lambda: df.allreduce(group, x.clone().requires_grad_()), "inputs", "refused by its library")
    refused(lambda: df.allreduce(group, x, torch.zeros((8, 511), device=place)), "outputs", "of shape (8, 511)")
    refused(lambda: df.allreduce(group, x, x.bfloat16()), "outputs", "bfloat16")
    refused(lambda: df.allreduce(group, x.to(torch.complex64)), "inputs.dtype")
    refused(lambda: df.allreduce(group, x.cpu().pin_memory()), "inputs", "host memory")
    refused(lambda: df.allreduce(group, x.flatten()[1:513]), "inputs", "at address")


@pytest.mark.gpu
@pytest.mark.gpus(2)
def test_a_tensor_on_another_device_is_named(group: df.Group, refused: Any) -> None:
    refused(lambda: df.allreduce(group, torch.zeros((8, 512), device="cuda:1")), "inputs", "on device 1")
