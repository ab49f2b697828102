# SPDX-License-Identifier: Apache-2.0
"""The compile-time definitions of kernels."""

from __future__ import annotations

from ..dtypes import DType

Defines = tuple[tuple[str, str | int], ...]


def defines(**values: DType | str | int) -> Defines:
    """A macro `DRVFUSE_<NAME>` for each argument: the C++ type of a dtype, 0 or 1 for a bool, else the value itself."""
    return tuple(
        (
            f"DRVFUSE_{name.upper()}",
            value.cxx if isinstance(value, DType) else value if isinstance(value, str) else int(value),
        )
        for name, value in values.items()
    )
