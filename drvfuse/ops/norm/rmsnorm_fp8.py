# SPDX-License-Identifier: Apache-2.0
"""`rmsnorm_fp8`: optional residual, RMSNorm or LayerNorm and quantisation of rows in one kernel on one device."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from ...dtypes import DType
from ...errors import ArgumentError, require_integer
from ...plans.definitions import defines
from ...plans.norm import NormShape
from ...plans.quantisation import Quantisation
from ...plans.rows import MAX_COLUMNS
from ...runtime.array import Array
from ...runtime.device import Device
from ...runtime.interop import ArrayLike
from ...runtime.stream import Stream
from ...structures import laid_out
from ...trace import layout
from ..call import operands, options
from ..call.faults import planted
from ..call.op import op
from ..call.operands import VECTOR, Operand
from ..call.options import PDLLevel
from ..call.planned import PlanCache, Planned, Ready, limits, resident
from ..call.prepared import Prepared, on_device
from ..call.results import refuse_capture
from ..call.specialisation import FP8_CAPABILITY, Specialisation, load
from ..call.streams import StreamArgument, resolve_stream
from ..call.tracing import CallTrace
from ..call.turns import DeviceTurns

if TYPE_CHECKING:
    from ...trace.buffer import Trace

FLOATS = ("bfloat16", "float16", "float32")
NORMS = ("rms", "layer")
_ARRAYS = ("input", "gamma", "beta", "residual", "residual_output", "output", "scales", "normed_output")


@laid_out("norm/row_form.cuh")
class NormParams(ctypes.Structure):
    """The kernel's parameters."""


class Normed(NamedTuple):
    """The results of `rmsnorm_fp8`. `scales` and `residual` are None if the call has none. Arrays that the caller gave
    are returned as they are."""

    output: Array
    scales: Array | None
    residual: Array | None


