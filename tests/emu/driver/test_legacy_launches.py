# SPDX-License-Identifier: Apache-2.0
"""cuLaunch and cuLaunchGrid, cooperative launches on several devices, and the attributes of streams."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as types
from driver_helpers import R, code, ok, primary
from loopback import FORMS, initialised

# out[block * blockDim + thread] = a + b * block, where `block` is the block's index in the grid. The last parameter, of
# 12 bytes, is not used.
PTX = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry put(.param .u64 out, .param .u32 a, .param .f32 b, .param .align 4 .b8 rest[12]) {
  .reg .b64 %rd<3>; .reg .b32 %r<8>; .reg .f32 %f<4>;
  ld.param.u64 %rd1, [out];
  ld.param.u32 %r1, [a];
  ld.param.f32 %f1, [b];
  mov.u32 %r2, %ctaid.y;
  mov.u32 %r3, %nctaid.x;
  mov.u32 %r4, %ctaid.x;
  mad.lo.u32 %r4, %r2, %r3, %r4;
  cvt.rn.f32.u32 %f2, %r4;
  cvt.rn.f32.u32 %f3, %r1;
  fma.rn.f32 %f2, %f1, %f2, %f3;
  mov.u32 %r5, %ntid.x;
  mov.u32 %r6, %tid.x;
  mad.lo.u32 %r4, %r4, %r5, %r6;
  mul.wide.u32 %rd2, %r4, 4;
  add.u64 %rd1, %rd1, %rd2;
  st.global.f32 [%rd1], %f2;
  ret;
}
"""


@pytest.fixture(params=FORMS)
def cuda(request: pytest.FixtureRequest) -> Iterator[Any]:
    with initialised(request.param, devices=2) as made:
        yield made


def _kernel(cuda: Any) -> Any:
    return ok(cuda.cuModuleGetFunction(ok(cuda.cuModuleLoadData(PTX)), b"put"))


def _read(cuda: Any, pointer: Any, count: int) -> list[float]:
    out = np.zeros(count, np.float32)
    ok(cuda.cuMemcpyDtoH(out, pointer, out.nbytes))
    return [float(x) for x in out]


def test_cuLaunch_uses_the_shape_and_parameters_set_before(cuda: Any) -> None:
    f, stream = _kernel(cuda), ok(cuda.cuStreamCreate(0))
    pointer = ok(cuda.cuMemAlloc(64))
    address = np.array([int(pointer)], np.uint64)
    wrong = R.CUDA_ERROR_INVALID_VALUE
    assert code(cuda.cuLaunch(f)) == wrong
    ok(cuda.cuFuncSetBlockShape(f, 2, 1, 1))
    ok(cuda.cuFuncSetSharedSize(f, 16))
    ok(cuda.cuParamSetv(f, 0, address, 8))
    ok(cuda.cuParamSeti(f, 8, 5))
    ok(cuda.cuParamSetf(f, 12, 0.5))
    ok(cuda.cuParamSetSize(f, 27))
    assert code(cuda.cuLaunchGrid(f, 2, 2)) == wrong
    ok(cuda.cuParamSetSize(f, 28))
    ok(cuda.cuMemsetD8(pointer, 0, 64))
    ok(cuda.cuLaunchGrid(f, 2, 2))
    assert _read(cuda, pointer, 8) == [5, 5, 5.5, 5.5, 6, 6, 6.5, 6.5]
    ok(cuda.cuParamSeti(f, 8, 7))
    ok(cuda.cuLaunch(f))
    assert _read(cuda, pointer, 4) == [7, 7, 5.5, 5.5]
    ok(cuda.cuParamSetf(f, 12, 2.0))
    ok(cuda.cuLaunchGridAsync(f, 2, 1, stream))
    ok(cuda.cuStreamSynchronize(stream))
    assert _read(cuda, pointer, 4) == [7, 7, 9, 9]
    for shape in ((0, 1, 1), (1025, 1, 1), (1, 1, 65), (64, 32, 1), (-1, -1, 1)):
        assert code(cuda.cuFuncSetBlockShape(f, *shape)) == wrong
    assert code(cuda.cuParamSeti(f, 4093, 1)) == wrong
    assert code(cuda.cuParamSeti(f, -1, 1)) == wrong
    assert code(cuda.cuParamSetv(f, 0, 16, 8)) == wrong
    assert code(cuda.cuParamSetSize(f, 4097)) == wrong
    ok(cuda.cuFuncSetSharedSize(f, 1 << 20))
    assert code(cuda.cuLaunch(f)) == wrong
    assert code(cuda.cuLaunchGrid(f, 0, 1)) == wrong


