# SPDX-License-Identifier: Apache-2.0
"""JAX's arrays as inputs and drvfuse's results in JAX, without a copy. JAX names no stream, and never
writes to an existing array.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from framework_support import DELAY, RANKS, SPIN, Hosts, framework, randoms

import drvfuse as df
from drvfuse import dtypes, reference
from drvfuse.reference import bits
from drvfuse.runtime.interop import as_array

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # other tests need memory too
jax = framework("jax")
jnp = framework("jax.numpy")

pytestmark = pytest.mark.filterwarnings("default")  # JAX's own warnings fail no test

BF16 = ml_dtypes.bfloat16


def gpus() -> list[Any]:
    try:
        return sorted(jax.devices("gpu"), key=lambda device: device.local_hardware_id)
    except RuntimeError:
        pytest.skip("this JAX has no GPUs")


def put(group: df.Group, hosts: Hosts) -> list[Any]:
    return [jax.device_put(host, gpus()[rank.device.index]) for rank, host in zip(group, hosts, strict=True)]


def same(results: Any, expected: np.ndarray) -> bool:
    return all((bits(np.asarray(result)) == bits(expected)).all() for result in results)


def delay(rank: Any) -> None:
    df.compile(SPIN, driver="cuda")["spin"].prepare(1, 1, DELAY, device=rank.device)(rank.stream)


@pytest.fixture
def connect(connect: Callable[[int], df.Group]) -> Callable[[int], df.Group]:
    gpus()
    return connect


# Tests that need no GPU.


def test_arrays_in_host_memory_are_refused(driver: str, refused: Any) -> None:
    x = jax.device_put(np.zeros((4, 256), np.float32), jax.devices("cpu")[0])
    with df.Group.local(1, driver=driver, max_blocks=4) as group:
        refused(lambda: df.allreduce(group, x), "inputs", "host memory")


@pytest.mark.emulated
def test_jax_does_not_take_emulated_memory_for_cuda_memory() -> None:
    array = df.device(0, driver="emu").zeros((4,), "float32")
    with pytest.raises(TypeError, match="unsupported device"):
        jax.dlpack.from_dlpack(array)
    assert (array.numpy() == 0).all()


# Tests that need GPUs.


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_collective_reads_arrays(connect: Any, ranks: int, dtype: str, rng: np.random.Generator) -> None:
    hosts = randoms(rng, ranks, (33, 1000), dtypes.get(dtype).numpy)
    with connect(ranks) as group:
        sums = df.allreduce(group, put(group, hosts))
        back = [jax.dlpack.from_dlpack(total) for total in sums]
        assert [array.unsafe_buffer_pointer() for array in back] == [total.ptr for total in sums]
        assert same(back, reference.allreduce(hosts))
        assert [next(iter(array.devices())).local_hardware_id for array in back] == [r.device.index for r in group]


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", RANKS)
def test_all_gather_and_reduce_scatter_read_arrays_and_their_results_are_read_back(
    connect: Any, ranks: int, rng: np.random.Generator
) -> None:
    hosts = randoms(rng, ranks, (8, 520), BF16)
    with connect(ranks) as group:
        inputs = put(group, hosts)
        gathered, scattered = df.all_gather(group, inputs).output, df.reduce_scatter(group, inputs)
        assert same([jax.dlpack.from_dlpack(array) for array in gathered], reference.all_gather(hosts))
        for array, expected in zip(scattered, reference.reduce_scatter(hosts), strict=True):
            assert same([jax.dlpack.from_dlpack(array)], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "uint8", "int32", "float8_e4m3fn", "float8_e5m2"])
def test_arrays_passed_in_either_direction_share_their_memory(group: df.Group, dtype: str, refused: Any) -> None:
    (rank,) = group
    host = np.arange(24, dtype=np.uint8).repeat(dtypes.get(dtype).itemsize).view(dtypes.get(dtype).numpy).reshape(4, 6)
    (theirs,) = put(group, [host])
    try:
        theirs.__dlpack__()
    except RuntimeError:  # older versions of JAX have no FP8 in DLPack
        assert dtype.startswith("float8")
        refused(lambda: as_array(theirs, driver=rank.device.driver, argument="x"), "x", "drvfuse.view")
        return
    array, _ = as_array(theirs, driver=rank.device.driver, argument="x")
    assert (array.ptr, array.shape, str(array.dtype)) == (theirs.unsafe_buffer_pointer(), (4, 6), dtype)
    assert (bits(array.numpy()) == bits(host)).all()
    ours = rank.array(host)
    back = jax.dlpack.from_dlpack(ours)
    assert (back.unsafe_buffer_pointer(), back.shape, back.dtype) == (ours.ptr, (4, 6), host.dtype)
    assert same([back], host)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", RANKS)
def test_jax_reads_fused_fp8_rows_as_bytes(connect: Any, ranks: int, rng: np.random.Generator) -> None:
    hosts = randoms(rng, ranks, (17, 1024), BF16)
    gamma = rng.uniform(0.5, 1.5, 1024).astype(BF16)
    expected = reference.allreduce_rmsnorm_fp8(hosts, gamma, epsilon=1e-6)
    with connect(ranks) as group:
        result = df.allreduce_rmsnorm_fp8(group, put(group, hosts), put(group, [gamma] * ranks), epsilon=1e-6)
        rows = [df.view(a.ptr, a.shape, "uint8", a.device, stream=a.stream, owner=a) for a in result.output]
        assert same([jax.dlpack.from_dlpack(row) for row in rows], bits(expected.output))
        assert same([jax.dlpack.from_dlpack(scale) for scale in result.scales], expected.scales)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", RANKS)
def test_a_call_waits_for_what_jax_still_computes(connect: Any, ranks: int, rng: np.random.Generator) -> None:
    @jax.jit
    def slow(x: Any) -> Any:
        """Adds 1 a thousand times, after matrix products that take time and whose result is not used."""

        def step(_: Any, carry: Any) -> Any:
            y, square = carry
            square = square @ square * 1e-3
            return y + 1 + 0 * square[0, 0], square

        return jax.lax.fori_loop(0, 1000, step, (x, jnp.ones((512, 512), x.dtype) * 1e-3))[0]

    hosts = [rng.integers(-99, 99, (64, 1024)).astype(np.float32) for _ in range(ranks)]
    with connect(ranks) as group:
        inputs = put(group, hosts)
        for x in inputs:
            slow(x).block_until_ready()  # the first call compiles
        sums = df.allreduce(group, [slow(x) for x in inputs])
        group.synchronize()
        expected = reference.allreduce([host + np.float32(1000) for host in hosts])
        assert all((bits(total.numpy()) == bits(expected)).all() for total in sums)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", RANKS)
def test_jax_waits_for_results(connect: Any, ranks: int, rng: np.random.Generator) -> None:
    hosts = randoms(rng, ranks, (64, 1024))
    with connect(ranks) as group:
        inputs = put(group, hosts)
        for rank in group:
            delay(rank)
        totals = df.allreduce(group, inputs)  # kept until JAX is done with them
        doubled = [jax.dlpack.from_dlpack(total) * 2 for total in totals]
        assert same(doubled, reference.allreduce(hosts) * np.float32(2))


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", RANKS)
def test_graphs_of_drvfuse_replay_calls_on_jaxs_arrays(connect: Any, ranks: int, rng: np.random.Generator) -> None:
    hosts = randoms(rng, ranks, (16, 1024))
    with connect(ranks) as group:
        outputs = [rank.zeros((16, 1024), "float32") for rank in group]
        prepared = df.allreduce.prepare(group, put(group, hosts), outputs)
        with df.Graph.capture([rank.stream for rank in group]) as graph:
            prepared.launch()
        del prepared
        gc.collect()  # the graph keeps the arrays alive
        others = put(group, randoms(rng, ranks, (16, 1024)))
        for _ in range(2):
            graph.launch(group.ranks[0].stream)
            group.synchronize()
            assert all((bits(out.numpy()) == bits(reference.allreduce(hosts))).all() for out in outputs)
        del others


@pytest.mark.gpu
def test_a_dropped_input_lives_until_the_call_is_complete(group: df.Group, rng: np.random.Generator) -> None:
    """JAX reuses the memory of a dropped array at once, and knows nothing of drvfuse's streams."""
    (rank,) = group
    for _ in range(3):
        host = rng.standard_normal((64, 1024)).astype(np.float32)
        (x,) = put(group, [host])
        output = rank.empty((64, 1024), "float32")
        delay(rank)
        df.allreduce(group, x, output)
        del x
        gc.collect()
        others = [put(group, [np.full((64, 1024), -1, np.float32)])[0].block_until_ready() for _ in range(16)]
        assert (bits(output.numpy()) == bits(host)).all()
        del others


