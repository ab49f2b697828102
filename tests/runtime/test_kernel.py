# SPDX-License-Identifier: Apache-2.0
"""Modules, kernels, prepared launches: arguments, limits, attributes."""

from __future__ import annotations

import ctypes
import gc
import struct
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda.bindings.driver import CUdeviceptr

import drvfuse as df
from drvfuse.errors import ArgumentError, DriverError, LaunchError, Unsupported
from drvfuse.ptx.facts import KernelInfo, Param
from drvfuse.runtime import launch_attributes as attributes
from drvfuse.runtime.module import Module
from drvfuse.runtime.packing import Arguments
from drvfuse.runtime.stream import Event, Stream

SOURCE = """
struct Pair { int a; double b; };

template <class T> __global__ void scale(T* out, const T* in, int n, float x, Pair pair, bool flip, long long shift) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = T(float(in[i]) * x * (flip ? -1.0f : 1.0f) + pair.a + float(pair.b) + shift);
}

extern "C" __global__ void add_one(int* p) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    p[blockIdx.x * blockDim.x + threadIdx.x] += 1;
    asm volatile("griddepcontrol.launch_dependents;");
}

extern "C" __global__ void __launch_bounds__(64) bounded(int* p) { p[threadIdx.x] = 1; }

extern "C" __global__ void shared_sum(int* out, int n) {
    extern __shared__ int values[];
    for (int i = threadIdx.x; i < n; i += blockDim.x) values[i] = i;
    __syncthreads();
    if (threadIdx.x == 0) {
        int sum = 0;
        for (int i = 0; i < n; ++i) sum += values[i];
        out[0] = sum;
    }
}

extern "C" __global__ void where(int* out) {
    int index = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    if (threadIdx.x + threadIdx.y + threadIdx.z == 0) out[index] = 100 * index + blockDim.x * blockDim.y * blockDim.z;
}
"""


@pytest.fixture(scope="module")
def module(driver: str) -> Module:
    return df.compile(SOURCE, ["scale<float>", "scale<int>"], driver=driver)


@pytest.fixture
def device(driver: str) -> df.Device:
    return df.device(0, driver=driver)


class Pair(ctypes.Structure):
    _fields_ = [("a", ctypes.c_int), ("b", ctypes.c_double)]


def test_a_launch_accepts_every_kind_of_argument(module: Module, device: df.Device, rng: np.random.Generator) -> None:
    values = rng.standard_normal(1000).astype(np.float32)
    source, out = device.array(values), device.zeros((1000,), "float32")
    launch = module["scale<float>"].prepare(8, 128, out, source, 1000, 2.0, Pair(3, 0.5), True, -7)
    launch(device.stream)
    np.testing.assert_array_equal(
        out.numpy(), values * np.float32(-2) + np.float32(3) + np.float32(0.5) + np.float32(-7)
    )


def test_set_changes_only_later_launches(module: Module, device: df.Device) -> None:
    source, first, second = device.array(np.arange(8, dtype=np.int32)), *(device.zeros(8, "int32") for _ in "ab")
    launch = module["scale<int>"].prepare(1, 8, first, source.ptr, 8, 1, bytes(16), False, 0)
    launch(device.stream)
    launch.set(0, second)
    launch.set(3, np.float32(3))
    launch.set(6, np.int64(100))
    launch(device.stream)
    np.testing.assert_array_equal(first.numpy(), np.arange(8))
    np.testing.assert_array_equal(second.numpy(), np.arange(8) * 3 + 100)
    with pytest.raises(ArgumentError, match="index"):
        launch.set(7, 0)


def test_a_launch_may_use_any_stream_of_the_device(module: Module, device: df.Device) -> None:
    array = device.zeros((32,), "int32")
    array.stream.synchronize()
    launch = module["add_one"].prepare(1, 32, array)
    with Stream(device) as a, Stream(device) as b:
        launch(a)
        b.follow(a)
        launch(SimpleNamespace(__cuda_stream__=lambda: (0, b.handle)))
        device.stream.follow(b)
        launch(device.stream.handle)
        np.testing.assert_array_equal(array.numpy(), 3)


