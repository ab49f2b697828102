# SPDX-License-Identifier: Apache-2.0
"""Checks of the arrays of a collective. All run before anything is launched, allocated or written.

A collective takes one array a local rank. Each check raises ArgumentError naming the argument (`inputs[2]`), what it
was and what it must be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import ArgumentError, kind_of
from ...runtime import interop
from ...runtime.array import Array

if TYPE_CHECKING:
    from ...comm.group import Group
    from ...dtypes import DType
    from ...runtime.stream import Stream

VECTOR_BYTES = 16


@dataclass(frozen=True)
class RankArray:
    """An array of one rank: `name` as in error texts; `producer` is the stream whose work it must be ordered after.

    `foreign` arrays belong to another library, which may reuse them in the order of `producer`.
    """

    name: str
    array: Array
    producer: Stream | None
    foreign: bool


def per_rank(group: Group, argument: str, value: Any) -> list[Any]:
    """`value` as a list with an entry a local rank; a bare value is accepted if there is one local rank."""
    if isinstance(value, (list, tuple)):
        if len(value) != len(group):
            raise ArgumentError(argument, f"{len(value)} arrays", f"{len(group)} arrays, one a local rank")
        return list(value)
    if len(group) != 1:
        raise ArgumentError(argument, kind_of(value), f"a list of {len(group)} arrays, one a local rank")
    return [value]


def is_bare(group: Group, value: Any) -> bool:
    """Whether results are returned bare: one local rank, and its array was given without a list."""
    return len(group) == 1 and not isinstance(value, (list, tuple))


def rank_arrays(
    group: Group, argument: str, value: Any, *, alignment: int | None = VECTOR_BYTES, writable: bool = False
) -> list[RankArray]:
    """One contiguous device array a local rank, on that rank's device, its first element aligned to `alignment`.

    `alignment=None` stands for that of the elements.
    """
    values = per_rank(group, argument, value)
    found = []
    for position, (rank, item) in enumerate(zip(group, values, strict=True)):
        name = argument if is_bare(group, value) else f"{argument}[{position}]"
        operand = rank_array(group, name, item, alignment=alignment, writable=writable)
        if operand.array.device is not rank.device:
            raise ArgumentError(
                name,
                f"on device {operand.array.device.index}",
                f"on device {rank.device.index}, the device of rank {rank.index}",
            )
        found.append(operand)
    return found


def rank_array(group: Group, name: str, item: Any, *, alignment: int | None, writable: bool = False) -> RankArray:
    """One contiguous, aligned device array of the group's driver."""
    array, producer = interop.as_array(item, driver=group.driver, argument=name, writable=writable)
    needed = array.dtype.itemsize if alignment is None else alignment
    if array.size and array.ptr % needed:
        raise ArgumentError(name, f"at address {array.ptr:#x}", f"aligned to {needed} bytes")
    return RankArray(name, array, producer, array is not item)


def same_shape(found: Sequence[RankArray], shape: tuple[int, ...], of: str) -> None:
    """Every array has `shape`, which is that of `of`."""
    for operand in found:
        if operand.array.shape != shape:
            raise ArgumentError(operand.name, f"of shape {operand.array.shape}", f"of shape {shape}, {of}")


def same_dtype(found: Sequence[RankArray], dtype: DType, of: str) -> None:
    """Every array has `dtype`, which is that of `of`."""
    for operand in found:
        if operand.array.dtype != dtype:
            raise ArgumentError(operand.name, f"of dtype {operand.array.dtype}", f"of dtype {dtype}, {of}")


def flatten(found: Sequence[Sequence[RankArray]]) -> list[RankArray]:
    """The arrays of all ranks in one list."""
    return [operand for of_rank in found for operand in of_rank]


def no_overlap(
    read: Sequence[RankArray], written: Sequence[RankArray], in_place: Sequence[tuple[RankArray, RankArray]] = ()
) -> None:
    """No written array shares memory with any other, but for the pairs of `in_place`, which may be the same memory."""
    exempt = {(id(a), id(b)) for a, b in in_place if (a.array.ptr, a.array.nbytes) == (b.array.ptr, b.array.nbytes)}
    exempt |= {(b, a) for a, b in exempt}
    spans = [(o.array.ptr, o.array.ptr + o.array.nbytes, o, False) for o in read if o.array.nbytes]
    spans += [(o.array.ptr, o.array.ptr + o.array.nbytes, o, True) for o in written if o.array.nbytes]
    spans.sort(key=lambda span: span[0])
    for position, (_, end, first, first_written) in enumerate(spans):
        for start, _, second, second_written in spans[position + 1 :]:
            if start >= end:
                break
            if (first_written or second_written) and (id(first), id(second)) not in exempt:
                culprit, other = (second, first) if second_written else (first, second)
                raise ArgumentError(culprit.name, f"overlapping {other.name}", "memory of its own")
