# SPDX-License-Identifier: Apache-2.0
"""The factory of a process's driver API. The functions of the API are in `emu.driver`, which the package `emu.machine`
may not import; so the package `emu` sets the factory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .process import Process

make: Callable[[Process], Any]
"""Makes the driver API of a process, an object whose attributes are the functions. `drvfuse/emu/__init__.py` sets it.
"""

attach: Callable[[str], Any]
"""Attaches to the machine that another process serves at an address, and returns an object with the methods of a
`Machine` that other packages of drvfuse use. `drvfuse/emu/__init__.py` sets it too.
"""
