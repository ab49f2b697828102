# SPDX-License-Identifier: Apache-2.0
"""The compile-time settings of the collectives' kernels: what plans need of every kernel, and the settings that all
kernels have that sum over ranks or nodes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, Self

from .... import dtypes
from ....comm import workspace
from ....dtypes import DType
from ....errors import ArgumentError
from ....plans.shared import Work
from ....trace import layout
from ...call import faults
from ...call.specialisation import FP8_CAPABILITY, Specialisation

PULL = ("one_stage", "two_stage")
PUSH: tuple[str, ...] = ("push_one_shot", "push_two_shot")
ALGOS = (*PULL, *PUSH)
ALGORITHMS = ("auto", *ALGOS, "naive")
BY_OWNER = ("two_stage", "push_two_shot", "multimem_two_stage")
"""The algorithms in which one rank computes an element for all ranks."""
INPUT_DTYPES = ("bfloat16", "float16", "float32")
MAX_PACKS = 8
MULTIMEM_CAPABILITY = (9, 0)


class Kernel(Protocol):
    """The settings of a collective's kernel, whatever it does."""

    @property
    def name(self) -> str:
        """The kernel's name in the compiled module."""

    @property
    def traced_name(self) -> str:
        """The kernel's name in traces."""

    @property
    def ranks(self) -> int: ...

    @property
    def cluster(self) -> int: ...

    @property
    def local(self) -> bool:
        """Whether no peer takes part."""

    @property
    def compares(self) -> bool:
        """Whether the kernel sends its peers a word that identifies the call, and compares it with the words of the
        peers (cu/sync/calls.cuh)."""

    @property
    def pushes(self) -> bool:
        """Whether the kernel pushes: it stores to peers (`plans.push`) and does not load from them."""

    @property
    def wide_blocks_share(self) -> bool:
        """Whether a block of a push kernel with more than 256 threads adds to the epoch as a whole, and not warp by
        warp. Must be what the kernel passes to `Push` (cu/sync/push.cuh) as `ByBlock`."""

    @property
    def uses_staging(self) -> bool:
        """Whether the kernel has inputs or results in the group's multicast staging."""

    @property
    def specialisation(self) -> Specialisation: ...

    def traced_by(self, words: int) -> Self:
        """Return the same kernel with traces of up to that number of words of a block."""


