# SPDX-License-Identifier: Apache-2.0
"""How the machine refuses a driver call, and calls that a test has chosen to fail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..findings.reports import Report


class Failure(Exception):
    """A driver call ends with this CUresult; `report` says why, where the code alone does not."""

    def __init__(self, code: Any, report: Report | None = None) -> None:
        super().__init__(code)
        self.code, self.report = code, report


@dataclass
class Injected:
    """Calls of a driver function that fail with a code: `left` of them, behind the next `after`, if about `device`."""

    function: str
    code: Any
    device: int | None
    after: int
    left: int

    def hits(self, devices: set[int]) -> bool:
        """Count a call of the function that is about these devices; True if it fails."""
        if self.left == 0 or (self.device is not None and self.device not in devices):
            return False
        if self.after:
            self.after -= 1
            return False
        self.left -= 1
        return True
