# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a group compare their calls: in the kernels of the call, or in a kernel before them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .... import config
from ...call import faults
from ...call.planned import PlanCache, Planned, Ready
from ...call.prepared import Direct, LaunchSequence
from .kernel import check_call
from .params import CheckParams
from .plan import call_of_rank

if TYPE_CHECKING:
    from ....comm.group import Group
    from ....runtime.launch import Launch
    from ....runtime.stream import Stream


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
