# SPDX-License-Identifier: Apache-2.0
"""The state of an mbarrier as text, from its word (`native/mbarrier.cuh`)."""

from __future__ import annotations

from .. import abi


def describe(opcode: str, word: int) -> str | None:
    """The state of the mbarrier that an instruction (`opcode`) has read as `word`. None if the word is no mbarrier."""
    if not _is_mbarrier(opcode, word):
        return None
    arrivals, expected, nbytes = _pending(word)
    rest = f"{nbytes} bytes pending" if nbytes >= 0 else f"{-nbytes} bytes more than expected"
    return f"parity {word >> abi.MBARRIER_PARITY_BIT & 1}, {arrivals} of {expected} arrivals pending, {rest}"


def brief(opcode: str, word: int) -> str | None:
    """The result of `describe` in a short form, for a cell of a table, without the parity. The number of bytes is
    negative if bytes arrived before they were expected.
    """
    if not _is_mbarrier(opcode, word):
        return None
    arrivals, expected, nbytes = _pending(word)
    return f"pending {arrivals} of {expected} arrivals, {nbytes} B"


def _is_mbarrier(opcode: str, word: int) -> bool:
    return opcode.startswith("mbarrier.") and bool(word & abi.MBARRIER_VALID)


def _pending(word: int) -> tuple[int, int, int]:
    """(arrivals still to come, arrivals of each phase, bytes still to come)."""
    nbytes, sign = word >> abi.MBARRIER_BYTES_SHIFT & abi.MBARRIER_BYTES_MASK, abi.MBARRIER_BYTES_MASK // 2 + 1
    expected = word >> abi.MBARRIER_EXPECTED_SHIFT & abi.MBARRIER_COUNT_MASK
    return word & abi.MBARRIER_COUNT_MASK, expected, (nbytes ^ sign) - sign
