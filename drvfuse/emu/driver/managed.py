# SPDX-License-Identifier: Apache-2.0
"""Managed memory: allocation, advice, prefetches and the attributes of ranges.

Managed memory is plain memory here, which the host and all devices access at the same address at any time, as on
devices with CONCURRENT_MANAGED_ACCESS. It never moves; advice and prefetches are kept for queries. It counts as
initialised host memory, since the emulator does not see the host's writes.
"""

from __future__ import annotations

from typing import Any

from ..bindings import R, T
from ..machine.memory.managed import Advice, Piecewise, Place
from ..machine.process.process import Process
from ..machine.run.work import Command
from .entry import check, entry, present

_ADVICE = T.CUmem_advise
_RANGE = T.CUmem_range_attribute
_KIND = T.CUmemLocationType
_GLOBAL, _HOST, _SINGLE = 1, 2, 4  # CUmemAttach_flags
_CPU, _NOWHERE = -1, -2  # CU_DEVICE_CPU, CU_DEVICE_INVALID
_KINDS = (
    _KIND.CU_MEM_LOCATION_TYPE_DEVICE,
    _KIND.CU_MEM_LOCATION_TYPE_HOST,
    _KIND.CU_MEM_LOCATION_TYPE_HOST_NUMA,
    _KIND.CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT,
)


@entry(1, unsafe=True)
def cuMemAllocManaged(proc: Process, bytesize: int, flags: int) -> Any:
    """Allocates managed memory. `flags` is CU_MEM_ATTACH_GLOBAL or CU_MEM_ATTACH_HOST, which have the same effect
    here.
    """
    context = proc.current()
    check(bytesize > 0 and flags in (_GLOBAL, _HOST))
    allocation = proc.memory.managed_alloc(context, bytesize)
    present(allocation.managed).attach = flags
    return T.CUdeviceptr(allocation.base)


def managed_range(proc: Process, start: int, count: int) -> list[tuple[Advice, int, int]]:
    """For each allocation that a range overlaps: its advice, and the offsets in the allocation at which the overlap
    begins and ends. Raises Failure unless all of the range is managed memory.
    """
    check(count > 0)
    found = proc.memory.within(start, count)
    if proc.memory.uncovered(start, count) is not None or any(a.managed is None for a in found):
        raise proc.memory.stray("managed memory is needed", start)
    return [
        (present(a.managed), max(start, a.base) - a.base, min(start + count, a.base + a.nbytes) - a.base) for a in found
    ]


def place_of(proc: Process, location: Any) -> Place:
    """The `Place` that a CUmemLocation names. Raises Failure for an invalid location or a device that does not
    exist.
    """
    check(location is not None and location.type in _KINDS, R.CUDA_ERROR_INVALID_DEVICE)
    if location.type == _KIND.CU_MEM_LOCATION_TYPE_DEVICE:
        return Place(int(location.type), proc.device(location.id).index)
    if location.type == _KIND.CU_MEM_LOCATION_TYPE_HOST_NUMA:
        check(location.id == 0, R.CUDA_ERROR_INVALID_DEVICE)
    return Place(int(location.type), 0)


def _device_place(proc: Process, device: Any) -> Place:
    """The memory location that a device argument names: a device, or the host for CU_DEVICE_CPU."""
    if device == _CPU:
        return Place(int(_KIND.CU_MEM_LOCATION_TYPE_HOST), 0)
    return Place(int(_KIND.CU_MEM_LOCATION_TYPE_DEVICE), proc.device(device).index)


@entry(bindings=12)
def cuMemAdvise(proc: Process, devPtr: Any, count: int, advice: Any, device: Any) -> None:
    """Sets advice. The device does not matter for READ_MOSTLY and UNSET_PREFERRED_LOCATION."""
    _advise(proc, devPtr, count, advice, lambda: _device_place(proc, device))


@entry(bindings=12, name="cuMemAdvise_v2")
@entry(bindings=13, name="cuMemAdvise")
def _advise_at(proc: Process, devPtr: Any, count: int, advice: Any, location: Any) -> None:
    _advise(proc, devPtr, count, advice, lambda: place_of(proc, location))


def _advise(proc: Process, address: Any, count: int, advice: Any, place: Any) -> None:
    proc.current()
    parts = managed_range(proc, address, count)
    if advice in (_ADVICE.CU_MEM_ADVISE_SET_READ_MOSTLY, _ADVICE.CU_MEM_ADVISE_UNSET_READ_MOSTLY):
        for kept, start, end in parts:
            kept.read_mostly.set(start, end, advice == _ADVICE.CU_MEM_ADVISE_SET_READ_MOSTLY)
    elif advice == _ADVICE.CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION:
        for kept, start, end in parts:
            kept.preferred.set(start, end, None)
    elif advice == _ADVICE.CU_MEM_ADVISE_SET_PREFERRED_LOCATION:
        where = place()
        for kept, start, end in parts:
            kept.preferred.set(start, end, where)
    else:
        where = place()
        check(where.kind in (int(_KINDS[0]), int(_KINDS[1])), R.CUDA_ERROR_INVALID_DEVICE)
        for kept, start, end in parts:
            accessed = kept.accessed_by.setdefault(where, Piecewise(False))
            accessed.set(start, end, advice == _ADVICE.CU_MEM_ADVISE_SET_ACCESSED_BY)


