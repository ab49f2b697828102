# SPDX-License-Identifier: Apache-2.0
"""Python processes that tests start import this module before all others. In them it makes cuMulticastCreate fail, as
`multicast_refusal` does in the test process, and divides the GPU (`divided_gpu`) if DRVFUSE_TEST_DIVIDE_GPU is set."""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn


def refusal(*args: Any, **kwargs: Any) -> NoReturn:
    """Replaces `cuMulticastCreate` of the CUDA driver. SystemExit is not an Exception, so no handler swallows it."""
    raise SystemExit("the test suite creates no multicast object on the CUDA driver (DRVFUSE_TEST_MULTICAST is not 1)")


class _Bindings:
    """An import finder that finds `cuda.bindings.driver` as usual, and changes the module once it is loaded."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == "cuda.bindings.driver" else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            module.cuMulticastCreate = refusal  # type: ignore[attr-defined]
            if os.environ.get("DRVFUSE_TEST_DRIVER") == "cuda" and "DRVFUSE_TEST_DIVIDE_GPU" in os.environ:
                sys.path.append(str(Path(__file__).parents[1]))
                import divided_gpu

                divided_gpu.divide(os.environ["DRVFUSE_TEST_DIVIDE_GPU"])

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Bindings)