@op
def rmsnorm_fp8(
    inputs: ArrayLike,
    gamma: ArrayLike,
    *,
    epsilon: float,
    weight_offset: float = 0.0,
    quantisation: Quantisation | None = None,
    residual: ArrayLike | None = None,
    residual_output: ArrayLike | None = None,
    beta: ArrayLike | None = None,
    norm: str = "rms",
    head_columns: int | None = None,
    output: ArrayLike | None = None,
    scales: ArrayLike | None = None,
    normed_output: ArrayLike | None = None,
    pdl_level: PDLLevel = PDLLevel.OFF,
    stream: StreamArgument = None,
    trace: Trace | None = None,
) -> Prepared[Normed]:
    """Add the residual to `inputs`, normalise each row and quantise it: `allreduce_rmsnorm_fp8` without other ranks.

    `inputs` [..., columns], bfloat16, float16 or float32, rows of 1 to 16384 columns. `gamma` and `beta` [columns], and
    `residual` in the inputs' shape: each of the inputs' dtype or float32. With `head_columns` the last dimension is
    split into heads of that number of columns. Each head is then a row, and gamma and beta are [head_columns].

    For each row, in float32 and in this order: x = +0 + inputs; with a residual, x + residual rounded to the residual's
    dtype, which is also stored in `residual_output`. With `norm` "rms": f = 1 / sqrt(mean(x^2) + epsilon) and
    y = (x * (gamma + weight_offset)) * f. With "layer" x is first replaced by x - mean(x), and beta is added to y.
    `normed_output`, if given, gets y rounded to the inputs' dtype. `quantisation`, by default `Quantisation.per_row()`,
    describes how y becomes `output` and `scales` and which shapes these have; with heads the shape of the rows is
    [..., heads]. The bits are those of `drvfuse.reference` and of `allreduce_rmsnorm_fp8` of one rank, and those of a
    row do not depend on the other rows.

    `output`, `scales` and `residual_output` are allocated where None; `residual_output` may be `residual`. All arrays
    are C-contiguous; arrays that begin at a multiple of 16 bytes, and whose rows are a multiple of 16 bytes long, are
    read and written fastest. With a `pdl_level` other than OFF gamma and beta are fetched before the previous kernel
    has finished, so that kernel must not write them. The next kernel may start when every block has stored its last row
    (ON), or when every block has begun (OVERLAP_AT_BEGINNING). `trace` is a `Trace` of the device. `stream`: None for
    the device's own stream, "current" for the stream of the inputs' framework, or a stream. The call does not block and
    needs no workspace. It can be captured if all results are given.

    Raises, before any launch, ArgumentError for arguments that do not fit, CaptureError for a result that a capture
    would have to allocate, and Unsupported for NO_WAIT_OVERLAP_AT_END and for a device before compute capability 8.9.

    Returns (output, scales, residual).
    """
    level = options.pdl_level(pdl_level)
    made = options.quantisation(quantisation)
    options.one_of("norm", norm, NORMS)
    if beta is not None and norm != "layer":
        raise ArgumentError("beta", "given", 'None, as norm="rms" has no beta')
    numbers = options.real("epsilon", epsilon, least=0.0), options.real("weight_offset", weight_offset), made.given
    driver = operands.driver_of(inputs=inputs, gamma=gamma, beta=beta, residual=residual)
    x = operands.whole("inputs", inputs, driver, FLOATS)
    lead, columns = _rows(x, head_columns)
    made.check(columns, x.dtype)
    read = {"input": x, "gamma": _input("gamma", gamma, x, (columns,))}
    if beta is not None:
        read["beta"] = _input("beta", beta, x, (columns,))
    if residual is not None:
        read["residual"] = _input("residual", residual, x, x.shape)
    device = operands.one_device(read.values())
    queue = resolve_stream(device, stream, [x])
    scales_shape = made.scales_shape(lead, columns)
    wanted: list[_Wanted] = [("output", output, made.output_shape(x.shape), made.output_dtype(x.dtype), 1)]
    if made.scales is not None and scales_shape is not None:
        wanted.append(("scales", scales, scales_shape, made.scales, made.scales_alignment))
    elif scales is not None:
        raise ArgumentError("scales", "given", f"None, as {made.kind} quantisation writes none")
    if residual is not None:
        wanted.append(("residual_output", residual_output, x.shape, read["residual"].dtype, 1))
    elif residual_output is not None:
        raise ArgumentError("residual_output", "given", "None, as there is no residual")
    if normed_output is not None:
        wanted.append(("normed_output", normed_output, x.shape, x.dtype, 1))
    written, values = _results(device, queue, wanted, read)
    result = Normed(values["output"], values.get("scales"), values.get("residual_output"))
    reads, writes = list(read.values()), list(written.values())
    if not x.array.size:
        return on_device("rmsnorm_fp8", DeviceTurns(device), queue, result, reads, writes, None)
    traced = None if trace is None else CallTrace([device], trace, "device")
    call = _Call(device, read | written, math.prod(lead), columns, made, norm == "layer", level)
    ready = call.ready(traced)
    ready.parameters.epsilon, ready.parameters.weight_offset, ready.parameters.given = numbers
    return on_device("rmsnorm_fp8", DeviceTurns(device), queue, result, reads, writes, ready, traced)


_Wanted = tuple[str, Any, tuple[int, ...], DType, int]


