# SPDX-License-Identifier: Apache-2.0
"""Runs translated PTX one thread at a time, without the native engine. The PTX is compiled as for the emulated driver,
but the runtime functions that it calls are stubs that check nothing."""

from __future__ import annotations

import ctypes
import struct

import llvmlite.binding as llvm
import numpy as np

from drvfuse.emu import abi
from drvfuse.emu.abi import structs
from drvfuse.emu.native import loader
from drvfuse.emu.translate.code import KernelCode
from drvfuse.emu.translate.module import translate

RESULTS = {"rt_clock": "i64 42", "rt_vprintf": "i32 1"}


class Program:
    """A translated, compiled module with memory of its own for globals, shared and local variables."""

    def __init__(self, ptx: str, raw: bool = False):
        self.code = translate(ptx, raw=raw)
        ir = "\n".join(
            line for line in self.code.ir.splitlines() if not line.startswith("declare") or "@rt_" not in line
        )
        for name, (result, types) in abi.RUNTIME_FUNCTIONS.items():
            if f"@{name}(" in ir:
                value = RESULTS.get(name, "void" if result == "void" else f"{result} 0")
                ir += f"\ndefine {result} @{name}({', '.join(types)}) {{ ret {value} }}\n"
        code = loader._compile(ir, loader._SUPPORT if raw else None)
        self.engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), loader._machine())
        self.engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self.engine.finalize_object()
        self.globals = ctypes.create_string_buffer(max(self.code.globals_bytes, 1))
        base = ctypes.addressof(self.globals)
        for v in self.code.globals:
            ctypes.memmove(base + v.offset, v.init, len(v.init))
            for at, target_offset in v.relocations:
                ctypes.memmove(base + v.offset + at, struct.pack("<Q", base + target_offset), 8)
        self.shared = ctypes.create_string_buffer(65536)
        self.local = ctypes.create_string_buffer(65536)

    def function(self, name: str, result: object, *args: object) -> object:
        return ctypes.CFUNCTYPE(result, *args)(self.engine.get_function_address(name))

    def thread(self, kernel: str, params: bytes, tid: int = 0, lane: int | None = None) -> Thread:
        return Thread(self, self.code.kernels[kernel], params, tid, tid % 32 if lane is None else lane)

    def run(self, kernel: str, params: bytes, threads: int = 1) -> None:
        """Run threads one after another. A thread may suspend only before strong accesses, and is resumed at once."""
        t = self.thread(kernel, params)
        for i in range(threads):
            t.restart(i)
            while (status := t.resume()) == abi.Status.YIELD:
                pass
            assert status == abi.Status.EXIT, abi.Status(status)


class Thread:
    def __init__(self, program: Program, code: KernelCode, params: bytes, tid: int, lane: int):
        self.call = program.function(code.symbol, ctypes.c_int32, ctypes.c_void_p)
        self.params = ctypes.create_string_buffer(params, max(len(params), 1))
        shared, params, blob = map(ctypes.addressof, (program.shared, self.params, program.globals))
        self.launch = structs.Launch(
            params=params, globals=blob, nctaid=(3, 2, 1), ntid=(64, 1, 1), shared_static=code.shared_static
        )
        self.launch.cluster_window = code.shared_static
        self.block = structs.Block(shared_base=shared, cluster_shared_base=shared, ctaid=(2, 1, 0))
        self.frame = ctypes.create_string_buffer(code.frame_bytes)
        self.base = ctypes.addressof(self.frame)
        self.program = program
        self.header = structs.Thread.from_buffer(self.frame)
        self.header.local_base = ctypes.addressof(program.local)
        self.header.block, self.header.launch = ctypes.addressof(self.block), ctypes.addressof(self.launch)
        self.restart(tid, lane)

    def restart(self, tid: int, lane: int | None = None) -> None:
        self.header.resume, self.header.tid[0] = 0, tid
        self.header.lane = tid % 32 if lane is None else lane

    def resume(self) -> int:
        return self.call(self.base)


def pointers(*arrays: np.ndarray) -> bytes:
    return b"".join(struct.pack("<Q", a.ctypes.data) for a in arrays)
