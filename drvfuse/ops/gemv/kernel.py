# SPDX-License-Identifier: Apache-2.0
"""The specialisation and the parameters of the kernel of the matrix-vector product."""

from __future__ import annotations

import ctypes
import dataclasses

from ...dtypes import DType
from ...errors import CompileError
from ...plans.definitions import defines
from ...plans.gemv import ACT_SCALE_GROUPS, PACK_BYTES, Plan, Shares
from ...runtime.device import Device
from ...structures import laid_out
from ...trace import layout
from ..call.epilogue_parameters import EpilogueParameters
from ..call.faults import planted
from ..call.operands import Operand
from ..call.options import PDLLevel
from ..call.planned import Planned, limits
from ..call.scratch import ScratchParams
from ..call.specialisation import FP8_CAPABILITY, Specialisation, load
from ..call.tracing import CallTrace
from .arguments import FLOATS, Inputs

TRACE_WRITERS = 2  # threads that write a trace; the second one writes in the last block only
_SHARES = [field.name for field in dataclasses.fields(Shares) if field.name != "grid"]


@laid_out("gemv/params.cuh", parts=(ScratchParams,))
class GemvParams(ctypes.Structure):
    """The kernel's parameters."""


def _access(weight: Operand) -> int:
    """The largest number of bytes, at most 16, such that all rows of the weight begin and end at multiples of it."""
    size, access = weight.dtype.itemsize, PACK_BYTES
    while weight.ptr % access or weight.stride * size % access or weight.shape[1] * size % access:
        access //= 2
    return access


class Call:
    """Everything on which the kernel and its launch depend: shapes, types, and the alignment of addresses."""

    def __init__(
        self,
        device: Device,
        inputs: Inputs,
        normed: Operand,
        n_normed: int,
        epilogue: EpilogueParameters | None,
        level: PDLLevel,
    ) -> None:
        x, w, g, bias = inputs.act, inputs.weight, inputs.gamma, inputs.bias
        self.device, self.m, self.n_normed, self.level = device, inputs.m, n_normed, level
        self.epilogue = epilogue
        self.n, self.k = w.shape
        self.dtypes = x.dtype, w.dtype, x.dtype if g is None else g.dtype, normed.dtype
        self.bias = None if bias is None else bias.dtype
        self.access = _access(w)
        width = PACK_BYTES // w.dtype.itemsize
        step, row = min(16, width * x.dtype.itemsize), x.stride * x.dtype.itemsize
        self.act_aligned = self.k % width == 0 and x.ptr % step == 0 and (self.m == 1 or row % step == 0)
        ends = (normed,) if g is None else (normed, g)
        self.norm_aligned = n_normed % 4 == 0 and all(o.ptr % (4 * o.dtype.itemsize) == 0 for o in ends)
        self.scales = "none"
        if (scales := inputs.weight_scales) is not None:
            self.scales = "group" if len(scales.shape) == 2 else "tensor" if scales.array.size == 1 else "row"
        self.act_scales, self.act_scale_step = "none", 0
        self.act_group = inputs.act_group or ACT_SCALE_GROUPS[0]
        if (scales := inputs.act_scales) is not None:
            self.act_scales = "group" if inputs.act_group else "row"
            self.act_scale_step = scales.array.size // self.m
        shapes = self.m, self.n, self.k, n_normed
        alignment = self.access, self.act_aligned, self.norm_aligned
        types = tuple(dtype.name for dtype in self.dtypes)
        scaled = self.scales, self.act_scales, self.act_scale_step, self.act_group
        then = None if self.bias is None else self.bias.name, "" if epilogue is None else epilogue.text
        self.key = ("gemv", shapes, types, alignment, scaled, then, level.value, planted())

    def plan(self, trace: CallTrace | None = None) -> tuple[Plan, Planned]:
        """The plan of this call, and a planned launch. With `trace`, a section of the trace is reserved for the
        launch."""
        bounds, size = limits(self.device), self.dtypes[1].itemsize
        plan = Plan.of(bounds, self.m, self.n, self.k, size, self.n_normed, self.access)
        traced: dict[str, int] = {}
        if trace is not None:
            (section,) = trace.reserve("gemv_partial_norm", plan.shares.grid, plan.phases, writers=TRACE_WRITERS)
            traced = layout.defines(section.capacity)
        spec = self._specialise(plan, traced)
        try:
            own = load(self.device, spec).attributes(self.device).shared_bytes
        except CompileError as error:
            if self.epilogue is None:
                raise
            raise self.epilogue.explained(error) from None
        smem, stashed = plan.shared_bytes(bounds.shared_bytes - own)
        template = GemvParams(
            columns=self.k,
            n_normed=self.n_normed,
            n_unnormed=self.n - self.n_normed,
            **{name: getattr(plan.shares, name) for name in _SHARES},
            polled_from=plan.shares.polled_from,
            early_trigger=int(self.level is PDLLevel.OVERLAP_AT_BEGINNING),
            groups=plan.groups,
            chunks=plan.shape.chunks,
            padded=plan.padded,
            stashed=int(stashed),
            act_scale_step=self.act_scale_step,
        )
        threads = plan.shape.threads(self.m)
        return plan, Planned(self.device, spec, plan.shares.grid, threads, template, smem=smem, pdl=self.level)

    def _specialise(self, plan: Plan, traced: dict[str, int]) -> Specialisation:
        act, weight, gamma, out = self.dtypes
        bias: DType = self.bias or out
        shape = plan.shape
        every = (
            *defines(act_dtype=act, weight_dtype=weight, gamma_dtype=gamma, out_dtype=out, m=self.m),
            *defines(warps_a_row=shape.warps_a_row, teams=shape.teams, packs=shape.packs, step=shape.step),
            *defines(norm_warps=shape.norm_warps(self.m), norm_batch=plan.norm_batch, norm_held=plan.norm_held),
            *defines(sum_lanes=shape.sum_lanes, access=self.access, stages=shape.stages, slots=shape.slots),
            *defines(sum_warps=shape.sum_warps, copied=shape.copied, chunked=shape.chunks > 1, whole=plan.whole),
            *defines(dependent=self.level is not PDLLevel.OFF, act_aligned=self.act_aligned),
            *defines(norm_aligned=self.norm_aligned, scales=self.scales),
            *defines(act_scales=self.act_scales, act_scale_group=self.act_group),
            *defines(biased=self.bias is not None, bias_dtype=bias),
            *traced.items(),
        )
        text = ""
        if self.epilogue is not None:
            every, text = (*every, ("DRVFUSE_EPILOGUE", 1)), self.epilogue.kernel_text
        plain = act.name in FLOATS and weight.name in FLOATS
        capability = (0, 0) if plain else FP8_CAPABILITY
        return Specialisation("gemv", "gemv_partial_norm", every, capability=capability, text=text)
