# SPDX-License-Identifier: Apache-2.0
"""A link in progress: its modules, and the image that it produces."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

from ...ptx.linker import Unit
from .objects import Object


@dataclass(eq=False)
class Link(Object):
    """A link in progress. `log` is the buffer for its errors; `image` is the result and lives as long as the
    link.
    """

    log: Any
    units: list[Unit] = field(default_factory=list)
    image: ctypes.Array[ctypes.c_char] | None = None
