# SPDX-License-Identifier: Apache-2.0
"""What cuda.bindings have of their own: enums and structs, which the emulated driver takes and returns, and the names
of all functions. Importing them needs no driver.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ..errors import DriverUnavailable

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


NAMES = [name for name in dir(T) if not name.startswith("_") and not isinstance(getattr(T, name), ModuleType)]
"""The public names of cuda.bindings.driver."""
FUNCTIONS = {
    name: getattr(T, name) for name in NAMES if name.startswith("cu") and not isinstance(getattr(T, name), type)
}
"""Its functions, as they are now: a program that runs on the emulated driver has others there."""
