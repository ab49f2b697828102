# SPDX-License-Identifier: Apache-2.0
"""The errors that a group raises for the reports that its kernels write when they give up waiting."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ..errors import BarrierTimeout, CallMismatch, DrvfuseError, NodeFailed
from .calls import number_in
from .workspace import CALL, EXCHANGE, WAIT_KINDS, differs

if TYPE_CHECKING:
    from ..nodes.layout import Nodes
    from .calls import ComparedCalls
    from .history import History


def error_of(
    report: Mapping[str, int], history: History, calls: ComparedCalls | None, ended: Mapping[int, str], nodes: Nodes
) -> Callable[[], DrvfuseError]:
    """The function that makes the error of a report, whose fields are those of `workspace.REPORT_DTYPE`.

    `ended` has the ranks whose processes have ended. This mapping may change, so each error copies it when the error is
    made.
    """
    if report["kind"] == EXCHANGE:
        return _other_node(report, history, nodes)
    return _compared(report, calls, ended) if report["kind"] == CALL else _timed_out(report, history, ended)


def _timed_out(report: Mapping[str, int], history: History, ended: Mapping[int, str]) -> Callable[[], DrvfuseError]:
    rank, peer, ordinal, expected = (report[name] for name in ("rank", "peer", "phase", "expected"))
    kind, word = WAIT_KINDS[report["kind"]], report["word"] if report["kind"] else None
    if word is None:
        phase = "start" if ordinal == 1 else f"phase {ordinal}"
    else:
        phase = kind if ordinal == 1 else f"{kind} of round {ordinal}"
    call = history.find(rank, peer, expected - ordinal)
    fields = rank, peer, report["block"], phase, expected, report["seen"], call, word
    return lambda: BarrierTimeout(*fields, ended=dict(ended))


def _compared(
    report: Mapping[str, int], calls: ComparedCalls | None, ended: Mapping[int, str]
) -> Callable[[], DrvfuseError]:
    """The function that makes the error of a report whose kind is CALL: the calls of two ranks differ, or the peer has
    not made the call."""
    rank, peer, number = (report[name] for name in ("rank", "peer", "phase"))
    own, seen = report["expected"], report["seen"]
    assert calls is not None
    call = f"{calls.name(own)}, as its call {number} since the last reset"
    if differs(report):
        peer_call = calls.name(seen)
        return lambda: CallMismatch(rank, peer, call, peer_call)
    numbers = number_in(own), number_in(seen)
    return lambda: BarrierTimeout(rank, peer, report["block"], "call", *numbers, call, ended=dict(ended))


def _other_node(report: Mapping[str, int], history: History, nodes: Nodes) -> Callable[[], DrvfuseError]:
    """The function that makes the error of a report whose kind is EXCHANGE: a kernel of another node gave up.

    The report's `peer` is the number of that node. If the exchange engine itself has added the sums of the nodes, the
    failed node is unknown. `expected` is the rank's epoch when the exchange began, which the call's earlier kernels
    have advanced.
    """
    rank, place, places = (report[name] for name in ("rank", "peer", "seen"))
    failed = place if places == nodes.count else None
    call = history.find(rank, rank, max(0, report["expected"] - 1))
    return lambda: NodeFailed(rank, nodes.of[rank], failed, call)
