# SPDX-License-Identifier: Apache-2.0
"""Calls of the fused norms, all-reduce or reduce-scatter + norm + quantisation, in any form, for benchmarks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from .. import dtypes, reference
from ..comm.group import Group
from ..comm.rank import Rank
from ..ops.collectives.rows.allreduce_rmsnorm_fp8 import allreduce_rmsnorm_fp8
from ..ops.collectives.rows.reduce_scatter_rmsnorm_fp8 import reduce_scatter_rmsnorm_fp8
from ..plans.quantisation import Quantisation
from ..plans.sums import split_rows
from ..reference.quantised import arrange
from ..runtime.array import Array
from .collective_calls import CollectiveCalls, Host, Result, bank, inputs_of, repeated
from .forms import Form
from .sizes import EPSILON

OPS: dict[str, Any] = {
    "allreduce_rmsnorm_fp8": allreduce_rmsnorm_fp8,
    "reduce_scatter_rmsnorm_fp8": reduce_scatter_rmsnorm_fp8,
}


def norms(group: Group, op: str, rows: int, columns: int, sets: int, form: Form) -> CollectiveCalls:
    """Calls of one of the fused ops in a form that fits the columns."""
    scatters, made = op == "reduce_scatter_rmsnorm_fp8", form.quantisation
    counts = split_rows(rows, group.size) if scatters else (rows,) * group.size
    starts = np.cumsum((0, *counts)) if scatters else [0] * group.size
    of_norm = form.head_columns or columns
    heads = (columns // of_norm,) if form.head_columns else ()

    def own(values: Host, rank: Rank) -> Host:
        """Fill a tensor by repeating the rows `values`, and return its rows that belong to `rank`."""
        return repeated(values, rows)[starts[rank.index] : starts[rank.index] + counts[rank.index]]

    def empty(dtype: Any, shape: Callable[[int], tuple[int, ...]]) -> list[Array]:
        return [rank.empty(shape(counts[rank.index]), dtype) for rank in group]

    banks = [bank(rank, rows, columns) for rank in range(group.size)]
    gamma = np.linspace(0.5, 1.5, of_norm, dtype=np.float32).astype(dtypes.get(form.gamma).numpy)
    beta = gamma[::-1].copy() if form.beta else None
    residual = bank(group.size, rows, columns, form.residual) if form.residual else None
    outputs = empty(made.output_dtype(dtypes.get("bfloat16")), lambda count: made.output_shape((count, columns)))
    options: dict[str, Any] = {"epsilon": EPSILON, "quantisation": made, "norm": form.norm, "outputs": outputs}
    if form.head_columns:
        options["head_columns"] = form.head_columns
    if beta is not None:
        options["betas"] = [rank.array(beta) for rank in group]
    written = {"output": outputs}
    if made.scales is not None:
        options["scales"] = written["scales"] = empty(
            made.scales, lambda count: made.scales_shape((count, *heads), of_norm) or ()
        )
    if residual is not None:
        options["residuals"] = [rank.array(own(residual, rank)) for rank in group]
        options["residual_outputs"] = written["residual"] = empty(form.residual, lambda count: (count, columns))
    if form.normed:
        options["normed_outputs"] = written["normed"] = empty("bfloat16", lambda count: (count, columns))

    @functools.cache
    def of_banks() -> dict[str, Any]:
        """The reference's results for the banks as inputs. Scales of groups have the layout "row"."""
        of_form: dict[str, Any] = {"norm": form.norm, "beta": beta, "head_columns": form.head_columns or None}
        wanted = partial(reference.allreduce_rmsnorm_fp8, banks, gamma, EPSILON, nodes=group.nodes, **of_form)
        found = wanted(residual=residual, quantisation=made)
        scales = found.scales
        if made.group and scales is not None:
            scales = reference.scales_by_row(scales, made, (len(banks[0]), *heads), of_norm)
        result = {"output": found.output, "scales": scales, "residual": found.residual}
        if form.normed:
            result["normed"] = wanted(residual=residual, quantisation=Quantisation.none()).output
        return result

    def expected(name: str) -> list[Host]:
        of_ranks = [own(of_banks()[name], rank) for rank in group]
        return [arrange(scales, made) for scales in of_ranks] if name == "scales" and made.group else of_ranks

    op_of = OPS[op]
    gammas = [rank.array(gamma) for rank in group]
    return CollectiveCalls(
        group,
        lambda inputs, **more: op_of.prepare(group, inputs, gammas, **options, **more),
        inputs_of(group, banks, rows, sets, lambda: [rank.empty((rows, columns), "bfloat16") for rank in group]),
        [Result(f"the {name}", arrays, partial(expected, name)) for name, arrays in written.items()],
    )
