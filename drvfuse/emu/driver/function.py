# SPDX-License-Identifier: Apache-2.0
"""Kernels: their attributes, parameters and loading state."""

from __future__ import annotations

from typing import Any

from ..bindings import R, T
from ..machine.objects import Function
from ..machine.process.process import Process
from ..machine.run import residency
from ..machine.run.work import Dim
from .entry import check, entry
from .module import function_of

_F = T.CUfunction_attribute
NON_PORTABLE = _F.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
_REQUIRED_CLUSTER = (
    _F.CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH,
    _F.CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT,
    _F.CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH,
)


def max_dynamic(proc: Process, function: Function) -> int:
    """The most dynamic shared memory, in bytes, that a launch of a kernel may have."""
    key = int(_F.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
    return function.attributes.get(key, max(0, residency.SHARED_DEFAULT - function.code.shared_static))


def required_cluster(function: Function) -> Dim | None:
    """The shape of clusters that the code of a kernel, or its attributes, require. None if they require none."""
    if function.code.reqncta:
        x, y, z = function.code.reqncta
    else:
        x, y, z = (function.attributes.get(int(attribute), 0) for attribute in _REQUIRED_CLUSTER)
    return (x, y, z) if x and y and z else None


def _attribute(proc: Process, function: Function, attrib: Any, own: dict[int, int]) -> int:
    check(attrib != _F.CU_FUNC_ATTRIBUTE_MAX)
    code = function.code
    version = proc.machine.capability[0] * 10 + proc.machine.capability[1]
    values = {
        _F.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: residency.max_threads(function),
        _F.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: code.shared_static,
        _F.CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES: sum(v.size for v in function.image.globals if v.space == "const"),
        _F.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES: code.local_bytes,
        _F.CU_FUNC_ATTRIBUTE_NUM_REGS: residency.registers(proc.machine.limits, function),
        _F.CU_FUNC_ATTRIBUTE_PTX_VERSION: version,
        _F.CU_FUNC_ATTRIBUTE_BINARY_VERSION: version,
        _F.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: max(0, residency.SHARED_DEFAULT - code.shared_static),
        _F.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: -1,
        _F.CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET: int(code.needs_cluster),
        **dict(zip(_REQUIRED_CLUSTER, code.reqncta or (0, 0, 0), strict=True)),
    }
    return own.get(int(attrib), values.get(attrib, 0))


def _set_attribute(proc: Process, function: Function, attrib: Any, value: int, own: dict[int, int]) -> None:
    if attrib == _F.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
        check(0 <= value <= proc.machine.limits.shared_block - function.code.shared_static)
    elif attrib == _F.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
        check(-1 <= value <= 100)
    elif attrib in _REQUIRED_CLUSTER:
        check(not function.code.reqncta, R.CUDA_ERROR_NOT_PERMITTED)
        check(value >= 0)
    elif attrib == NON_PORTABLE:
        check(value in (0, 1))
    else:
        check(attrib == _F.CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE)
    own[int(attrib)] = value


@entry(1)
def cuFuncGetAttribute(proc: Process, attrib: Any, hfunc: Any) -> int:
    function = function_of(proc, hfunc)
    return _attribute(proc, function, attrib, function.attributes)


@entry()
def cuFuncSetAttribute(proc: Process, hfunc: Any, attrib: Any, value: int) -> None:
    function = function_of(proc, hfunc)
    _set_attribute(proc, function, attrib, value, function.attributes)


@entry(1)
def cuFuncGetName(proc: Process, hfunc: Any) -> bytes:
    check(hfunc)
    return function_of(proc, hfunc).name.encode()


@entry(1)
def cuFuncGetModule(proc: Process, hfunc: Any) -> Any:
    module = function_of(proc, hfunc).module
    assert module is not None
    return T.CUmodule(module.handle)


@entry()
def cuFuncLoad(proc: Process, function: Any) -> None:
    """Does nothing: modules are loaded eagerly."""
    function_of(proc, function)


@entry(1)
def cuFuncIsLoaded(proc: Process, function: Any) -> Any:
    function_of(proc, function)
    return T.CUfunctionLoadingState.CU_FUNCTION_LOADING_STATE_LOADED


@entry(2)
def cuFuncGetParamInfo(proc: Process, func: Any, paramIndex: int) -> tuple[int, int]:
    return _param(function_of(proc, func), paramIndex)


@entry(1, bindings=13)
def cuFuncGetParamCount(proc: Process, func: Any) -> int:
    return len(function_of(proc, func).code.params)


def _param(function: Function, index: int) -> tuple[int, int]:
    params = function.code.params
    check(0 <= index < len(params))
    return params[index].offset, params[index].size


@entry(2)
def cuKernelGetParamInfo(proc: Process, kernel: Any, paramIndex: int) -> tuple[int, int]:
    return _param(proc.get(kernel, Function), paramIndex)


@entry(1)
def cuKernelGetAttribute(proc: Process, attrib: Any, kernel: Any, dev: Any) -> int:
    found, device = proc.get(kernel, Function), proc.device(dev)
    return _attribute(proc, found, attrib, found.on_device.get(device.index, {}))


@entry()
def cuKernelSetAttribute(proc: Process, attrib: Any, val: int, kernel: Any, dev: Any) -> None:
    found, device = proc.get(kernel, Function), proc.device(dev)
    _set_attribute(proc, found, attrib, val, found.on_device.setdefault(device.index, {}))
