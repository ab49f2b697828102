# SPDX-License-Identifier: Apache-2.0
"""How the machine refuses a driver call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..findings.reports import Report


class Failure(Exception):
    """A driver call ends with this CUresult; `report` says why, where the code alone does not."""

    def __init__(self, code: Any, report: Report | None = None) -> None:
        super().__init__(code)
        self.code, self.report = code, report
