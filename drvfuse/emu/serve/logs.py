# SPDX-License-Identifier: Apache-2.0
"""The buffers of this process to which the machine's errors of loading and linking are written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..wire.calls import Call
from ..wire.jit_options import ErrorLog

if TYPE_CHECKING:
    from ..findings.reports import Report


class ErrorLogs:
    """The error buffers of calls, during the call, and of linker states (CUlinkState), until they are destroyed."""

    def __init__(self) -> None:
        self._links: dict[int, ErrorLog] = {}

    def failed(self, call: Call, refusal: Report | None) -> None:
        """Write the message of `refusal` to the error buffer of a failed call, or to the error buffer of the linker
        state that the call uses. If there is no such buffer, or `refusal` is None, nothing is written.
        """
        log = _named(call)
        if log is None and "state" in (p.name for p in call.signature.given):
            log = self._links.get(call.value("state"))
        if log is not None and refusal is not None:
            log.write(refusal.message)

    def succeeded(self, call: Call, results: Sequence[Any]) -> None:
        """Called after a call has succeeded: if it has made a linker state, remember the state's error buffer; if it
        has destroyed one, forget the buffer.
        """
        if call.signature.name == "cuLinkCreate":
            log = _named(call)
            if log is not None:
                self._links[int(results[0])] = log
        elif call.signature.name == "cuLinkDestroy":
            self._links.pop(call.value("state"), None)


def _named(call: Call) -> ErrorLog | None:
    """The error buffer that the options of a call name, or None."""
    names = [p.name for p in call.signature.given]
    for options, values in (("options", "optionValues"), ("jitOptions", "jitOptionsValues")):
        if options in names:
            return ErrorLog.of(call.value(options), call.value(values))
    return None
