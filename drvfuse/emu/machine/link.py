# SPDX-License-Identifier: Apache-2.0
"""Linking: modules that are put together, and what came of it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

from ...ptx.linker import Unit
from .objects import Object


@dataclass(eq=False)
class Link(Object):
    """A link in progress. `log` is where its errors go; `image` what it gave, which lives as long as this."""

    log: Any
    units: list[Unit] = field(default_factory=list)
    image: ctypes.Array[ctypes.c_char] | None = None
