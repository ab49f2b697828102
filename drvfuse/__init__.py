# SPDX-License-Identifier: Apache-2.0
"""drvfuse: fused multi-GPU collectives on the CUDA driver API, and an emulated driver that runs the same PTX on a CPU.

Importing this package opens no CUDA library and imports no submodule; each public name loads its module on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "Array": "runtime.array",
    "Device": "runtime.device",
    "Epilogue": "ops.collectives.epilogue",
    "Event": "runtime.stream",
    "Graph": "runtime.graph",
    "Group": "comm.group",
    "Kernel": "runtime.kernel",
    "Launch": "runtime.kernel",
    "Module": "runtime.kernel",
    "PDLLevel": "ops.call.options",
    "Rank": "comm.group",
    "Replicated": "ops.collectives.epilogue",
    "Stream": "runtime.stream",
    "SymmetricBuffer": "runtime.memory",
    "Trace": "trace.buffer",
    "allreduce": "ops.collectives.allreduce",
    "allreduce_rmsnorm_fp8": "ops.collectives.allreduce_rmsnorm_fp8",
    "check_device": "ops.call.scratch",
    "compile": "runtime.kernel",
    "device": "runtime.device",
    "fp8_add_Ifp_Ifp_Ofp_Og16": "ops.coat.group_scales",
    "fp8_add_rmsnorm_pg2pg_forward": "ops.coat.group_scales",
    "fp8_division": "ops.coat.division",
    "fp8_division_transpose": "ops.coat.division",
    "fp8_layernorm_noparam_backward": "ops.coat.layernorm",
    "fp8_layernorm_noparam_forward": "ops.coat.layernorm",
    "fp8_layernorm_param_backward": "ops.coat.layernorm",
    "fp8_layernorm_param_forward": "ops.coat.layernorm",
    "fp8_rmsnorm_backward": "ops.coat.rmsnorm_backward",
    "fp8_rmsnorm_forward": "ops.coat.rmsnorm_forward",
    "fp8_rmsnorm_pg2pg_forward": "ops.coat.group_scales",
    "fp8_workspace_bytes": "ops.coat.rmsnorm_backward",
    "float32": "ops.collectives.epilogue",
    "gemv_partial_norm": "ops.gemv.gemv_partial_norm",
    "int32": "ops.collectives.epilogue",
    "last_calls": "runtime.driver",
    "view": "runtime.array",
}
_SUBMODULES = {
    "config": "config",
    "dtypes": "dtypes",
    "emu": "emu",
    "errors": "errors",
    "reference": "reference",
    "reference_gemv": "reference.gemv",
}

__all__ = [
    "Array",
    "Device",
    "Epilogue",
    "Event",
    "Graph",
    "Group",
    "Kernel",
    "Launch",
    "Module",
    "PDLLevel",
    "Rank",
    "Replicated",
    "Stream",
    "SymmetricBuffer",
    "Trace",
    "allreduce",
    "allreduce_rmsnorm_fp8",
    "check_device",
    "compile",
    "config",
    "device",
    "dtypes",
    "emu",
    "errors",
    "float32",
    "fp8_add_Ifp_Ifp_Ofp_Og16",
    "fp8_add_rmsnorm_pg2pg_forward",
    "fp8_division",
    "fp8_division_transpose",
    "fp8_layernorm_noparam_backward",
    "fp8_layernorm_noparam_forward",
    "fp8_layernorm_param_backward",
    "fp8_layernorm_param_forward",
    "fp8_rmsnorm_backward",
    "fp8_rmsnorm_forward",
    "fp8_rmsnorm_pg2pg_forward",
    "fp8_workspace_bytes",
    "gemv_partial_norm",
    "int32",
    "last_calls",
    "reference",
    "reference_gemv",
    "view",
]

if TYPE_CHECKING:
    from . import config, dtypes, emu, errors, reference
    from .comm.group import Group, Rank
    from .ops.call.options import PDLLevel
    from .ops.call.scratch import check_device
    from .ops.coat.division import fp8_division, fp8_division_transpose
    from .ops.coat.group_scales import (
        fp8_add_Ifp_Ifp_Ofp_Og16,
        fp8_add_rmsnorm_pg2pg_forward,
        fp8_rmsnorm_pg2pg_forward,
    )
    from .ops.coat.layernorm import (
        fp8_layernorm_noparam_backward,
        fp8_layernorm_noparam_forward,
        fp8_layernorm_param_backward,
        fp8_layernorm_param_forward,
    )
    from .ops.coat.rmsnorm_backward import fp8_rmsnorm_backward, fp8_workspace_bytes
    from .ops.coat.rmsnorm_forward import fp8_rmsnorm_forward
    from .ops.collectives.allreduce import allreduce
    from .ops.collectives.allreduce_rmsnorm_fp8 import allreduce_rmsnorm_fp8
    from .ops.collectives.epilogue import Epilogue, Replicated, float32, int32
    from .ops.gemv.gemv_partial_norm import gemv_partial_norm
    from .reference import gemv as reference_gemv
    from .runtime.array import Array, view
    from .runtime.device import Device, device
    from .runtime.driver import last_calls
    from .runtime.graph import Graph
    from .runtime.kernel import Kernel, Launch, Module, compile
    from .runtime.memory import SymmetricBuffer
    from .runtime.stream import Event, Stream
    from .trace.buffer import Trace


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    elif name in _SUBMODULES:
        value = importlib.import_module(f".{_SUBMODULES[name]}", __name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
