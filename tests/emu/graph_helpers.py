# SPDX-License-Identifier: Apache-2.0
"""Helpers of the tests of explicit graphs: kernels in PTX, parameters of nodes, small queries."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from cuda.bindings import driver as T
from driver_helpers import ok, primary

from drvfuse.emu.bindings import MAJOR

PTX = b"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry add(.param .u64 p, .param .u32 v) {
  .reg .u64 %a, %o; .reg .u32 %x, %v, %t;
  ld.param.u64 %a, [p]; ld.param.u32 %v, [v];
  mov.u32 %t, %tid.x; mul.wide.u32 %o, %t, 4; add.u64 %a, %a, %o;
  ld.global.u32 %x, [%a]; add.u32 %x, %x, %v; st.global.u32 [%a], %x; ret;
}
.visible .entry scale(.param .u64 p, .param .u32 v) {
  .reg .u64 %a, %o; .reg .u32 %x, %v, %t;
  ld.param.u64 %a, [p]; ld.param.u32 %v, [v];
  mov.u32 %t, %tid.x; mul.wide.u32 %o, %t, 4; add.u64 %a, %a, %o;
  ld.global.u32 %x, [%a]; mul.lo.u32 %x, %x, %v; st.global.u32 [%a], %x; ret;
}
"""
N = T.CUgraphNodeType
DEVICE, HOST = T.CUmemorytype.CU_MEMORYTYPE_DEVICE, T.CUmemorytype.CU_MEMORYTYPE_HOST
WORDS = 32
BYTES = 4 * WORDS


class Graphs:
    """A stream, two kernels and words on a device, and calls that differ between major versions of the bindings."""

    def __init__(self, cuda: Any, start: int = 0, device: int = 0) -> None:
        self.cuda, self.context = cuda, primary(cuda, device)
        self.stream = ok(cuda.cuStreamCreate(1))
        self.words = ok(cuda.cuMemAlloc(BYTES))
        ok(cuda.cuMemcpyHtoD(self.words, np.full(WORDS, start, np.uint32), BYTES))
        module = ok(cuda.cuModuleLoadData(PTX))
        self.add, self.scale = (ok(cuda.cuModuleGetFunction(module, name)) for name in (b"add", b"scale"))
        self.graph = ok(cuda.cuGraphCreate(0))

    def kernel(self, function: Any, value: int, words: Any = None) -> Any:
        """The parameters of a kernel node."""
        p = T.CUDA_KERNEL_NODE_PARAMS()
        p.func, p.blockDimX = function, WORDS
        p.gridDimX = p.gridDimY = p.gridDimZ = p.blockDimY = p.blockDimZ = 1
        p.kernelParams = self.arguments(value, words)
        return p

    def arguments(self, value: int, words: Any = None) -> Any:
        return (int(self.words if words is None else words), value), (ctypes.c_void_p, ctypes.c_uint32)

    def queue(self, function: Any, value: int, stream: Any = None, words: Any = None) -> None:
        """Launch a kernel on a stream."""
        where = self.stream if stream is None else stream
        shape = 1, 1, 1, WORDS, 1, 1, 0
        ok(self.cuda.cuLaunchKernel(function, *shape, where, self.arguments(value, words), 0))

    def launch(self, function: Any, value: int, *after: Any, graph: Any = None, words: Any = None) -> Any:
        """Add a kernel node after the nodes `after`. Returns the node."""
        where = self.graph if graph is None else graph
        return ok(self.cuda.cuGraphAddKernelNode(where, list(after), len(after), self.kernel(function, value, words)))

    def empty(self, *after: Any) -> Any:
        return ok(self.cuda.cuGraphAddEmptyNode(self.graph, list(after), len(after)))

    def instantiate(self, graph: Any = None) -> Any:
        return ok(self.cuda.cuGraphInstantiate(self.graph if graph is None else graph, 0))

    def run(self, executable: Any = None, times: int = 1) -> None:
        found = self.instantiate() if executable is None else executable
        for _ in range(times):
            ok(self.cuda.cuGraphLaunch(found, self.stream))
        ok(self.cuda.cuStreamSynchronize(self.stream))

    def read(self, words: Any = None) -> int:
        """The value that all words have."""
        out = np.zeros(WORDS, np.uint32)
        ok(self.cuda.cuMemcpyDtoH(out, self.words if words is None else words, BYTES))
        assert (out == out[0]).all()
        return int(out[0])

    def connect(self, first: Any, second: Any, data: Any = None, remove: bool = False) -> Any:
        """Add or remove one edge. Returns the result of the driver call."""
        name = f"cuGraph{'Remove' if remove else 'Add'}Dependencies{'_v2' if MAJOR == 12 else ''}"
        edges = None if data is None else [data]
        return getattr(self.cuda, name)(self.graph, [first], [second], edges, 1)

    def edges(self, graph: Any = None) -> set[tuple[int, int]]:
        query = self.cuda.cuGraphGetEdges_v2 if MAJOR == 12 else self.cuda.cuGraphGetEdges
        where = self.graph if graph is None else graph
        count = ok(query(where))[-1]
        first, second, _, _ = ok(query(where, count))
        return {(int(a), int(b)) for a, b in zip(first, second, strict=True)}

    def nodes(self, graph: Any = None) -> list[int]:
        where = self.graph if graph is None else graph
        return [int(node) for node in ok(self.cuda.cuGraphGetNodes(where, ok(self.cuda.cuGraphGetNodes(where))[1]))[0]]


def copy(to: Any, to_kind: Any, source: Any, from_kind: Any, nbytes: int) -> Any:
    """The parameters of a copy of one row."""
    p = T.CUDA_MEMCPY3D()
    p.dstMemoryType, p.srcMemoryType, p.WidthInBytes, p.Height, p.Depth = to_kind, from_kind, nbytes, 1, 1
    setattr(p, "dstHost" if to_kind == HOST else "dstDevice", to)
    setattr(p, "srcHost" if from_kind == HOST else "srcDevice", source)
    return p


def fill(to: Any, value: int, width: int, size: int = 4, height: int = 1, pitch: int = 0) -> Any:
    p = T.CUDA_MEMSET_NODE_PARAMS()
    p.dst, p.value, p.width, p.elementSize, p.height, p.pitch = to, value, width, size, height, pitch
    return p


def allocation(nbytes: int, device: int = 0) -> Any:
    p = T.CUDA_MEM_ALLOC_NODE_PARAMS()
    p.poolProps.allocType = T.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    p.poolProps.location.type = T.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    p.poolProps.location.id = device
    p.bytesize = nbytes
    return p
