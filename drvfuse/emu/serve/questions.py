# SPDX-License-Identifier: Apache-2.0
"""Requests of a client to its machine that are no driver calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..driver import ENTRIES, perform
from ..driver.launch import layout_of
from ..driver.refused import refuse
from ..machine.objects import Function
from ..wire.arguments import Invalid

if TYPE_CHECKING:
    from ..findings.reports import Report
    from ..machine.process.process import Process


def _layout(process: Process, handle: int) -> Any:
    found = process.handles.get(handle)
    return layout_of(found) if isinstance(found, Function) else None


def _finding(process: Process, device: int) -> Report | None:
    with process.machine.lock:  # held while the contexts are read, as other threads of the client may make contexts
        return process.finding(device)


def _registered(process: Process) -> list[int]:
    with process.machine.lock:
        return process.memory.registered()


def _inject(process: Process, *arguments: Any, **options: Any) -> None:
    process.inject(*arguments, **options)


def _refuse(process: Process, name: str) -> Any:
    return refuse(process, name), process.refusal


def _refuse_argument(process: Process, name: str, words: str) -> Any:
    return perform(process, ENTRIES[name], Invalid(words)), process.refusal


QUESTIONS: dict[str, Callable[..., Any]] = {
    "layout": _layout,
    "refuse": _refuse,
    "refuse_argument": _refuse_argument,
    "reports": lambda process, known: process.reports[known:],
    "finding": _finding,
    "registered": _registered,
    "declare_polled": lambda process, address, nbytes: process.declare_polled(address, nbytes),
    "clock": lambda process: process.clock(),
    "launches": lambda process: list(process.launches),
    "held": lambda process: process.held(),
    "inject": lambda process, function, code, device, after, times: _inject(
        process, function, code, device=device, after=after, times=times
    ),
    "clear_injected": lambda process: process.injected.clear(),
}
