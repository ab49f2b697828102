# SPDX-License-Identifier: Apache-2.0
"""From a specialisation of a collective to its kernel: source, definitions, name, parameter block, grid and chunks.

Everything here depends on shapes, dtypes and limits that are the same on every rank, so every rank arrives at the same
kernel, grid and number of barriers. The structures match those of the `.cu` files byte for byte.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from ... import dtypes
from ...comm import workspace
from ...dtypes import DType
from ...errors import ArgumentError
from ...trace import layout
from ..call import faults

CU = Path(__file__).parents[2] / "cu"
OPS = ("allreduce", "allreduce_rmsnorm_fp8")
ALGOS = ("one_stage", "two_stage")
INPUT_DTYPES = ("bfloat16", "float16", "float32")
FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2")
SCALES_DTYPES = ("float32", "bfloat16")

PACK_BYTES = 16
MAX_THREADS = 512
MAX_PACKS = 8
MAX_COLUMNS = 16384
MAX_ROWS = 2**31 - 1
_MAX_PAYLOAD = 2**32 - 1  # the fused kernels' offsets have 32 bits


@dataclass(frozen=True)
class CollectiveKernel:
    """What a kernel is compiled for.

    `packs`: 16-byte packs a thread has in flight (all-reduce) or holds of a row (fused), from :func:`allreduce_launch`
    or :func:`rmsnorm_launch`. `ragged`: the elements (all-reduce) or columns (fused) are no multiple of a pack's.
    `staged`: the kernel copies its input to the workspace, where peers read it. `local`: the sources are on this device
    and no peer takes part (one_stage only). `epilogue`: C++ text that defines `EpilogueParams` and `epilogue` as
    `cu/collectives/epilogue.cuh` says, or "". The fused op's output dtype is its input's (no quantisation) or an FP8
    type.
    `traced`: if not 0, the kernel takes a `TraceParams` last, and a block notes up to so many words. `fault`: what is
    planted in it (`ops.call.faults`).
    """

    op: str
    algo: str
    dtype: DType
    ranks: int
    out_dtype: DType
    packs: int = 1
    ragged: bool = False
    staged: bool = False
    local: bool = False
    residual: bool = False
    gamma_dtype: DType = field(default_factory=lambda: dtypes.get("float32"))
    scales_dtype: DType = field(default_factory=lambda: dtypes.get("float32"))
    epilogue: str = ""
    traced: int = 0
    fault: str = field(default_factory=faults.planted)

    def __post_init__(self) -> None:
        _check("op", self.op, OPS)
        _check("algo", self.algo, ALGOS[:1] if self.local else ALGOS)
        _check("dtype", self.dtype.name, INPUT_DTYPES)
        _check("ranks", self.ranks, range(1, workspace.MAX_RANKS + 1))
        _check("packs", self.packs, range(1, MAX_PACKS + 1))
        if self.op == "allreduce":
            _check("out_dtype", self.out_dtype.name, INPUT_DTYPES)
        else:
            _check("out_dtype", self.out_dtype.name, (self.dtype.name, *FP8_DTYPES))
            _check("gamma_dtype", self.gamma_dtype.name, INPUT_DTYPES)
            _check("scales_dtype", self.scales_dtype.name, SCALES_DTYPES)
            _check("epilogue", self.epilogue, ("",))

    @property
    def name(self) -> str:
        """The kernel's name in the compiled module."""
        return f"{self.op}_{self.algo}"

    @property
    def width(self) -> int:
        """Elements of a pack."""
        return PACK_BYTES // self.dtype.itemsize

    @property
    def min_arch(self) -> int:
        """The least compute capability, as 80 for 8.0: FP8 conversions need 8.9, the rest 8.0."""
        return 89 if self.out_dtype.name in FP8_DTYPES else 80


def _check(argument: str, got: object, allowed: tuple[str, ...] | range) -> None:
    if got not in allowed:
        wanted = f"{allowed.start} to {allowed.stop - 1}" if isinstance(allowed, range) else "one of " + repr(allowed)
        raise ArgumentError(argument, got, wanted)


@dataclass(frozen=True)
class CompileRequest:
    """The arguments of `runtime.nvrtc.compile_source`, less the architecture."""

    source: str
    name: str
    defines: dict[str, str | int]
    names: tuple[str, ...]
    options: tuple[str, ...]
    include: tuple[str, ...]


@cache
def request(spec: CollectiveKernel) -> CompileRequest:
    """How to compile the kernel of `spec`."""
    defines: dict[str, str | int] = {
        **workspace.defines(),
        **faults.defines(spec.fault),
        "DRVFUSE_RANKS": spec.ranks,
        "DRVFUSE_PACKS": spec.packs,
        "DRVFUSE_RAGGED": int(spec.ragged),
        "DRVFUSE_STAGED": int(spec.staged),
        "DRVFUSE_LOCAL": int(spec.local),
        "DRVFUSE_TWO_STAGE": int(spec.algo == "two_stage"),
        "DRVFUSE_DTYPE": spec.dtype.cxx,
        "DRVFUSE_OUT_DTYPE": spec.out_dtype.cxx,
    }
    if spec.op == "allreduce_rmsnorm_fp8":
        defines |= {
            "DRVFUSE_RESIDUAL": int(spec.residual),
            "DRVFUSE_GAMMA_DTYPE": spec.gamma_dtype.cxx,
            "DRVFUSE_SCALES_DTYPE": spec.scales_dtype.cxx,
        }
    if spec.traced:
        defines |= layout.defines(spec.traced)
    lines = []
    if spec.epilogue:
        defines["DRVFUSE_EPILOGUE"] = 1
        lines += ['#include "common/prelude.cuh"', spec.epilogue]
    lines += [f'#include "collectives/{spec.op}.cu"', ""]
    return CompileRequest("\n".join(lines), f"{spec.name}.cu", defines, (), ("--fmad=false",), (str(CU),))


