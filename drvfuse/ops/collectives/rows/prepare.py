# SPDX-License-Identifier: Apache-2.0
"""The last steps of the fused ops: from checked arguments to a `Prepared`."""

from __future__ import annotations

from collections.abc import Sequence

from ....plans import shared as plans
from ....plans.quantisation import Quantisation
from ...call.prepared import Prepared
from ...call.streams import Streams, resolve_streams
from ..shared import multimem, plan
from ..shared import prepare as collective_call
from ..shared.kernel import PUSH
from ..shared.options import CallOptions
from .arguments import FusedRows, NormArguments
from .call import Addresses, FusedCall
from .form import NormForm
from .results import FusedResults, NormResult


def prepare(
    kind: type[FusedCall],
    common: CallOptions,
    rows: FusedRows,
    norm: NormArguments,
    quantisation: Quantisation,
    results: FusedResults,
    algos: Sequence[str],
    streams: Streams,
    bare: bool,
    use_multimem: bool = False,
) -> Prepared[NormResult]:
    """Prepare a call of the class `kind` by the first of `algos` for which the workspace is large enough. `bare`: the
    call returns bare arrays in place of lists."""
    group, sources, dtype = common.group, rows.inputs, rows.dtype
    queues = resolve_streams(group, streams, sources)
    written, result = results.allocate(group, queues, bare)
    added = norm.residuals
    form = NormForm(
        kind=quantisation.kind if quantisation.kind in ("static", "group") else "",
        group=quantisation.group,
        layout=quantisation.layout,
        head=rows.head,
        residual=added[0].dtype if added and added[0].dtype != dtype else None,
        layer=norm.layer,
        beta=bool(norm.betas),
        normed=results.normed,
    )

    def make(algo: str) -> FusedCall:
        placed = None
        if use_multimem:
            ragged = plans.ragged(rows.columns, dtype.itemsize)
            addresses = [] if ragged or not rows.rows else [source.ptr for source in sources]
            placed = multimem.Placement.of(group, queues, addresses, [], sources[0].array.nbytes)
            staged = placed.staged
        else:
            pulls = algo not in (*PUSH, "naive") and rows.rows > 0
            staged = pulls and not plan.readable_by_peers(group, sources)
        return kind(
            options=common,
            shape=sources[0].shape,
            dtype=dtype,
            quantisation=quantisation,
            rows=max(rows.counts, default=rows.rows),
            columns=rows.columns,
            algo=algo,
            staged=staged,
            residual=bool(added),
            gamma_dtype=norm.gammas[0].dtype,
            form=form,
            numbers=norm.numbers,
            multimem=placed,
            counts=rows.counts,
        )

    none = [0] * len(sources)
    named = (written.get(name) for name in ("residual_outputs", "outputs", "scales"))
    each = sources, norm.gammas, added, *named, norm.betas, written.get("normed_outputs")
    arrays = list(map(Addresses, *([o.ptr for o in of_ranks] if of_ranks else none for of_ranks in each)))
    return collective_call.prepare(
        common,
        algos,
        make,
        (lambda call: call.sequence(arrays)) if rows.rows else None,
        result,
        list(zip(sources, *norm.arrays, strict=True)),
        list(zip(*written.values(), strict=True)),
        queues,
    )
