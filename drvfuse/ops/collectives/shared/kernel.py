# SPDX-License-Identifier: Apache-2.0
"""The compile-time settings of the kernels of the collectives."""

from __future__ import annotations

from dataclasses import dataclass, field

from .... import dtypes
from ....comm import workspace
from ....dtypes import DType
from ....errors import ArgumentError
from ....plans.quantisation import E8M0
from ....plans.shared import Work
from ....trace import layout
from ...call import faults
from ...call.specialisation import FP8_CAPABILITY, Specialisation
from ..rows.form import NormForm

OPS = ("allreduce", "allreduce_rmsnorm_fp8")
PULL = ("one_stage", "two_stage")
PUSH = ("push_one_shot", "push_two_shot")
ALGOS = (*PULL, *PUSH)
ALGORITHMS = ("auto", *ALGOS, "naive")
BY_OWNER = ("two_stage", "push_two_shot", "multimem_two_stage")
"""The algorithms in which one rank computes an element for all ranks."""
INPUT_DTYPES = ("bfloat16", "float16", "float32")
SCALES_DTYPES = ("float32", "bfloat16")
MAX_PACKS = 8
MULTIMEM_CAPABILITY = (9, 0)


@dataclass(frozen=True)
class CollectiveKernel:
    """The compile-time settings of a kernel.

    `packs`: the 16-byte packs that a thread has in flight (all-reduce) or holds of a row (fused), from
    `plans.shared`. `ragged`: the elements (all-reduce) or columns (fused) do not fill whole packs. `staged`:
    the kernel copies its input to the workspace, where peers read it. `local`: the kernel sums arrays on this device
    alone, and no peer takes part (one_stage only). `epilogue`: C++ text that defines `EpilogueParams` and `epilogue` as
    `cu/common/epilogue.cuh` says, or "" for none. The fused op's output dtype is its input's (no quantisation), an FP8
    type or FP4; `form` describes its other variants.

    For push algorithms (`plans.push`): `cluster` blocks of `threads` threads share a row. `exact`: no thread has
    fewer than `packs` packs. A block sends `depth` units ahead of the unit that it sums. `relays`: in the last of
    several rounds an owner executes a fence before it sends its first result (`cu/sync/push.cuh`).

    `multimem`: the kernel sums and stores through multicast memory (one_stage and two_stage) and stages inputs there.
    `to_outputs`: the outputs lie in multicast memory too, which is possible only if inputs are not staged.

    `nodes`: the sources are the partial sums of nodes (two_stage, not staged), which a kernel of the op "node_sums" has
    written. That kernel has `algo` "two_stage" too, may be staged, and its `out_dtype` is `dtype`.

    `compares`: the kernel sends its peers a word that identifies the call, and compares it with the words of the peers
    (`cu/sync/calls.cuh`).
    `traced`: if not 0, the kernel has a last argument `TraceParams`, and a block records up to that number of words.
    `fault`: the fault that is planted in the kernel (`ops.call.faults`).
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
    form: NormForm = NormForm()
    epilogue: str = ""
    cluster: int = 1
    threads: int = 512
    exact: bool = False
    depth: int = 0
    relays: bool = False
    multimem: bool = False
    to_outputs: bool = False
    nodes: bool = False
    compares: bool = False
    traced: int = 0
    fault: str = field(default_factory=faults.planted)

    def __post_init__(self) -> None:
        _check("op", self.op, (*OPS, "node_sums"))
        _check("algo", self.algo, PULL[:1] if self.local else self._multimem_algos() if self.multimem else ALGOS)
        _check("local", self.local, (False,) if self.multimem else (False, True))
        _check("to_outputs", self.to_outputs, (False, True) if self._may_store_to_outputs() else (False,))
        _check("nodes", self.nodes, (False, True) if self._may_add_nodes() else (False,))
        _check("dtype", self.dtype.name, INPUT_DTYPES)
        _check("ranks", self.ranks, range(1, workspace.MAX_RANKS + 1))
        _check("packs", self.packs, range(1, MAX_PACKS + 1))
        if self.op == "allreduce":
            _check("out_dtype", self.out_dtype.name, INPUT_DTYPES)
        elif self.op == "node_sums":
            _check("algo", self.algo, PULL[1:])
            _check("out_dtype", self.out_dtype.name, (self.dtype.name,))
        else:
            _check("out_dtype", self.out_dtype.name, (self.dtype.name, *dtypes.FP8, dtypes.FP4))
            _check("gamma_dtype", self.gamma_dtype.name, INPUT_DTYPES)
            groups = (E8M0, "float8_e4m3fn") if self.form.group else ()
            _check("scales_dtype", self.scales_dtype.name, (*SCALES_DTYPES, *groups))
            _check("epilogue", self.epilogue, ("",))

    def _multimem_algos(self) -> tuple[str, ...]:
        return PULL if self.op == "allreduce" else PULL[1:]

    def _may_store_to_outputs(self) -> bool:
        return self.multimem and self.op == "allreduce" and self.algo == "two_stage" and not self.staged

    def _may_add_nodes(self) -> bool:
        return self.algo == "two_stage" and not self.staged and not self.multimem and self.op != "node_sums"

    @property
    def name(self) -> str:
        """The kernel's name in the compiled module."""
        if self.op == "node_sums":
            return self.op
        return f"{self.op}_multimem_{self.algo}" if self.multimem else f"{self.op}_{self.algo}"

    @property
    def work(self) -> Work:
        """The properties of this kernel that plans depend on."""
        sizes = self.dtype.itemsize, self.out_dtype.itemsize
        return Work(
            self.op,
            self.algo,
            self.ranks,
            *sizes,
            staged=self.staged,
            local=self.local,
            residual=self.residual,
            multimem=self.multimem,
            to_outputs=self.to_outputs,
            nodes=self.nodes,
            residual_itemsize=self.form.residual.itemsize if self.form.residual else 0,
            normed=self.form.normed,
            group=self.form.group or self.form.head,
            scales_itemsize=self.scales_dtype.itemsize,
            out_lanes=self.out_dtype.lanes,
        )

    @property
    def pushes(self) -> bool:
        """Whether the kernel pushes: it stores to peers (`plans.push`) and does not load from them."""
        return self.algo in PUSH

    @property
    def uses_staging(self) -> bool:
        """Whether the kernel has inputs or results in the group's multicast staging."""
        return self.multimem and (self.staged or (self.algo == "two_stage" and not self.to_outputs))

    @property
    def specialisation(self) -> Specialisation:
        """How the kernel is compiled. Multicast needs compute capability 9.0, FP8 conversions 8.9, everything else
        8.0."""
        defines: dict[str, str | int] = {
            **workspace.defines(),
            "DRVFUSE_RANKS": self.ranks,
            "DRVFUSE_PACKS": self.packs,
            "DRVFUSE_RAGGED": int(self.ragged),
            "DRVFUSE_EXACT": int(self.exact),
            "DRVFUSE_STAGED": int(self.staged),
            "DRVFUSE_LOCAL": int(self.local),
            "DRVFUSE_MULTIMEM": int(self.multimem),
            "DRVFUSE_NODES": int(self.nodes),
            "DRVFUSE_COMPARES": int(self.compares),
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
                **self.form.defines(self.dtype, self.out_dtype != self.dtype),
            }
        if self.pushes:
            defines |= {
                "DRVFUSE_TWO_SHOT": int(self.algo == "push_two_shot"),
                "DRVFUSE_DEPTH": self.depth,
                "DRVFUSE_RELAYS": int(self.relays),
                "DRVFUSE_MOST_THREADS": max(128, 1 << (self.threads - 1).bit_length()),
                "DRVFUSE_KERNEL": self.name,
            }
        if self.multimem:
            defines |= {"DRVFUSE_KERNEL": self.name, "DRVFUSE_TO_OUTPUTS": int(self.to_outputs)}
        if self.traced:
            defines |= layout.defines(self.traced)
        text = ""
        if self.epilogue:
            defines["DRVFUSE_EPILOGUE"] = 1
            text = f'#include "common/prelude.cuh"\n{self.epilogue}\n'
        narrow = (*dtypes.FP8, dtypes.FP4)  # FP4 needs FP8 conversions for its scales
        capability = FP8_CAPABILITY if self.out_dtype.name in narrow else (8, 0)
        needs = f"{self.out_dtype} output"
        if self.multimem:
            capability, needs = MULTIMEM_CAPABILITY, "multicast"
        file = f"{self.op}_push" if self.pushes else f"{self.op}_multimem" if self.multimem else self.op
        fixed = tuple(defines.items())
        family = "nodes" if self.op == "node_sums" else "rows" if self.op == "allreduce_rmsnorm_fp8" else "sums"
        return Specialisation(f"collectives/{family}", file, fixed, self.name, capability, needs, text, self.fault)


def _check(argument: str, got: object, allowed: tuple[object, ...] | range) -> None:
    if got not in allowed:
        wanted = f"{allowed.start} to {allowed.stop - 1}" if isinstance(allowed, range) else "one of " + repr(allowed)
        raise ArgumentError(argument, got, wanted)


def check_call(ranks: int) -> Specialisation:
    """Return how the kernel that compares the calls of `ranks` ranks is compiled."""
    fixed = tuple((workspace.defines() | {"DRVFUSE_RANKS": ranks, "DRVFUSE_COMPARES": 1}).items())
    return Specialisation("collectives/shared", "check_call", fixed)
