# SPDX-License-Identifier: Apache-2.0
"""Thread block clusters by the driver API: their launch attribute, function attributes, occupancy, residency."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cluster_source import TOP
from cuda.bindings import driver as types
from driver_helpers import R, code, function, ok, primary, ptx

from drvfuse.emu import Machine

F = types.CUfunction_attribute
SOURCE = f"""typedef unsigned u32;
{TOP}
extern "C" __global__ void ranks(u32* out) {{ if (!threadIdx.x) out[blockIdx.x] = rank_(); }}
extern "C" __global__ void __cluster_dims__(4, 1, 1) four(u32* out) {{
  u32 explicit_;
  asm("{{ .reg .pred q; mov.pred q, %%is_explicit_cluster; selp.u32 %0, 1, 0, q; }}" : "=r"(explicit_));
  if (!threadIdx.x) out[blockIdx.x] = rank_() + 10 * explicit_;
}}
extern "C" __global__ void __launch_bounds__(32, 1, 2) two_at_most(u32* out) {{ out[blockIdx.x] = rank_(); }}
// How many clusters of so many blocks are at work at once, at most.
extern "C" __global__ void crowd(u32* out, u32 blocks) {{
  if (!threadIdx.x) {{ u32 n = 1 + atomicAdd(out, 1); atomicMax(out + 1, (n + blocks - 1) / blocks); }}
  C_SYNC
  for (u32 i = 0; i < 20; i++) __nanosleep(1000);
  C_SYNC
  if (!threadIdx.x) atomicSub(out, 1);
}}
"""


@pytest.fixture
def cuda() -> Iterator[Any]:
    with Machine(devices=1, sm_count=132) as machine:
        ok(machine.driver.cuInit(0))
        primary(machine.driver)
        yield machine.driver


def configuration(grid: Any, block: int = 32, cluster: Any = None, smem: int = 0) -> Any:
    config = types.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid if isinstance(grid, tuple) else (grid, 1, 1)
    config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
    config.sharedMemBytes = smem
    if cluster is not None:
        attribute = types.CUlaunchAttribute()
        attribute.id = types.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dim = attribute.value.clusterDim
        dim.x, dim.y, dim.z = cluster if isinstance(cluster, tuple) else (cluster, 1, 1)
        config.attrs, config.numAttrs = [attribute], 1
    return config


def launched(cuda: Any, f: Any, grid: Any, cluster: Any = None, blocks: int = 64) -> Any:
    """The error of a launch, or what it wrote."""
    out, zeros = ok(cuda.cuMemAlloc(4 * blocks)), np.zeros(blocks, np.uint32)
    ok(cuda.cuMemcpyHtoD(out, zeros, 4 * blocks))
    result = code(cuda.cuLaunchKernelEx(configuration(grid, cluster=cluster), f, ((out,), (None,)), 0))
    if result != R.CUDA_SUCCESS:
        return result
    ok(cuda.cuMemcpyDtoH(zeros, out, 4 * blocks))
    return zeros.tolist()


def test_the_launch_attribute_makes_clusters_within_its_limits(cuda: Any) -> None:
    f = function(cuda, SOURCE, "ranks")
    assert launched(cuda, f, 12, 4, 12) == [0, 1, 2, 3] * 3
    assert launched(cuda, f, 8, 8, 8) == list(range(8))
    assert launched(cuda, f, 12, 8) == R.CUDA_ERROR_INVALID_VALUE
    assert launched(cuda, f, 12, (4, 2, 1)) == R.CUDA_ERROR_INVALID_VALUE
    assert launched(cuda, f, 12, 0) == R.CUDA_ERROR_INVALID_VALUE
    assert launched(cuda, f, 16, 16) == R.CUDA_ERROR_INVALID_CLUSTER_SIZE
    ok(cuda.cuFuncSetAttribute(f, F.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1))
    assert launched(cuda, f, 16, 16, 16) == list(range(16))
    assert launched(cuda, f, 32, 32) == R.CUDA_ERROR_INVALID_CLUSTER_SIZE


def test_a_kernel_can_require_its_clusters(cuda: Any) -> None:
    f = function(cuda, SOURCE, "four")
    names = ("CLUSTER_SIZE_MUST_BE_SET", "REQUIRED_CLUSTER_WIDTH", "REQUIRED_CLUSTER_HEIGHT", "REQUIRED_CLUSTER_DEPTH")
    found = [ok(cuda.cuFuncGetAttribute(getattr(F, f"CU_FUNC_ATTRIBUTE_{name}"), f)) for name in names]
    assert found == [1, 4, 1, 1]
    assert launched(cuda, f, 8, None, 8) == [10, 11, 12, 13] * 2
    assert launched(cuda, f, 8, 4, 8) == [10, 11, 12, 13] * 2
    assert launched(cuda, f, 8, 2) == R.CUDA_ERROR_INVALID_VALUE
    assert launched(cuda, f, 6) == R.CUDA_ERROR_INVALID_VALUE
    width = F.CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH
    assert code(cuda.cuFuncSetAttribute(f, width, 2)) == R.CUDA_ERROR_NOT_PERMITTED


def test_a_kernel_can_limit_the_size_of_its_clusters(cuda: Any) -> None:
    f = function(cuda, SOURCE, "two_at_most")
    assert launched(cuda, f, 4, 2, 4) == [0, 1, 0, 1]
    assert launched(cuda, f, 4, 4) == R.CUDA_ERROR_INVALID_CLUSTER_SIZE


def test_the_required_cluster_of_a_function_can_be_set(cuda: Any) -> None:
    f = function(cuda, SOURCE, "ranks")
    for name in ("WIDTH", "HEIGHT", "DEPTH"):
        attribute = getattr(F, f"CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_{name}")
        assert ok(cuda.cuFuncGetAttribute(attribute, f)) == 0
        assert code(cuda.cuFuncSetAttribute(f, attribute, -1)) == R.CUDA_ERROR_INVALID_VALUE
        ok(cuda.cuFuncSetAttribute(f, attribute, 2 if name == "WIDTH" else 1))
    assert launched(cuda, f, 4, None, 4) == [0, 1, 0, 1]


def test_occupancy_of_clusters_is_that_measured_on_a_gpu(cuda: Any) -> None:
    f = function(cuda, SOURCE, "ranks")
    ok(cuda.cuFuncSetAttribute(f, F.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 200 << 10))
    ok(cuda.cuFuncSetAttribute(f, F.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1))

    def active(cluster: int) -> int:
        return ok(cuda.cuOccupancyMaxActiveClusters(f, configuration(2 * cluster, cluster=cluster, smem=200 << 10)))

    assert [active(n) for n in (1, 2, 4, 8, 16)] == [132, 66, 30, 15, 7]
    largest = cuda.cuOccupancyMaxPotentialClusterSize
    assert ok(largest(f, configuration(32, smem=200 << 10))) == 16
    ok(cuda.cuFuncSetAttribute(f, F.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 0))
    assert ok(largest(f, configuration(32))) == 8
    assert ok(largest(f, configuration(32, block=1024, smem=230 << 10))) == 0
    assert code(cuda.cuOccupancyMaxActiveClusters(f, configuration(3, cluster=2))) == R.CUDA_ERROR_INVALID_VALUE


@pytest.mark.parametrize(
    ("sm_count", "smem", "cluster", "most"), [(8, 200 << 10, 4, 2), (8, 200 << 10, 8, 1), (6, 0, 8, 8)]
)
def test_clusters_become_resident_as_a_whole(sm_count: int, smem: int, cluster: int, most: int) -> None:
    with Machine(devices=1, sm_count=sm_count, seed=3) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        primary(cuda)
        f = function(cuda, SOURCE, "crowd")
        ok(cuda.cuFuncSetAttribute(f, F.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, smem))
        out, found = ok(cuda.cuMemAlloc(8)), np.zeros(2, np.uint32)
        ok(cuda.cuMemcpyHtoD(out, found, 8))
        config = configuration(8 * cluster, cluster=cluster, smem=smem)
        ok(cuda.cuLaunchKernelEx(config, f, ((out, types.cuuint32_t(cluster)), (None, None)), 0))
        ok(cuda.cuMemcpyDtoH(found, out, 8))
        assert found.tolist() == [0, most]
        assert machine.reports == []


def test_a_cluster_that_no_gpc_holds_is_refused() -> None:
    with Machine(devices=1, sm_count=2) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        primary(cuda)
        f = function(cuda, SOURCE, "ranks")
        ok(cuda.cuFuncSetAttribute(f, F.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 200 << 10))
        out = ok(cuda.cuMemAlloc(64))
        config = configuration(4, cluster=4, smem=200 << 10)
        assert ok(cuda.cuOccupancyMaxActiveClusters(f, config)) == 0
        assert code(cuda.cuLaunchKernelEx(config, f, ((out,), (None,)), 0)) == R.CUDA_ERROR_INVALID_CLUSTER_SIZE


def test_an_access_to_a_block_that_has_not_begun_is_a_launch_failure_with_a_report() -> None:
    source = (
        SOURCE
        + """
