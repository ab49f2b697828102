# SPDX-License-Identifier: Apache-2.0
"""Reads the arguments of calls, and writes and reads calls and their results as messages.

The message of a call has the values that were read from its arguments, in the order of the function's prototype. The
message of a result has the CUresult, then the results in the order of the prototype, then what the call has written to
memory of the caller. This module does not write the CUresult: the code that sends the message does, as a failed call
has no results. If all arguments are numbers, which is the usual case, a single `struct` format packs them.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import Any

from . import code_inputs, host_inputs, inputs, outputs
from .calls import Call, Caller, Machine, Run
from .managed import Managed, RangeAttribute
from .message import Incoming, Outgoing
from .node_params import FilledParams, NodeParams, NodeResult
from .rows import Batch, Rows, RowsArray
from .scalars import Enumeration, Handle, scalar
from .signatures import ALL, SIGNATURES, Parameter, Signature
from .table import ATTRIBUTES

_INPUT_ROLES: dict[str, type[inputs.Input]] = {
    "batch": Batch,
    "image": code_inputs.Image,
    "node": NodeParams,
    "filled": FilledParams,
    "parameters": code_inputs.Parameters,
    "options": code_inputs.Options,
    "attribute": inputs.Attribute,
    "descriptor": host_inputs.Descriptor,
    "host": host_inputs.Host,
    "registered": host_inputs.Registered,
    "text": host_inputs.Buffer,
}
_OUTPUT_ROLES: dict[str, type[outputs.Output]] = {
    "attribute": outputs.Attribute,
    "code": outputs.Code,
    "descriptor": outputs.Descriptor,
    "managed": Managed,
    "node": NodeResult,
    "pinned": outputs.Pinned,
    "range": RangeAttribute,
}
_INPUT_TYPES: dict[str, type[inputs.Input]] = {
    "CUDA_LAUNCH_PARAMS": code_inputs.LaunchArray,
    "CUDA_MEMCPY2D": Rows,
    "CUDA_MEMCPY3D": Rows,
    "CUDA_MEMCPY3D_PEER": Rows,
    "CUDA_MEMCPY3D_BATCH_OP": RowsArray,
    "CUoccupancyB2DSize": code_inputs.Callback,
    "CUasyncCallback": code_inputs.Function,
    "CUlogsCallback": code_inputs.Function,
    "CUhostFn": code_inputs.Function,
    "CUstreamCallback": code_inputs.Function,
    "char": inputs.Text,
}


def input_of(p: Parameter) -> inputs.Input:
    """The Input for a parameter, which reads the argument and writes it to messages."""
    if p.role in _INPUT_ROLES:
        return _INPUT_ROLES[p.role](p)
    if p.type in _INPUT_TYPES:
        return _INPUT_TYPES[p.type](p)
    if p.type == "void" or p.memory:
        return host_inputs.Target(p) if p.lent else host_inputs.Source(p)
    kind = scalar(p.type)
    if kind is None:
        return (inputs.StructArray if p.extent else inputs.Struct)(p)
    if p.extent:
        return inputs.Array(p)
    if p.mode == "inout" and isinstance(kind, Handle):
        return inputs.Moved(p)
    if p.type in ATTRIBUTES or p.role == "kind":
        return inputs.Kind(p)
    return (inputs.Member if isinstance(kind, Enumeration) else inputs.Input)(p)


def output_of(p: Parameter) -> outputs.Output:
    """The Output for a parameter, which writes the result to messages and reads it."""
    if p.role:
        return _OUTPUT_ROLES[p.role](p)
    if p.type == "char":
        return outputs.Text(p)
    if p.mode == "inout" and isinstance(scalar(p.type), Handle) and not p.extent:
        return outputs.Moved(p)
    if scalar(p.type) is None and p.type != "void":
        return (outputs.StructArray if p.extent else outputs.Struct)(p)
    return (outputs.Array if p.extent else outputs.Output)(p)


class Coder:
    """Checks the arguments of one driver function, and converts its calls and results to messages and back."""

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        wanted = {p.extent for p in signature.returned}
        self.inputs = [inputs.Wanted(p) if p.name in wanted else input_of(p) for p in signature.given]
        self.outputs = [output_of(p) for p in signature.returned]
        places = {item.name: i for i, item in enumerate(self.inputs)}
        for item in self.inputs:
            item.places = places
        self._readers = [item.read for item in self.inputs]
        self._dependent = [i for i, item in enumerate(self.inputs) if item.dependent]
        self._numbers = self._form(self.inputs, inputs.Input, inputs.Member, inputs.Kind, inputs.Wanted)
        self._results = self._form(self.outputs, outputs.Output)

    @staticmethod
    def _form(items: Sequence[Any], *plain: type) -> struct.Struct | None:
        """The `struct` format of `items` if all are numbers, else None."""
        if any(type(item) not in plain for item in items):
            return None
        return struct.Struct("<" + "".join(item.scalar.code for item in items))

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The arguments of a call in the form in which the emulated function gets them. Raises what cuda.bindings raise
        for arguments that they do not accept, and Invalid for arguments that the driver refuses.
        """
        if kwargs or len(args) != len(self._readers):
            args = self.signature.bind(args, kwargs)
        if not args:
            return []
        values = [read(value) for read, value in zip(self._readers, args, strict=True)]
        for i in self._dependent:
            values[i] = self.inputs[i].complete(values[i], values)
        return values

    def write_call(self, out: Outgoing, values: Sequence[Any], caller: Caller) -> Call:
        """Write a call to `out`, and return its Call. `values` are its arguments, as `read` has returned them. Raises
        Invalid if host memory cannot be read or written.
        """
        call = Call(self.signature, values, caller)
        if self._numbers is not None:
            out.parts.append(self._numbers.pack(*values))
        else:
            for item, value in zip(self.inputs, values, strict=True):
                item.put(out, value, call)
        return call

    def read_call(self, incoming: Incoming, machine: Machine) -> Run:
        run = Run(self.signature, machine)
        if self._numbers is not None:
            words = incoming.take(self._numbers)
            run.values = [item.scalar.given(w) for item, w in zip(self.inputs, words, strict=True)]
        else:
            for item in self.inputs:
                run.values.append(item.take(incoming, run))
        return run

    def write_result(self, out: Outgoing, results: Sequence[Any], run: Run) -> None:
        """Write the results of a call that has succeeded, without the CUresult."""
        if self._results is not None:
            raw = [item.scalar.raw(v) for item, v in zip(self.outputs, results, strict=True)]
            out.parts.append(self._results.pack(*raw))
        else:
            for item, value in zip(self.outputs, results, strict=True):
                item.put(out, value, run)
        for memory in run.lent:
            out.data(b"" if getattr(memory, "unused", False) else memoryview(memory)[:-1])
        self.write_filled(out, run)

    @staticmethod
    def write_filled(out: Outgoing, run: Run) -> None:
        """Write the structures of the caller that the call has filled in. They are sent even if the call failed."""
        for content in run.filled:
            out.data(content())

    @staticmethod
    def read_filled(incoming: Incoming, call: Call) -> None:
        for store in call.filled:
            store(incoming.view() or b"")

    def read_result(self, incoming: Incoming, call: Call) -> list[Any]:
        if self._results is not None:
            words = incoming.take(self._results)
            found = [item.scalar.result(w) for item, w in zip(self.outputs, words, strict=True)]
        else:
            found = [item.take(incoming, call) for item in self.outputs]
        for store in call.lent:
            store(incoming.view() or b"")
        self.read_filled(incoming, call)
        return found


@functools.cache
def coder(name: str) -> Coder:
    """The Coder of the driver function `name`, which the installed bindings must have."""
    return Coder(SIGNATURES[name])


def numbered(number: int) -> Coder | None:
    """The Coder of the driver function with this number in the table of prototypes. None if the installed bindings do
    not have the function.
    """
    if not 0 <= number < len(ALL) or SIGNATURES.get(ALL[number].name) is not ALL[number]:
        return None
    return coder(ALL[number].name)
