# SPDX-License-Identifier: Apache-2.0
"""The last steps of every collective: from the description of a call to a `Prepared`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from ....errors import ArgumentError
from ....plans.traffic import Traffic
from ...call.operands import Operand
from ...call.planned import Ready
from ...call.prepared import LaunchSequence, Prepared
from ...call.turns import GroupTurns
from .compared import compared
from .epilogue import BoundEpilogue
from .options import CallOptions

if TYPE_CHECKING:
    from ....runtime.stream import Stream


class CollectiveCall(Protocol):
    """The description of a collective call that runs by one algorithm."""

    @property
    def name(self) -> str:
        """The name of the algorithm in `Prepared.algo`."""

    @property
    def text(self) -> str:
        """A description of everything that must be equal on all ranks."""

    def traffic(self) -> Traffic:
        """Return the bytes that the call moves over all ranks."""


Call = TypeVar("Call", bound=CollectiveCall)
R = TypeVar("R")


def prepare(
    options: CallOptions,
    algos: Sequence[str],
    make: Callable[[str], Call],
    sequence: Callable[[Call], tuple[LaunchSequence, list[Ready]]] | None,
    result: R,
    read: Sequence[Sequence[Operand]],
    written: Sequence[Sequence[Operand]],
    queues: Sequence[Stream],
    epilogue: BoundEpilogue | None = None,
) -> Prepared[R]:
    """Prepare the call by the first of `algos` for which the workspace is large enough.

    `make(algo)` describes the call by the algorithm `algo`, and `sequence(call)` returns the launches of a described
    call. A call without elements has no launches, and its `sequence` is None. `read[i]` and `written[i]` are the arrays
    of local rank i, its input first.
    """
    planned: LaunchSequence | None = None
    ready: list[Ready] = []
    if sequence is None:
        call = make(algos[0])
    else:
        call, planned, ready = _first_that_fits(algos, make, sequence)
    planned, ready = compared(options.group, call.text, planned, ready)
    more: Sequence[Sequence[Operand]] = [()] * len(read) if epilogue is None else epilogue.operands
    return Prepared(
        options.op,
        GroupTurns(options.group),
        result,
        [[*of_rank, *of_epilogue] for of_rank, of_epilogue in zip(read, more, strict=True)],
        [list(of_rank) for of_rank in written],
        planned,
        queues,
        ready,
        algo=call.name,
        traffic=call.traffic,
        parameters=epilogue,
        trace=options.trace,
    )


def _first_that_fits(
    algos: Sequence[str], make: Callable[[str], Call], sequence: Callable[[Call], tuple[LaunchSequence, list[Ready]]]
) -> tuple[Call, LaunchSequence, list[Ready]]:
    for algo in algos[:-1]:
        call = make(algo)
        try:
            return call, *sequence(call)
        except ArgumentError as error:
            if error.argument != "workspace_bytes":
                raise
    call = make(algos[-1])
    return call, *sequence(call)
