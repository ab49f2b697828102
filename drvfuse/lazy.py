# SPDX-License-Identifier: Apache-2.0
"""Packages that load each public name on first use.

The stub `__init__.pyi` next to a package's `__init__.py` is the only list of its public names. Type checkers and
editors read it like any stub; `attach` reads the same lines when the package is imported. Each line has one of two
forms:

    from .module import name as public
    from . import module as public
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable


def attach(package: str, init: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for the package `package`, whose `__init__.py` is the file
    `init`."""
    homes: dict[str, tuple[str, str]] = {}
    with open(f"{init}i", encoding="utf-8") as stub:
        for line in stub:
            match line.split():
                case ["from", ".", "import", module, "as", public]:
                    homes[public] = (f".{module}", "")
                case ["from", module, "import", name, "as", public]:
                    homes[public] = (module, name)
    namespace = sys.modules[package].__dict__

    def load(public: str) -> object:
        if public not in homes:
            said = f"module {package!r} has no attribute {public!r}"
            raise AttributeError(said, name=public, obj=sys.modules[package])
        home, name = homes[public]
        module = importlib.import_module(home, package)
        value = namespace[public] = getattr(module, name) if name else module
        return value

    def names() -> list[str]:
        return sorted({*homes, *(name for name in namespace if name.startswith("__"))})

    return load, names, sorted(homes)
