# SPDX-License-Identifier: Apache-2.0
"""Buffers of this process into which the machine's errors of loading and linking are written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..wire.calls import Call
from ..wire.jit_options import ErrorLog

if TYPE_CHECKING:
    from ..findings.reports import Report


class ErrorLogs:
    """The error buffers of calls, during the call, and those of links, until they are destroyed."""

    def __init__(self) -> None:
        self._links: dict[int, ErrorLog] = {}

    def failed(self, call: Call, refusal: Report | None) -> None:
        """Write the machine's report on a failed call into the buffer."""
        log = _named(call)
        if log is None and "state" in (p.name for p in call.signature.given):
            log = self._links.get(call.value("state"))
        if log is not None and refusal is not None:
            log.write(refusal.message)

    def succeeded(self, call: Call, results: Sequence[Any]) -> None:
        """Remember the buffer of a new link, and forget that of one which is destroyed."""
        if call.signature.name == "cuLinkCreate":
            log = _named(call)
            if log is not None:
                self._links[int(results[0])] = log
        elif call.signature.name == "cuLinkDestroy":
            self._links.pop(call.value("state"), None)


def _named(call: Call) -> ErrorLog | None:
    """The buffer that the options of a call name."""
    names = [p.name for p in call.signature.given]
    for options, values in (("options", "optionValues"), ("jitOptions", "jitOptionsValues")):
        if options in names:
            return ErrorLog.of(call.value(options), call.value(values))
    return None