def test_grids_and_blocks_may_have_three_dimensions(module: Module, device: df.Device) -> None:
    out = device.zeros((2 * 3 * 4,), "int32")
    module["where"].prepare((2, 3, 4), (5, 2), out)(device.stream)
    np.testing.assert_array_equal(out.numpy(), np.arange(24) * 100 + 10)


def test_a_launch_may_use_more_than_48_kib_of_shared_memory(module: Module, device: df.Device) -> None:
    kernel, out = module["shared_sum"], device.zeros((1,), "int32")
    count = 20_000
    large = kernel.prepare(1, 256, out, count, smem=4 * count)
    small = kernel.prepare(1, 256, out, 100, smem=4 * 100)
    for launch, n in ((small, 100), (large, count)):
        launch(device.stream)
        assert out.numpy()[0] == n * (n - 1) // 2
    limit = device.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
    with pytest.raises(LaunchError, match="smem"):
        kernel.prepare(1, 256, out, 1, smem=limit + 1)
    with pytest.raises(LaunchError, match="smem"):
        kernel.prepare(1, 256, out, 1, smem=-1)


def test_a_launch_keeps_its_arrays_and_orders_their_free(module: Module, device: df.Device) -> None:
    array = device.zeros((32,), "int32")
    launch = module["add_one"].prepare(1, 32, array)
    weak = weakref.ref(array)
    device.synchronize()
    with Stream(device) as other:
        launch(other)
        assert other in array._block.users.values()  # type: ignore[union-attr]
    del array
    gc.collect()
    assert weak() is not None
    del launch
    gc.collect()
    assert weak() is None


def test_captured_launch_is_replayed_with_the_arguments_of_its_capture(module: Module, device: df.Device) -> None:
    array, other = device.zeros((32,), "int32"), device.zeros((32,), "int32")
    device.synchronize()
    launch = module["add_one"].prepare(1, 32, array)
    with Stream(device) as stream:
        with df.Graph.capture(stream) as graph:
            launch(stream)
            launch(stream)
        launch.set(0, other)
        graph.launch(stream)
        graph.launch(stream)
        stream.synchronize()
    assert (array.numpy() == 4).all() and not other.numpy().any()


def test_launches_may_be_dependent_cooperative_and_prioritised(module: Module, device: df.Device) -> None:
    if device.capability < (9, 0):
        pytest.skip("needs compute capability 9.0")
    array = device.zeros((64,), "int32")
    kernel = module["add_one"]
    kernel.prepare(2, 32, array)(device.stream)
    kernel.prepare(2, 32, array, pdl=True)(device.stream)
    kernel.prepare(2, 32, array, cooperative=True)(device.stream)
    kernel.prepare(2, 32, array, priority=-1, attrs=[attributes.MemSyncDomain("DEFAULT")])(device.stream)
    np.testing.assert_array_equal(array.numpy(), 4)


@pytest.mark.gpu
def test_launches_may_have_clusters(module: Module, device: df.Device) -> None:
    if device.capability < (9, 0):
        pytest.skip("needs compute capability 9.0")
    array = device.zeros((512,), "int32")
    module["add_one"].prepare(16, 32, array, cluster=2)(device.stream)
    module["add_one"].prepare(16, 32, array, cluster=16)(device.stream)
    np.testing.assert_array_equal(array.numpy(), 2)


def test_recorded_launches_name_their_kernels(module: Module, device: df.Device) -> None:
    module["add_one"].prepare(2, 32, device.zeros((64,), "int32"))(device.stream)
    assert any("cuLaunchKernelEx(<grid 2x1x1 block 32x1x1 smem 0>, add_one," in call for call in df.last_calls(5))