@dataclass(frozen=True)
class CollectiveKernel:
    """The compile-time settings of a kernel that sums over ranks or nodes. Families add settings of their own.

    `op` is one of the `ops` of the family, and the name of the kernel's file without what says how it reaches peers.
    `packs`: the 16-byte packs that a thread has in flight, or holds of a row, from the family's plans. `ragged`: the
    elements, or the columns of a row, do not fill whole packs. `staged`: the kernel copies its input to the workspace,
    where peers read it. `local`: the kernel sums arrays on this device alone, and no peer takes part (one_stage only).

    For push algorithms (`plans.push`): `cluster` blocks of `threads` threads share a unit. `exact`: no thread has fewer
    than `packs` packs. A block sends `depth` units ahead of the unit that it sums. `relays`: in the last of several
    rounds an owner executes a fence before it sends its first result (`cu/sync/push.cuh`).

    `multimem`: the kernel sums and stores through multicast memory (one_stage and two_stage) and stages inputs there.
    `to_outputs`: the outputs lie in multicast memory too, which is possible only if inputs are not staged.
    `nodes`: the sources are the partial sums of nodes, which another kernel has written. `many`: the packs are those of
    several tensors, at most that number (cu/collectives/sums/many.cuh); 0 for one tensor.

    `compares` is that of `Kernel`. `traced`: if not 0, the kernel has a last argument `TraceParams`, and a block
    records up to that number of words. `fault`: the fault that is planted in the kernel (`ops.call.faults`).
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
    cluster: int = 1
    threads: int = 512
    exact: bool = False
    depth: int = 0
    relays: bool = False
    multimem: bool = False
    to_outputs: bool = False
    nodes: bool = False
    many: int = 0
    compares: bool = False
    traced: int = 0
    fault: str = field(default_factory=faults.planted)

    family: ClassVar[str]
    ops: ClassVar[tuple[str, ...]]
    wide_blocks_share: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check("op", self.op, self.ops)
        check("algo", self.algo, PULL[:1] if self.local else self.multimem_algos if self.multimem else ALGOS)
        check("local", self.local, (False,) if self.multimem else (False, True))
        to_outputs = self.multimem and self.algo == "two_stage" and not self.staged
        check("to_outputs", self.to_outputs, (False, to_outputs))
        # Over several nodes a reduce-scatter's last kernel reads sums of its own device alone.
        adds_nodes = self.local or (self.algo == "two_stage" and not self.staged and not self.multimem)
        check("nodes", self.nodes, (False, adds_nodes))
        check("dtype", self.dtype.name, INPUT_DTYPES)
        check("ranks", self.ranks, range(1, workspace.MAX_RANKS + 1))
        check("packs", self.packs, range(1, MAX_PACKS + 1))

    @property
    def multimem_algos(self) -> tuple[str, ...]:
        """The algorithms that the family has through multicast memory."""
        return ()

    @property
    def name(self) -> str:
        """The kernel's name in the compiled module."""
        return f"{self.op}_multimem_{self.algo}" if self.multimem else f"{self.op}_{self.algo}"

    @property
    def traced_name(self) -> str:
        """The kernel's name in traces: algorithm "naive" launches a kernel of one_stage."""
        return self.name.replace("one_stage", "naive") if self.local and not self.nodes else self.name

    @property
    def work(self) -> Work:
        """The properties of this kernel that plans depend on."""
        return Work(**self.work_fields)

    @property
    def work_fields(self) -> dict[str, Any]:
        return {
            "algo": self.algo,
            "ranks": self.ranks,
            "itemsize": self.dtype.itemsize,
            "out_itemsize": self.out_dtype.itemsize,
            "staged": self.staged,
            "local": self.local,
            "multimem": self.multimem,
            "to_outputs": self.to_outputs,
            "nodes": self.nodes,
        }

    @property
    def pushes(self) -> bool:
        """See `Kernel`."""
        return self.algo in PUSH

    @property
    def uses_staging(self) -> bool:
        """See `Kernel`."""
        return self.multimem and (self.staged or (self.algo == "two_stage" and not self.to_outputs))

    @property
    def defines(self) -> dict[str, str | int]:
        """The macros with which the kernel is compiled."""
        found: dict[str, str | int] = {
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
        if self.pushes:
            found |= {
                "DRVFUSE_TWO_SHOT": int(self.algo == "push_two_shot"),
                "DRVFUSE_DEPTH": self.depth,
                "DRVFUSE_RELAYS": int(self.relays),
                "DRVFUSE_MOST_THREADS": max(128, 1 << (self.threads - 1).bit_length()),
                "DRVFUSE_KERNEL": self.name,
            }
        if self.multimem:
            found |= {"DRVFUSE_KERNEL": self.name, "DRVFUSE_TO_OUTPUTS": int(self.to_outputs)}
        if self.many:
            found["DRVFUSE_MANY"] = self.many
        if self.traced:
            found |= layout.defines(self.traced)
        return found

    def traced_by(self, words: int) -> Self:
        """See `Kernel`."""
        return replace(self, traced=words)

    @property
    def text(self) -> str:
        """C++ text before the kernel's file."""
        return ""

    @property
    def specialisation(self) -> Specialisation:
        """How the kernel is compiled. Multicast needs compute capability 9.0, FP8 conversions 8.9, everything else
        8.0."""
        narrow = (*dtypes.FP8, dtypes.FP4)  # FP4 needs FP8 conversions for its scales
        capability = FP8_CAPABILITY if self.out_dtype.name in narrow else (8, 0)
        needs = f"{self.out_dtype} output"
        if self.multimem:
            capability, needs = MULTIMEM_CAPABILITY, "multicast"
        file = f"{self.op}_push" if self.pushes else f"{self.op}_multimem" if self.multimem else self.op
        folder, fixed = f"collectives/{self.family}", tuple(self.defines.items())
        return Specialisation(folder, file, fixed, self.name, capability, needs, self.text, self.fault)


def check(argument: str, got: object, allowed: tuple[object, ...] | range) -> None:
    """Raise ArgumentError for a setting of a kernel that is not `allowed`."""
    if got not in allowed:
        wanted = f"{allowed.start} to {allowed.stop - 1}" if isinstance(allowed, range) else "one of " + repr(allowed)
        raise ArgumentError(argument, got, wanted)


def check_call(ranks: int) -> Specialisation:
    """Return how the kernel that compares the calls of `ranks` ranks is compiled."""
    fixed = tuple((workspace.defines() | {"DRVFUSE_RANKS": ranks, "DRVFUSE_COMPARES": 1}).items())
    return Specialisation("collectives/shared", "check_call", fixed)
