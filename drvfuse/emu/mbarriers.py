# SPDX-License-Identifier: Apache-2.0
"""The word of an mbarrier in plain text (its layout is that of `runtime_mbarrier.cuh`)."""

from __future__ import annotations

from . import abi

_COUNT = (1 << 20) - 1
_EXPECTED, _BYTES = 20, 40
_SIGN = 1 << 20
_VALID = 1 << 63


def told(opcode: str, word: int) -> str | None:
    """What the word that an instruction has found says of its phase; None if that is no mbarrier (any more)."""
    if not opcode.startswith("mbarrier.") or not word & _VALID:
        return None
    pending, expected = word & _COUNT, word >> _EXPECTED & _COUNT
    nbytes = ((word >> _BYTES & 2 * _SIGN - 1) ^ _SIGN) - _SIGN
    coming = f"{nbytes} bytes pending" if nbytes >= 0 else f"{-nbytes} bytes more than expected"
    return f"parity {word >> abi.MBARRIER_PARITY & 1}, {pending} of {expected} arrivals pending, {coming}"