def test_recorded_launches_show_the_arguments_at_the_time_of_the_launch(module: Module, device: df.Device) -> None:
    array = device.zeros((64,), "float32")
    values = (array, array, 0, 0.1, Pair(7, 1.25), True, -2)
    launch = module["scale<float>"].prepare(1, 32, *values, priority=0)
    with df.Stream(device) as one, df.Stream(device) as other:
        launch(one)
        launch.set(6, 3)
        launch(other)
        launch.set(6, 4)
        shown = [call for call in df.last_calls(9) if call.startswith("cuLaunchKernelEx")]
        for call, stream, number in zip(shown[-2:], (one, other), ("0xfffffffffffffffe", "3"), strict=True):
            assert call == (
                f"cuLaunchKernelEx(<grid 1x1x1 block 32x1x1 smem 0>, scale<float>, stream {stream.handle:#x} of device "
                f"{device.index}, attributes [Priority(value=0)], arguments ({array.ptr:#x}, {array.ptr:#x}, 0, 0.1, "
                f"Pair(a=7, b=1.25), 1, {number})) -> CUDA_SUCCESS"
            )
        device.synchronize()


def test_a_failed_launch_shows_its_arguments(module: Module, device: df.Device) -> None:
    launch = module["add_one"].prepare(2, 32, device.zeros((64,), "int32"))
    launch._config.blockDimX = 4096
    with pytest.raises(DriverError) as caught:
        launch(device.stream)
    assert caught.value.call == "cuLaunchKernelEx"
    assert f"stream {device.stream.handle:#x} of device {device.index}, arguments (0x" in caught.value.args_text


def test_pdl_without_a_wait_is_refused(module: Module, device: df.Device) -> None:
    array = device.zeros((64,), "int32")
    with pytest.raises(LaunchError, match=r"bounded has no griddepcontrol\.wait"):
        module["bounded"].prepare(1, 32, array, pdl=True)
    with pytest.raises(LaunchError, match="griddepcontrol"):
        module["bounded"].prepare(1, 32, array, attrs=[attributes.ProgrammaticStreamSerialization()])


def test_cooperative_grid_that_does_not_fit_is_refused(module: Module, device: df.Device) -> None:
    kernel, array = module["add_one"], device.zeros((64,), "int32")
    fits = kernel.occupancy(device, 64) * device.sm_count
    kernel.prepare(fits, 64, array, cooperative=True)
    with pytest.raises(LaunchError, match=f"{fits + 1} blocks.*{fits} fit"):
        kernel.prepare(fits + 1, 64, array, cooperative=True)


