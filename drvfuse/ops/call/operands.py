# SPDX-License-Identifier: Apache-2.0
"""What the ops on one device have in common before a launch: checked arrays, their device, stream and outputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...dtypes import DType
from ...errors import ArgumentError, CaptureError, kind_of
from ...runtime import interop
from ...runtime.array import Array
from ...runtime.device import Device
from ...runtime.driver import Driver, get_driver
from ...runtime.stream import Stream

VECTOR = 16


def driver_of(*arrays: Any) -> Driver:
    """The driver of the first drvfuse Array among `arrays`, else the one of the `driver` setting."""
    for array in arrays:
        if isinstance(array, Array):
            return array.device.driver
    return get_driver(None)


@dataclass(frozen=True)
class Operand:
    """A checked array of the call: rows of `columns` elements at `stride`. `foreign`: of another library."""

    name: str
    span: Array
    shape: tuple[int, ...]
    stride: int
    producer: Stream | None
    foreign: bool

    @property
    def ptr(self) -> int:
        return self.span.ptr

    @property
    def dtype(self) -> DType:
        return self.span.dtype

    @property
    def rows_aligned(self) -> bool:
        """Whether every row begins at a multiple of 16 bytes."""
        step = self.stride * self.dtype.itemsize
        return self.ptr % VECTOR == 0 and step % VECTOR == 0


def rows(name: str, value: Any, driver: Driver, allowed: Sequence[str]) -> Operand:
    """An input whose rows may be farther apart than they are long."""
    found = interop.as_rows(value, driver=driver, argument=name)
    if found.span.dtype.name not in allowed:
        raise ArgumentError(f"{name}.dtype", str(found.span.dtype), "one of " + ", ".join(allowed))
    return Operand(name, found.span, found.shape, found.stride, found.producer, not isinstance(value, Array))


def whole(name: str, value: Any, driver: Driver, dtype: Sequence[str], writable: bool = False) -> Operand:
    """A C-contiguous input or output."""
    array, producer = interop.as_array(value, driver=driver, argument=name, writable=writable)
    if array.dtype.name not in dtype:
        raise ArgumentError(f"{name}.dtype", str(array.dtype), "one of " + ", ".join(dtype))
    columns = array.shape[-1] if array.shape else 1
    return Operand(name, array, array.shape, columns, producer, not isinstance(value, Array))


def require_shape(operand: Operand, shape: tuple[int, ...], why: str) -> None:
    if operand.shape != shape:
        raise ArgumentError(operand.name, f"of shape {operand.shape}", f"of shape {shape}, {why}")


def one_device(operands: Iterable[Operand]) -> Device:
    """The device of all operands."""
    first, *rest = operands
    for operand in rest:
        if operand.span.size and operand.span.device is not first.span.device:
            raise ArgumentError(
                operand.name,
                f"on device {operand.span.device.index}",
                f"on device {first.span.device.index}, as {first.name} is",
            )
    return first.span.device


def workspace(driver: Driver, value: Any) -> list[Operand]:
    """The caller's workspace, if he gives one, for `no_overlap`."""
    return [] if value is None else [whole("workspace", value, driver, ("uint8",))]


def no_overlap(read: Sequence[Operand], written: Sequence[Operand]) -> None:
    """No output shares memory with another array of the call."""
    for position, output in enumerate(written):
        for other in (*read, *written[:position]):
            a, b = output.span, other.span
            if a.nbytes and b.nbytes and a.ptr < b.ptr + b.nbytes and b.ptr < a.ptr + a.nbytes:
                raise ArgumentError(output.name, f"overlapping {other.name}", "memory of its own")


def resolve_stream(stream: Any, x: Operand) -> Stream:
    """None: the device's own stream. "current": that of x's framework. Else a stream or a handle, of which
    0 and 1 are the legacy default stream."""
    if stream is None:
        return x.span.device.stream
    if isinstance(stream, str):
        if stream != "current":
            raise ArgumentError("stream", repr(stream), 'None, "current" or a stream')
        if x.producer is None:
            raise ArgumentError("stream", '"current"', f"explicit: {x.name} does not say its stream")
        return x.producer
    return Stream.wrap(x.span.device, stream)


def new_outputs(
    device: Device, stream: Stream, shapes: Sequence[tuple[str, tuple[int, ...], DType]], given: Any
) -> list[Operand]:
    """The arrays of `outputs=`, checked, or new ones allocated in the order of `stream`."""
    if given is None:
        if stream.capture_id() is not None:
            raise CaptureError("outputs=None allocates, which a capture forbids; pass outputs")
        made = [(name, device.empty(shape, dtype, stream=stream)) for name, shape, dtype in shapes]
        return [Operand(f"outputs.{name}", a, a.shape, a.shape[-1] if a.shape else 1, None, False) for name, a in made]
    names = ", ".join(name for name, _, _ in shapes)
    if not isinstance(given, (list, tuple)) or len(given) != len(shapes):
        shown = f"{len(given)} arrays" if isinstance(given, (list, tuple)) else kind_of(given)
        raise ArgumentError("outputs", shown, f"a tuple or list of {len(shapes)}: ({names})")
    found = []
    for value, (name, shape, dtype) in zip(given, shapes, strict=True):
        operand = whole(f"outputs.{name}", value, device.driver, [dtype.name], writable=True)
        require_shape(operand, shape, "that of the result")
        found.append(operand)
    return found
