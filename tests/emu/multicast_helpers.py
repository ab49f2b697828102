# SPDX-License-Identifier: Apache-2.0
"""Helpers for tests of emulated multicast. Their multicast objects are made by driver calls."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from cuda.bindings import driver as types
from emu.driver_helpers import ok, primary, ptx

PIECE = 2 << 20
READ_WRITE = types.CUmemAccess_flags(3)


def located(device: int) -> Any:
    location = types.CUmemLocation()
    location.type = types.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = device
    return location


def memory_prop(device: int) -> Any:
    prop = types.CUmemAllocationProp()
    prop.type = types.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location = located(device)
    return prop


def object_prop(devices: int, nbytes: int = PIECE) -> Any:
    prop = types.CUmulticastObjectProp()
    prop.numDevices, prop.size = devices, nbytes
    return prop


def access(*devices: int, flags: Any = READ_WRITE) -> list[Any]:
    found = []
    for device in devices:
        item = types.CUmemAccessDesc()
        item.location, item.flags = located(device), flags
        found.append(item)
    return found


def team(cuda: Any, devices: int, nbytes: int = PIECE) -> Any:
    """A multicast object to which all of its devices are added."""
    handle = ok(cuda.cuMulticastCreate(object_prop(devices, nbytes)))
    for device in range(devices):
        ok(cuda.cuMulticastAddDevice(handle, device))
    return handle


def mapped(cuda: Any, handle: Any, nbytes: int, devices: int, flags: Any = READ_WRITE) -> int:
    """Map physical memory or a multicast object, with access for the first `devices` devices. Returns the address."""
    address = ok(cuda.cuMemAddressReserve(nbytes, 0, 0, 0))
    ok(cuda.cuMemMap(address, nbytes, 0, handle, 0))
    ok(cuda.cuMemSetAccess(address, nbytes, access(*range(devices), flags=flags), devices))
    return int(address)


@dataclass
class Shared:
    """Memory of every device, each at an address of its own, and the multicast address of all of it."""

    handle: Any
    multicast: int
    memories: list[Any]
    own: list[int]
    nbytes: int

    def close(self, cuda: Any) -> None:
        for device in range(len(self.own)):
            ok(cuda.cuMulticastUnbind(self.handle, device, 0, self.nbytes))
        for address in (self.multicast, *self.own):
            ok(cuda.cuMemUnmap(address, self.nbytes))
            ok(cuda.cuMemAddressFree(address, self.nbytes))
        for handle in (self.handle, *self.memories):
            ok(cuda.cuMemRelease(handle))


def shared(cuda: Any, devices: int, nbytes: int = PIECE) -> Shared:
    """Memory and a multicast object of the first `devices` devices. Makes the context of device 0 current."""
    for device in reversed(range(devices)):
        primary(cuda, device)
    handle = team(cuda, devices, nbytes)
    memories = [ok(cuda.cuMemCreate(nbytes, memory_prop(device), 0)) for device in range(devices)]
    for memory in memories:
        ok(cuda.cuMulticastBindMem(handle, 0, memory, 0, nbytes, 0))
    own = [mapped(cuda, memory, nbytes, devices) for memory in memories]
    return Shared(handle, mapped(cuda, handle, nbytes, devices), memories, own, nbytes)


PRELUDE = """
typedef unsigned u32; typedef unsigned long long u64;
struct Team { u32* mc; u32* own[8]; u32* out[8]; u32 rank, ranks; };
#define REDUCE(v, sem, how, p) \\
  asm volatile("multimem.ld_reduce." #sem ".global." #how " %0, [%1];" : "=r"(v) : "l"(p) : "memory");
#define MST(sem, p, v) asm volatile("multimem.st." #sem ".global.u32 [%0], %1;" :: "l"(p), "r"((u32)(v)) : "memory");
#define MRED(sem, p, v) \\
  asm volatile("multimem.red." #sem ".global.add.u32 [%0], %1;" :: "l"(p), "r"((u32)(v)) : "memory");
#define LD(v, sem, p) asm volatile("ld." #sem ".global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
#define ST(sem, p, v) asm volatile("st." #sem ".global.u32 [%0], %1;" :: "l"(p), "r"((u32)(v)) : "memory");
#define ALIAS asm volatile("fence.proxy.alias;" ::: "memory");
// All ranks meet at the word `flag` of each, by addresses of their own, which their first threads signal and poll.
__device__ void meet(Team t, u32 flag, u32 value) {
  __syncthreads();
  if (threadIdx.x < t.ranks) {
    ST(release.sys, t.own[threadIdx.x] + flag + t.rank, value)
    u32 seen;
    do LD(seen, acquire.sys, t.own[t.rank] + flag + threadIdx.x) while (seen < value);
  }
  __syncthreads();
}
"""


class _Team(ctypes.Structure):
    """The parameter of the kernels that `launch` runs: multicast address, own addresses and outputs of all ranks."""

    _fields_ = [
        ("mc", ctypes.c_uint64),
        ("own", ctypes.c_uint64 * 8),
        ("out", ctypes.c_uint64 * 8),
        ("rank", ctypes.c_uint32),
        ("ranks", ctypes.c_uint32),
    ]


def launch(
    cuda: Any, made: Shared, body: str, *, threads: int = 32, out: list[int] | None = None, arch: str = "compute_90a"
) -> list[Any]:
    """Run a kernel with this body on all devices at once. Returns the CUresult of each context. `out` is memory for
    each device.
    """
    source = f'{PRELUDE}\nextern "C" __global__ void kernel(Team t) {{\n{body}\n}}\n'
    ranks = len(made.own)
    for rank in range(ranks):
        primary(cuda, rank)
        module = ok(cuda.cuModuleLoadData(ptx(source, arch)))
        function = ok(cuda.cuModuleGetFunction(module, b"kernel"))
        team = _Team(made.multicast, tuple(made.own), tuple(out or ()), rank, ranks)
        ok(cuda.cuLaunchKernel(function, 1, 1, 1, threads, 1, 1, 0, 0, ((team,), (None,)), 0))
    results = []
    for rank in range(ranks):
        primary(cuda, rank)
        results.append(cuda.cuCtxSynchronize()[0])
    return results


def write(cuda: Any, address: int, data: np.ndarray[Any, Any]) -> None:
    ok(cuda.cuMemcpyHtoD(address, data, data.nbytes))


def read(cuda: Any, address: int, count: int, dtype: Any = np.uint32) -> np.ndarray[Any, Any]:
    data = np.zeros(count, dtype)
    ok(cuda.cuMemcpyDtoH(data, address, data.nbytes))
    return data
