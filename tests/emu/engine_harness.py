# SPDX-License-Identifier: Apache-2.0
"""Runs CUDA C++ directly on the native engine, without a `Machine`."""

from __future__ import annotations

import functools
import struct
from typing import Any

import numpy as np
import pytest
from cuda.bindings import nvrtc

from drvfuse.emu.machine.run.engine import Engine
from drvfuse.emu.machine.run.engine_launch import EngineLaunch
from drvfuse.emu.space.window import Window

FILE = "test.cu"
PRELUDE = """
typedef unsigned u32; typedef unsigned long long u64;
__device__ u32 load(const u32* p) {
    u32 v;
    asm volatile("ld.acquire.sys.global.u32 %0,[%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ void store(u32* p, u32 v) {
    asm volatile("st.release.sys.global.u32 [%0],%1;" :: "l"(p), "r"(v) : "memory");
}
__device__ u64 timer() { u64 v; asm volatile("mov.u64 %0,%%globaltimer;":"=l"(v)); return v; }
#define KERNEL extern "C" __global__ void
"""


@functools.cache
def ptx(source: str) -> str:
    """The PTX of a kernel's CUDA source, compiled after PRELUDE. A source that is PTX is returned unchanged."""
    if source.startswith(".version"):
        return source
    _, program = nvrtc.nvrtcCreateProgram((PRELUDE + "#line 1\n" + source).encode(), FILE.encode(), 0, [], [])
    options = [b"-arch=compute_90a", b"-lineinfo", b"--std=c++17", b"--fmad=false"]
    (code,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if code != 0:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = bytearray(size)
        nvrtc.nvrtcGetProgramLog(program, log)
        pytest.fail(log.decode())
    _, size = nvrtc.nvrtcGetPTXSize(program)
    text = bytearray(size)
    nvrtc.nvrtcGetPTX(program, text)
    nvrtc.nvrtcDestroyProgram(program)
    return text.rstrip(b"\0").decode()


def line_of(source: str, mark: str) -> int:
    """The number of the line that holds the comment `// mark`."""
    return next(i for i, line in enumerate(source.splitlines(), 1) if f"// {mark}" in line)


class Rig:
    """A memory window, a native engine, and arrays in the window."""

    def __init__(self, seed: int = 0, **options: int) -> None:
        self.window = Window(1)
        self.engine = Engine(self.window, seed, **options)

    def close(self) -> None:
        self.window.close()

    def array(self, values: Any, device: int = 0, readers: int = 0xFF, writers: int = 0xFF) -> int:
        data = np.ascontiguousarray(values)
        address = self.window.alloc(data.nbytes, device, readers, writers)
        self.window.view(address, data.nbytes)[:] = data.view(np.uint8).reshape(-1)
        self.window.mark_initialised(address, data.nbytes)
        return address

    def empty(self, nbytes: int, device: int = 0, readers: int = 0xFF, writers: int = 0xFF) -> int:
        return self.window.alloc(nbytes, device, readers, writers)

    def read(self, address: int, dtype: Any, count: int) -> np.ndarray:
        return self.window.view(address, count * np.dtype(dtype).itemsize).view(dtype).copy()

    def launch(
        self,
        source: str,
        *args: int | float,
        grid: int | tuple[int, int, int] = 1,
        block: int | tuple[int, int, int] = 32,
        device: int = 0,
        smem: int = 0,
        resident: int = 1000,
        kernel: str = "k",
        cluster: tuple[int, int, int] | None = None,
    ) -> EngineLaunch:
        """Launch `kernel`; ints and floats are packed as the kernel's parameters say."""
        module = self.engine.load(ptx(source))
        code = module.kernels[kernel]
        packed = bytearray(code.param_bytes)
        for p, value in zip(code.params, args, strict=True):
            form = {"f32": "f", "f64": "d"}.get(p.type) or {1: "B", 2: "H", 4: "I", 8: "Q"}[p.size]
            if form in "BHIQ":
                value &= (1 << 8 * p.size) - 1
            struct.pack_into("<" + form, packed, p.offset, value)
        blob = 0
        if module.globals_bytes:
            blob = self.window.alloc(module.globals_bytes, device, 0xFF, 0xFF, initialised=True)
            for v in module.globals:
                self.window.view(blob + v.offset, max(len(v.init), 1))[: len(v.init)] = np.frombuffer(v.init, np.uint8)
                for at, target in v.relocations:
                    self.window.view(blob + v.offset + at, 8).view(np.uint64)[:] = blob + target
        return EngineLaunch(
            self.engine,
            module,
            kernel,
            device=device,
            grid=(grid, 1, 1) if isinstance(grid, int) else grid,
            block=(block, 1, 1) if isinstance(block, int) else block,
            smem=smem,
            params=bytes(packed),
            globals_addr=blob,
            max_resident=resident,
            cluster=cluster,
        )

    def finish(self, *launches: EngineLaunch) -> bool:
        """Run until all launches have ended. Returns False if they can never end, as all their threads wait."""
        while not all(x.done or x.fault for x in launches):
            self.engine.run(launches)
            if self.engine.idle and not self.engine.advance_clock():
                return False
        return True

    def run(self, source: str, *args: int | float, **options: Any) -> EngineLaunch:
        """Launch a kernel while no other runs, and run it to its end. Asserts that it succeeds."""
        launch = self.launch(source, *args, **options)
        assert self.finish(launch), launch.blocked()[:4]
        assert launch.fault is None, launch.fault
        return launch
