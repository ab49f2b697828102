# SPDX-License-Identifier: Apache-2.0
"""The factory of a process's driver API. The API's functions are in a room above this one, so the package `emu` sets
the factory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .process import Process

make: Callable[[Process], Any]
"""The API of a process, as an object whose attributes are the functions. Set by `drvfuse/emu/__init__.py`."""

attach: Callable[[str], Any]
"""The machine that another process serves at an address, as an object with what others use of a `Machine`. Set there
too.
"""