def _rows(x: Operand, head_columns: int | None) -> tuple[tuple[int, ...], int]:
    """The shape of the array of rows (of heads, with `head_columns`), and the number of columns of a row or head."""
    shape = x.shape
    if not shape or not shape[-1]:
        raise ArgumentError("inputs", f"of shape {shape}", "of shape [..., columns] with at least one column")
    if head_columns is None:
        if shape[-1] > MAX_COLUMNS:
            raise ArgumentError("inputs", f"of shape {shape}", f"of shape [..., 1 to {MAX_COLUMNS} columns]")
        return shape[:-1], shape[-1]
    needed = f"a number from 1 to {MAX_COLUMNS} that divides the {shape[-1]} columns, or None"
    columns = require_integer("head_columns", head_columns, needed, 1, MAX_COLUMNS)
    if shape[-1] % columns:
        raise ArgumentError("head_columns", columns, needed)
    return (*shape[:-1], shape[-1] // columns), columns


def _input(name: str, value: Any, x: Operand, shape: tuple[int, ...]) -> Operand:
    """The operand of an input, which must have the shape `shape`, and the dtype of `x` or float32."""
    kinds = (x.dtype.name,) if x.dtype.name == "float32" else (x.dtype.name, "float32")
    found = operands.whole(name, value, x.device.driver, kinds)
    operands.require_shape(found, shape, "as the inputs require")
    return found


def _results(
    device: Device, queue: Stream, wanted: list[_Wanted], read: dict[str, Operand]
) -> tuple[dict[str, Operand], dict[str, Any]]:
    """The arrays to write, by argument: a dict of operands, and a dict of the objects that the call returns. All are
    checked before the first is allocated.
    """
    found = {}
    for name, value, shape, dtype, alignment in wanted:
        if value is not None:
            found[name] = operands.whole(name, value, device.driver, (dtype.name,), writable=True)
            operands.require_shape(found[name], shape, "that of the result")
            operands.require_alignment(found[name], alignment)
            operands.one_device((read["input"], found[name]))
    in_place = [(read["residual"], found["residual_output"])] if "residual_output" in found else []
    operands.no_overlap(list(read.values()), list(found.values()), in_place)
    for name, value, *_ in wanted:
        if value is None:
            refuse_capture([queue], name)
    written, values = {}, {}
    for name, value, shape, dtype, _ in wanted:
        if name not in found:
            value = device.empty(shape, dtype, stream=queue)
            found[name] = operands.made(name, value)
        written[name], values[name] = found[name], value
    return written, values


class _Call:
    """Everything on which the kernel and its launch depend. The keys of `arrays` are fields of `NormParams`."""

    def __init__(
        self,
        device: Device,
        arrays: dict[str, Operand],
        rows: int,
        columns: int,
        quantisation: Quantisation,
        layer: bool,
        level: PDLLevel,
    ) -> None:
        self.device, self.arrays, self.rows, self.columns = device, arrays, rows, columns
        self.quantisation, self.layer, self.level = quantisation, layer, level
        self.dtype = arrays["input"].dtype
        vectors = [operand for name, operand in arrays.items() if name != "scales"]
        self.ragged = columns * self.dtype.itemsize % VECTOR != 0 or any(each.ptr % VECTOR for each in vectors)

    def ready(self, trace: CallTrace | None) -> Ready:
        """A launch with the arrays' addresses. With `trace`, a section of the trace is reserved for it."""
        if trace is None:
            kinds = tuple((name, operand.dtype.name) for name, operand in self.arrays.items())
            compiled = self.quantisation.definitions(self.dtype)
            shape = self.rows, self.columns, self.ragged, self.layer, self.level.value, planted()
            ready = self.device.part(PlanCache).get(("norm", kinds, compiled, shape), self._plan).take()
        else:
            ready = self._plan(trace).take([section.parameters for section in trace.sections])
        for field in _ARRAYS:
            ready.point(field, self.arrays[field].ptr if field in self.arrays else 0)
        return ready

    def _plan(self, trace: CallTrace | None = None) -> Planned:
        device = self.device
        shape = NormShape.of(limits(device), self.rows, self.columns, self.dtype.itemsize, "residual" in self.arrays)
        spec = self._specialise(shape, {})
        grid = shape.grid(self.rows, resident(load(device, spec), device, shape.threads))
        if trace is not None:
            (section,) = trace.reserve("rmsnorm_fp8", grid, shape.phases(self.rows, grid))
            spec = self._specialise(shape, layout.defines(section.capacity))
        early = int(self.level is PDLLevel.OVERLAP_AT_BEGINNING)
        template = NormParams(rows=self.rows, columns=self.columns, early_trigger=early)
        return Planned(device, spec, grid, shape.threads, template, pdl=self.level, cluster=shape.cluster)

    def _specialise(self, shape: NormShape, traced: dict[str, int]) -> Specialisation:
        arrays, given = self.arrays, self.quantisation
        every = (
            *given.definitions(self.dtype),
            *defines(dtype=self.dtype, gamma_dtype=arrays["gamma"].dtype),
            *defines(residual_dtype=arrays.get("residual", arrays["input"]).dtype, residual="residual" in arrays),
            *defines(layer=self.layer, beta="beta" in arrays, normed="normed_output" in arrays, ragged=self.ragged),
            *defines(**shape._asdict()),
            *traced.items(),
        )
        capability = FP8_CAPABILITY if given.dtype is not None else (0, 0)
        return Specialisation("norm", "rmsnorm_fp8", every, capability=capability)
