# SPDX-License-Identifier: Apache-2.0
"""The last steps of every collective, from the description of a call to a `Prepared`; and how the ranks of a group
compare their calls, in the kernels of the call or in a kernel before them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from .... import config
from ....errors import ArgumentError
from ....plans.traffic import Traffic
from ...call import faults
from ...call.operands import Operand
from ...call.planned import PlanCache, Planned, Ready
from ...call.prepared import Direct, LaunchSequence, Prepared
from ...call.turns import GroupTurns
from .epilogue import BoundEpilogue
from .kernel import check_call
from .options import CallOptions
from .params import CheckParams
from .plan import call_of_rank

if TYPE_CHECKING:
    from ....comm.group import Group
    from ....runtime.launch import Launch
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


class ComparedFirst:
    """A launch sequence that begins with a kernel, which compares the rank's call with the calls of its peers.

    The launches of `sequence` follow, if it is not None. `launches` does not contain the comparing kernel.
    """

    def __init__(self, checks: Sequence[Launch], sequence: LaunchSequence | None) -> None:
        self._alone = Direct(checks)
        self._sequence = sequence
        self.launches: Sequence[Sequence[Launch]] = [[] for _ in checks] if sequence is None else sequence.launches

    def check(self, captures: Sequence[int | None], alone: bool) -> None:
        (self._sequence or self._alone).check(captures, alone)

    def launch(self, positions: Sequence[int], streams: Sequence[Stream]) -> None:
        self._alone.launch(positions, streams)
        if self._sequence is not None:
            self._sequence.launch(positions, streams)


def compared(
    group: Group, name: str, sequence: LaunchSequence | None, ready: Sequence[Ready]
) -> tuple[LaunchSequence | None, list[Ready]]:
    """Return the launch sequence and launches of a call. If the group compares calls, sequence and launches are changed
    so that the ranks compare this call.

    `name` describes everything that must be equal on all ranks, except the grid. A call whose kernels wait for no peer,
    or that has no kernels, is compared by a separate kernel, which is launched first.
    """
    calls = group.calls
    if calls is None:
        return sequence, list(ready)
    waits = bool(ready) and ready[0].planned.awaits_peers
    if waits:
        name += f", {ready[0].planned.grid} blocks of {ready[0].planned.threads} threads"
    hash_ = calls.announce(name)
    in_its_kernels = waits and not calls.first
    for one in ready:
        one.parameters.call.hash = hash_ if one.planned.compares else 0
    if in_its_kernels:
        return sequence, list(ready)
    checks = _checks(group, hash_)
    return ComparedFirst([one.launch for one in checks], sequence), [*ready, *checks]


def _checks(group: Group, hash_: int) -> list[Ready]:
    """Return, for each local rank, a launch of the kernel that compares calls."""
    planned = group.part(PlanCache).get(("check_call", faults.planted()), lambda: _planned(group))
    timeout = int(config.get("spin_timeout") * 1e9)
    found = [one.take() for one in planned]
    for one in found:
        one.parameters.call.hash, one.parameters.call.timeout_ns = hash_, timeout
    return found


def _planned(group: Group) -> list[Planned]:
    spec = check_call(group.layout.inside)
    return [
        Planned(rank.device, spec, 1, 32, CheckParams(call_of_rank(group, position)), awaits_peers=True)
        for position, rank in enumerate(group.ranks)
    ]
