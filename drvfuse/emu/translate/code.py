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
    """The place of an access or a suspend; `inlined` are (file, line) of the inlining calls, innermost first. `address`
    is the operand that names the memory, as in the PTX, or "". `function` is the kernel or function that it is in.
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
    """`symbol` runs one thread over a frame of `frame_bytes`. `sites` are the whole module's, indexed by site number.

    Dynamic shared memory begins at `shared_static`. max_threads: of .maxntid or .reqntid, 0 if not given.
    reqncta: of .reqnctapercluster; max_cluster: blocks of a cluster by .maxclusterrank, 0 if not given; needs_cluster:
    a launch has to have clusters (.explicitcluster). refused: (why, file, line) of a kernel without code, because it or
    what it calls uses an instruction that is refused by name.
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
    """A `.global` or `.const` variable at `offset` of the globals blob.

    init: its first bytes, the rest is zero. relocations: (offset in the variable, offset in the blob): a u64 there
    is the blob's address plus that. managed: the host may use it too.
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
