# SPDX-License-Identifier: Apache-2.0
"""Checks of the arrays of a matrix-vector product, which raise ArgumentError."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...dtypes import FP8, DType
from ...errors import ArgumentError
from ...plans.gemv import ACT_SCALE_GROUPS, MAX_ROWS, SCALE_GROUP
from ...runtime.device import Device
from ...runtime.driver import Driver
from ...runtime.stream import Stream
from ..call import operands
from ..call.operands import Operand
from ..call.results import refuse_capture

FLOATS = ("bfloat16", "float16", "float32")
WEIGHTS = (*FLOATS, "float8_e4m3fn")
ACTS = (*FLOATS, *FP8)
OF_FP8 = "bfloat16"  # dtype of the results for an FP8 act, unless the outputs are given


class Inputs(NamedTuple):
    """The arrays that a product reads. `act_group` is the number of columns that share a scale of act, 0 if act has a
    scale for each row or one scale.
    """

    act: Operand
    weight: Operand
    act_scales: Operand | None
    act_group: int
    weight_scales: Operand | None
    bias: Operand | None
    gamma: Operand | None = None

    @property
    def m(self) -> int:
        """Rows of act."""
        return 1 if len(self.act.shape) == 1 else self.act.shape[0]

    @property
    def present(self) -> list[Operand]:
        """All arrays that were given, act first."""
        every = (self.act, self.weight, self.gamma, self.act_scales, self.weight_scales, self.bias)
        return [operand for operand in every if operand is not None]


def inputs(driver: Driver, *, act: Any, weight: Any, act_scales: Any, weight_scales: Any, bias: Any) -> Inputs:
    """The arrays that a product reads, without gamma."""
    x, w = _matrices(driver, act, weight)
    of_act, group = _act_scales(driver, act_scales, x)
    of_weight = _weight_scales(driver, weight_scales, w)
    added = None
    if bias is not None:
        added = operands.whole("bias", bias, driver, FLOATS)
        operands.require_shape(added, (w.shape[0],), "one for each row of weight")
    return Inputs(x, w, of_act, group, of_weight, added)


def _matrices(driver: Driver, act: Any, weight: Any) -> tuple[Operand, Operand]:
    x = operands.rows("act", act, driver, ACTS)
    w = operands.rows("weight", weight, driver, WEIGHTS)
    if len(w.shape) != 2 or not w.shape[1]:
        raise ArgumentError("weight", f"of shape {w.shape}", "of shape [N, K] with K of at least 1")
    if w.stride * w.dtype.itemsize >= 1 << 31:
        raise ArgumentError("weight", f"with rows {w.stride} elements apart", "with rows less than 2 GiB apart")
    n, k = w.shape
    if n >= 1 << 31:
        raise ArgumentError("weight", f"of shape {w.shape}", "of less than 2^31 rows")
    if len(x.shape) not in (1, 2) or x.shape[-1] != k or not 1 <= (1, *x.shape)[-2] <= MAX_ROWS:
        raise ArgumentError(
            "act", f"of shape {x.shape}", f"of shape [{k}] or [M, {k}], M from 1 to {MAX_ROWS}; weight has {k} columns"
        )
    return x, w


def _weight_scales(driver: Driver, given: Any, w: Operand) -> Operand | None:
    if given is None:
        return None
    n, k = w.shape
    scales = _of_fp8(driver, "weight_scales", given, w)
    allowed = ((), (1,), (n,), (n, -(-k // SCALE_GROUP)))
    if scales.shape not in allowed:
        raise ArgumentError(
            "weight_scales", f"of shape {scales.shape}", f"of shape () or (1,), {allowed[2]} or {allowed[3]}"
        )
    return scales


def _act_scales(driver: Driver, given: Any, x: Operand) -> tuple[Operand | None, int]:
    """The scales of act, and the number of columns that share one, 0 if there is a scale for each row or one scale."""
    if given is None:
        return None, 0
    scales = _of_fp8(driver, "act_scales", given, x)
    *rows, k = x.shape
    if scales.shape in ((), tuple(rows)):
        return scales, 0
    shapes = {(*rows, -(-k // columns)): columns for columns in reversed(ACT_SCALE_GROUPS)}
    if scales.shape not in shapes:
        of_rows = f" or {tuple(rows)}" if rows else ""
        of_groups = " or ".join(map(str, reversed(shapes)))
        raise ArgumentError(
            "act_scales",
            f"of shape {scales.shape}",
            f"of shape (){of_rows} or, with a scale per group of columns, {of_groups}",
        )
    return scales, shapes[scales.shape]


def _of_fp8(driver: Driver, argument: str, given: Any, scaled: Operand) -> Operand:
    if scaled.dtype.name in FLOATS:
        raise ArgumentError(argument, "given", f"None for {scaled.name} of {scaled.dtype}")
    return operands.whole(argument, given, driver, ["float32"])


def gamma(driver: Driver, given: Any, n_normed: int) -> Operand | None:
    """The operand gamma, the weights of the norm. It may be None if no column is normed."""
    if given is None and not n_normed:
        return None
    g = operands.whole("gamma", given, driver, FLOATS)
    operands.require_shape(g, (n_normed,), "one for each normed column")
    return g


def outputs(
    device: Device, stream: Stream, x: Operand, n: int, n_normed: int, normed: Any, unnormed: Any
) -> tuple[Operand, Operand]:
    """Both outputs, checked or allocated. If neither is given, their dtype is act's, or bfloat16 for an FP8 act."""
    lead = x.shape[:-1]
    dtype: DType | None = None
    found: dict[str, Operand] = {}
    wanted = {"normed_output": (normed, n_normed), "unnormed_output": (unnormed, n - n_normed)}
    for name, (value, columns) in wanted.items():
        if value is not None:
            found[name] = operands.whole(name, value, device.driver, FLOATS, writable=True)
            if dtype not in (None, found[name].dtype):
                raise ArgumentError(f"{name}.dtype", str(found[name].dtype), f"{dtype}, as that of normed_output")
            operands.require_shape(found[name], (*lead, columns), "that of the result")
            if found[name].device is not device:
                operands.one_device((x, found[name]))
            dtype = found[name].dtype
    made = dtype or (OF_FP8 if x.dtype.name in FP8 else x.dtype)
    for name, (value, columns) in wanted.items():
        if value is None:
            if columns:  # an empty array takes no memory, so a capture may make it
                refuse_capture([stream], name)
            found[name] = operands.made(name, device.empty((*lead, columns), made, stream=stream))
    return found["normed_output"], found["unnormed_output"]


def counter(device: Device, given: Any) -> Operand | None:
    """The operand of the caller's counter, by which a kernel detects that two launches run at the same time. None if
    none is given, as then the workspace has the counter."""
    if given is None:
        return None
    found = operands.whole("finish_counter", given, device.driver, ["int32", "uint32"], writable=True)
    if found.array.size != 1:
        raise ArgumentError("finish_counter", f"of shape {found.shape}", "of one element")
    if found.array.device is not device:
        raise ArgumentError("finish_counter", f"on device {found.array.device.index}", f"on device {device.index}")
    return found
