# SPDX-License-Identifier: Apache-2.0
"""Attributes of pointers."""

from __future__ import annotations

from typing import Any

from ..bindings import R, T
from ..machine.memory.allocation import Allocation
from ..machine.memory.process_memory import READ, READ_WRITE
from ..machine.process.failure import Failure
from ..machine.process.process import Process
from .entry import check, entry, present

_P = T.CUpointer_attribute


def _attribute(proc: Process, a: Allocation, attribute: Any, address: int) -> Any:
    """The value of a pointer attribute, with the type of cuda.bindings."""
    host = a.device is None and a.multicast is None and a.managed is None
    owner = a.multicast.devices[0] if a.multicast else a.device or (a.context.device if a.context else None)
    index = owner.index if owner else -1
    if attribute == _P.CU_POINTER_ATTRIBUTE_CONTEXT:
        return T.CUcontext(present(a.context).handle)
    if attribute == _P.CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        return int(T.CUmemorytype.CU_MEMORYTYPE_HOST if host else T.CUmemorytype.CU_MEMORYTYPE_DEVICE)
    if attribute == _P.CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        check(not a.registered or a.alias is not None)
        return T.CUdeviceptr(proc.memory.on_device(address))
    if attribute == _P.CU_POINTER_ATTRIBUTE_HOST_POINTER:
        check(host or a.managed is not None)
        return address if a.host is None else a.host + address - a.base
    if attribute == _P.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
        return T.CUmemoryPool(a.pool.handle if a.pool else 0)
    if attribute in (_P.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, _P.CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR):
        return T.CUdeviceptr(a.base)
    if attribute == _P.CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
        return _access_flags(proc, a)
    exported = a.mapped or a.pool
    plain = {
        _P.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: index,
        _P.CU_POINTER_ATTRIBUTE_BUFFER_ID: a.number,
        _P.CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: a.synchronous,
        _P.CU_POINTER_ATTRIBUTE_IS_MANAGED: a.managed is not None,
        _P.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: a.exportable,
        _P.CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE: 0,
        _P.CU_POINTER_ATTRIBUTE_RANGE_SIZE: a.nbytes,
        _P.CU_POINTER_ATTRIBUTE_MAPPING_SIZE: a.nbytes,
        _P.CU_POINTER_ATTRIBUTE_MAPPED: True,
        _P.CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: exported.handle_types if exported else 0,
        _P.CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID: a.number,
    }
    check(attribute in plain, R.CUDA_ERROR_NOT_SUPPORTED)
    return plain[attribute]


def _access_flags(proc: Process, a: Allocation) -> int:
    """The CU_POINTER_ATTRIBUTE_ACCESS_FLAGS of an allocation: the access of the current context's device."""
    bit = 1 << proc.current().device.index
    read, write = proc.machine.window.access(a.base, proc.table) if not a.registered else (0, 0)
    return READ_WRITE if write & bit else READ if read & bit else 0


@entry(1)
def cuPointerGetAttribute(proc: Process, attribute: Any, ptr: Any) -> Any:
    return _attribute(proc, present(proc.memory.find(ptr)), attribute, ptr)


@entry()
def cuPointerSetAttribute(proc: Process, value: Any, attribute: Any, ptr: Any) -> None:
    """Sets an attribute, which can only be CU_POINTER_ATTRIBUTE_SYNC_MEMOPS. The attribute is only kept for queries, as
    copies to and from pageable memory, and copies without a stream, are synchronous in any case.
    """
    check(attribute == _P.CU_POINTER_ATTRIBUTE_SYNC_MEMOPS)
    present(proc.memory.find(ptr)).synchronous = bool(value)


@entry(1)
def cuPointerGetAttributes(proc: Process, numAttributes: int, attributes: Any, ptr: Any) -> list[Any]:
    """Returns attributes. Unlike the query of one attribute, it succeeds for any pointer: unknown memory gives
    zeros.
    """
    allocation = proc.memory.find(ptr)
    return [_or_empty(proc, allocation, attribute, ptr) for attribute in attributes[:numAttributes]]


def _or_empty(proc: Process, allocation: Allocation | None, attribute: Any, address: int) -> Any:
    if allocation is not None:
        try:
            return _attribute(proc, allocation, attribute, address)
        except Failure:
            pass
    empty = {
        _P.CU_POINTER_ATTRIBUTE_CONTEXT: T.CUcontext,
        _P.CU_POINTER_ATTRIBUTE_DEVICE_POINTER: T.CUdeviceptr,
        _P.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: T.CUdeviceptr,
        _P.CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR: T.CUdeviceptr,
        _P.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: T.CUmemoryPool,
    }
    if attribute == _P.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        return -2
    return empty[attribute](0) if attribute in empty else 0
