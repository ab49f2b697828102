# SPDX-License-Identifier: Apache-2.0
"""The functions of the emulated driver, one module a noun; importing this package registers all of them."""

from . import context, device, error, event, graph, launch, memory, module, occupancy, pool, stream, vmm
from .entry import ENTRIES

__all__ = [
    "ENTRIES",
    "context",
    "device",
    "error",
    "event",
    "graph",
    "launch",
    "memory",
    "module",
    "occupancy",
    "pool",
    "stream",
    "vmm",
]
