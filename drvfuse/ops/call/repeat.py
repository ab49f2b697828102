# SPDX-License-Identifier: Apache-2.0
"""Plain calls, `op(...)` in place of `op.prepare(...)`, that differ from an earlier call only in addresses of arrays.

Whether a plain call is valid, and what it launches, follows from its `Layout`. Two properties of the addresses matter,
and the layout has both: their alignment, and which arrays share memory. So the first call of a layout is checked and
planned like any other, and then kept as a `Repeat`. A later call of the layout writes its addresses to the parameters
of the `Repeat`, and launches the `Repeat`.

A call has no layout if the result of a check may change between two calls. This is the case for arrays of other
libraries, and for memory from other pools than drvfuse's: such memory may be freed, or a peer may lose access to it.
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
from .planned import POINTER_BYTES, PlanCache, Pointed
from .prepared import Prepared, submit
from .results import refuse_capture
from .turns import GroupTurns

# The types of plain values, which `Layout.key` holds together with their types: equal ones describe the same call.
_PLAIN = {
    bool,
    int,
    str,
    type(None),
    PDLLevel,
    DType,
    Quantisation,
    type,
}


class Repeats(PlanCache):
    """A cache of a group or a device: for each `Layout.key` the `Repeat` objects that no thread is launching now."""


class Layout(NamedTuple):
    """Everything that decides what a plain call does, except its addresses.

    `owner` is the group or device that keeps the `Repeat` objects of such calls. `key` holds the other arguments, and
    the shape, dtype and alignment of each array. `arrays` are in the order of the arguments.
    """

    owner: Group | Device
    key: Hashable
    arrays: list[Array]

    @classmethod
    def of(cls, op: object, args: Sequence[Any], options: Mapping[str, Any]) -> Layout | None:
        """Return the `Layout` of a call with these arguments, or None if the call has none.

        An argument must be the group, a pooled array or a stream of drvfuse, a plain value, a list of these, or a list
        of such lists. `Layout.key` says whether a stream was given, but not which stream: streams are resolved for
        each call.
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
                if kind is str and value == "current":  # may mean another stream in each call
                    return None
                key += kind, value
            elif kind is float:
                key += value, math.copysign(1, value)  # 0.0 and -0.0 are equal, but are different arguments
            elif kind is Group:
                owner = value
                key.append(kind)
            elif kind is Stream:
                key.append(kind)
            else:
                return None
        if not arrays:
            return None
        # If arrays share an allocation, the key also says which of them are the same array, and which overlap.
        if len(blocks) < len(arrays):
            key.append(tuple(map(arrays.index, arrays)))
            key.append(_overlaps(arrays))
        return cls(owner or arrays[0].device, tuple(key), arrays)


def _overlaps(arrays: Sequence[Array]) -> tuple[tuple[int, int, int], ...]:
    """Return (index, index of the surrounding array, offset in that array) for each array that begins inside
    another."""
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
"""(write, parameters, offset, pick): `pick` selects from the addresses of all arrays those that `write` stores to
`parameters`, from `offset` on."""


class Repeat:
    """A call that was launched, kept so that it can be launched with other arrays of its layout. It holds no array and
    no group."""

    def __init__(self, prepared: Prepared[Any], arrays: Sequence[Array]) -> None:
        """`arrays` are those of the call's layout. Raises LookupError if the launch sequence has no attribute
        `pointed`, or if there is an array whose address is in no parameter."""
        more: Sequence[Pointed] | None = getattr(prepared._sequence, "pointed", None)
        if more is None:
            raise LookupError(f"{prepared!r} cannot be repeated: its launch sequence has no attribute `pointed`")
        self.note, self._sequence = prepared.note, prepared._sequence
        self._ready = prepared._ready  # keeps the launches alive, to which the group holds only weak references
        self._turns = None if isinstance(prepared._turns, GroupTurns) else prepared._turns
        every = list(arrays)  # the arrays of the layout, and after them those that the call has allocated
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
        holders = [*prepared._ready, *more]
        self._runs = [run for holder in holders for run in _runs(holder, every)]
        pointed = {address for holder in holders for address in holder.pointers.values()}
        if any(array.size and array.ptr not in pointed for array in every):
            raise LookupError(f"{prepared!r} cannot be repeated: no parameter has the address of one of its arrays")

    @classmethod
    def of(cls, prepared: Prepared[Any], arrays: Sequence[Array]) -> Repeat | None:
        """Return a `Repeat` of the call, or None if it cannot be repeated. `arrays` are those of the call's
        `Layout`."""
        try:
            return cls(prepared, arrays)
        except LookupError:
            return None

    def launch(self, layout: Layout, streams: Any, stream: Any) -> Any:
        """Queue the call with the arrays of `layout`, on the streams that the caller gave."""
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
        submit(self, turns, self._sequence, self._positions, routes)
        return self._result(arrays)


def _runs(holder: Pointed, arrays: Sequence[Array]) -> list[_Run]:
    """Return the writes that fill in all addresses in `holder`: one for each run of adjacent pointers."""
    numbers = {array.ptr: number for number, array in enumerate(arrays) if array.size}
    runs: list[tuple[int, list[int]]] = []
    end = -1
    for offset, address in sorted(holder.pointers.items()):
        if address:
            if offset != end:
                runs.append((offset, []))
            runs[-1][1].append(numbers[address])
            end = offset + POINTER_BYTES
    return [(struct.Struct(f"{len(of)}Q").pack_into, holder.parameters, offset, _picker(of)) for offset, of in runs]


def _picker(numbers: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return a function that returns the items with the indices `numbers` of a sequence, in this order."""
    if len(numbers) == 1:
        return operator.itemgetter(slice(numbers[0], numbers[0] + 1))
    return operator.itemgetter(*numbers)


def _maker(value: Any, index: Mapping[int, int]) -> Callable[[Sequence[Array]], Any]:
    """Return a function that makes a result of the same form as `value` from other arrays; `index` maps `id(array)` of
    each array in `value` to the position of that array's replacement.
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
