# SPDX-License-Identifier: Apache-2.0
"""`allreduce_many` over several nodes: the kernels of an all-reduce over nodes, on the packs of all tensors together.

A rank's kernel has only the addresses of its own tensors. So inputs are always staged: each rank copies its packs to
its payload, where its peers read them. Results go through payloads, as those of every all-reduce over nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ....plans import nodes as shares
from ....plans import shared as plans
from ....plans.limits import ceil_div
from ...call.planned import Ready
from ...call.prepared import LaunchSequence
from ..shared import plan
from ..shared.options import CallOptions
from ..sums.many_kernel import AllreduceNodesManyParams, ManyCall, ManyKernel, NodeSumsManyParams
from . import sums as nodes
from .stages import AcrossNodes, Stage, link

if TYPE_CHECKING:
    from ....dtypes import DType


def sequence(
    options: CallOptions,
    dtype: DType,
    counts: Sequence[int],
    inputs: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
) -> tuple[LaunchSequence, list[Ready]]:
    """Return the launch sequence and the launches for tensors t of `counts[t]` >= 1 elements, which lie at
    `inputs[t][i]` and `outputs[t][i]` on local rank i."""
    group, width = options.group, plans.PACK_BYTES // dtype.itemsize
    share = shares.Share(1, width, plans.PACK_BYTES, group.layout.inside, link(group).places, staged=True)
    ragged = any(plans.ragged(count, dtype.itemsize) for count in counts)
    none = [0] * len(group)
    stages: list[Stage] = []
    every: list[Ready] = []
    for chunk in shares.chunks(sum(ceil_div(count, width) for count in counts), share, group.workspace.payload_bytes):
        many = ManyCall.of(counts, width, chunk.first)
        key = ("allreduce_many", dtype.name, tuple(counts), chunk, options.blocks)
        parameters = NodeSumsManyParams(many=many)
        before = nodes.sums(options, dtype, ragged, chunk, none, parameters, key, ManyKernel)
        after = plan.take(
            group,
            key,
            lambda chunk=chunk, many=many: _results(options, dtype, ragged, chunk, many),  # type: ignore[misc]
            [[]] * len(group),
            none,
            options.pdl,
            options.trace,
        )
        nodes.point(group, after, chunk)
        for position in range(len(group)):
            before[position].point("many.inputs", *(of_tensor[position] for of_tensor in inputs))
            after[position].point("many.outputs", *(of_tensor[position] for of_tensor in outputs))
        stages += nodes.stages(group, chunk, before, after)
        every += [*before, *after]
    return AcrossNodes(group, stages), every


def _results(options: CallOptions, dtype: DType, ragged: bool, chunk: shares.Chunk, many: ManyCall) -> plan.Plan:
    """Return the plan of the kernel after the exchange, which adds the nodes' partial sums and writes the results."""
    count = chunk.items * chunk.share.width
    shape = plans.allreduce_launch(count, dtype.itemsize, chunk.share.inside, nodes.ALGORITHM, options.blocks)
    spec = ManyKernel(
        op="allreduce",
        algo=nodes.ALGORITHM,
        dtype=dtype,
        ranks=chunk.share.inside,
        out_dtype=dtype,
        packs=shape.packs,
        ragged=ragged,
        nodes=True,
    )
    parameters = AllreduceNodesManyParams(count=count, columns=1, chunk_packs=chunk.largest, many=many)
    return plan.pull(spec, shape, count, chunk.largest, parameters)
