# SPDX-License-Identifier: Apache-2.0
"""What cuda.bindings have of their own: enums and structs, which the emulated driver takes and returns, and functions
that it has not. Importing them needs no driver.
"""

from __future__ import annotations

from typing import Any

from ..errors import DriverUnavailable, Unsupported

try:
    from cuda.bindings import __version__ as _version  # not `import cuda.bindings`: see program/in_children
    from cuda.bindings import driver as _driver
except ImportError as error:  # pragma: no cover - the package is installed wherever the tests run
    raise DriverUnavailable(
        "the emulated driver returns cuda-python's types, and cuda.bindings is not installed: "
        "pip install 'drvfuse[cu12]' or 'drvfuse[cu13]'"
    ) from error

T: Any = _driver
R: Any = _driver.CUresult
MAJOR = int(_version.split(".")[0])
"""Major version of the installed bindings; in 13 some functions have another signature than in 12."""


def other(name: str) -> Any:
    """What cuda.bindings.driver has by a name that is no emulated function: a function raises Unsupported when called.

    Raises AttributeError for a name that it does not have.
    """
    value = getattr(T, name)
    if name.startswith("cu") and callable(value) and not isinstance(value, type):

        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise Unsupported(f"{name} is not part of the emulated driver")

        return refuse
    return value
