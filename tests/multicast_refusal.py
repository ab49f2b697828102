# SPDX-License-Identifier: Apache-2.0
"""Keeps the test suite from creating a multicast object on the CUDA driver, whatever a test asks for.

Such an object depends on the fabric manager of the whole host, and one that goes wrong can take its GPUs out of
service. The emulated driver is not touched: its functions are its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import pytest
from cuda.bindings import driver as bindings

from drvfuse.runtime.driver import Driver


def refusal(*args: Any, **kwargs: Any) -> NoReturn:
    """What stands for `cuMulticastCreate` of the CUDA driver. Its exception is no Exception, so nothing swallows it."""
    pytest.fail("the test suite creates no multicast object on the CUDA driver (DRVFUSE_TEST_MULTICAST is not 1)")


def forbid() -> None:
    """Put the refusal into cuda.bindings, and into the gate of every CUDA driver, one of a stand-in's functions too."""
    bindings.cuMulticastCreate = refusal
    original = Driver._raw

    def raw(self: Driver, name: str) -> Callable[..., Any]:
        return refusal if name == "cuMulticastCreate" and self.machine is None else original(self, name)

    Driver._raw = raw  # type: ignore[method-assign]
