# SPDX-License-Identifier: Apache-2.0
"""`reduce_scatter_rmsnorm_fp8`: reduce-scatter, optional residual, norm and FP8 quantisation of rows in one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ....plans.quantisation import Quantisation
from ....runtime.interop import ArrayLike
from ...call import operands
from ...call.op import op
from ...call.options import PDLLevel
from ...call.prepared import Prepared
from ...call.streams import Streams
from ..shared import split as own_parts
from ..shared.options import CallOptions
from ..shared.split import ALGORITHMS, ROW_FORMS
from .arguments import FusedRows, NormArguments, quantisation_of
from .prepare import prepare
from .results import FusedResults, NormResult
from .scatter_call import FusedScatterCall

if TYPE_CHECKING:
    from ....comm.group import Group
    from ....trace.buffer import Trace


@op
def reduce_scatter_rmsnorm_fp8(
    group: Group,
    inputs: ArrayLike | Sequence[ArrayLike],
    gammas: ArrayLike | Sequence[ArrayLike],
    *,
    epsilon: float,
    splits: Sequence[int] | None = None,
    weight_offset: float = 0.0,
    residuals: ArrayLike | Sequence[ArrayLike] | None = None,
    residual_outputs: ArrayLike | Sequence[ArrayLike] | None = None,
    norm: str = "rms",
    betas: ArrayLike | Sequence[ArrayLike] | None = None,
    head_columns: int | None = None,
    quantisation: Quantisation | None = None,
    outputs: ArrayLike | Sequence[ArrayLike] | None = None,
    scales: ArrayLike | Sequence[ArrayLike] | None = None,
    normed_outputs: ArrayLike | Sequence[ArrayLike] | None = None,
    algo: str = "auto",
    pdl_level: PDLLevel = PDLLevel.OFF,
    max_num_blocks: int | None = None,
    streams: Streams = None,
    trace: Trace | None = None,
) -> Prepared[NormResult]:
    """Sum `inputs` over the ranks, and on each rank add the residual to its own rows, normalise and quantise these.

    The inputs' leading dimensions are one dimension of rows [rows, columns], which is split as by `reduce_scatter`:
    `splits[r]` are the rows of rank r, and None splits them as equally as possible. All other arrays have only the rows
    of their rank: `residuals`, `residual_outputs`, `outputs` and `normed_outputs` are [rows of the rank, columns], and
    `scales` are those of these rows, with `head_columns` [rows of the rank, heads]. Each row has the bits that
    `allreduce_rmsnorm_fp8` gives it, and the other arguments are those of that op. Residuals are not replicated: the
    `residual_outputs` of one call are the residuals of the next.

    `algo` is "push", "pull", "naive" or "auto", as for `reduce_scatter`, over several nodes too. `pdl_level`,
    `max_num_blocks`, `streams`, `trace`, arrays and errors are as for `allreduce`. The rule, rounding by rounding, is
    `drvfuse.reference.reduce_scatter_rmsnorm_fp8`.

    Returns (output, scales, residual): lists, or bare arrays if `inputs` is a bare array of the one local rank.
    """
    common = CallOptions.of("reduce_scatter_rmsnorm_fp8", group, algo, ALGORITHMS, pdl_level, max_num_blocks, trace)
    rows = FusedRows.of(operands.of_ranks(group, "inputs", inputs), head_columns).split(group, splits)
    normed = NormArguments.of(group, rows, norm, gammas, betas, residuals, epsilon, weight_offset)
    quantised = quantisation_of(rows, quantisation)
    results = FusedResults.of(group, rows, normed, quantised, outputs, scales, normed_outputs, residual_outputs)
    received = (group.layout.inside - 1) * max(rows.counts) * rows.input_bytes
    algos = [ROW_FORMS[name] for name in own_parts.algorithms(common.op, group, algo, received, rows.inputs)]
    bare = operands.is_bare(group, inputs)
    return prepare(FusedScatterCall, common, rows, normed, quantised, results, algos, streams, bare)
