# SPDX-License-Identifier: Apache-2.0
"""What the litmus tests of streams, graphs and copies share: a kernel that writes or reads a word, and its launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from driver_helpers import ok
from litmus import At, Lab, Suite

# Roles 0 and 2 write the word, role 1 reads it, and role 3 does nothing.
KERNEL = """
P(0) {
  ST(weak, x, 1)  // @w
}
P(1) {
  LD(weak, x)  // @r
}
P(2) {
  ST(weak, x, 2)  // @v
}
P(3) {
}
"""


def run(here: Lab, role: int, stream: Any = None, device: int = 0) -> None:
    """Queue a launch of one thread that has this role."""
    here.launch({role: At()}, stream, device=device)


def order_streams(here: Lab, before: Any, after: Any, device: int = 0) -> None:
    """Let the stream `after` wait for the work that is queued on the stream `before`, by an event."""
    event = here.event(device)
    ok(here.cuda.cuEventRecord(event, before))
    ok(here.cuda.cuStreamWaitEvent(after, event, 0))


class StreamSuite(Suite):
    """Cases that differ in how they queue launches of KERNEL."""

    def case(self, name: str, races: str = "", **options: Any) -> Callable[[Callable[[Lab], None]], None]:
        """Add the case that the decorated function drives."""

        def add(drive: Callable[[Lab], None]) -> None:
            self.add(name, KERNEL, drive, races=races, **options)

        return add