@pytest.mark.parametrize(
    ("kernel", "grid", "block", "options", "message"),
    [
        ("add_one", 1, 2048, {}, "block is"),
        ("add_one", 1, (1, 1, 128), {}, "block is"),
        ("bounded", 1, 65, {}, "at most 64"),
        ("add_one", (1, 70_000), 32, {}, "grid is"),
        ("add_one", 3, 32, {"cluster": 2}, "multiple of the cluster"),
        ("add_one", 32, 32, {"cluster": 32}, "32 blocks; it must have at most 16"),
        ("add_one", (4, 6), 32, {"cluster": (2, 4)}, "multiple of the cluster"),
    ],
)
def test_shapes_beyond_the_limits_are_launch_errors(
    module: Module, device: df.Device, kernel: str, grid: Any, block: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(LaunchError, match=message):
        module[kernel].prepare(grid, block, device.zeros((4,), "int32"), **options)


IN_CLUSTERS = """
extern "C" __global__ void __cluster_dims__(2, 1, 1) pairs(int* out) {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  out[blockIdx.x] = rank;
}
extern "C" __global__ void plain(int* out) { out[blockIdx.x] = 1; }
"""


def test_clusters_that_differ_from_required_ones_or_do_not_fit_are_refused(driver: str) -> None:
    device = df.device(0, driver=driver)
    if device.capability < (9, 0):
        pytest.skip("needs compute capability 9.0")
    module, out = df.compile(IN_CLUSTERS, driver=driver), device.zeros((8,), "int32")
    module["pairs"].prepare(8, 1, out)(device.stream)
    module["pairs"].prepare(8, 1, out, cluster=2)(device.stream)
    np.testing.assert_array_equal(out.numpy(), [0, 1] * 4)
    with pytest.raises(LaunchError, match=r"cluster is \(4, 1, 1\); pairs requires \(2, 1, 1\)"):
        module["pairs"].prepare(8, 1, out, cluster=4)
    with pytest.raises(LaunchError, match="multiple of the cluster"):
        module["pairs"].prepare(7, 1, out)


@pytest.mark.emulated
def test_a_cluster_that_no_gpc_can_hold_is_refused() -> None:
    with df.emu.Machine(devices=1, sm_count=2) as machine:
        device = df.device(0, driver=machine)
        kernel, out = df.compile(IN_CLUSTERS, driver=machine)["plain"], device.zeros((8,), "int32")
        kernel.prepare(8, 32, out, cluster=2, smem=200 << 10)
        with pytest.raises(LaunchError, match="no cluster of 4 blocks of plain with 204800 bytes fits"):
            kernel.prepare(8, 32, out, cluster=4, smem=200 << 10)


@pytest.mark.emulated
def test_clusters_need_compute_capability_9() -> None:
    with df.emu.Machine(devices=1, arch="sm_80") as machine:
        device = df.device(0, driver=machine)
        kernel = df.compile('extern "C" __global__ void k(int* out) {}', driver=machine)["k"]
        out = device.zeros((8,), "int32")
        with pytest.raises(Unsupported, match="clusters need compute capability 9.0"):
            kernel.prepare(8, 32, out, cluster=2)


@pytest.mark.parametrize("shape", [0, (1, 2, 3, 4), (), (1, -1), 1.5, "x"])
def test_malformed_shapes_are_argument_errors(module: Module, device: df.Device, shape: Any) -> None:
    array = device.zeros((4,), "int32")
    with pytest.raises(ArgumentError, match="grid"):
        module["add_one"].prepare(shape, 32, array)
    with pytest.raises(ArgumentError, match="block"):
        module["add_one"].prepare(1, shape, array)
    with pytest.raises(ArgumentError, match="cluster"):
        module["add_one"].prepare(1, 32, array, cluster=shape)


def test_the_device_is_that_of_the_arrays_or_must_be_given(module: Module, device: df.Device) -> None:
    array = device.zeros((32,), "int32")
    with pytest.raises(ArgumentError, match="device"):
        module["add_one"].prepare(1, 32, array.ptr)
    module["add_one"].prepare(1, 32, array.ptr, device=device)(device.stream)
    np.testing.assert_array_equal(array.numpy(), 1)


@pytest.mark.gpus(2)
def test_array_of_another_device_is_refused(module: Module, device: df.Device, driver: str) -> None:
    other = df.device(1, driver=driver)
    with pytest.raises(
        ArgumentError,
        match=r"argument 0 of add_one \(counted from 0\) is .* on device 1.*; it must be on device 0, .*as its \.ptr",
    ):
        module["add_one"].prepare(1, 32, other.zeros((4,), "int32"), device=device)
    launch = module["add_one"].prepare(1, 32, device.zeros((32,), "int32"))
    with pytest.raises(ArgumentError, match="stream"):
        launch(other.stream)


def test_a_wrong_number_of_arguments_is_refused(module: Module, device: df.Device) -> None:
    with pytest.raises(ArgumentError, match="arguments of add_one is 2 values; it must be 1 value$"):
        module["add_one"].prepare(1, 32, device.zeros((4,), "int32"), 1)


def test_an_unknown_kernel_is_refused_with_the_known_ones(module: Module) -> None:
    with pytest.raises(ArgumentError, match="add_one"):
        module["nothere"]
    assert module["scale<int>"] is module["scale<int>"]


def test_a_kernel_reports_its_attributes_and_occupancy(module: Module, device: df.Device) -> None:
    kernel = module["bounded"]
    kernel.load(device)
    facts = kernel.attributes(device)
    assert facts.max_threads <= 64 and facts.registers > 0 and facts.local_bytes == 0
    assert kernel.occupancy(device, 64) >= 1
    assert module["shared_sum"].occupancy(device, 64, 100 * 1024) <= 2


def test_a_kernel_is_loaded_once(module: Module, device: df.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = Module(module.image, module.driver)
    loads: list[int] = []
    real = device.driver.cuModuleLoadData
    monkeypatch.setitem(device.driver.__dict__, "cuModuleLoadData", lambda image: (loads.append(1), real(image))[1])
    for _ in range(2):
        fresh["add_one"].load(device)
        fresh["bounded"].load(device)
    assert len(loads) == 1 and fresh["add_one"]._on(device) is fresh["add_one"]._on(device)


def test_unknown_and_repeated_launch_attributes_are_refused(module: Module, device: df.Device) -> None:
    array = device.zeros((32,), "int32")
    with pytest.raises(ArgumentError, match="attrs"):
        module["add_one"].prepare(1, 32, array, attrs=["priority"])
    with pytest.raises(ArgumentError, match="twice"):
        module["add_one"].prepare(1, 32, array, priority=1, attrs=[attributes.Priority(1)])


def test_launch_attributes_of_the_bindings_are_accepted(module: Module, device: df.Device) -> None:
    types = device.driver.types
    raw = types.CUlaunchAttribute()
    raw.id, raw.value.priority = types.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PRIORITY, -1
    array = device.zeros((32,), "int32")
    module["add_one"].prepare(1, 32, array, attrs=[raw])(device.stream)
    np.testing.assert_array_equal(array.numpy(), 1)


def test_every_launch_attribute_can_be_built(device: df.Device) -> None:
    types = device.driver.types
    event = Event(device)
    built = [
        attributes.Cooperative(),
        attributes.Cluster(2, 1, 1),
        attributes.PreferredCluster(4),
        attributes.ClusterScheduling("SPREAD"),
        attributes.ProgrammaticStreamSerialization(),
        attributes.ProgrammaticEvent(event, at_block_start=True),
        attributes.LaunchCompletionEvent(event),
        attributes.Priority(-3),
        attributes.MemSyncDomain("REMOTE"),
        attributes.MemSyncDomainMap(0, 1),
        attributes.AccessPolicyWindow(0x1000, 4096, 0.5),
        attributes.SynchronizationPolicy("BLOCKING_SYNC"),
        attributes.SharedMemoryCarveout(50),
    ]
    values = [attribute.build(types) for attribute in built]
    assert len({int(value.id) for value in values}) == len(values)
    assert values[1].value.clusterDim.x == 2 and values[7].value.priority == -3
    assert int(values[5].value.programmaticEvent.event) == event.handle
    assert values[10].value.accessPolicyWindow.num_bytes == 4096
    with pytest.raises(Unsupported, match="SIDEWAYS"):
        attributes.ClusterScheduling("SIDEWAYS").build(types)


def test_attribute_newer_than_the_bindings_is_unsupported(device: df.Device) -> None:
    types = SimpleNamespace(CUlaunchAttribute=device.driver.types.CUlaunchAttribute, CUlaunchAttributeID=object())
    with pytest.raises(Unsupported, match="NVLINK_UTIL_CENTRIC_SCHEDULING"):
        attributes.NvlinkCentricScheduling().build(types)


INFO = KernelInfo(
    "k",
    "k",
    (Param("int", 8, 0), Param("int", 4, 8), Param("float", 4, 12), Param("bytes", 6, 16), Param("int", 1, 22)),
    23,
    False,
    False,
    None,
)


def packed(arguments: Arguments) -> bytes:
    """The bytes that a driver would read through the void**."""
    pointers = ctypes.cast(arguments.address, ctypes.POINTER(ctypes.c_void_p))
    return b"".join(ctypes.string_at(pointers[i], param.size) for i, param in enumerate(INFO.params))


@pytest.mark.parametrize(("number", "stored"), [(-1, 0xFFFFFFFF), (2**32 - 1, 0xFFFFFFFF), (-(2**31), 0x80000000)])
def test_integers_are_packed_little_endian_with_both_signs(number: int, stored: int) -> None:
    arguments = Arguments(INFO, [1 << 40, number, 0.1, b"abcdef", True], device=None)  # type: ignore[arg-type]
    assert packed(arguments) == struct.pack("<QIf6sB", 1 << 40, stored, 0.1, b"abcdef", 1)


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, 1 << 64, "an int of 64 bits"),
        (0, 1.0, "an Array or an int"),
        (0, None, "an Array or an int"),
        (1, 1 << 32, "an int of 32 bits"),
        (1, -(1 << 31) - 1, "an int of 32 bits"),
        (1, 2.5, "an int of 32 bits"),
        (2, "2.5", "a number"),
        (2, None, "a number"),
        (2, 1e39, "fits a 32-bit float"),
        (3, b"abc", "a buffer of 6 bytes"),
        (3, 5, "a buffer of 6 bytes"),
        (4, 256, "an int of 8 bits"),
    ],
)
def test_wrong_arguments_are_argument_errors(index: int, value: object, message: str) -> None:
    arguments = Arguments(INFO, [0, 0, 0, bytes(6), 0], device=None)  # type: ignore[arg-type]
    before = packed(arguments)
    with pytest.raises(ArgumentError, match=f"argument {index} of k .*{message}"):
        arguments.set(index, value)
    assert packed(arguments) == before


