# SPDX-License-Identifier: Apache-2.0
"""The fault that is planted in kernels (cu/common/faults.cuh). Only `drvfuse check` and tests plant one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_planted = ""


def planted() -> str:
    """Return the name of the fault that is planted in kernels of calls made now; "" for none."""
    return _planted


def defines(fault: str) -> dict[str, str | int]:
    """Return the definitions with which a kernel is compiled so that it has `fault`."""
    return {"DRVFUSE_FAULT": f'"{fault}"'} if fault else {}


@contextlib.contextmanager
def in_kernels(fault: str) -> Iterator[None]:
    """A context in which the kernels of all calls that are made or prepared, by any thread, have `fault`."""
    global _planted
    before, _planted = _planted, fault
    try:
        yield
    finally:
        _planted = before
