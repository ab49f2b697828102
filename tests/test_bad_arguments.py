# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments of the public API: each call succeeds or raises an error of drvfuse, and the next call is right.

Python's own TypeError for unknown or missing arguments is not tested here.
"""

from __future__ import annotations

import decimal
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import drvfuse as df
from drvfuse import coat
from drvfuse.errors import ArgumentError, DrvfuseError
from drvfuse.nodes.joint import NodesWanted

pytestmark = pytest.mark.emulated

CALLS = 5000
OWNERS = (df.Group, df.Stream, df.Event, df.SymmetricBuffer, df.Multicast, df.emu.Machine)
BF16 = ml_dtypes.bfloat16
SOURCE = 'extern "C" __global__ void put(int* to, int value, float f) { to[threadIdx.x] = value; }'


class Raises:
    """Every protocol of arrays, streams and numbers raises."""

    def fail(self, *args: object, **options: object) -> Any:
        raise RuntimeError("planted")

    __repr__ = __len__ = __iter__ = __index__ = __int__ = __eq__ = __bool__ = fail  # type: ignore[assignment]
    __dlpack__ = __dlpack_device__ = __cuda_stream__ = fail
    __cuda_array_interface__ = property(fail)
    __hash__ = object.__hash__


class Nonsense:
    """Every protocol of arrays and streams returns something of a wrong type."""

    __cuda_array_interface__ = {"shape": "x", "typestr": 3, "data": None, "version": "v"}

    def __dlpack_device__(self) -> Any:
        return "x"

    def __dlpack__(self, **options: object) -> Any:
        return 7

    def __cuda_stream__(self) -> Any:
        return "s"


class Huge:
    """Every protocol returns numbers that are too large, or below zero."""

    __cuda_array_interface__ = {"shape": (2**70,), "typestr": "<f4", "data": (2**70, False), "version": 3}

    def __dlpack_device__(self) -> Any:
        return 2, 0

    def __dlpack__(self, **options: object) -> Any:
        return object()

    def __cuda_stream__(self) -> Any:
        return 0, -5

    def __index__(self) -> int:
        return 2**80


WRONG = [
    *(None, True, False, 0, -1, 1, 3, 2**31, 2**40, 2**63, 2**64, 2**70, -(2**70), 1.5, float("nan"), float("inf")),
    *(1e300, decimal.Decimal("1.5"), np.float32(2), np.True_, np.int64(-1), np.uint64(2**64 - 1), 1j),
    *("", "x", "a\0b", "\udcff", "current", "cuda", "float32", b"", b"x\0", memoryview(b"abc")),
    *((), [], [None], [1, "a"], (2**40, 2**40), {}, {"a": 1}, set(), range(3), [[1], [2]], slice(None), Ellipsis),
    *(object(), type, BF16, df, df.PDLLevel.ON, lambda: 1, np.zeros(3), np.zeros(3, object), np.array("x")),
    *(Raises(), Nonsense(), Huge(), [Raises()]),
]


class Objects:
    """One object of each public kind on a small machine, and calls of the public API with right arguments."""

    def __init__(self, machine: df.emu.Machine) -> None:
        self.group = group = df.Group.local(2, driver=machine, workspace_bytes=1 << 20, max_blocks=4)
        self.device = device = group[0].device
        self.stream, self.event = df.Stream(device), df.Event(device)
        self.array = device.array(np.arange(64, dtype=np.float32))
        self.kernel = df.compile(SOURCE, driver=machine)["put"]
        target = device.zeros(32, "int32")
        self.launch = self.kernel.prepare(1, 32, target, 5, 1.0, device=device)
        self.buffer = group.symmetric(4096)
        with df.Graph.capture(device.stream) as self.graph:
            self.kernel.prepare(1, 32, target, 5, 1.0, device=device)(device.stream)
        self.inputs = [rank.array(np.ones((4, 64), np.float32)) for rank in group]
        gammas = [rank.array(np.ones(64, np.float32)) for rank in group]
        scaled = df.allreduce.prepare(group, self.inputs, epilogue=df.Epilogue("x * s", s=df.float32(1.0)))
        act, weight = device.array(np.ones((1, 512), BF16)), device.array(np.ones((64, 512), BF16))
        codes, scales = device.array(np.ones((16, 64), ml_dtypes.float8_e4m3fn)), device.array(np.ones((16, 4), BF16))
        ones, other = device.array(np.ones(64, BF16)), group[1].device
        quantisation = df.Quantisation.mxfp8()
        kernel, graph, array, stream, event = self.kernel, self.graph, self.array, self.stream, self.event
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []

        def add(function: Callable[..., Any], *args: Any, **options: Any) -> None:
            self.calls.append((function, args, options))

        add(df.device, 0, driver=machine)
        for home in (device, group[0]):
            add(home.empty, (2, 3), "float32")
            add(home.zeros, (2, 3), "float32")
            add(home.array, np.zeros(3))
        add(device.empty, 3, "float32", stream=None)
        for method in (device.can_access_peer, device.enable_peer, device.peer_enabled):
            add(method, other)
        add(device.allow_peers, [other])
        add(device.attribute, "MULTIPROCESSOR_COUNT")
        add(df.Stream, device, priority=0)
        add(df.Event, device, timing=False)
        add(df.Stream.wrap, device, stream)
        add(stream.wait, event)
        add(stream.record, event)
        add(stream.follow, device.stream)
        add(stream.fill, array.ptr, 1, 4)
        add(event.record, stream)
        add(event.elapsed_ms, event)
        add(array.reshape, (8, 8))
        add(array.copy_from, np.zeros(64, np.float32))
        add(array.used_on, stream)
        add(array.used_before, event)
        add(df.view, array.ptr, (4,), "float32", device, stream=None, owner=None)
        compiling = {"defines": {}, "options": (), "include": (), "arch": "sm_90a", "name": "x.cu", "names": ()}
        add(df.compile, SOURCE, driver=machine, **compiling)
        add(kernel.module.__getitem__, "put")
        launching = {"device": device, "smem": 0, "cluster": None, "cooperative": False, "pdl": False}
        add(kernel.prepare, 1, 32, target, 5, 1.0, priority=None, attrs=(), **launching)
        add(kernel.configure, 1, 32, device=device, smem=0)
        add(kernel.occupancy, device, 32, 0)
        add(kernel.attributes, device)
        add(kernel.load, device)
        add(self.launch.set, 1, 5)
        add(self.launch.resize, 1)
        add(self.kernel.prepare(1, 32, target, 5, 1.0, device=device), stream)
        add(graph.launch, device.stream)
        add(graph.upload, device.stream)
        add(graph.keep, array)
        add(self.buffer.arrays, (4,), "float32", 0)
        add(df.Group.local, 1, driver=machine, workspace_bytes=1 << 16, max_blocks=2)
        add(group.symmetric, 64, multicast=False)
        add(group.split, [None, None], 0)
        add(df.Trace, group, nbytes=4096)
        add(df.Multicast, [device, other], 1 << 21)
        add(df.last_calls, 1)
        add(df.check_device, device)
        add(df.Epilogue, "x * s", s=df.float32(1.0))
        add(df.float32, 1.0)
        add(df.int32, 1)
        add(df.Replicated, [array])
        add(scaled.set, s=df.float32(2.0))
        add(scaled.launch, None)
        for name in ("check", "definitions", "groups", "output_dtype", "output_shape", "row_bytes", "row_scale_bytes"):
            bfloat16 = df.dtypes.get("bfloat16")
            values = {"check": (64, bfloat16), "row_bytes": (64, bfloat16), "output_shape": ((4, 64),)}
            values |= dict.fromkeys(("definitions", "output_dtype"), (bfloat16,))
            add(getattr(quantisation, name), *values.get(name, (64,)))
        add(quantisation.scales_shape, (4,), 64)
        add(df.Quantisation.per_row, "float8_e4m3fn", "float32", 1.0)
        common: dict[str, Any] = {"algo": "auto", "pdl_level": df.PDLLevel.OFF, "max_num_blocks": None}
        common |= {"streams": None, "trace": None}
        add(df.allreduce, group, self.inputs, None, epilogue=None, use_multimem=False, **common)
        add(df.allreduce_many, group, [[x] for x in self.inputs], None, **common)
        add(df.reduce_scatter, group, self.inputs, None, splits=None, **common)
        add(df.all_gather, group, self.inputs, None, scales=None, quantisation=None, **common)
        add(df.all_to_all, group, self.inputs, None, splits=None, **common)
        add(df.broadcast, group, self.inputs, None, root=0, **common)
        normed = {"epsilon": 1e-6, "weight_offset": 0.0, "residuals": None, "norm": "rms", "betas": None}
        normed |= {"head_columns": None, "quantisation": None, "outputs": None, "scales": None, **common}
        add(df.allreduce_rmsnorm_fp8, group, self.inputs, gammas, use_multimem=False, **normed)
        add(df.reduce_scatter_rmsnorm_fp8, group, self.inputs, gammas, splits=None, **normed)
        one = {"pdl_level": df.PDLLevel.OFF, "stream": None}
        add(df.gemv_partial_norm, act, weight, ones[:32], n_normed=32, epsilon=1e-6, finish_counter=None, **one)
        options = {"weight_offset": 0.0, "norm": "rms", "quantisation": None}
        add(df.rmsnorm_fp8, self.inputs[0], gammas[0], epsilon=1e-6, residual=None, beta=None, **options, **one)
        given = {"outputs": None, "workspace": None, **one}
        add(coat.fp8_rmsnorm_forward, codes, scales, ones, 16, 1e-6, False, **given)
        add(coat.fp8_division, self.inputs[0], 16, "float8_e4m3fn", None, False, **given)
        add(coat.fp8_division_transpose, self.inputs[0], 16, "float8_e4m3fn", None, False, False, **given)
        machines = {"seed": 0, "race": False, "peers": None, "sm_count": 132, "memory_bytes": 1 << 28}
        machines |= {"check_initialised": True, "delay_stores": False, "record": None, "replay": None}
        add(df.emu.Machine, devices=1, arch="sm_90a", **machines)
        add(machine.declare_polled, array, 16)
        add(df.config.get, "driver")
        for setting in df.config.SETTINGS:
            add(partial(overridden, setting), "1")

    def works(self) -> None:
        """An all-reduce gives the right sum."""
        hosts = [np.random.default_rng(7 + i).standard_normal(64).astype(np.float32) for i in range(2)]
        sums = df.allreduce(self.group, [rank.array(host) for rank, host in zip(self.group, hosts, strict=True)])
        assert sums[1].numpy().tobytes() == (hosts[0] + hosts[1]).tobytes()


def overridden(name: str, value: object) -> None:
    with df.config.override(**{name: value}):
        pass


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Objects]:
    with pytest.MonkeyPatch.context() as patch, df.emu.Machine(devices=2, memory_bytes=256 << 20) as machine:
        patch.chdir(tmp_path_factory.mktemp("records"))  # for `Machine(record="x")`
        yield Objects(machine)


def test_wrong_arguments_raise_errors_of_drvfuse_and_the_next_call_is_right(objects: Objects) -> None:
    """A sample of all pairs of an argument and a wrong value, the same in every run."""
    draw = random.Random(0)
    pairs = [(call, at) for call in objects.calls for at in (*range(len(call[1])), *call[2])]
    for number in range(CALLS):
        (function, args, options), at = pairs[number % len(pairs)]
        wrong = draw.choice(WRONG)
        changed = [wrong if i == at else value for i, value in enumerate(args)]
        try:
            made = function(*changed, **{name: wrong if name == at else value for name, value in options.items()})
        except DrvfuseError:
            pass
        else:
            kept = (objects.stream, objects.event, objects.device.stream)
            if isinstance(made, OWNERS) and not any(made is own for own in kept):
                made.close()
        if number % 97 == 0:
            objects.works()
    objects.works()


REFUSED: dict[str, tuple[str, Callable[[Objects], Any]]] = {
    "empty": ("shape", lambda o: o.device.empty((2**40, 2**40), "float32")),
    "workspace": ("workspace_bytes", lambda o: df.Group.local(1, driver=o.device.driver, workspace_bytes=2**70)),
    "symmetric": ("nbytes", lambda o: o.group.symmetric(2**70)),
    "trace": ("nbytes", lambda o: df.Trace(o.group, nbytes=2**70)),
    "priority": ("priority", lambda o: df.Stream(o.device, priority=2**40)),
    "multicast": ("nbytes", lambda o: df.Multicast([rank.device for rank in o.group], 2**70)),
    "resize below 1": ("grid", lambda o: o.launch.resize(-1)),
    "resize to 0": ("grid", lambda o: o.launch.resize(0)),
    "resize to a fraction": ("grid", lambda o: o.launch.resize(2.7)),
    "resize to True": ("grid", lambda o: o.launch.resize(True)),
    "resize above the checked grid": ("grid", lambda o: o.launch.resize(2)),
    "fill": ("value", lambda o: o.stream.fill(o.array.ptr, 256, 4)),
    "peer": ("other", lambda o: o.device.can_access_peer(1)),
    "event": ("stream", lambda o: o.event.record(None)),
    "smem": ("smem", lambda o: o.kernel.prepare(1, 32, o.array, 5, 1.0, device=o.device, smem="x")),
    "name": ("name", lambda o: df.compile(SOURCE, name=5, driver=o.device.driver)),
    "NUL in a source": ("source", lambda o: df.compile("int x;\0", driver=o.device.driver)),
    "kernel": ("name", lambda o: o.kernel.module[[]]),
    "set": ("index", lambda o: o.launch.set("x", 1)),
    "last calls": ("count", lambda o: df.last_calls("x")),
    "device": ("index", lambda o: df.device(True, driver=o.device.driver)),
    "decimal stream": ("stream", lambda o: df.Stream.wrap(o.device, decimal.Decimal("1.5"))),
    "float stream": ("stream", lambda o: df.Stream.wrap(o.device, np.float32(2))),
    "bool stream": ("stream", lambda o: df.Stream.wrap(o.device, np.True_)),
    "flag": ("stochastic", lambda o: coat.fp8_division(o.inputs[0], 16, "float8_e4m3fn", None, 1)),
    "other flag": (
        "only_transposed",
        lambda o: coat.fp8_division_transpose(o.inputs[0], 16, "float8_e4m3fn", None, False, "yes"),
    ),
    "setting": ("setting cache_dir", lambda o: overridden("cache_dir", "a\0b")),
    "exchange of one node": ("exchange", lambda o: NodesWanted(exchange=object()).check()),
    "devices": ("devices", lambda o: df.Group.local(2**40, driver=o.device.driver)),
    "quantisation": ("shape", lambda o: df.Quantisation.per_row().output_shape(None)),
    "repr": ("norm", lambda o: df.rmsnorm_fp8(o.inputs[0], o.inputs[0][0], epsilon=1e-6, norm=Raises())),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_argument_is_named(objects: Objects, case: str) -> None:
    argument, call = REFUSED[case]
    with pytest.raises(ArgumentError) as caught:
        call(objects)
    assert caught.value.argument == argument


@pytest.mark.parametrize("protocol", ["inputs", "streams"])
def test_an_exception_of_a_foreign_object_is_chained(objects: Objects, protocol: str) -> None:
    given = {"inputs": objects.inputs, "streams": None, protocol: [Raises(), Raises()]}
    with pytest.raises(ArgumentError, match=f"{protocol}\\[0\\] is ") as caught:
        df.allreduce(objects.group, given["inputs"], streams=given["streams"])
    assert isinstance(caught.value.__cause__, RuntimeError) and str(caught.value.__cause__) == "planted"
