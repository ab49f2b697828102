# SPDX-License-Identifier: Apache-2.0
"""The checked arrays of a call, each with its name in messages and the stream on which its contents are produced.

Every check runs before anything is launched, allocated or written. It raises ArgumentError, which names the argument
(`inputs[2]`), what it was and what it must be.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import ArgumentError, DriverUnavailable, any_of, counted, kind_of
from ...runtime import interop
from ...runtime.array import Array
from ...runtime.device import Device
from ...runtime.driver import Driver, get_driver
from ...runtime.stream import Stream

if TYPE_CHECKING:
    from ...comm.group import Group
    from ...comm.rank import Rank
    from ...dtypes import DType

VECTOR = 16


class Operand:
    """An array of a call: rows of `shape[-1]` elements, `stride` elements apart.

    `array` is all memory from the first element to the last. `producer` is the stream after whose work the call comes,
    or None if the array names no stream. A `foreign` array belongs to another library: work that is queued later on
    `producer` may reuse its memory.
    """

    __slots__ = ("array", "dtype", "foreign", "name", "producer", "ptr", "shape", "stride")

    def __init__(
        self, name: str, array: Array, shape: tuple[int, ...], stride: int, producer: Stream | None, foreign: bool
    ) -> None:
        self.name, self.array, self.shape, self.stride = name, array, shape, stride
        self.producer, self.foreign = producer, foreign
        self.ptr, self.dtype = array.ptr, array.dtype

    def __repr__(self) -> str:
        return f"<Operand {self.name} {self.dtype}{list(self.shape)}>"

    @property
    def argument(self) -> str:
        """The argument that the array belongs to, such as "inputs" for "inputs[2]"."""
        return self.name.partition("[")[0].partition(".")[0]

    @property
    def device(self) -> Device:
        return self.array.device

    @property
    def rows_aligned(self) -> bool:
        """Whether every row begins at a multiple of 16 bytes."""
        return self.ptr % VECTOR == 0 and self.stride * self.dtype.itemsize % VECTOR == 0


def driver_of(**arrays: Any) -> Driver:
    """Return the driver of the first drvfuse Array among the arguments, else the driver of the `driver` setting.

    An argument in host memory raises ArgumentError even where the driver of the setting is not available.
    """
    for array in arrays.values():
        if isinstance(array, Array):
            return array.device.driver
    try:
        return get_driver(None)
    except DriverUnavailable:
        for name, array in arrays.items():
            interop.refuse_host(array, name)
        raise


def made(name: str, array: Array) -> Operand:
    """Return the operand of an array that drvfuse has just allocated: no stream produces its contents."""
    return Operand(name, array, array.shape, array.shape[-1] if array.shape else 1, None, False)


def whole(
    name: str, value: Any, driver: Driver, dtypes: Sequence[str] | None = None, writable: bool = False
) -> Operand:
    """Return the operand of a C-contiguous input or output, whose dtype must be one of `dtypes`."""
    producer: Stream | None
    if isinstance(value, Array) and value.device.driver is driver:
        value.require_open()
        array, producer = value, value.stream
    else:
        array, producer = interop.as_array(value, driver=driver, argument=name, writable=writable)
    if dtypes is not None and array.dtype.name not in dtypes:
        raise ArgumentError(f"{name}.dtype", str(array.dtype), any_of(dtypes))
    shape = array.shape
    return Operand(name, array, shape, shape[-1] if shape else 1, producer, array is not value)


def rows(name: str, value: Any, driver: Driver, dtypes: Sequence[str]) -> Operand:
    """Return the operand of an input that may have gaps between its rows."""
    if isinstance(value, Array):
        return whole(name, value, driver, dtypes)
    found = interop.as_rows(value, driver=driver, argument=name)
    if found.span.dtype.name not in dtypes:
        raise ArgumentError(f"{name}.dtype", str(found.span.dtype), any_of(dtypes))
    return Operand(name, found.span, found.shape, found.stride, found.producer, True)


def require_shape(operand: Operand, shape: tuple[int, ...], why: str) -> None:
    if operand.shape != shape:
        raise ArgumentError(operand.name, f"of shape {operand.shape}", f"of shape {shape}, {why}")


def require_alignment(operand: Operand, alignment: int) -> None:
    if operand.ptr % alignment and operand.array.size:
        raise ArgumentError(operand.name, f"at address {operand.ptr:#x}", f"aligned to {alignment} bytes")


def one_device(operands: Iterable[Operand]) -> Device:
    """Return the one device of all operands. Raises ArgumentError for an operand with elements on another device."""
    first, *rest = operands
    device = first.device
    for operand in rest:
        if operand.device is not device and operand.array.size:
            where = f"on device {device.index}, as {first.name} is"
            raise ArgumentError(operand.name, f"on device {operand.device.index}", where)
    return device


def per_rank(group: Group, argument: str, value: Any) -> list[Any]:
    """Return `value` as a list with an entry per local rank. With one local rank `value` need not be in a list."""
    several = isinstance(value, (list, tuple))
    if (len(value) if several else 1) == len(group.ranks):
        return list(value) if several else [value]
    got = f"a list of {counted(len(value), 'array')}" if several else kind_of(value)
    raise ArgumentError(argument, got, f"a list of {counted(len(group), 'array')}, one per local rank")


def is_bare(group: Group, value: Any) -> bool:
    """Whether results are returned without lists: there is one local rank, and its array was given without a list."""
    return len(group.ranks) == 1 and not isinstance(value, (list, tuple))


def of_ranks(
    group: Group,
    argument: str,
    value: Any,
    shape: tuple[int, ...] | list[tuple[int, ...]] | None = None,
    dtype: DType | None = None,
    why: str = "",
    *,
    alignment: int = VECTOR,
    writable: bool = False,
    suffix: str = "",
) -> list[Operand]:
    """Return the operands of one contiguous array per local rank. Each must lie on its rank's device and have `shape`
    and `dtype`; messages give `why` as the reason.

    A list in place of one shape has a shape for each local rank. Where `shape` or `dtype` is None, all arrays must have
    that of the first array. The names of the arrays in messages end in `suffix`.
    """
    ranks, driver = group.ranks, group.driver
    values = per_rank(group, argument, value)
    names = _names(argument, suffix, 0 if is_bare(group, value) else len(ranks))
    found: list[Operand] = []
    shapes = shape if isinstance(shape, list) else None
    for rank, name, item in zip(ranks, names, values, strict=True):
        if shapes is not None:
            shape = shapes[len(found)]
        operand = _of_rank(rank, name, item, driver, alignment, writable)
        if shape is None:
            shape, why = operand.shape, f"that of {name}"
        if dtype is None:
            dtype, why = operand.dtype, why or f"that of {name}"
        if operand.shape != shape:
            raise ArgumentError(name, f"of shape {operand.shape}", f"of shape {shape}, {why}")
        if operand.dtype is not dtype and operand.dtype != dtype:
            raise ArgumentError(name, f"of dtype {operand.dtype}", f"of dtype {dtype}, {why}")
        found.append(operand)
    return found


def _of_rank(rank: Rank, name: str, item: Any, driver: Driver, alignment: int, writable: bool) -> Operand:
    """Return the operand of an array, which must be contiguous and lie on the device of `rank`."""
    if isinstance(item, Array) and item.device is rank.device:  # the checks of `whole`, repeated here for speed
        item.require_open()
        operand = Operand(name, item, item.shape, 1, item.stream, False)
    else:
        operand = whole(name, item, driver, None, writable)
    array = operand.array
    require_alignment(operand, alignment)
    if array.device is not rank.device:
        where = f"on device {rank.device.index}, the device of rank {rank.index}"
        raise ArgumentError(name, f"on device {array.device.index}", where)
    return operand


def rows_of_ranks(
    group: Group, argument: str, value: Any, lengths: Sequence[int] | None, why: str = ""
) -> list[Operand]:
    """Return the operands of one contiguous input per local rank, at any address, with `lengths[i]` rows on rank i;
    messages give `why` as the reason for the shape. Where `lengths` is None, all have as many rows as the first input.
    The other dimensions and the dtype of all inputs are those of the first."""
    ranks, driver = group.ranks, group.driver
    values = per_rank(group, argument, value)
    names = _names(argument, "", 0 if is_bare(group, value) else len(ranks))
    found: list[Operand] = []
    for rank, name, item in zip(ranks, names, values, strict=True):
        operand = _of_rank(rank, name, item, driver, 1, False)
        if not operand.shape:
            raise ArgumentError(name, "of shape ()", "of at least one dimension, which counts rows")
        first = found[0] if found else operand
        why = why or f"that of {first.name}"
        length = lengths[rank.index] if lengths is not None else first.shape[0]
        if operand.shape != (length, *first.shape[1:]):
            more = " where no splits are given" if lengths is None and operand.shape[1:] == first.shape[1:] else ""
            expected = f"of shape {(length, *first.shape[1:])}, {why}{more}"
            raise ArgumentError(name, f"of shape {operand.shape}", expected)
        if operand.dtype != first.dtype:
            raise ArgumentError(name, f"of dtype {operand.dtype}", f"of dtype {first.dtype}, {why}")
        found.append(operand)
    return found


@functools.lru_cache(maxsize=256)
def _names(argument: str, suffix: str, ranks: int) -> tuple[str, ...]:
    return tuple(f"{argument}[{position}]{suffix}" for position in range(ranks)) or (argument + suffix,)


def no_overlap(
    read: Sequence[Operand],
    written: Sequence[Operand],
    in_place: Sequence[tuple[Operand, Operand]] = (),
    why: str = "",
) -> None:
    """Raise ArgumentError if a written array shares memory with any other array. The two arrays of a pair in `in_place`
    may be the same memory. The error's text ends in `why`.
    """
    reached = 0
    for start, nbytes in sorted([(o.ptr, o.array.nbytes) for o in (*read, *written)]):
        if start < reached:
            break
        reached = start + nbytes
    else:
        return
    exempt = {(a.name, b.name) for a, b in in_place if (a.ptr, a.array.nbytes) == (b.ptr, b.array.nbytes)}
    for position, output in enumerate(written):
        low, high = output.ptr, output.ptr + output.array.nbytes
        for other in (*read, *written[:position]):
            start, end = other.ptr, other.ptr + other.array.nbytes
            if low < end and start < high and start < end and low < high and (other.name, output.name) not in exempt:
                raise ArgumentError(output.name, f"overlapping {other.name}", f"memory of its own{why}")
