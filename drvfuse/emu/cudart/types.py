# SPDX-License-Identifier: Apache-2.0
"""cuda.bindings.runtime, for its types and signatures. Importing it needs no driver."""

from __future__ import annotations

from typing import Any

from cuda.bindings import runtime as _runtime

RT: Any = _runtime


def is_function(name: str, value: Any) -> bool:
    """True if `value`, the member `name` of a module of the bindings, is a function of the API."""
    return name.startswith("cu") and callable(value) and not isinstance(value, type)
