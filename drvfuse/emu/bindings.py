# SPDX-License-Identifier: Apache-2.0
"""The enums and structs of cuda.bindings, which the emulated driver accepts and returns, and the names of the functions
of cuda.bindings. Importing this module needs no driver.
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
"""The major version of the installed bindings. Some functions have different signatures in 12 and 13."""


NAMES = [name for name in dir(T) if not name.startswith("_") and not isinstance(getattr(T, name), ModuleType)]
"""The public names of cuda.bindings.driver."""
FUNCTIONS = {
    name: getattr(T, name) for name in NAMES if name.startswith("cu") and not isinstance(getattr(T, name), type)
}
"""The original functions of cuda.bindings.driver, which `program.switch` may replace there later."""
