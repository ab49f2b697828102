# SPDX-License-Identifier: Apache-2.0
"""The functions of the emulated driver, one module a noun; importing this package registers all of them."""

from . import (
    context,
    copy,
    device,
    error,
    event,
    function,
    graph,
    launch,
    memory,
    module,
    occupancy,
    pointer,
    pool,
    stream,
    vmm,
)
from .entry import ENTRIES

__all__ = [
    "ENTRIES",
    "context",
    "copy",
    "device",
    "error",
    "event",
    "function",
    "graph",
    "launch",
    "memory",
    "module",
    "occupancy",
    "pointer",
    "pool",
    "stream",
    "vmm",
]
