# SPDX-License-Identifier: Apache-2.0
"""The compile-time definitions of kernels."""

from __future__ import annotations

from ..dtypes import DType

Defines = tuple[tuple[str, str | int], ...]


def defines(**values: DType | str | int) -> Defines:
    """`DRVFUSE_` and each name in capitals, as its value: of an element type the C++ type, of a flag 0 or 1."""
    return tuple(
        (
            f"DRVFUSE_{name.upper()}",
            value.cxx if isinstance(value, DType) else value if isinstance(value, str) else int(value),
        )
        for name, value in values.items()
    )
