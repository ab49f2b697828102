# SPDX-License-Identifier: Apache-2.0
"""`allreduce_rmsnorm_fp8`: all-reduce, optional residual, RMSNorm and FP8 quantisation of rows in one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ....errors import require_kind
from ....plans import tuning
from ....plans.quantisation import Quantisation
from ....runtime.interop import ArrayLike
from ...call import operands
from ...call.op import op
from ...call.options import PDLLevel
from ...call.prepared import Prepared
from ...call.streams import Streams
from ..nodes import sums as nodes
from ..shared import multimem, plan
from ..shared.kernel import ALGORITHMS, PULL
from ..shared.options import CallOptions
from ..shared.tuned import Tuned
from .arguments import InputRows, NormArguments, NormResult, RowsResults, quantisation_of
from .call import RowsCall, prepare

if TYPE_CHECKING:
    from ....comm.group import Group
    from ....trace.buffer import Trace


@op
def allreduce_rmsnorm_fp8(
    group: Group,
    inputs: ArrayLike | Sequence[ArrayLike],
    gammas: ArrayLike | Sequence[ArrayLike],
    *,
    epsilon: float,
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
    use_multimem: bool = False,
    pdl_level: PDLLevel = PDLLevel.OFF,
    max_num_blocks: int | None = None,
    streams: Streams = None,
    trace: Trace | None = None,
) -> Prepared[NormResult]:
    """Sum `inputs` over the ranks, add the residual, normalise each row and quantise it, on every rank.

    `inputs`: a list with one array [..., columns] per local rank, of one shape and dtype (bfloat16, float16 or
    float32), 1 to 16384 columns. `gammas`: one array [columns] per rank, of the inputs' dtype or float32. `residuals`:
    one array per rank, of the inputs' shape, in the inputs' dtype or float32. Gammas, betas and residuals must be equal
    on all ranks, which is not checked. With a `pdl_level` other than OFF gammas and betas may be read before the
    previous kernel has finished, so that kernel must not write them.

    For each row, in float32 and in this order: x = the sum over ranks 0, 1, ... from +0; with residuals, x + residual
    rounded to the residuals' dtype, which is also stored in `residual_outputs`; f = 1 / sqrt(mean(x^2) + epsilon);
    y = (x * (gamma + weight_offset)) * f. Every algorithm, rank and batch size gives the same bits, except with
    `use_multimem`.

    `quantisation`, a `drvfuse.Quantisation`, says how y becomes the output and which shapes and dtypes outputs and
    scales have; y is about output * scale. None means `Quantisation.per_row()`: the scale of a row is max|y| / 448 in
    float32, and the output is y / scale, saturated and rounded once to float8_e4m3fn. A row whose scale is 0 has output
    0; a row with a NaN has a NaN scale. With `Quantisation.none()` the output is y, rounded once to the inputs' dtype,
    and there are no scales.

    `norm="layer"`: LayerNorm. x is replaced by x - mean(x) before f is computed, and `betas`, if there are any, are
    added to y: one array per rank, like the gammas. `drvfuse.reference.norm` has the order of all operations.

    `head_columns`: the last dimension is split into heads of that number of columns, which must divide it, and each
    head is a row of its own. Gammas and betas then have the shape [head_columns], and scales [..., heads]. The bits are
    those of the call on arrays of the shape [..., heads, head_columns].

    `normed_outputs`: arrays like the inputs, which get y before quantisation, rounded to the inputs' dtype. They have
    the bits that `outputs` have with `Quantisation.none()`.

    `use_multimem=True`: each row has an owner, a rank that sums the row through multicast memory, normalises it, and
    stores output and scale to all ranks; with residuals the owner stores the residual output too. `algo` must be "auto"
    or "two_stage", which mean the same. Inputs, staging and sums are as with `allreduce`, so x begins with the sum
    rounded to the inputs' dtype; rows whose size is no multiple of 16 bytes are staged too. All ranks hold equal bits:
    those of `drvfuse.reference` for the sum that the switches returned.

    `outputs`, `scales` and `residual_outputs` (of the residuals' dtype) are allocated if they are None.
    `residual_outputs[i]` may be `residuals[i]`; otherwise nothing that is written may share memory with anything.
    `algo`, `pdl_level`, `max_num_blocks`, `streams`, `trace`, arrays and errors are as for `allreduce`. The rule in
    numpy, rounding by rounding, is `drvfuse.reference.allreduce_rmsnorm_fp8`.

    Returns (output, scales, residual): lists, or bare arrays if `inputs` is a bare array of the one local rank.
    """
    common = CallOptions.of("allreduce_rmsnorm_fp8", group, algo, ALGORITHMS, pdl_level, max_num_blocks, trace)
    require_kind("use_multimem", use_multimem, bool, "True or False")
    rows = InputRows.of(operands.of_ranks(group, "inputs", inputs), head_columns)
    normed = NormArguments.of(group, rows, norm, gammas, betas, residuals, epsilon, weight_offset)
    quantised = quantisation_of(rows, quantisation)
    results = RowsResults.of(group, rows, normed, quantised, outputs, scales, normed_outputs, residual_outputs)
    algos = _algorithms(common, use_multimem, rows, results.row_bytes)
    bare = operands.is_bare(group, inputs)
    return prepare(RowsCall, common, rows, normed, quantised, results, algos, streams, bare, use_multimem)


def _algorithms(common: CallOptions, use_multimem: bool, rows: InputRows, sent: int) -> list[str]:
    """Return the algorithms to try one after another: the workspace may be too small for the first one. A row's owner
    sends `sent` bytes of the row's results to each peer."""
    group, algo = common.group, common.algo
    if group.link is not None:
        return [nodes.algorithm(group, algo, use_multimem)]
    if use_multimem:
        return [multimem.algorithm(group, algo, PULL[1:])]
    if algo != "auto":
        plan.require_peers(group, algo)
        return [algo]
    if not group.peers_readable:
        return ["naive"]
    best = tuning.fused_algorithm(group.part(Tuned).costs, group.size, rows.input_bytes, sent, rows.rows)
    # If the workspace is too small for `best`, one_stage may still fit, as it needs less of the workspace, or none.
    return [best, "one_stage"]
