# SPDX-License-Identifier: Apache-2.0
"""The refusal of `multicast_refusal` for the Python processes that tests start, which import this before all else."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, NoReturn


def refusal(*args: Any, **kwargs: Any) -> NoReturn:
    """Replaces `cuMulticastCreate` of the CUDA driver. SystemExit is not an Exception, so no handler swallows it."""
    raise SystemExit("the test suite creates no multicast object on the CUDA driver (DRVFUSE_TEST_MULTICAST is not 1)")


class _Bindings:
    """Finds `cuda.bindings.driver` as usual, and puts the refusal into the module once it is loaded."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == "cuda.bindings.driver" else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            module.cuMulticastCreate = refusal  # type: ignore[attr-defined]

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Bindings)
