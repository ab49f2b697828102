# SPDX-License-Identifier: Apache-2.0
"""Memory that the engine lends to launches: frames of threads, shared and local memory, parameters."""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import abi
from ...abi import Kind
from ...space import pages
from ...space.window import Window

_KEPT = 64 << 20  # larger pieces are freed when they are given back


class LaunchMemory:
    """Pieces of memory that launches borrow. Pieces that were given back are kept, by size, and lent again.

    Memory of the kind NONE, such as the frames of threads, is ordinary host memory. All other memory is in the window.
    """

    def __init__(self, window: Window) -> None:
        self._window = window
        self._free: dict[tuple[Kind, int], list[Any]] = {}

    def take(self, kind: Kind, nbytes: int) -> tuple[int, Any]:
        """Lend at least `nbytes` of a kind of memory (`Kind.NONE`: outside of the window). Returns its address, and a
        ticket with which `give` gives it back.
        """
        size = max(4096, 1 << (nbytes - 1).bit_length())
        kept = self._free.get((kind, size))
        if kept:
            piece = kept.pop()
        elif kind is Kind.NONE:
            piece = zeroed(size)
        else:
            piece = self._carve(kind, size)
        address = piece if isinstance(piece, int) else piece.ctypes.data
        return address, (kind, size, piece)

    def give(self, ticket: Any) -> None:
        kind, size, piece = ticket
        if size <= _KEPT:
            self._free.setdefault((kind, size), []).append(piece)
        elif kind is not Kind.NONE:
            self._window.free(piece)

    def _carve(self, kind: Kind, size: int) -> int:
        """The address of `size` bytes of the window. A small piece is cut from a new granule, and the rest
        of the granule is kept for later calls.
        """
        if size >= 1 << abi.GRANULE_SHIFT:
            return self._window.scratch(size, kind)
        base = self._window.scratch(1 << abi.GRANULE_SHIFT, kind)
        pieces = range(base, base + (1 << abi.GRANULE_SHIFT), size)
        self._free.setdefault((kind, size), []).extend(reversed(pieces[1:]))
        return base


def zeroed(nbytes: int) -> np.ndarray:
    return np.frombuffer(pages.arena(nbytes), np.uint8)
