# SPDX-License-Identifier: Apache-2.0
"""Makes a process use the emulated driver if a program on the emulated driver has started it.

Python imports this module when it starts, before any module of the program. The module removes its folder from
`sys.path`, and imports the `sitecustomize` that this folder has hidden. When the process imports cuda.bindings, it is
switched to the emulated driver. In a process that never imports cuda.bindings, this module does not import drvfuse.
"""

import builtins
import importlib
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

_HERE = Path(__file__).resolve().parent


class _Switch:
    """An import finder that finds `cuda.bindings` as usual. When `cuda.bindings` has been imported, the finder switches
    this process to the emulated driver.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "cuda.bindings":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _switch()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _switch() -> None:
    # If drvfuse is not installed, the parent has imported it from a folder that is not in the path of this process.
    if importlib.util.find_spec("drvfuse") is None:
        sys.path.append(str(_HERE.parents[3]))
    # Python's own `__import__` is put back during the switch, as the program may have replaced it.
    program, builtins.__import__ = builtins.__import__, importlib.__import__
    try:
        from drvfuse.emu.program.children import switch

        switch()
    finally:
        builtins.__import__ = program


def _import_hidden() -> None:
    """Import the `sitecustomize` that this module hides, if there is one."""
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _HERE]
sys.meta_path.insert(0, _Switch())
_import_hidden()
