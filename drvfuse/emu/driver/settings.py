# SPDX-License-Identifier: Apache-2.0
"""Settings of a context, a kernel or a device that are stored and returned, and have no effect on the emulation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..bindings import R, T
from ..machine.objects import Device, Function, Object
from ..machine.process.process import Process
from .entry import check, entry
from .function import function_of

_BANKS = T.CUsharedconfig.CU_SHARED_MEM_CONFIG_FOUR_BYTE_BANK_SIZE


@dataclass(eq=False)
class Notification(Object):
    """A callback for events of a device. It is never called, as these events do not occur on an emulated device."""

    device: Device


# Contexts ------------------------------------------------------------------------------------------------------------


@entry()
def cuCtxSetFlags(proc: Process, flags: int) -> None:
    check(0 <= flags < 0x100)
    proc.current().flags = flags


@entry()
def cuCtxSetCacheConfig(proc: Process, config: Any) -> None:
    proc.current().cache_config = int(config)


@entry(1)
def cuCtxGetCacheConfig(proc: Process) -> Any:
    return T.CUfunc_cache(proc.current().cache_config)


@entry()
def cuCtxSetSharedMemConfig(proc: Process, config: Any) -> None:
    """Does nothing, as on all devices on which the banks of shared memory have a fixed width."""
    proc.current()


@entry(1)
def cuCtxGetSharedMemConfig(proc: Process) -> Any:
    proc.current()
    return _BANKS


@entry()
def cuCtxResetPersistingL2Cache(proc: Process) -> None:
    proc.current()


@entry(1)
def cuCtxGetExecAffinity(proc: Process, typename: Any) -> Any:
    """Returns all multiprocessors of the device, as no context is restricted."""
    proc.current()
    check(typename == T.CUexecAffinityType.CU_EXEC_AFFINITY_TYPE_SM_COUNT, R.CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY)
    found = T.CUexecAffinityParam()
    found.type = typename
    found.param.smCount.val = proc.machine.sm_count
    return found


@entry()
def cuFlushGPUDirectRDMAWrites(proc: Process, target: Any, scope: Any) -> None:
    """Does nothing, as no other device of the host writes to memory of an emulated device."""
    proc.current()


# Kernels -------------------------------------------------------------------------------------------------------------


@entry()
def cuFuncSetCacheConfig(proc: Process, hfunc: Any, config: Any) -> None:
    function_of(proc, hfunc)


@entry()
def cuFuncSetSharedMemConfig(proc: Process, hfunc: Any, config: Any) -> None:
    function_of(proc, hfunc)


@entry()
def cuKernelSetCacheConfig(proc: Process, kernel: Any, config: Any, dev: Any) -> None:
    proc.get(kernel, Function)
    proc.device(dev)


# Devices -------------------------------------------------------------------------------------------------------------


@entry(1)
def cuDeviceRegisterAsyncNotification(proc: Process, device: Any, callbackFunc: int, userData: int) -> Any:
    check(callbackFunc)
    return T.CUasyncCallbackHandle(proc.add(Notification(proc.device(device))).handle)


@entry()
def cuDeviceUnregisterAsyncNotification(proc: Process, device: Any, callback: Any) -> None:
    found = proc.get(callback, Notification, R.CUDA_ERROR_INVALID_VALUE)
    check(found.device is proc.device(device))
    proc.remove(found)
