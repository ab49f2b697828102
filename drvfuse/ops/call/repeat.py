# SPDX-License-Identifier: Apache-2.0
"""Calls that differ from an earlier one in the addresses of their arrays alone.

Whether a plain call is right, and what it launches, depends on its `Layout`, on addresses only by what they are
multiples of and by which arrays share memory. So the first call of a layout is checked and planned as any other, and
then kept as a `Repeat`, which later ones launch with their own addresses written to the parameters.

Where an answer may change between two calls, the call has no layout: arrays of other libraries and memory that is not
of drvfuse's pools can be closed or be out of a peer's reach.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from ... import config
from ...comm.group import Group
from ...dtypes import DType
from ...plans.quantisation import Quantisation
from ...runtime.array import Array
from ...runtime.device import Device
from ...runtime.stream import Stream
from .faults import planted
from .options import PDLLevel
from .order import Route
from .planned import POINTER_BYTES, PlanCache, Ready
from .prepared import Prepared, submit
from .results import refuse_capture
from .turns import GroupTurns

_PLAIN = {bool, int, str, type(None), PDLLevel, DType, Quantisation, type}  # whose equal values mean the same


class Repeats(PlanCache):
    """The last layouts of the calls of a group or a device, each with its calls that are not being launched now."""


class Layout(NamedTuple):
    """Everything that decides a plain call but the addresses: its arrays in the order of its arguments, the group or
    device that keeps its repeats, and the other arguments.
    """

    owner: Group | Device
    key: Hashable
    arrays: list[Array]

    @classmethod
    def of(cls, op: object, args: Sequence[Any], options: Mapping[str, Any]) -> Layout | None:
        """None where an argument is anything but the group, one of drvfuse's pooled arrays or streams, a plain value,
        a list of these, or lists in a list.

        Streams are no part of the key: they are resolved anew for each call.
        """
        owner: Group | Device | None = None
        arrays: list[Array] = []
        blocks: set[object] = set()
        values: list[Any] = []
        key: list[Any] = [op, planted(), config.get("spin_timeout"), len(args), *options]
        for argument in (*args, *options.values()):
            if type(argument) in (list, tuple):
                key.append(len(argument))
                if argument and all(type(inner) in (list, tuple) for inner in argument):
                    key += (list, *map(len, argument))
                    argument = [value for inner in argument for value in inner]
                values += argument
            else:
                key.append(None)
                values.append(argument)
        for value in values:
            kind = type(value)
            if kind is Array:
                if value._block is None:
                    return None
                blocks.add(value._block)
                arrays.append(value)
                key.append(value._layout or value.layout)
            elif kind in _PLAIN:
                if kind is str and value == "current":  # streams of arrays
                    return None
                key += kind, value
            elif kind is float:
                key += value, math.copysign(1, value)  # as 0.0 equals -0.0
            elif kind is Group:
                owner = value
                key.append(kind)
            elif kind is Stream:
                key.append(kind)
            else:
                return None
        if not arrays:
            return None
        if len(blocks) < len(arrays):  # some share an allocation
            key.append(tuple(map(arrays.index, arrays)))
            key.append(_overlaps(arrays))
        return cls(owner or arrays[0].device, tuple(key), arrays)


def _overlaps(arrays: Sequence[Array]) -> tuple[tuple[int, int, int], ...]:
    """For each array that begins inside another: its number, that of the first array that contains its start, and the
    offset in that one.
    """
    found, begin, reached, first = [], 0, 0, 0
    for number in sorted({*map(arrays.index, arrays)}, key=lambda number: (arrays[number].ptr, number)):
        array = arrays[number]
        if array.ptr < reached:
            found.append((number, first, array.ptr - begin))
        else:
            begin, first = array.ptr, number
        reached = max(reached, array.ptr + array.nbytes)
    return tuple(sorted(found))


_Run = tuple[Callable[..., None], Any, int, Callable[[Sequence[int]], Sequence[int]]]
"""How to write addresses to parameters from an offset on, and which of those of all arrays."""


class Repeat:
    """A call that was launched, to be launched with other arrays of its layout. It keeps neither arrays nor a group."""

    def __init__(self, prepared: Prepared[Any], arrays: Sequence[Array]) -> None:
        """See `of`. Raises LookupError for a schedule that is not `repeatable`, and where launches do not point to all
        arrays."""
        if not getattr(prepared._schedule, "repeatable", False):
            raise LookupError(f"{prepared!r} has steps with addresses of their own")
        self.note, self._schedule = prepared.note, prepared._schedule
        self._ready = prepared._ready  # kept alive, as the group holds only weak references to launches that it adapts
        self._turns = None if isinstance(prepared._turns, GroupTurns) else prepared._turns
        every = list(arrays)  # and those that the call has allocated
        self._made: list[tuple[Device, tuple[int, ...], DType, int]] = []
        self._left_out = ""
        for position, written in enumerate(prepared._writes):
            for operand in written:
                if all(operand.array is not array for array in every):
                    every.append(operand.array)
                    self._made.append((operand.device, operand.shape, operand.dtype, position))
                    if operand.array.size and not self._left_out:
                        self._left_out = operand.argument
        index = {id(array): number for number, array in enumerate(every)}
        operands = map(operator.add, prepared._reads, prepared._writes)
        self._used = [_picker([index[id(operand.array)] for operand in of_rank]) for of_rank in operands]
        self._positions = range(len(self._used))
        self._result = _maker(prepared._result, index)
        self._runs = [run for ready in prepared._ready for run in _runs(ready, every)]
        pointed = {address for ready in prepared._ready for address in ready.pointers.values()}
        if any(array.size and array.ptr not in pointed for array in every):
            raise LookupError(f"{prepared!r} does not point to all arrays")

    @classmethod
    def of(cls, prepared: Prepared[Any], arrays: Sequence[Array]) -> Repeat | None:
        """The call as a `Repeat`, if it can be one; `arrays` are those of its layout."""
        try:
            return cls(prepared, arrays)
        except LookupError:
            return None

    def launch(self, layout: Layout, streams: Any, stream: Any) -> Any:
        """Queue the call with the arrays of `layout`, on the streams that it was given."""
        turns, arrays = self._turns or GroupTurns(cast("Group", layout.owner)), layout.arrays
        _, queues = turns.choose(streams, None, stream, ())
        if self._made:
            turns.require_open()
            if self._left_out:
                refuse_capture(queues, self._left_out)
            arrays += [device.empty(shape, dtype, stream=queues[rank]) for device, shape, dtype, rank in self._made]
        addresses = [array.ptr for array in arrays]
        for write, parameters, offset, pick in self._runs:
            write(parameters, offset, *pick(addresses))
        routes = [Route.of_arrays(on, pick(arrays)) for on, pick in zip(queues, self._used, strict=True)]
        submit(self, turns, self._schedule, self._positions, routes)
        return self._result(arrays)


def _runs(ready: Ready, arrays: Sequence[Array]) -> list[_Run]:
    """The pointers of a launch as numbers of arrays, adjacent ones together."""
    numbers = {array.ptr: number for number, array in enumerate(arrays) if array.size}
    runs: list[tuple[int, list[int]]] = []
    end = -1
    for offset, address in sorted(ready.pointers.items()):
        if address:
            if offset != end:
                runs.append((offset, []))
            runs[-1][1].append(numbers[address])
            end = offset + POINTER_BYTES
    return [(struct.Struct(f"{len(of)}Q").pack_into, ready.parameters, offset, _picker(of)) for offset, of in runs]


def _picker(numbers: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that selects the items with these numbers, in this order."""
    if len(numbers) == 1:
        return operator.itemgetter(slice(numbers[0], numbers[0] + 1))
    return operator.itemgetter(*numbers)


def _maker(value: Any, index: Mapping[int, int]) -> Callable[[Sequence[Array]], Any]:
    """A function that makes a result of the same form as `value` from other arrays; `index` gives the position of each
    array in `value` by its identity.
    """
    if isinstance(value, Array):
        return operator.itemgetter(index[id(value)])
    if not isinstance(value, (list, tuple)):
        return lambda arrays: value
    make = getattr(value, "_make", type(value))
    if all(isinstance(part, Array) for part in value):
        pick = _picker([index[id(part)] for part in value])
        return lambda arrays: make(pick(arrays))
    parts = [_maker(part, index) for part in value]
    return lambda arrays: make([part(arrays) for part in parts])
