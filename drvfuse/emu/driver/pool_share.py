# SPDX-License-Identifier: Apache-2.0
"""Memory pools that are passed to other processes by file descriptors, and memory in these pools."""

from __future__ import annotations

from typing import Any

from ..bindings import R, T
from ..findings.reports import Report
from ..machine.memory.exports import Export
from ..machine.objects import Pool, SharedPool
from ..machine.process.failure import Failure
from ..machine.process.process import Process
from .entry import check, entry, present
from .ipc import handle_of, item_of, own
from .pool import DESCRIPTOR, pool_of


@entry(1)
def cuMemPoolExportToShareableHandle(proc: Process, pool: Any, handleType: Any, flags: int) -> int:
    """Returns a new file descriptor of this operating-system process, which the caller closes. The descriptor keeps no
    memory alive.
    """
    found = pool_of(proc, pool)
    check(flags == 0 and not found.imported)
    check(handleType == DESCRIPTOR and found.handle_types == DESCRIPTOR, R.CUDA_ERROR_NOT_SUPPORTED)
    return proc.machine.mappables.descriptors.export(SharedPool(0, found.handle_types, found))


@entry(1)
def cuMemPoolImportFromShareableHandle(proc: Process, handle: Any, handleType: Any, flags: int) -> Any:
    """Makes a pool by which this process can open memory of a pool that another process has exported. The new
    pool cannot be used for allocations. The caller still owns the descriptor. At first only the device of the memory
    has access.
    """
    check(flags == 0)
    check(handleType == DESCRIPTOR, R.CUDA_ERROR_NOT_SUPPORTED)
    item = proc.machine.mappables.descriptors.find(handle)
    if not isinstance(item, SharedPool):
        text = f"{handle} is not a descriptor of a memory pool that was exported on this machine"
        raise Failure(R.CUDA_ERROR_INVALID_VALUE, Report("descriptor", text))
    made = Pool(item.pool.device, handle_types=item.handle_types, imported=True, origin=item.pool)
    return T.CUmemoryPool(proc.add(made).handle)


@entry(1)
def cuMemPoolExportPointer(proc: Process, ptr: Any) -> Any:
    """Exports an allocation of an exportable pool, by its address."""
    allocation = proc.memory.at(ptr)
    if allocation is None or allocation.pool is None or allocation.freed or allocation.origin is not None:
        raise proc.memory.stray("cuMemPoolExportPointer needs the address of a pool's allocation", ptr)
    check(allocation.pool.handle_types == DESCRIPTOR)
    return handle_of(proc, proc.memory.shared(allocation), T.CUmemPoolPtrExportData)


@entry(1)
def cuMemPoolImportPointer(proc: Process, pool: Any, shareData: Any) -> Any:
    """Opens memory of an imported pool, at the same address as in the process that owns it. This process must free it,
    by cuMemFreeAsync or cuMemFree, before the owner frees it.
    """
    found = pool_of(proc, pool)
    export = present(item_of(proc, present(shareData), Export))
    if export.home is proc.memory:
        raise own("memory")
    check(found.imported and export.live and export.allocation.pool is found.origin)
    return T.CUdeviceptr(proc.memory.open(export, pool=found).base)
