# SPDX-License-Identifier: Apache-2.0
"""The layout of the words that a traced kernel writes; cu/trace/trace.cuh says what they mean."""

from __future__ import annotations

import ctypes

from ..structures import laid_out

ROLES = (
    *(
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
        "receive",
    ),
    *("apply_load", "apply_reduce", "apply_store", "finish"),
)
"""The names of `enum class TraceRole`, in the order of the enum."""

HEADER_WORDS = 4
WORD_BYTES = 8
ALIGNMENT = 16  # alignment of a section in bytes: its words are stored in pairs
CLOCK_BITS = 48
LEAST_WORDS, MOST_WORDS = 64, 4096  # the fewest and most words of a block, in static shared memory


@laid_out("trace/trace.cuh")
class TraceParams(ctypes.Structure):
    """The last argument of a traced kernel."""


def block_words(phases: int, waits: int) -> int:
    """The number of words, which is even, for a block with up to `phases` phases and `waits` waits.

    The words are the header, one word for each wait and one for each phase. The time of the last phase, "finish", is in
    the header. So at least one of the `phases` words stays 0; if none is 0, the block had too many phases.
    """
    return -(-(HEADER_WORDS + waits + phases) // 2) * 2


def capacity(words: int) -> int:
    """The number of words for which a kernel is compiled if its blocks need `words`: a power of two. There are few such
    numbers, since for each of them the kernel is compiled separately.
    """
    return max(LEAST_WORDS, 1 << (words - 1).bit_length())


def defines(capacity: int = LEAST_WORDS) -> dict[str, int]:
    """The preprocessor definitions with which a kernel is compiled for tracing."""
    return {"DRVFUSE_TRACE": 1, "DRVFUSE_TRACE_HEADER": HEADER_WORDS, "DRVFUSE_TRACE_WORDS": capacity}
