# SPDX-License-Identifier: Apache-2.0
"""Structures shared by the host and the kernels have one layout on both sides: offset and size of each field."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np
import pytest

import drvfuse as df
from drvfuse import dtypes
from drvfuse.check.protocols import Peers
from drvfuse.comm import workspace
from drvfuse.errors import CompileError
from drvfuse.nodes.link import PROGRESS_DTYPE
from drvfuse.ops.call import scratch
from drvfuse.ops.call.specialisation import CU
from drvfuse.ops.coat.division import DivisionParams
from drvfuse.ops.coat.forward_launch import ForwardParams
from drvfuse.ops.coat.group_scales import GroupParams
from drvfuse.ops.coat.layernorm import LayerNormParams
from drvfuse.ops.coat.rmsnorm_backward import BackwardParams
from drvfuse.ops.collectives.moves.arranged_copies import PlaceScalesParams
from drvfuse.ops.collectives.moves.kernel import Arrangement, Moved, MoveParams, MovePushParams
from drvfuse.ops.collectives.nodes.stages import CountParams, ExchangeEndedParams
from drvfuse.ops.collectives.rows.form import NormForm
from drvfuse.ops.collectives.rows.params import FormParams, params_of
from drvfuse.ops.collectives.shared.params import (
    AllreduceMultimemParams,
    AllreduceNodesParams,
    AllreduceParams,
    AllreducePushParams,
    Call,
    CheckParams,
    FusedMultimemParams,
    FusedNodesParams,
    FusedParams,
    FusedPushParams,
    MultimemCall,
    NodeCall,
    NodeSumsParams,
    PushCall,
)
from drvfuse.ops.collectives.sums.many_kernel import (
    MOST_TENSORS,
    AllreduceManyParams,
    AllreduceNodesManyParams,
    ManyCall,
    NodeSumsManyParams,
)
from drvfuse.ops.collectives.sums.scatter_kernel import (
    FusedScatterNodesParams,
    FusedScatterParams,
    FusedScatterPushParams,
    RowParts,
    ScatterNodesParams,
    ScatterParams,
    ScatterPushParams,
)
from drvfuse.ops.gemv.kernel import GemvParams
from drvfuse.ops.norm.rmsnorm_fp8 import NormParams
from drvfuse.plans.quantisation import Quantisation
from drvfuse.trace import layout

pytestmark = pytest.mark.emulated


class Block(NamedTuple):
    """A structure of the host, the C++ type that it must match, and the definitions that the C++ header needs."""

    host: type[ctypes.Structure] | np.dtype[Any]
    header: str
    cxx: str
    defines: dict[str, str | int]


def _defines(**values: str | int) -> dict[str, str | int]:
    return {f"DRVFUSE_{name}": value for name, value in values.items()}


_TEAMS = _defines(TEAM_WARPS=1, TEAMS=1, PACKS=1, ALIGNED=1, GROUP=16)
_FP8 = _defines(DTYPE="e4m3", WEIGHT_DTYPE="bf16")
_COLLECTIVE = {
    **workspace.defines(),
    **_defines(RANKS=2, PACKS=1, RAGGED=0, STAGED=0, LOCAL=0, TWO_STAGE=0, EXACT=0, DTYPE="bf16", OUT_DTYPE="bf16"),
    **_defines(MULTIMEM=0, NODES=0, COMPARES=0),
}
_MULTIMEM = _defines(MULTIMEM=1, TWO_STAGE=1, TO_OUTPUTS=0, KERNEL="kernel")
_NODES = _defines(NODES=1, TWO_STAGE=1)
_LOCAL = _defines(LOCAL=1, TWO_STAGE=0)
_PUSH = _defines(TWO_SHOT=0, DEPTH=0, RELAYS=0, KERNEL="kernel", MOST_THREADS=128)
_MANY = _defines(MANY=MOST_TENSORS)
_FUSED = {
    **_COLLECTIVE,
    **_defines(CLUSTER=1, RESIDUAL=0, GAMMA_DTYPE="bf16", SCALES_DTYPE="float", RESIDUAL_DTYPE="bf16"),
    **_defines(LAYER=0, BETA=0, NORMED=0, MORE=0, QUANT=0, GROUP=0, SCALES_LAYOUT=0, HEAD=0),
}
_NORMED = _defines(NORMED=1, MORE=1, OUT_DTYPE="e4m3", QUANT=1)
_FORM = NormForm(normed=True)
_MOVES = {
    **workspace.defines(),
    **_defines(RANKS=2, SAME=1, ARRANGED=0, COMPARES=0, PUT=0, STAGED=0, PACKS=8, KERNEL="kernel"),
}
_DIVISION = _defines(
    DTYPE="bf16",
    OUT_DTYPE="e4m3",
    SCALE_DTYPE="bf16",
    TILE_ROWS=16,
    KEPT=0,
    WARPS=8,
    RUN=1,
    ALIGNED=1,
    FIND_SCALE=1,
    ROWS_OUT=1,
    COLUMNS_OUT=0,
)
_FORWARD = {
    **_FP8,
    **_defines(GROUP=16, WARPS=8, BATCH=4, BLOCK_ROWS=4, TILE_ROWS=4, TILE_COLUMNS=8, ROW_LANES=8, RUN=1, ALIGNED=1),
    **_defines(WHOLE=0, LAYER=0, AFFINE=0),
}
_BACKWARD = {**_FP8, **_TEAMS, **_defines(GRADIENTS=1, CENTRED=0, WEIGHTED=1, FULL=0)}
_LAYERNORM = {**_FP8, **_TEAMS, **_defines(PARAMETERS=1, RUN=1, TILE_ROWS=4, ROW_LANES=8)}
_GROUPS = {**_FP8, **_TEAMS, **_defines(ADD=1, NORM=1)}
_GEMV = {
    **_defines(
        ACT_DTYPE="bf16", WEIGHT_DTYPE="bf16", GAMMA_DTYPE="bf16", OUT_DTYPE="bf16", M=1, WARPS_A_ROW=1, TEAMS=2
    ),
    **_defines(PACKS=1, STEP=1, NORM_WARPS=1, SUM_LANES=1, ACCESS=16, STAGES=2, SLOTS=4, SUM_WARPS=1, COPIED=1),
    **_defines(CHUNKED=0, WHOLE=1, DEPENDENT=0, ACT_ALIGNED=1, NORM_ALIGNED=1, SCALES="none"),
    **_defines(ACT_SCALES="none", ACT_SCALE_GROUP=128, BIASED=0, BIAS_DTYPE="bf16"),
}
_NORM = {
    **_defines(
        DTYPE="bf16", GAMMA_DTYPE="bf16", RESIDUAL_DTYPE="bf16", RESIDUAL=0, LAYER=0, BETA=0, NORMED=0, RAGGED=0
    ),
    **_defines(LANES=0, PACKS=1, CLUSTER=1, EXACT=1, THREADS=32),
    **dict(Quantisation.per_row().definitions(dtypes.get("bfloat16"))),
}

BLOCKS = [
    Block(AllreduceParams, "collectives/sums/allreduce.cu", "AllreduceParams", _COLLECTIVE),
    Block(FusedParams, "collectives/rows/steps.cuh", "FusedParams", _FUSED),
    Block(AllreducePushParams, "collectives/sums/allreduce_push.cu", "AllreducePushParams", _COLLECTIVE | _PUSH),
    Block(FusedPushParams, "collectives/rows/allreduce_rmsnorm_fp8_push.cu", "FusedPushParams", _FUSED | _PUSH),
    Block(
        AllreduceMultimemParams,
        "collectives/sums/allreduce_multimem.cu",
        "AllreduceMultimemParams",
        _COLLECTIVE | _MULTIMEM,
    ),
    Block(
        FusedMultimemParams,
        "collectives/rows/allreduce_rmsnorm_fp8_multimem.cu",
        "FusedMultimemParams",
        _FUSED | _MULTIMEM,
    ),
    Block(NodeCall, "collectives/nodes/sums.cuh", "NodeCall", _COLLECTIVE),
    Block(NodeSumsParams, "collectives/nodes/node_sums.cu", "NodeSumsParams", _COLLECTIVE),
    Block(AllreduceNodesParams, "collectives/sums/allreduce.cu", "Params", _COLLECTIVE | _NODES),
    Block(FusedNodesParams, "collectives/rows/allreduce_rmsnorm_fp8.cu", "Params", _FUSED | _NODES),
    Block(FormParams, "collectives/rows/steps.cuh", "FusedParams", _FUSED | _NORMED),
    Block(
        params_of(FusedPushParams, _FORM),
        "collectives/rows/allreduce_rmsnorm_fp8_push.cu",
        "FusedPushParams",
        _FUSED | _PUSH | _NORMED,
    ),
    Block(
        params_of(FusedMultimemParams, _FORM),
        "collectives/rows/allreduce_rmsnorm_fp8_multimem.cu",
        "FusedMultimemParams",
        _FUSED | _MULTIMEM | _NORMED,
    ),
    Block(
        params_of(FusedNodesParams, _FORM),
        "collectives/rows/allreduce_rmsnorm_fp8.cu",
        "Params",
        _FUSED | _NODES | _NORMED,
    ),
    Block(PROGRESS_DTYPE, "collectives/nodes/progress.cuh", "Progress", {}),
    Block(MultimemCall, "collectives/shared/multimem_packs.cuh", "MultimemCall", _COLLECTIVE | _MULTIMEM),
    Block(PushCall, "sync/push.cuh", "PushCall", workspace.defines() | _defines(COMPARES=0)),
    Block(Call, "sync/workspace.cuh", "Call", workspace.defines()),
    Block(ManyCall, "collectives/sums/many.cuh", "ManyCall", _COLLECTIVE | _MANY),
    Block(NodeSumsManyParams, "collectives/nodes/node_sums.cu", "Params", _COLLECTIVE | _MANY),
    Block(AllreduceNodesManyParams, "collectives/sums/allreduce.cu", "Params", _COLLECTIVE | _NODES | _MANY),
    Block(AllreduceManyParams, "collectives/sums/allreduce_push.cu", "Params", _COLLECTIVE | _PUSH | _MANY),
    Block(ScatterParams, "collectives/sums/parts.cuh", "ScatterParams", _COLLECTIVE),
    Block(ScatterPushParams, "collectives/sums/reduce_scatter_push.cu", "ScatterPushParams", _COLLECTIVE | _PUSH),
    Block(RowParts, "collectives/rows/parts.cuh", "RowParts", _FUSED),
    Block(ScatterNodesParams, "collectives/sums/reduce_scatter.cu", "Params", _COLLECTIVE | _NODES | _LOCAL),
    Block(
        FusedScatterNodesParams, "collectives/rows/reduce_scatter_rmsnorm_fp8.cu", "Params", _FUSED | _NODES | _LOCAL
    ),
    Block(FusedScatterParams, "collectives/rows/reduce_scatter_rmsnorm_fp8.cu", "FusedScatterParams", _FUSED),
    Block(
        FusedScatterPushParams,
        "collectives/rows/reduce_scatter_rmsnorm_fp8_push.cu",
        "FusedScatterPushParams",
        _FUSED | _PUSH,
    ),
    Block(Moved, "collectives/moves/tables.cuh", "Moved", _MOVES),
    Block(MoveParams, "collectives/moves/tables.cuh", "MoveParams", _MOVES),
    Block(Arrangement, "collectives/moves/arranged_scales.cuh", "Arrangement", workspace.defines()),
    Block(PlaceScalesParams, "collectives/moves/place_scales.cu", "PlaceScalesParams", workspace.defines()),
    Block(MovePushParams, "collectives/moves/move_push.cu", "MovePushParams", _MOVES),
    Block(
        CheckParams,
        "collectives/shared/check_call.cu",
        "CheckParams",
        workspace.defines() | _defines(RANKS=2, COMPARES=1),
    ),
    Block(CountParams, "collectives/nodes/count_exchange.cu", "CountParams", {}),
    Block(
        ExchangeEndedParams,
        "collectives/nodes/exchange_ended.cu",
        "ExchangeEndedParams",
        workspace.defines() | _defines(RANKS=2),
    ),
    Block(workspace.REPORT_DTYPE, "sync/workspace.cuh", "Report", workspace.defines()),
    Block(ForwardParams, "coat/forward.cuh", "ForwardParams", _FORWARD),
    Block(BackwardParams, "coat/backward_rows.cuh", "BackwardParams", _BACKWARD),
    Block(LayerNormParams, "coat/fp8_layernorm_forward.cu", "LayerNormParams", _LAYERNORM),
    Block(DivisionParams, "coat/fp8_division.cu", "DivisionParams", _DIVISION),
    Block(GroupParams, "coat/fp8_group_scales.cu", "GroupParams", _GROUPS),
    Block(NormParams, "norm/rmsnorm_fp8.cu", "NormParams", _NORM),
    Block(GemvParams, "gemv/params.cuh", "GemvParams", _GEMV),
    Block(scratch.ScratchParams, "sync/scratch.cuh", "Scratch", {}),
    Block(scratch._REPORT, "sync/scratch.cuh", "ScratchReport", {}),
    Block(layout.TraceParams, "trace/trace.cuh", "TraceParams", layout.defines()),
    Block(Peers, "../check/cu/slots.cu", "Peers", {}),
]


def of_host(block: Block) -> dict[str, tuple[int, int]]:
    """Offset and size of each field by its name. For a ctypes structure, the name "" means the whole structure."""
    if isinstance(block.host, np.dtype):
        assert block.host.fields is not None
        return {name: (offset, kind.itemsize) for name, (kind, offset, *_) in block.host.fields.items()}
    fields = {name: getattr(block.host, name) for name, *_ in block.host._fields_}
    return {"": (0, ctypes.sizeof(block.host))} | {name: (field.offset, field.size) for name, field in fields.items()}


def source_of(block: Block, names: list[str]) -> str:
    """The source of a kernel that stores the offset and size of each field; the name "" means the whole structure.

    If a structure extends another one, only the fields that it adds are compared, as the base structure has a case of
    its own.

    NVRTC has no <cstddef>, but its front end evaluates the spelling of offsetof below. The structured binding does not
    compile if the structure has another number of fields.
    """
    fields = [name for name in names if name]
    lines = [f'#include "{block.header}"', f'extern "C" __global__ void layout({block.cxx}* null, u32* out) {{']
    if not isinstance(block.host, np.dtype) and block.host.__base__ is ctypes.Structure:
        lines.append(f"auto& [{', '.join(f'field_{name}' for name in fields)}] = *null;")
    for i, name in enumerate(names):
        offset = f"__INTADDR__(&((({block.cxx}*)0)->{name}))" if name else "0"
        size = f"sizeof((({block.cxx}*)0)->{name})" if name else f"sizeof({block.cxx})"
        lines.append(f"out[{2 * i}] = u32({offset}), out[{2 * i + 1}] = u32({size});")
    return "\n".join([*lines, "}"])


def in_kernel(block: Block, names: list[str]) -> dict[str, tuple[int, int]]:
    with df.emu.Machine(devices=1) as machine:
        device = df.device(0, driver=machine)
        source = source_of(block, names)
        module = df.compile(source, driver=machine, include=[CU], defines=block.defines)
        out = device.zeros(2 * len(names), "uint32")
        module["layout"].prepare(1, 1, 0, out, device=device)(device.stream)
        device.synchronize()
        values = out.numpy().tolist()
    return {name: (values[2 * i], values[2 * i + 1]) for i, name in enumerate(names)}


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.cxx)
def test_every_field_has_the_offset_and_size_that_the_kernel_sees(block):
    expected = of_host(block)
    assert in_kernel(block, list(expected)) == expected


def test_a_kernel_that_uses_a_field_unknown_to_the_host_does_not_compile():
    block = BLOCKS[0]
    names = list(of_host(block))
    with pytest.raises(CompileError, match="more elements than there are binding names"):
        in_kernel(block, names[:-1])
