# SPDX-License-Identifier: Apache-2.0
"""Functions of the runtime that are one call of the driver.

Most functions are like `cudaStreamQuery(stream)`, which calls `cuStreamQuery(hStream)`. The driver's function has the
same name except for the prefix, or `RENAMED` gives its name. It has the same parameters in the same order, sometimes
followed by a context; the current context is then passed. `convert` converts arguments and results by their types in
the signatures and docstrings of cuda.bindings. If the emulated driver refuses a function, the function of the runtime
is refused too.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from ..bindings import T
from ..findings.reports import Report
from .convert import argument_maker, result_maker
from .state import Failed, Function, State
from .structs import NOT_SUPPORTED
from .types import RT

RENAMED = {
    "cudaDeviceFlushGPUDirectRDMAWrites": "cuFlushGPUDirectRDMAWrites",
    "cudaDeviceGetCacheConfig": "cuCtxGetCacheConfig",
    "cudaDeviceGetLimit": "cuCtxGetLimit",
    "cudaDeviceGetSharedMemConfig": "cuCtxGetSharedMemConfig",
    "cudaDeviceGetStreamPriorityRange": "cuCtxGetStreamPriorityRange",
    "cudaDeviceSetCacheConfig": "cuCtxSetCacheConfig",
    "cudaDeviceSetLimit": "cuCtxSetLimit",
    "cudaDeviceSetSharedMemConfig": "cuCtxSetSharedMemConfig",
    "cudaDeviceSynchronize": "cuCtxSynchronize",
    "cudaEventCreateWithFlags": "cuEventCreate",
    "cudaFreeAsync": "cuMemFreeAsync",
    "cudaGetDeviceCount": "cuDeviceGetCount",
    "cudaGetDeviceFlags": "cuCtxGetFlags",
    "cudaGraphInstantiateWithFlags": "cuGraphInstantiate",
    "cudaHostGetDevicePointer": "cuMemHostGetDevicePointer",
    "cudaHostGetFlags": "cuMemHostGetFlags",
    "cudaHostRegister": "cuMemHostRegister",
    "cudaHostUnregister": "cuMemHostUnregister",
    "cudaMallocFromPoolAsync": "cuMemAllocFromPoolAsync",
    "cudaStreamCreateWithFlags": "cuStreamCreate",
}
_DEVICE_ALONE = ("cuDevice", "cuDriver")
"""The prefixes of driver functions that need no context."""

_RETURNS = re.compile(r"\nReturns\n-+\n(.*?)(?:\n\S+[^\n]*\n---|\Z)", re.S)


def paired(name: str) -> Function:
    """The function `name` of the runtime, which calls its counterpart in the driver. If the driver has none with the
    same number of parameters (apart from a last one, `ctx`), the function is refused.
    """
    counterpart = RENAMED.get(name, "cu" + name.removeprefix("cuda"))
    real, other = getattr(RT, name), getattr(T, counterpart, None)
    outputs = results(real)
    signature = inspect.signature(real)
    parameters = list(signature.parameters.values())
    others = [] if other is None else list(inspect.signature(other).parameters.values())
    with_context = len(others) == len(parameters) + 1 and others[-1].name == "ctx"
    if other is None or not (with_context or len(others) == len(parameters)):
        return Function(name, refuse(name, signature), len(outputs), False)
    makers = [argument_maker(p.name, p.annotation, q.annotation) for p, q in zip(parameters, others, strict=False)]
    result_makers = [result_maker(text) for text in outputs]

    def call(state: State, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        made = [make(state, value) for make, value in zip(makers, bound.args, strict=True)]
        last = (state.context(),) if with_context else ()
        found = getattr(state.cu, counterpart)(*(argument.value for argument in made), *last)
        for argument in made:
            argument.finish()
        values = found if len(outputs) > 1 else (found,) * len(outputs)
        given = tuple(make(value) for make, value in zip(result_makers, values, strict=True))
        return given[0] if len(given) == 1 else given or None

    return Function(name, call, len(outputs), not counterpart.startswith(_DEVICE_ALONE))


def results(real: Any) -> list[str]:
    """The types that the docstring of `real`, a function of the bindings, names for its results, without the error
    code.
    """
    found = _RETURNS.search(real.__doc__ or "")
    names = [line for line in (found[1] if found else "").splitlines() if line and not line.startswith(" ")]
    return [line.partition(" : ")[2] or line for line in names[1:]]


NEWER = "it is newer than the functions that the emulated runtime has"
_REASONS = {
    r"Array|Mipmapped|Texture|Surface|GetChannelDesc": "arrays, textures and surfaces are not emulated",
    r"Graphics|VDPAU": "interoperability with graphics is not emulated",
    r"ExecutionCtx|GreenCtx": "green contexts are not emulated",
    r"Conditional": "conditional nodes of graphs are not emulated",
    r"GetKernel$": "functions of the host do not represent kernels here",
}


def reason(name: str) -> str:
    """The reason why a function is refused."""
    return next((why for pattern, why in _REASONS.items() if re.search(pattern, name)), NEWER)


def refuse(name: str, signature: inspect.Signature) -> Callable[..., Any]:
    """The replacement for a refused function. Each call fails with cudaErrorNotSupported. The machine gets a report of
    the first call, unless another process serves the machine.
    """

    def call(state: State, *args: Any, **kwargs: Any) -> Any:
        signature.bind(*args, **kwargs)
        process = getattr(state.driver, "process", None)  # None if another process serves the machine
        if process is not None:
            report = Report("unsupported", f"{name} is refused: {reason(name)}", process=process.title)
            with process.machine.lock:
                process.machine.report(report)
        raise Failed(NOT_SUPPORTED)

    return call