@pytest.mark.gpu
def test_an_array_keeps_the_memory_of_a_dropped_result(group: df.Group, rng: np.random.Generator) -> None:
    (rank,) = group
    host = rng.standard_normal((64, 1024)).astype(np.float32)
    total = jax.dlpack.from_dlpack(df.allreduce(group, rank.array(host)))
    gc.collect()
    others = [rank.array(np.full((64, 1024), -1, np.float32)) for _ in range(8)]
    rank.stream.synchronize()
    assert all(other.ptr != total.unsafe_buffer_pointer() for other in others)
    assert same([total], host)


@pytest.mark.gpu
def test_arrays_that_an_op_cannot_use_are_refused_by_argument_name(group: df.Group, refused: Any) -> None:
    (x,) = put(group, [np.zeros((8, 512), np.float32)])
    refused(lambda: df.allreduce(group, x, x), "outputs", "read-only")
    refused(lambda: df.allreduce(group, x.astype(jnp.complex64)), "inputs.dtype", "(5, 64, 1)")
    outputs = group.ranks[0].zeros((8, 511), "float32")
    refused(lambda: df.allreduce(group, x, outputs), "outputs", "of shape (8, 511)")


@pytest.mark.gpu
@pytest.mark.gpus(2)
def test_arrays_on_other_devices_are_named(group: df.Group, refused: Any) -> None:
    x = jax.device_put(np.zeros((8, 512), np.float32), gpus()[1])
    refused(lambda: df.allreduce(group, x), "inputs", "on device 1")
    mesh = jax.sharding.Mesh(np.array(gpus()[:2]), ("rows",))
    sharded = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows")))
    refused(lambda: df.allreduce(group, sharded), "inputs", "refused by its library")
