# SPDX-License-Identifier: Apache-2.0
"""What options of `drvfuse bench` mean, and the drivers that it may use."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from ..errors import ArgumentError, DriverUnavailable, Unsupported, shown
from ..ops.call.options import one_of
from ..plans.rows import MAX_COLUMNS
from ..runtime.multicast_support import VETOES, refuse_vetoed
from .shapes import matrix_shape

Started = tuple[str, Iterator[dict[str, Any]], int]
"""The heading of the table, an iterator over its results, which measures each when it is requested, and their number.
"""

_Shape = TypeVar("_Shape", bound=tuple[int, ...])


def shapes_of(
    arguments: argparse.Namespace, parse: Callable[[str], _Shape], default: Sequence[_Shape]
) -> Sequence[_Shape]:
    return [parse(text) for text in arguments.shape] if arguments.shape else default


@contextlib.contextmanager
def real(multicast: bool = False) -> Iterator[None]:
    if multicast:
        refuse_vetoed()
    else:
        os.environ.update(VETOES)  # set before a peer is loaded, which could create multicast objects
    try:
        yield
    except DriverUnavailable as error:  # replaced, as its message advises the use of emulated GPUs
        why = "a benchmark needs a GPU, as emulated times mean nothing; `drvfuse doctor` says what is missing"
        raise DriverUnavailable(why) from error


def row_shapes(arguments: argparse.Namespace, default: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    """The shapes that were given. Raises ArgumentError if a row is too long for a norm."""
    shapes = shapes_of(arguments, lambda text: matrix_shape(text, "--shape"), default)
    for rows, columns in shapes:
        if columns > MAX_COLUMNS:
            raise ArgumentError("--shape", shown(f"{rows}x{columns}"), f"of at most {MAX_COLUMNS} columns")
    return shapes


def ops_of(arguments: argparse.Namespace, known: Iterable[str]) -> list[str]:
    """The ops that `--op` selects, by the names of their benchmarks; without the option all of `known`."""
    names = {op.replace("_", "-"): op for op in known}
    return [names[one_of("--op", name, tuple(names))] for name in arguments.op or names]


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def require(option: str, package: str) -> None:
    if not installed(package):
        raise Unsupported(f"{option} needs the package {package}, which is not installed")
