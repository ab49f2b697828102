# SPDX-License-Identifier: Apache-2.0
"""The emulated CUDA driver: several GPUs in one process, on the CPU, running the PTX that a real driver would get.

`Machine` is a configured set of emulated devices, which several processes may use (`Process`). `driver` is the driver
API of the process-wide default machine, with `cuda.bindings.driver`'s own names, signatures and results. `Report` is
one report of a machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..lazy import attach
from .machine.process import api

if TYPE_CHECKING:
    from .machine.process.process import Process

__getattr__, __dir__, __all__ = attach(__name__, __file__)


def _driver_of(process: Process) -> Any:
    from .driver import EmulatedDriver

    return EmulatedDriver(process)


def _attach(address: str) -> Any:
    from .serve.client import AttachedMachine

    return AttachedMachine(address, "environment variable DRVFUSE_EMU_MACHINE")


api.make, api.attach = _driver_of, _attach
