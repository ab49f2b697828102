# SPDX-License-Identifier: Apache-2.0
"""The fault that kernels are compiled with: none, except in `drvfuse check` and in tests. See cu/common/faults.cuh."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_planted = ""


def planted() -> str:
    """The name of the fault that kernels compiled now get, or ""."""
    return _planted


def defines(fault: str) -> dict[str, str | int]:
    """The definitions that plant `fault`."""
    return {"DRVFUSE_FAULT": f'"{fault}"'} if fault else {}


@contextlib.contextmanager
def in_kernels(fault: str) -> Iterator[None]:
    """A block in which the kernels of calls that are made or prepared, by any thread, get `fault`."""
    global _planted
    before, _planted = _planted, fault
    try:
        yield
    finally:
        _planted = before
