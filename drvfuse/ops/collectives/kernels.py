# SPDX-License-Identifier: Apache-2.0
"""What the kernels of the collectives are compiled for, and their parameters, byte for byte as in the `.cu` files."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

from ... import dtypes
from ...comm import workspace
from ...dtypes import DType
from ...errors import ArgumentError
from ...plans.collectives import Work
from ...trace import layout
from ..call import faults
from ..call.specialisation import FP8_CAPABILITY, Specialisation

OPS = ("allreduce", "allreduce_rmsnorm_fp8")
PULL, PUSH = ("one_stage", "two_stage"), ("push_one_shot", "push_two_shot")
ALGOS = (*PULL, *PUSH)
ALGORITHMS = ("auto", *ALGOS, "naive")
INPUT_DTYPES = ("bfloat16", "float16", "float32")
SCALES_DTYPES = ("float32", "bfloat16")
MAX_PACKS = 8


@dataclass(frozen=True)
class CollectiveKernel:
    """What a kernel is compiled for.

    `packs`: 16-byte packs a thread has in flight (all-reduce) or holds of a row (fused), from
    `plans.collectives`. `ragged`: the elements (all-reduce) or columns (fused) are no multiple of a pack's.
    `staged`: the kernel copies its input to the workspace, where peers read it. `local`: the sources are on this device
    and no peer takes part (one_stage only). `epilogue`: C++ text that defines `EpilogueParams` and `epilogue` as
    `cu/collectives/epilogue.cuh` says, or "". The fused op's output dtype is its input's (no quantisation) or an FP8
    type.
    The push algorithms: `cluster` blocks share a row, of `threads` threads each; with `exact` every thread has all its
    packs; `depth` is how far a block sends ahead (`plans.push`).
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
    cluster: int = 1
    threads: int = 512
    exact: bool = False
    depth: int = 0
    traced: int = 0
    fault: str = field(default_factory=faults.planted)

    def __post_init__(self) -> None:
        _check("op", self.op, OPS)
        _check("algo", self.algo, PULL[:1] if self.local else ALGOS)
        _check("dtype", self.dtype.name, INPUT_DTYPES)
        _check("ranks", self.ranks, range(1, workspace.MAX_RANKS + 1))
        _check("packs", self.packs, range(1, MAX_PACKS + 1))
        if self.op == "allreduce":
            _check("out_dtype", self.out_dtype.name, INPUT_DTYPES)
        else:
            _check("out_dtype", self.out_dtype.name, (self.dtype.name, *dtypes.FP8))
            _check("gamma_dtype", self.gamma_dtype.name, INPUT_DTYPES)
            _check("scales_dtype", self.scales_dtype.name, SCALES_DTYPES)
            _check("epilogue", self.epilogue, ("",))

    @property
    def name(self) -> str:
        """The kernel's name in the compiled module."""
        return f"{self.op}_{self.algo}"

    @property
    def work(self) -> Work:
        """What plans must know of it."""
        sizes = self.dtype.itemsize, self.out_dtype.itemsize
        return Work(self.op, self.algo, self.ranks, *sizes, self.staged, self.local, self.residual)

    @property
    def pushes(self) -> bool:
        """Whether it stores to peers (`plans.push`) rather than loads from them."""
        return self.algo in PUSH

    @property
    def specialisation(self) -> Specialisation:
        """How it is compiled. FP8 conversions need compute capability 8.9, the rest 8.0."""
        defines: dict[str, str | int] = {
            **workspace.defines(),
            "DRVFUSE_RANKS": self.ranks,
            "DRVFUSE_PACKS": self.packs,
            "DRVFUSE_RAGGED": int(self.ragged),
            "DRVFUSE_EXACT": int(self.exact),
            "DRVFUSE_STAGED": int(self.staged),
            "DRVFUSE_LOCAL": int(self.local),
            "DRVFUSE_TWO_STAGE": int(self.algo == "two_stage"),
            "DRVFUSE_DTYPE": self.dtype.cxx,
            "DRVFUSE_OUT_DTYPE": self.out_dtype.cxx,
        }
        if self.op == "allreduce_rmsnorm_fp8":
            defines |= {
                "DRVFUSE_RESIDUAL": int(self.residual),
                "DRVFUSE_GAMMA_DTYPE": self.gamma_dtype.cxx,
                "DRVFUSE_SCALES_DTYPE": self.scales_dtype.cxx,
                "DRVFUSE_CLUSTER": self.cluster,
            }
        if self.pushes:
            defines |= {
                "DRVFUSE_TWO_SHOT": int(self.algo == "push_two_shot"),
                "DRVFUSE_DEPTH": self.depth,
                "DRVFUSE_MOST_THREADS": max(128, 1 << (self.threads - 1).bit_length()),
                "DRVFUSE_KERNEL": self.name,
            }
        if self.traced:
            defines |= layout.defines(self.traced)
        text = ""
        if self.epilogue:
            defines["DRVFUSE_EPILOGUE"] = 1
            text = f'#include "common/prelude.cuh"\n{self.epilogue}\n'
        capability = FP8_CAPABILITY if self.out_dtype.name in dtypes.FP8 else (8, 0)
        needs = f"{self.out_dtype} output"
        file = f"{self.op}_push" if self.pushes else self.op
        fixed = tuple(defines.items())
        return Specialisation("collectives", file, fixed, self.name, capability, needs, text, self.fault)


def _check(argument: str, got: object, allowed: tuple[str, ...] | range) -> None:
    if got not in allowed:
        wanted = f"{allowed.start} to {allowed.stop - 1}" if isinstance(allowed, range) else "one of " + repr(allowed)
        raise ArgumentError(argument, got, wanted)


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


class PushCall(ctypes.Structure):
    """`struct PushCall` of cu/sync/push.cuh."""

    _fields_ = (
        ("slots", ctypes.c_uint64 * workspace.MAX_RANKS),
        ("first_share", ctypes.c_uint64),
        ("share", ctypes.c_uint64),
        ("half_bytes", ctypes.c_uint32),
        ("rounds", ctypes.c_int32),
    )


class AllreducePushParams(AllreduceParams):
    """`struct AllreducePushParams` of cu/collectives/allreduce_push.cu."""

    _fields_ = (("push", PushCall),)  # type: ignore[assignment]  # behind those of the base


class FusedPushParams(FusedParams):
    """`struct FusedPushParams` of cu/collectives/allreduce_rmsnorm_fp8_push.cu."""

    _fields_ = (("push", PushCall),)  # type: ignore[assignment]  # behind those of the base


def parameters(op: str, algo: str) -> type[AllreduceParams] | type[FusedParams]:
    """The first argument of a kernel."""
    if op == "allreduce":
        return AllreducePushParams if algo in PUSH else AllreduceParams
    return FusedPushParams if algo in PUSH else FusedParams