def test_a_pointer_of_cuda_python_is_an_argument_of_8_bytes() -> None:
    arguments = Arguments(INFO, [CUdeviceptr(1 << 40), 0, 0, bytes(6), 0], device=None)  # type: ignore[arg-type]
    assert packed(arguments)[:8] == (1 << 40).to_bytes(8, "little")
    with pytest.raises(ArgumentError, match="argument 1 of k .*an int of 32 bits"):
        arguments.set(1, CUdeviceptr(16))


def test_infinities_and_integers_are_accepted_as_floats() -> None:
    arguments = Arguments(INFO, [0, 0, float("inf"), bytes(6), 0], device=None)  # type: ignore[arg-type]
    arguments.set(2, 3)
    assert packed(arguments)[12:16] == struct.pack("<f", 3)


def test_an_array_in_a_narrow_integer_parameter_is_refused(device: df.Device) -> None:
    with pytest.raises(ArgumentError, match=r"argument 1 of k \(counted from 0\)"):
        Arguments(INFO, [0, device.zeros((1,), "int8"), 0, bytes(6), 0], device)


def test_an_error_for_a_damaged_image_names_the_call(device: df.Device, module: Module) -> None:
    import dataclasses

    broken = Module(dataclasses.replace(module.image, cubin=b"\x7fELF garbage", ptx="not ptx"), device.driver)
    with pytest.raises(DriverError, match="cuModuleLoadData"):
        broken["add_one"].load(device)


