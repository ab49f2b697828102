# SPDX-License-Identifier: Apache-2.0
"""How a traced kernel lays out what it writes: cu/trace.cuh says what the words mean."""

from __future__ import annotations

import ctypes

ROLES = (
    "producer",
    "stage",
    "push",
    "sync",
    "wait",
    "barrier",
    "load",
    "multiply",
    "reduce",
    "store",
    "gather",
    "elect",
    "apply_load",
    "apply_reduce",
    "apply_store",
    "finish",
)
"""Names of `enum class TraceRole`, in its order."""

HEADER_WORDS = 5
WORD_BYTES = 8
CLOCK_BITS = 48
MAX_COUNT = 0xFFFF  # the count of a block's events stops here


class TraceParams(ctypes.Structure):
    """`struct TraceParams`: the last argument of a traced kernel."""

    _fields_ = (("section", ctypes.c_uint64), ("events", ctypes.c_uint64))


def defines() -> dict[str, int]:
    """The definitions with which a kernel is compiled to be traced."""
    return {"DRVFUSE_TRACE": 1, "DRVFUSE_TRACE_HEADER": HEADER_WORDS}


def section_bytes(blocks: int, events: int) -> int:
    """Bytes of the section of a launch of `blocks` blocks with up to `events` events each."""
    return blocks * (HEADER_WORDS + events) * WORD_BYTES