class Call(ctypes.Structure):
    """`struct Call` of cu/sync/workspace.cuh: what every collective gets."""

    _fields_ = (
        ("sources", ctypes.c_uint64 * workspace.MAX_RANKS),
        ("workspaces", ctypes.c_uint64 * workspace.MAX_RANKS),
        ("input", ctypes.c_uint64),
        ("report", ctypes.c_uint64),
        ("timeout_ns", ctypes.c_uint64),
        ("rank", ctypes.c_int32),
        ("early_trigger", ctypes.c_int32),
    )


class AllreduceParams(ctypes.Structure):
    """`struct AllreduceParams` of cu/collectives/allreduce.cu."""

    _fields_ = (
        ("call", Call),
        ("output", ctypes.c_uint64),
        ("count", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("chunk_packs", ctypes.c_int64),
    )


class FusedParams(ctypes.Structure):
    """`struct FusedParams` of cu/collectives/allreduce_rmsnorm_fp8.cu."""

    _fields_ = (
        ("call", Call),
        ("gamma", ctypes.c_uint64),
        ("residual", ctypes.c_uint64),
        ("residual_output", ctypes.c_uint64),
        ("output", ctypes.c_uint64),
        ("scales", ctypes.c_uint64),
        ("rows", ctypes.c_int32),
        ("chunk_rows", ctypes.c_int32),
        ("columns", ctypes.c_int32),
        ("epsilon", ctypes.c_float),
        ("weight_offset", ctypes.c_float),
        ("scale_ub", ctypes.c_float),
    )


PARAMETERS: dict[str, type[ctypes.Structure]] = {"allreduce": AllreduceParams, "allreduce_rmsnorm_fp8": FusedParams}


@dataclass(frozen=True)
class LaunchShape:
    """Grid and block, and the `packs` the kernel must be compiled for."""

    blocks: int
    threads: int
    packs: int


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def allreduce_launch(count: int, dtype: DType, ranks: int, algo: str, max_blocks: int) -> LaunchShape:
    """Grid and block for `count` >= 1 elements: a thread a pack (two stages: of the rank's share), if blocks allow."""
    packs = _ceil_div(count * dtype.itemsize, PACK_BYTES)
    if algo == "two_stage":
        packs = _ceil_div(packs, ranks)
    threads = 256 if packs <= 256 * 64 else MAX_THREADS
    blocks = min(_ceil_div(packs, threads), max_blocks, workspace.MAX_BLOCKS)
    return LaunchShape(blocks, threads, min(4, max(1, 8 // ranks)))


def rmsnorm_launch(rows: int, columns: int, dtype: DType, ranks: int, algo: str, max_blocks: int) -> LaunchShape:
    """Grid and block for 1 to MAX_ROWS rows of 1 to MAX_COLUMNS columns: a block a row, few packs a thread."""
    if rows > MAX_ROWS:
        raise ArgumentError("rows", rows, f"at most {MAX_ROWS}")
    if not 1 <= columns <= MAX_COLUMNS:
        raise ArgumentError("columns", columns, f"1 to {MAX_COLUMNS}")
    row_packs = _ceil_div(columns * dtype.itemsize, PACK_BYTES)
    packs = _ceil_div(row_packs, MAX_THREADS)
    threads = _ceil_div(_ceil_div(row_packs, packs), 32) * 32
    share = _ceil_div(rows, ranks) if algo == "two_stage" else rows
    return LaunchShape(min(share, max_blocks, workspace.MAX_BLOCKS), threads, packs)


def allreduce_chunk(spec: CollectiveKernel, count: int, payload_bytes: int) -> int:
    """`AllreduceParams.chunk_packs`: all, or as much as the payload holds; 1 where the kernel has no chunks."""
    packs = _ceil_div(count, spec.width)
    out_bytes = spec.width * spec.out_dtype.itemsize
    if spec.algo == "two_stage":
        packs = _ceil_div(packs, spec.ranks)
        each = spec.ranks * PACK_BYTES + out_bytes if spec.staged else 2 * out_bytes
    elif spec.staged:
        each = 2 * PACK_BYTES
    else:
        return 1
    return _chunk(packs, each, payload_bytes, "16-byte pack of every rank")


def rmsnorm_chunk(spec: CollectiveKernel, rows: int, columns: int, payload_bytes: int) -> int:
    """`FusedParams.chunk_rows`: as many rows as the payload holds, or all; 1 where the kernel has no chunks."""
    row_packs = _ceil_div(columns, spec.width)
    row_bytes = row_packs * PACK_BYTES
    if spec.algo == "two_stage":
        rows = _ceil_div(rows, spec.ranks)
        # The scales of a chunk are rounded up to 16 bytes; 16 bytes a row is an upper bound.
        result = row_bytes if spec.residual else row_packs * spec.width * spec.out_dtype.itemsize // 16 * 16 + 32
        each = spec.ranks * row_bytes + result if spec.staged else 2 * result
    elif spec.staged:
        each = 2 * row_bytes
    else:
        return 1
    return _chunk(rows, each, min(payload_bytes, _MAX_PAYLOAD), "row of every rank")


def _chunk(wanted: int, each: int, payload_bytes: int, what: str) -> int:
    chunk = min(wanted, payload_bytes // each)
    if chunk < 1:
        raise ArgumentError("workspace_bytes", payload_bytes, f"at least {each}, one {what}")
    return chunk
