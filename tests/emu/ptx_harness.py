# SPDX-License-Identifier: Apache-2.0
"""Runs translated PTX straight, one thread at a time, compiled as kernels are, with runtime functions that allow
everything."""

from __future__ import annotations

import ctypes
import struct

import llvmlite.binding as llvm
import numpy as np

from drvfuse.emu import abi
from drvfuse.emu.native import loader
from drvfuse.emu.translate.module import KernelCode, translate

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
        """Run threads one after another; strong accesses resume at once, nothing else may suspend."""
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
        self.launch = ctypes.create_string_buffer(256)
        self.block = ctypes.create_string_buffer(256)
        self.frame = ctypes.create_string_buffer(code.frame_bytes)
        self.base = ctypes.addressof(self.frame)
        self.program = program
        struct.pack_into("<QQ", self.launch, 0, ctypes.addressof(self.params), ctypes.addressof(program.globals))
        struct.pack_into("<IIIIII", self.launch, abi.L_NCTAID_X, 3, 2, 1, 64, 1, 1)
        struct.pack_into("<I", self.launch, abi.L_SHARED_STATIC, code.shared_static)
        struct.pack_into("<QIII", self.block, 0, ctypes.addressof(program.shared), 2, 1, 0)
        struct.pack_into("<Q", self.frame, abi.T_LOCAL_BASE, ctypes.addressof(program.local))
        struct.pack_into("<QQ", self.frame, abi.T_BLOCK, ctypes.addressof(self.block), ctypes.addressof(self.launch))
        self.restart(tid, lane)

    def restart(self, tid: int, lane: int | None = None) -> None:
        self.set("I", abi.T_RESUME, 0)
        self.set("I", abi.T_TID_X, tid)
        self.set("I", abi.T_LANE, tid % 32 if lane is None else lane)

    def set(self, code: str, offset: int, value: int) -> None:
        struct.pack_into("<" + code, self.frame, offset, value)

    def get(self, code: str, offset: int) -> int:
        return struct.unpack_from("<" + code, self.frame, offset)[0]

    def resume(self) -> int:
        return self.call(self.base)


def pointers(*arrays: np.ndarray) -> bytes:
    return b"".join(struct.pack("<Q", a.ctypes.data) for a in arrays)
