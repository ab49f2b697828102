# SPDX-License-Identifier: Apache-2.0
"""The steps of every FP8 op after its inputs were checked: results, workspace, plan, parameters and launch."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from ...runtime.kernel import Kernel
from ..call import operands, options, results, scratch
from ..call.faults import planted
from ..call.operands import Operand
from ..call.options import PDLLevel
from ..call.planned import PlanCache, Planned, Ready
from ..call.prepared import Prepared, on_device
from ..call.results import Wanted
from ..call.scratch import Workspace
from ..call.specialisation import FP8_CAPABILITY, Defines, Specialisation
from ..call.streams import resolve_stream
from ..call.turns import DeviceTurns, WorkspaceTurns

R = TypeVar("R")
_STRIDES = {"x": "x_stride", "scales": "scale_stride", "a": "a_stride", "b": "b_stride"}


class Fp8Params(ctypes.Structure):
    """The parameters of a kernel. The field with an array's name has the array's address. `_STRIDES` maps arrays to the
    fields that have their row strides."""

    def bind(self, space: Workspace) -> None:
        """Write the workspace's parameters, such as its address, to the field `scratch`."""
        self.scratch = space.params


class Options(NamedTuple):
    """The options of a call, as the caller has given them."""

    outputs: Any
    stream: Any
    level: PDLLevel
    workspace: Any

    @classmethod
    def of(cls, outputs: Any, stream: Any, pdl_level: Any, workspace: Any = None) -> Options:
        """The options of a call. Raises ArgumentError for a wrong `pdl_level`; `Fp8Call` checks the others."""
        return cls(outputs, stream, options.pdl_level(pdl_level), workspace)


class Fp8Call:
    """A call of the op `name` for a matrix of `rows` and `columns`. `arrays` maps fields of the kernel's parameters to
    the arrays whose addresses they get. The keys of `read` and `wanted` are fields of the parameters too.

    `read` are inputs, the matrix first; `others` are inputs whose addresses the op itself writes to the parameters.
    `wanted` describes the results, and `values` are the arrays that the call returns. `own` is the workspace that the
    caller has passed, if any.
    """

    def __init__(
        self,
        name: str,
        given: Options,
        read: Mapping[str, Operand],
        wanted: Mapping[str, Wanted],
        workspace_bytes: int = 0,
        others: Sequence[Operand] = (),
    ) -> None:
        self.name, self.level = name, given.level
        self._strides = {_STRIDES[field]: operand for field, operand in read.items() if field in _STRIDES}
        self._read = [*read.values(), *others]
        x = self._read[0]
        self.rows, self.columns = math.prod(x.shape[:-1]), x.shape[-1]
        self.device = operands.one_device(self._read)
        self._queue = resolve_stream(self.device, given.stream, [x])
        self._written, self.values = results.outputs(self.device, self._queue, list(wanted.values()), given.outputs)
        self._workspace_bytes = workspace_bytes
        self.own = scratch.checked(given.workspace, self.device.driver, self.device, workspace_bytes)
        operands.no_overlap(self._read, [*self._written, *self.own])
        self.arrays = {**read, **dict(zip(wanted, self._written, strict=True))}

    def aligned(self, *fields: str) -> bool:
        """Whether all rows begin and end at multiples of 16 bytes, in each of the arrays `fields` that the call has."""
        return self.columns % 16 == 0 and all(self.arrays[one].rows_aligned for one in fields if one in self.arrays)

    def planned(
        self,
        kernel: str,
        defines: Defines,
        grid: Callable[[Kernel], int] | int,
        threads: int,
        template: ctypes.Structure,
        *,
        smem: int = 0,
        waits: bool = False,
        cluster: int = 1,
    ) -> Planned:
        """A planned launch of a kernel. `template` holds the kernel's parameters; its fields `columns` and
        `early_trigger` are set here. The kernel is compiled with the macros `defines`, and the other arguments describe
        the launch."""
        template.columns = self.columns
        template.early_trigger = int(self.level is PDLLevel.OVERLAP_AT_BEGINNING)
        spec = Specialisation("coat", kernel, defines, capability=FP8_CAPABILITY)
        return Planned(
            self.device, spec, grid, threads, template, smem=smem, waits=waits, pdl=self.level, cluster=cluster
        )

    def ready(self, key: tuple[Hashable, ...], plan: Callable[[], Planned]) -> Ready:
        """A launch with the addresses and strides of this call's arrays. `plan()` makes the plan of the launch, unless
        a plan for `key` and the size of the matrix was made before."""
        key = (*key, self.rows, self.columns, self.level, planted())
        ready = self.device.part(PlanCache).get(key, plan).take()
        for field, operand in self.arrays.items():
            ready.point(field, operand.ptr)
        for field, operand in self._strides.items():
            setattr(ready.parameters, field, operand.stride)
        return ready

    def prepared(self, ready: Ready, result: R, *, workspace: bool) -> Prepared[R]:
        """The prepared call that launches `ready` and returns `result`. If `workspace` is true, the launch uses the
        caller's workspace or, if the caller gave none, the stream's."""
        turns = DeviceTurns(self.device)
        if workspace:
            own = self.own[0].array if self.own else None
            turns = WorkspaceTurns(self.device, self._queue, own, self._workspace_bytes, ready.parameters.bind)
        return on_device(self.name, turns, self._queue, result, self._read, self._written, ready)
