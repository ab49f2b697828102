# SPDX-License-Identifier: Apache-2.0
"""The result of translating a module: LLVM IR text, and what a launch needs to know about its kernels and variables."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Param:
    """A kernel parameter: `type` is the PTX type ("u64", "f32", "b8" for aggregates)."""

    name: str
    type: str
    size: int
    align: int
    offset: int


@dataclass(frozen=True)
class Site:
    """The place in the source of an instruction that accesses memory or at which a thread may be suspended.

    `inlined` are (file, line) of the calls by which the code was inlined, innermost first. `address` is the text of the
    memory operand in the PTX, or "". `function` is the kernel or function that contains the instruction.
    """

    opcode: str
    ptx_line: int
    file: str
    line: int
    inlined: tuple[tuple[str, int], ...]
    address: str = ""
    function: str = ""


@dataclass(frozen=True)
class KernelCode:
    """A translated kernel. The function `symbol` runs one thread. The thread's frame, which keeps its state while it is
    suspended, has `frame_bytes`.

    shared_static   the offset of dynamic shared memory in the shared memory of a block
    max_threads     the maximum number of threads of a block (.maxntid or .reqntid); 0 if there is no limit
    sites           the sites of the whole module, by site number
    reqncta         the required shape of clusters (.reqnctapercluster); None if no shape is required
    max_cluster     the maximum number of blocks of a cluster (.maxclusterrank); 0 if there is no limit
    needs_cluster   whether a launch must have clusters (.explicitcluster)
    refused         (reason, file, line) if the kernel has no code, because the kernel or a function that it calls has
                    an instruction that the translator refuses (`refused.py`)
    """

    name: str
    symbol: str
    frame_bytes: int
    params: tuple[Param, ...]
    param_bytes: int
    shared_static: int
    local_bytes: int
    max_threads: int
    reqntid: tuple[int, int, int] | None
    sites: tuple[Site, ...]
    has_pdl_wait: bool
    has_pdl_trigger: bool
    has_copies: bool
    reqncta: tuple[int, int, int] | None
    max_cluster: int
    needs_cluster: bool
    refused: tuple[str, str | None, int] | None


@dataclass(frozen=True)
class GlobalVar:
    """A `.global` or `.const` variable, at `offset` in the memory block of the module's variables.

    `init` are its first bytes; the others are zero. `relocations` are pairs (offset in the variable, offset in the
    block): the u64 at the first offset is the address of the byte at the second. With `managed`, the host may use the
    variable too.
    """

    name: str
    space: str
    size: int
    align: int
    offset: int
    init: bytes
    relocations: tuple[tuple[int, int], ...] = ()
    managed: bool = False


@dataclass(frozen=True)
class Translated:
    ir: str
    kernels: dict[str, KernelCode]
    globals: tuple[GlobalVar, ...]
    globals_bytes: int
    target: str
    libraries: tuple[str, ...]  # the libraries of abi.LIBRARIES that the code calls
