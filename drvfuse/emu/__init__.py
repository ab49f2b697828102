# SPDX-License-Identifier: Apache-2.0
"""The emulated CUDA driver: several GPUs in one process, on the CPU, running the PTX that a real driver would get.

`Machine` is a configured set of emulated devices; `driver` is the driver API of the process-wide default machine, with
`cuda.bindings.driver`'s own names, signatures and results.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .machine import api

if TYPE_CHECKING:
    from . import driver as driver
    from .findings.reports import Report as Report
    from .machine.machine import Machine as Machine
    from .machine.machine import default_machine as default_machine

__all__ = ["Machine", "Report", "driver"]


def __getattr__(name: str) -> Any:
    if name in ("Machine", "default_machine"):
        return getattr(importlib.import_module(".machine.machine", __name__), name)
    if name == "Report":
        return importlib.import_module(".findings.reports", __name__).Report
    if name == "driver":
        return importlib.import_module(".driver", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _driver_of(machine: Machine) -> Any:
    from .driver import EmulatedDriver

    return EmulatedDriver(machine)


api.make = _driver_of
