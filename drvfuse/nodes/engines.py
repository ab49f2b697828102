# SPDX-License-Identifier: Apache-2.0
"""The engine that an argument `exchange` selects."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from ..errors import ArgumentError, Unsupported, foreign, shown
from .exchange import Exchange
from .in_process import InProcess

_MEMBERS = ("open", "check_captures", "all_gather", "all_reduce", "abort", "close", "name", "watched")


def _nccl() -> Exchange:
    from .nccl import Nccl

    return Nccl()


def _mpi() -> Exchange:
    from .mpi import Mpi

    return Mpi()


_ENGINES: dict[str, tuple[Callable[[], Exchange], str, str]] = {
    "nccl": (_nccl, "nccl", "drvfuse[nccl-cu12] or drvfuse[nccl-cu13]"),
    "mpi": (_mpi, "mpi4py", "drvfuse[mpi]"),
    "in_process": (InProcess, "drvfuse", ""),
}


def find_engine(exchange: Any, whole: bool, emulated: bool) -> Exchange:
    """The engine for a group on real or `emulated` GPUs. `whole` says that all ranks of the group are in this process.

    `exchange` is the name of an engine, an object with the methods of `Exchange`, or None. None means "in_process" if
    the group is whole, otherwise "nccl" (not on emulated GPUs) or "mpi", whichever is installed, in this order.
    Raises ArgumentError for any other value, and Unsupported if the package of the engine is not installed.
    """
    if exchange is None:
        if whole:
            return InProcess()
        names = [name for name in ("nccl", "mpi") if name != "nccl" or not emulated]
        usable = [name for name in names if _installed(name)]
        if not usable:
            remedies = " or ".join(f"{_ENGINES[name][2]}" for name in names)
            raise Unsupported(
                f"a group over several nodes needs an engine that exchanges between them: install {remedies}"
            )
        exchange = usable[0]
    check_engine(exchange)
    if isinstance(exchange, str):
        if exchange == "nccl" and emulated:
            raise Unsupported('exchange="nccl" needs real GPUs; on emulated ones use "mpi" or "in_process"')
        if not _installed(exchange):
            make, package, remedy = _ENGINES[exchange]
            raise Unsupported(f'exchange="{exchange}" needs the package {package}: install {remedy}')
        return _ENGINES[exchange][0]()
    found: Exchange = exchange
    return found


def check_engine(exchange: Any) -> None:
    """Raise ArgumentError for a value of `exchange` that no group accepts, however many nodes it has."""
    if isinstance(exchange, str) and exchange not in _ENGINES:
        names = [f'"{name}"' for name in _ENGINES]
        raise ArgumentError("exchange", shown(exchange), f"None, an Exchange, or one of {', '.join(names)}")
    if exchange is None or isinstance(exchange, str):
        return
    expected = "an object with the methods of drvfuse.nodes.exchange.Exchange"
    missing = foreign("exchange", expected, lambda: [name for name in _MEMBERS if not hasattr(exchange, name)])
    if missing:
        raise ArgumentError("exchange", f"{shown(exchange)} without {', '.join(missing)}", expected)


def _installed(name: str) -> bool:
    return find_spec(_ENGINES[name][1]) is not None
