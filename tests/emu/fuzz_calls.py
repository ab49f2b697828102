# SPDX-License-Identifier: Apache-2.0
"""Calls every function of the emulated driver with arguments that no program should give, in a process of its own.

    python fuzz_calls.py {here|served} SEED ROUNDS LOG

Every call must return a tuple of the right shape or raise an error about its arguments. Any other error and any crash
is a failure. The calls are logged in LOG, so that a crash can be traced to the last of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import mmap
import os
import random
import socket
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from drvfuse import config, emu
from drvfuse.emu.bindings import FUNCTIONS, R, T
from drvfuse.emu.driver import ENTRIES
from drvfuse.emu.driver.refused import REFUSED, results
from drvfuse.emu.wire import code_inputs, host_inputs, inputs, structs
from drvfuse.emu.wire.arguments import Invalid
from drvfuse.emu.wire.coder import coder
from drvfuse.emu.wire.scalars import Boolean, Enumeration, Handle

PTX = b"""
.version 8.0
.target sm_90
.address_size 64
.visible .global .u32 variable = 7;
.visible .entry kernel(.param .u64 p, .param .u32 n, .param .f32 f) { ret; }
"""
FAR = 2**47 - 4096  # an unmapped address at the end of the address space
WHOLE = (0, 1, 2, 3, 7, 64, 4096, 5, 16, -1, 2**31 - 1, 2**32 - 1, 2**40, 2**63)
DIMENSIONS = (0, 1, 2, -1, 2**32 - 1, 2**32, 2**64)
ODD = (None, "text", b"bytes", 1.5, float("nan"), [], [None], (), {}, object(), np.zeros(3), np.float32(2), len, 1j)


def host_memory() -> dict[str, Any]:
    """Map memory. Return the mappings, and addresses: in 64 KiB before inaccessible pages, in read-only memory, in the
    inaccessible pages, and outside all mappings."""
    pages = mmap.mmap(-1, 1 << 20)
    start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    libc = ctypes.CDLL(None)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    assert (
        libc.mprotect(start + (1 << 16), (1 << 20) - (1 << 16), mmap.PROT_NONE if hasattr(mmap, "PROT_NONE") else 0)
        == 0
    )
    constant = mmap.mmap(-1, 1 << 16, prot=mmap.PROT_READ)
    readable = np.frombuffer(constant, np.uint8)
    return {"keep": (pages, constant), "addresses": [start, start + 4096, readable.ctypes.data, start + (1 << 16), FAR]}


class State:
    """The live objects of a process, and handles of destroyed ones."""

    def __init__(self, cuda: Any) -> None:
        self.cuda = cuda
        self.hold: list[Any] = []
        ok(cuda.cuInit(0))
        ok(cuda.cuCtxSetCurrent(ok(cuda.cuDevicePrimaryCtxRetain(0))))
        module = ok(cuda.cuModuleLoadData(PTX))
        library = ok(cuda.cuLibraryLoadData(PTX, [], [], 0, [], [], 0))
        stream, event = ok(cuda.cuStreamCreate(1)), ok(cuda.cuEventCreate(0))
        memory, pinned = ok(cuda.cuMemAlloc(4096)), ok(cuda.cuMemHostAlloc(4096, 0))
        graph = ok(cuda.cuGraphCreate(0))
        dead_stream, dead_event = ok(cuda.cuStreamCreate(0)), ok(cuda.cuEventCreate(0))
        dead_memory = ok(cuda.cuMemAlloc(64))
        ok(cuda.cuStreamDestroy(dead_stream))
        ok(cuda.cuEventDestroy(dead_event))
        ok(cuda.cuMemFree(dead_memory))
        self.memory = [memory, int(memory) + 4000, pinned, dead_memory]
        alive = [module, library, stream, event, graph, ok(cuda.cuCtxGetCurrent())]
        alive += [ok(cuda.cuModuleGetFunction(module, b"kernel")), ok(cuda.cuLibraryGetKernel(library, b"kernel"))]
        alive += [ok(cuda.cuDeviceGetDefaultMemPool(0)), ok(cuda.cuGraphInstantiate(graph, 0)), memory]
        alive += [ok(cuda.cuGraphAddMemsetNode(graph, None, 0, self._fill(memory), 0))]
        self.alive = {type(handle).__name__: handle for handle in alive}
        self.handles = [*alive, dead_stream, dead_event]
        self.handles.remove(memory)

    @staticmethod
    def _fill(address: Any) -> Any:
        p = T.CUDA_MEMSET_NODE_PARAMS()
        p.dst, p.width, p.height, p.elementSize = address, 16, 1, 4
        return p


def ok(result: tuple[Any, ...]) -> Any:
    assert result[0] == R.CUDA_SUCCESS, result
    return result[1] if len(result) == 2 else result[1:]


class Arguments:
    """A source of random arguments for a function, by the types of its parameters."""

    def __init__(self, draw: random.Random, host: dict[str, Any]) -> None:
        self.draw, self.host = draw, host
        self.function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
        self.code = ctypes.cast(self.function, ctypes.c_void_p).value

    def of(self, item: inputs.Input, state: State) -> Any:
        draw, p = self.draw, item.parameter
        if draw.random() < 0.04:
            return draw.choice(ODD)
        if p.type in state.alive and not isinstance(item, inputs.List) and draw.random() < 0.6:
            return state.alive[p.type]
        if isinstance(item, code_inputs.Function):
            return draw.choice((0, self.code, 7, FAR, *self.host["addresses"]))
        if isinstance(item, inputs.Text):
            return draw.choice((b"", b"kernel", b"variable", b"\xff\xfe", b"/no/such/file", b"a" * 70000))
        if isinstance(item, host_inputs.Buffer):
            return draw.choice((bytearray(64), bytearray(1), b""))
        if isinstance(item, inputs.Moved):
            return draw.choice((None, item.scalar.kind(0), item.scalar.kind(2**32 - 1)))
        if isinstance(item, code_inputs.Image):
            return draw.choice((PTX, b"", b"\x7fELF", b"\x50\xed\x55\xba" + bytes(12), *self.host["addresses"], 0, 5))
        if isinstance(item, code_inputs.Parameters):
            forms = (((0, 1, 1.0), (ctypes.c_void_p, ctypes.c_int, ctypes.c_float)), ((), ()), ((1,), (ctypes.c_int,)))
            return draw.choice((*self.host["addresses"], 0, 1, *(forms if p.name != "extra" else ())))
        if isinstance(item, inputs.Struct):
            kind = getattr(T, p.type)
            return draw.choice((None, self.structure(p.type), self.structure(p.type), kind(), kind(FAR)))
        if isinstance(item, inputs.StructArray):
            return [self.structure(p.type) for _ in range(draw.randrange(3))]
        if isinstance(item, code_inputs.Options):
            return [draw.choice((1, 0, bytes(16), -1)) for _ in range(draw.randrange(3))]
        if isinstance(item, inputs.Array) and isinstance(item.scalar, Handle):
            kind = item.scalar.kind
            return [kind(int(draw.choice((0, 7, *state.handles, *state.memory)))) for _ in range(draw.randrange(3))]
        if isinstance(item, inputs.Array):
            kinds = list(item.scalar.kind) if isinstance(item.scalar, Enumeration) else [0, 64, 2**40]
            return [draw.choice(kinds) for _ in range(draw.randrange(3))]
        if isinstance(item, host_inputs.HostMemory) and p.type == "void":
            return draw.choice((None, 0, 1, bytes(64), np.zeros(64, np.uint8), *self.host["addresses"], *state.memory))
        if isinstance(item.scalar, Enumeration):
            return draw.choice((*list(item.scalar.kind)[:40], 9999, -1, 2**40))
        if isinstance(item, inputs.Attribute):
            return draw.choice((0, 1, T.cuuint64_t(0), T.cuuint64_t(2**63)))
        if isinstance(item.scalar, Boolean):
            return draw.choice((True, False))
        if p.type == "CUdeviceptr":
            return draw.choice((0, 1, 2**63, 2**64 - 1, *state.memory, *self.host["addresses"], *state.handles))
        if p.type == "CUdevice":
            return draw.choice((0, 1, 2, -1, 2**31 - 1, *state.handles[:1]))
        if isinstance(item.scalar, Handle):
            return draw.choice((0, 1, 2, 7, 2**64 - 1, *state.handles, *state.handles, *state.memory))
        small = "Dim" in p.name or p.name in ("width", "height", "length")
        return draw.choice(DIMENSIONS if small else WHOLE)

    def structure(self, name: str) -> Any:
        """A structure with random contents, except for members that the bindings themselves dereference."""
        made = getattr(T, name)()
        size = ctypes.sizeof(structs.Structure(name).place)
        fill = self.draw.choice((b"\0", b"\1", b"\xff", None))
        content = self.draw.randbytes(size) if fill is None else fill * size
        ctypes.memmove(int(made.getPtr()), content, size)
        return made


@contextlib.contextmanager
def drivers(mode: str) -> Iterator[Any]:
    """Yield a function that creates an emulated process. Its machine belongs to this process if `mode` is "here";
    otherwise a child process serves the machine."""
    if mode == "here":
        with emu.Machine(devices=2, memory_bytes=64 << 20) as machine:
            yield lambda: machine.process("fuzz")
        return
    there, here = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        with emu.Machine(devices=2, memory_bytes=64 << 20, served=True) as machine, emu.Server(machine) as server:
            there.send(server.address.encode())
            there.recv(1)
        os._exit(0)
    address = here.recv(200).decode()
    yield lambda: emu.AttachedMachine(address)
    here.send(b".")
    assert os.waitpid(pid, 0)[1] == 0


def shown(value: Any) -> str:
    """How an argument appears in the log. A structure with random contents may fail to print itself, so its bytes are
    shown.
    """
    return type(value).__name__ if hasattr(value, "getPtr") and not hasattr(value, "__int__") else repr(value)[:100]


def attempt(call: Any) -> tuple[type[BaseException] | None, Any]:
    try:
        return None, call()
    except Invalid:
        return None, None
    except Exception as error:
        return type(error), error


def main(mode: str, seed: int, rounds: int, log: str) -> int:
    faulthandler.enable()
    os.chdir(os.path.dirname(log))  # some calls write files to the current folder
    draw = random.Random(seed)
    arguments = Arguments(draw, host_memory())
    calls = raised = failed = 0
    wrong: list[str] = []
    names = [*sorted(ENTRIES.keys() & FUNCTIONS.keys()), *sorted(REFUSED.keys() & FUNCTIONS.keys())]
    with drivers(mode) as process, open(log, "w") as written:
        for name in names:
            made = coder(name) if name in ENTRIES else None
            wanted = ENTRIES[name].outputs if made else results(name)
            with process() as owner:
                state, function = State(owner.driver), getattr(owner.driver, name)
                for _ in range(rounds if made is not None and made.inputs else 1):
                    given = [arguments.of(item, state) for item in made.inputs] if made else [0] * draw.randrange(4)
                    written.write(f"{name}({', '.join(shown(value) for value in given)})\n")
                    written.flush()
                    expected, _ = attempt(lambda given=given, made=made: made and made.read(tuple(given), {}))
                    kind, result = attempt(lambda given=given, function=function: function(*given))
                    shape = type(result) is tuple and type(result[0]) is R and len(result) == wanted + 1
                    if kind is not expected or not (kind or shape):
                        call = f"{name}({', '.join(shown(value) for value in given)})"
                        wrong.append(f"{call}: {result!r}, and reading the arguments raises {expected}")
                    raised += kind is not None
                    failed += kind is None and result[0] != 0
                    calls += 1
    print(f"{calls} calls, {raised} raised, {failed} failed", *wrong, sep="\n")
    return len(wrong)


if __name__ == "__main__":
    with config.override(emu_loop_limit=20_000):
        sys.exit(min(1, main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])))