extern "C" __global__ void early(u32* out) { __shared__ u32 s; if (rank_() == 0 && !threadIdx.x) C_ST(&s, 1, 1) }"""
    )
    with Machine(devices=1) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        primary(cuda)
        f = function(cuda, source, "early")
        out = ok(cuda.cuMemAlloc(64))
        ok(cuda.cuLaunchKernelEx(configuration(2, cluster=2), f, ((out,), (None,)), 0))
        assert code(cuda.cuCtxSynchronize()) == R.CUDA_ERROR_LAUNCH_FAILED
        (report,) = machine.reports
        assert report.kind == "cluster_absent"
        assert "CTA not present" in report.message
        assert report.block == (0, 0, 0)


def test_devices_before_compute_capability_9_have_no_clusters() -> None:
    source = 'extern "C" __global__ void k(unsigned* out) { out[blockIdx.x] = 1; }'
    with Machine(devices=1, arch="sm_80") as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        primary(cuda)
        attribute = types.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH
        assert ok(cuda.cuDeviceGetAttribute(attribute, 0)) == 0
        f = ok(cuda.cuModuleGetFunction(ok(cuda.cuModuleLoadData(ptx(source, "compute_80"))), b"k"))
        out = ok(cuda.cuMemAlloc(64))
        assert code(cuda.cuLaunchKernelEx(configuration(2, cluster=2), f, ((out,), (None,)), 0)) == (
            R.CUDA_ERROR_NOT_SUPPORTED
        )
        assert code(cuda.cuOccupancyMaxPotentialClusterSize(f, configuration(2))) == R.CUDA_ERROR_NOT_SUPPORTED


def test_devices_of_compute_capability_9_have_clusters(cuda: Any) -> None:
    assert ok(cuda.cuDeviceGetAttribute(types.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH, 0)) == 1


def test_a_graph_keeps_the_clusters_of_a_launch(cuda: Any) -> None:
    f, out, found = function(cuda, SOURCE, "ranks"), ok(cuda.cuMemAlloc(16)), np.zeros(4, np.uint32)
    stream = ok(cuda.cuStreamCreate(1))
    ok(cuda.cuStreamBeginCapture(stream, types.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
    config = configuration(4, cluster=2)
    config.hStream = stream
    ok(cuda.cuLaunchKernelEx(config, f, ((out,), (None,)), 0))
    executable = ok(cuda.cuGraphInstantiate(ok(cuda.cuStreamEndCapture(stream)), 0))
    for _ in range(2):
        ok(cuda.cuGraphLaunch(executable, stream))
    ok(cuda.cuStreamSynchronize(stream))
    ok(cuda.cuMemcpyDtoH(found, out, 16))
    assert found.tolist() == [0, 1, 0, 1]


def test_a_cooperative_grid_of_clusters_has_to_fit(cuda: Any) -> None:
    f = function(cuda, SOURCE, "ranks")
    ok(cuda.cuFuncSetAttribute(f, F.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 200 << 10))
    together = types.CUlaunchAttribute()
    together.id = types.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    together.value.cooperative = 1
    out = ok(cuda.cuMemAlloc(4 * 128))
    for blocks, expected in ((120, R.CUDA_SUCCESS), (128, R.CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE)):
        config = configuration(blocks, cluster=8, smem=200 << 10)
        config.attrs, config.numAttrs = [*config.attrs, together], 2
        assert code(cuda.cuLaunchKernelEx(config, f, ((out,), (None,)), 0)) == expected
    ok(cuda.cuCtxSynchronize())


def test_a_deadlock_shows_the_barrier_of_the_cluster_and_its_phases() -> None:
    source = (
        SOURCE
        + """
extern "C" __global__ void stuck(u32* out) {
  C_SYNC
  if (rank_() == 1 && threadIdx.x == 3) while (*(volatile u32*)out == 0) {}
  C_ARRIVE("") asm volatile("barrier.cluster.wait;"); }"""
    )
    with Machine(devices=1) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        primary(cuda)
        f, out = function(cuda, source, "stuck"), ok(cuda.cuMemAlloc(64))
        ok(cuda.cuMemsetD32(out, 0, 16))
        ok(cuda.cuLaunchKernelEx(configuration(2, cluster=2), f, ((out,), (None,)), 0))
        assert code(cuda.cuCtxSynchronize()) == R.CUDA_ERROR_LAUNCH_TIMEOUT
        report = machine.reports[-1]
        assert report.kind == "deadlock"
        assert "at the barrier of the cluster, which misses 1 of its threads" in report.message
        assert "the cluster's barrier, phase 0" in report.timeline