def test_compile_accepts_a_file(driver: str, device: df.Device, tmp_path: Any) -> None:
    path = tmp_path / "one.cu"
    path.write_text('#include "one.cuh"\nextern "C" __global__ void one(int* p) { p[threadIdx.x] = ONE; }')
    (tmp_path / "one.cuh").write_text("#define ONE (1 + EXTRA)\n")
    module = df.compile(path, driver=driver, defines={"EXTRA": 4}, include=[tmp_path])
    array = device.zeros((8,), "int32")
    module["one"].prepare(1, 8, array)(device.stream)
    np.testing.assert_array_equal(array.numpy(), 5)
    assert str(path) in module.image.ptx


def test_compile_names_a_file_that_it_cannot_read(driver: str, tmp_path: Path) -> None:
    file = tmp_path / "given.cu"
    file.write_text('#include "beside.cuh"\nextern "C" __global__ void k(int* p) { *p = BESIDE; }')
    (tmp_path / "beside.cuh").write_text("#define BESIDE 5\n")
    module = df.compile(file, driver=driver)
    assert module.image.name == str(file)
    array = df.device(0, driver=driver).zeros((1,), "int32")
    module["k"].prepare(1, 1, array)(array.stream)
    assert array.numpy() == [5]
    (tmp_path / "binary.cu").write_bytes(b"\xff\xfe\xfa")
    for wrong in (tmp_path / "missing.cu", tmp_path, tmp_path / "binary.cu", b"int x;", None):
        with pytest.raises(ArgumentError, match="source is"):
            df.compile(wrong, driver=driver)  # type: ignore[arg-type]
