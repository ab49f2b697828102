# SPDX-License-Identifier: Apache-2.0
"""Readers of the options `--shape` and `--shapes`, which raise ArgumentError."""

from __future__ import annotations

from ..errors import ArgumentError, shown


def matrix_shape(text: str, option: str = "--shape") -> tuple[int, int]:
    """Read rows and columns from the value of `option`, such as "8192x4096"."""
    rows, columns = _numbers(option, text, "rows x columns, such as 8192x4096", 2)
    return rows, columns


def gemv_shape(text: str) -> tuple[int, int, int]:
    """Read N, K and the number of normed columns from the value of `--shape`. Without a number of normed columns it is
    3 N / 4.
    """
    n, k, *rest = _numbers("--shape", text, "N x K or N x K x normed columns, such as 2112x7168x1536", 2, 3)
    n_normed = rest[0] if rest else 3 * n // 4
    if n_normed > n:
        raise ArgumentError("--shape", shown(text), f"of at most N = {n} normed columns")
    return n, k, n_normed


def _numbers(option: str, text: str, expected: str, *counts: int) -> list[int]:
    parts = text.lower().split("x")
    if len(parts) not in counts or not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise ArgumentError(option, shown(text), expected)
    return [int(part) for part in parts]
