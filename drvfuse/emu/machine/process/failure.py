# SPDX-License-Identifier: Apache-2.0
"""The failure of a driver call, failures that a test has injected, and the errors that faults of kernels leave in their
contexts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ....errors import ArgumentError, require_integer, shown
from ...bindings import R

if TYPE_CHECKING:
    from ...findings.reports import Report
    from .process import Process


class Failure(Exception):
    """Ends a driver call with a CUresult. `report` gives the reason if the code alone does not."""

    def __init__(self, code: Any, report: Report | None = None) -> None:
        super().__init__(code)
        self.code, self.report = code, report


@dataclass
class Injected:
    """An error that a test injects: `after` more calls of a driver function run as usual, then `left` calls fail with
    `code`. With `device`, calls that do not concern this device are ignored.
    """

    function: str
    code: Any
    device: int | None
    after: int
    left: int

    @classmethod
    def checked(
        cls, process: Process, function: str, code: Any, device: int | None, after: int, times: int
    ) -> Injected:
        """Check the arguments of `Process.inject` and make an Injected of them. Raises ArgumentError."""
        if not callable(getattr(process.driver, str(function), None)):
            raise ArgumentError("function", shown(function), "the name of a function of the driver")
        if code not in list(R) or code == R.CUDA_SUCCESS:
            raise ArgumentError("code", shown(code), "a CUresult that is a failure")
        if device is not None:
            most = len(process.machine.devices) - 1
            device = require_integer("device", device, f"an integer between 0 and {most}", 0, most)
        after = require_integer("after", after, "an integer of at least 0", 0)
        times = require_integer("times", times, "an integer of at least 1", 1)
        return cls(function, R(code), device, after, times)

    def hits(self, devices: set[int]) -> bool:
        """Whether a call of `function` that concerns `devices` is to fail. Counts the call in `after` or `left`, unless
        it is ignored.
        """
        if self.left == 0 or (self.device is not None and self.device not in devices):
            return False
        if self.after:
            self.after -= 1
            return False
        self.left -= 1
        return True


_LAUNCH_FAILED = (
    *("trap", "warp_lanes", "warp_mismatch", "matrix_lanes", "unsupported", "copy_size", "mbarrier"),
    *("barrier_count", "barrier_divergence", "barrier_kinds", "barrier_left", "cluster_absent", "cluster_barrier"),
    "bad_free",
)
_CODES = {
    **dict.fromkeys(_LAUNCH_FAILED, R.CUDA_ERROR_LAUNCH_FAILED),
    "misaligned": R.CUDA_ERROR_MISALIGNED_ADDRESS,
    "no_cluster": R.CUDA_ERROR_ILLEGAL_INSTRUCTION,
    "no_function": R.CUDA_ERROR_INVALID_PC,
    "stack_overflow": R.CUDA_ERROR_HARDWARE_STACK_ERROR,
    "assert": R.CUDA_ERROR_ASSERT,
    "endless": R.CUDA_ERROR_LAUNCH_TIMEOUT,
    "interrupted": R.CUDA_ERROR_LAUNCH_TIMEOUT,
}


def error_of(kind: str) -> Any:
    """The CUresult that a fault of this kind leaves in the context of its kernel."""
    return _CODES.get(kind, R.CUDA_ERROR_ILLEGAL_ADDRESS)