@entry(bindings=12)
def cuMemPrefetchAsync(proc: Process, devPtr: Any, count: int, dstDevice: Any, hStream: Any) -> None:
    """Queues a prefetch, which moves nothing but is ordered as work of its stream. Not allowed in a capture."""
    _prefetch(proc, devPtr, count, _device_place(proc, dstDevice), hStream)


@entry(bindings=12, name="cuMemPrefetchAsync_v2")
@entry(bindings=13, name="cuMemPrefetchAsync")
def _prefetch_to(proc: Process, devPtr: Any, count: int, location: Any, flags: int, hStream: Any) -> None:
    check(flags == 0)
    _prefetch(proc, devPtr, count, place_of(proc, location), hStream)


def _prefetch(proc: Process, address: Any, count: int, place: Place, hStream: Any) -> None:
    stream = proc.stream(hStream)
    parts = managed_range(proc, address, count)
    stream.refuse_captured(R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
    for kept, start, end in parts:
        kept.prefetched.set(start, end, place)
    proc.enqueue(stream, Command(stream.context))


# Attributes of a range ----------------------------------------------------------------------------------------------


def _common(pieces: list[tuple[Piecewise[Any], int, int]]) -> Any:
    """The common value of all bytes of the pieces, or None if they differ."""
    found = {piece.common(start, end) for piece, start, end in pieces}
    return found.pop() if len(found) == 1 else None


def _range_attribute(proc: Process, size: int, attribute: Any, address: Any, count: int) -> Any:
    parts = managed_range(proc, address, count)
    if attribute == _RANGE.CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY:
        check(size > 0 and size % 4 == 0)
        return _accessed_by(parts, size // 4)
    check(size == 4)
    if attribute == _RANGE.CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY:
        return int(bool(_common([(kept.read_mostly, start, end) for kept, start, end in parts])))
    preferred = "PREFERRED" in attribute.name
    pieces = [(kept.preferred if preferred else kept.prefetched, start, end) for kept, start, end in parts]
    place = _common(pieces)
    if attribute.name.endswith("_TYPE"):
        return int(_KIND.CU_MEM_LOCATION_TYPE_INVALID) if place is None else place.kind
    if attribute.name.endswith("_ID"):
        return 0 if place is None else place.number
    return _NOWHERE if place is None else _ordinal(place)


def _ordinal(place: Place) -> int:
    return place.number if place.kind == int(_KIND.CU_MEM_LOCATION_TYPE_DEVICE) else _CPU


def _accessed_by(parts: list[tuple[Advice, int, int]], room: int) -> list[int]:
    """The result of an ACCESSED_BY query, with `room` entries: devices by index, the host, then CU_DEVICE_INVALID."""
    places = sorted({place for kept, _, _ in parts for place in kept.accessed_by})
    nowhere: Piecewise[bool] = Piecewise(False)
    devices = [
        _ordinal(place)
        for place in places
        if _common([(kept.accessed_by.get(place, nowhere), start, end) for kept, start, end in parts])
    ]
    return [*devices, *[_NOWHERE] * room][:room]


@entry(1)
def cuMemRangeGetAttribute(proc: Process, dataSize: int, attribute: Any, devPtr: Any, count: int) -> Any:
    """Returns a number of 4 bytes or, for ACCESSED_BY, a list of `dataSize` / 4 numbers."""
    return _range_attribute(proc, dataSize, attribute, devPtr, count)


@entry(1)
def cuMemRangeGetAttributes(
    proc: Process, dataSizes: Any, attributes: Any, numAttributes: int, devPtr: Any, count: int
) -> list[Any]:
    pairs = list(zip(dataSizes, attributes, strict=False))[:numAttributes]
    check(pairs)
    return [_range_attribute(proc, size, attribute, devPtr, count) for size, attribute in pairs]


@entry()
def cuStreamAttachMemAsync(proc: Process, hStream: Any, dptr: Any, length: int, flags: int) -> None:
    """Keeps the attachment, which has no effect here: the host may always access managed memory. `length` is 0
    or the size of the allocation.

    CU_MEM_ATTACH_SINGLE needs a stream other than a default stream. Not allowed in a capture.
    """
    stream = proc.stream(hStream)
    allocation = proc.memory.at(dptr)
    if allocation is None or allocation.managed is None:
        raise proc.memory.stray("cuStreamAttachMemAsync needs the address of managed memory", dptr)
    check(length in (0, allocation.nbytes) and flags in (_GLOBAL, _HOST, _SINGLE))
    check(flags != _SINGLE or not stream.is_legacy)
    stream.refuse_captured(R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
    allocation.managed.attach = flags
    proc.enqueue(stream, Command(stream.context))
