# SPDX-License-Identifier: Apache-2.0
"""The linker of a program (cuLinkCreate): the modules that were added to it, and the image that it produces."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

from ....ptx.linker import Unit
from ..objects import Object


@dataclass(eq=False)
class Link(Object):
    """The state of a linker (CUlinkState). `units` are the modules that were added, and `log` is the buffer for its
    errors. `image` is the result, which lives as long as this object.
    """

    log: Any
    units: list[Unit] = field(default_factory=list)
    image: ctypes.Array[ctypes.c_char] | None = None