def test_a_cooperative_launch_on_several_devices_waits_for_all(cuda: Any) -> None:
    launches, pointers, streams, keep = [], [], [], []
    for device in range(2):
        primary(cuda, device)
        f, stream, pointer = _kernel(cuda), ok(cuda.cuStreamCreate(1)), ok(cuda.cuMemAlloc(16))
        values = (ctypes.c_uint64(int(pointer)), ctypes.c_uint32(device), ctypes.c_float(10), (ctypes.c_char * 12)())
        array = (ctypes.c_void_p * 4)(*(ctypes.addressof(value) for value in values))
        keep.append((values, array))
        p = types.CUDA_LAUNCH_PARAMS()
        p.function, p.hStream, p.kernelParams = f, stream, ctypes.addressof(array)
        p.gridDimX, p.gridDimY, p.gridDimZ, p.blockDimX, p.blockDimY, p.blockDimZ = 2, 1, 1, 2, 1, 1
        launches.append(p)
        pointers.append(pointer)
        streams.append(stream)
    word = ok(cuda.cuMemAlloc(4))
    ok(cuda.cuMemsetD32(word, 0, 1))
    ok(cuda.cuStreamWaitValue32(streams[1], word, 1, 1))
    ok(cuda.cuLaunchCooperativeKernelMultiDevice(launches, 2, 0))
    assert code(cuda.cuStreamQuery(streams[0])) == R.CUDA_ERROR_NOT_READY
    ok(cuda.cuStreamWriteValue32(0, word, 1, 0))
    for device, pointer in enumerate(pointers):
        primary(cuda, device)
        ok(cuda.cuStreamSynchronize(streams[device]))
        assert _read(cuda, pointer, 4) == [device, device, device + 10, device + 10]
    ok(cuda.cuMemsetD32(word, 0, 1))
    ok(cuda.cuStreamWaitValue32(streams[1], word, 1, 1))
    ok(cuda.cuLaunchCooperativeKernelMultiDevice(launches, 2, 3))
    ok(cuda.cuStreamSynchronize(streams[0]))
    ok(cuda.cuStreamWriteValue32(0, word, 1, 0))
    wrong = R.CUDA_ERROR_INVALID_VALUE
    assert code(cuda.cuLaunchCooperativeKernelMultiDevice([launches[0]] * 2, 2, 0)) == wrong
    assert code(cuda.cuLaunchCooperativeKernelMultiDevice(launches, 2, 4)) == wrong
    assert code(cuda.cuLaunchCooperativeKernelMultiDevice([], 0, 0)) == wrong
    launches[1].blockDimX = 1
    assert code(cuda.cuLaunchCooperativeKernelMultiDevice(launches, 2, 0)) == wrong
    launches[1].hStream = 0
    assert code(cuda.cuLaunchCooperativeKernelMultiDevice(launches, 2, 0)) == wrong
    ok(cuda.cuCtxSynchronize())


def test_attributes_of_streams_can_be_read_back_and_copied(cuda: Any) -> None:
    kind, stream, other = types.CUstreamAttrID, ok(cuda.cuStreamCreate(1)), ok(cuda.cuStreamCreate(1))
    policy, priority = (getattr(kind, f"CU_LAUNCH_ATTRIBUTE_{name}") for name in ("SYNCHRONIZATION_POLICY", "PRIORITY"))
    domains = kind.CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP
    auto = types.CUsynchronizationPolicy.CU_SYNC_POLICY_AUTO
    assert ok(cuda.cuStreamGetAttribute(stream, policy)).syncPolicy == auto
    found = ok(cuda.cuStreamGetAttribute(stream, domains)).memSyncDomainMap
    assert (found.default_, found.remote) == (0, 1)
    value = types.CUstreamAttrValue()
    value.syncPolicy = types.CUsynchronizationPolicy.CU_SYNC_POLICY_SPIN
    ok(cuda.cuStreamSetAttribute(stream, policy, value))
    value = types.CUstreamAttrValue()
    value.priority = -3
    ok(cuda.cuStreamSetAttribute(stream, priority, value))
    ok(cuda.cuStreamCopyAttributes(other, stream))
    for one in (stream, other):
        assert ok(cuda.cuStreamGetPriority(one)) == -3
        assert ok(cuda.cuStreamGetAttribute(one, priority)).priority == -3
        assert ok(cuda.cuStreamGetAttribute(one, policy)).syncPolicy == types.CUsynchronizationPolicy(2)
    wrong = R.CUDA_ERROR_INVALID_VALUE
    cluster = kind.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    assert code(cuda.cuStreamGetAttribute(stream, cluster)) == wrong
    assert code(cuda.cuStreamSetAttribute(stream, cluster, value)) == wrong
    assert code(cuda.cuStreamSetAttribute(stream, policy, None)) == wrong
    assert code(cuda.cuStreamSetAttribute(stream, kind.CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN, value)) == wrong
