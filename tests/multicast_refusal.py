# SPDX-License-Identifier: Apache-2.0
"""Keeps the test suite from creating a multicast object on the CUDA driver, whatever a test asks for.

Such an object depends on the fabric manager of the whole host, and one that goes wrong can take its GPUs out of
service. The emulated driver is not affected, as it has functions of its own.

Processes that tests start get a refusal too, by a directory in their PYTHONPATH: pools and workers inherit it, and
`subprocess` adds it to an environment that a test has made. Interpreters that ignore PYTHONPATH (-I, -E) go without it.
"""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any, NoReturn

import pytest
from cuda.bindings import driver as bindings

from drvfuse.runtime.driver import Driver

IN_CHILDREN = str(Path(__file__).with_name("in_children"))
"""The directory of the `sitecustomize` that installs the refusal in processes that tests start."""


def refusal(*args: Any, **kwargs: Any) -> NoReturn:
    """Replaces `cuMulticastCreate` of the CUDA driver. What it raises is not an Exception, so no handler swallows
    it."""
    pytest.fail("the test suite creates no multicast object on the CUDA driver (DRVFUSE_TEST_MULTICAST is not 1)")


def forbid() -> None:
    """Make cuMulticastCreate fail in three places: in cuda.bindings; in every `Driver` object named "cuda", also if it
    has a stand-in for the CUDA driver; and in the bindings of every process that is started from now on."""
    bindings.cuMulticastCreate = refusal
    original = Driver.raw

    def raw(self: Driver, name: str) -> Callable[..., Any]:
        return refusal if name == "cuMulticastCreate" and self.machine is None else original(self, name)

    Driver.raw = raw  # type: ignore[method-assign]
    _forbid_in_child(os.environ)
    start = subprocess.Popen.__init__

    @functools.wraps(start)
    def started(self: Any, *args: Any, env: Any = None, **options: Any) -> None:
        start(self, *args, env=env if env is None else _forbid_in_child(dict(env)), **options)

    subprocess.Popen.__init__ = started  # type: ignore[method-assign]


def _forbid_in_child(environment: MutableMapping[str, str]) -> MutableMapping[str, str]:
    """Put `IN_CHILDREN` first in PYTHONPATH, so that its `sitecustomize` is imported and no other. Return
    `environment`."""
    others = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", IN_CHILDREN)]
    environment["PYTHONPATH"] = os.pathsep.join([IN_CHILDREN, *others])
    return environment
