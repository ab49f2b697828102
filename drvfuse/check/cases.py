# SPDX-License-Identifier: Apache-2.0
"""The cases that `drvfuse check` runs. Every kernel must run in at least one of them."""

from __future__ import annotations

from functools import partial

from . import coat, differing, gemv, moves, norm, push, rows, sums
from . import nodes as over_nodes
from .run import Case
from .shared import mixed, near_32_bits, repeated, two_streams

form_of_rows = partial(repeated, op="allreduce_rmsnorm_fp8", shape=(9, 512), side=False)

CASES: dict[str, Case] = {
    "allreduce-one_stage": partial(repeated, op="allreduce", algo="one_stage"),
    "allreduce-two_stage": partial(repeated, op="allreduce", algo="two_stage"),
    "allreduce-naive": partial(repeated, op="allreduce", algo="naive"),
    "allreduce-in-place": sums.in_place,
    "allreduce-epilogue": sums.epilogue,
    "allreduce-two-streams": two_streams,
    "allreduce-ordinals": near_32_bits,
    "allreduce-push_one_shot": partial(repeated, op="allreduce", algo="push_one_shot"),
    "allreduce-push_two_shot": partial(repeated, op="allreduce", algo="push_two_shot"),
    "allreduce-push-epochs": partial(near_32_bits, algo="push_one_shot"),
    "rows-one_stage": partial(repeated, op="allreduce_rmsnorm_fp8", algo="one_stage"),
    "rows-two_stage": partial(repeated, op="allreduce_rmsnorm_fp8", algo="two_stage"),
    "rows-naive": partial(repeated, op="allreduce_rmsnorm_fp8", algo="naive"),
    "rows-push_one_shot": partial(repeated, op="allreduce_rmsnorm_fp8", algo="push_one_shot"),
    "rows-push_two_shot": partial(repeated, op="allreduce_rmsnorm_fp8", algo="push_two_shot"),
    "rows-layer": partial(form_of_rows, algo="push_two_shot", form="layer"),
    "rows-mxfp8": partial(form_of_rows, algo="two_stage", form="mxfp8"),
    "rows-nvfp4": partial(form_of_rows, algo="push_two_shot", form="nvfp4"),
    "rows-forms": rows.fused,
    "allreduce-nodes": partial(repeated, op="allreduce", algo="two_stage", nodes=2),
    "scatter-nodes": over_nodes.reducing,
    "rows-nodes": partial(repeated, op="allreduce_rmsnorm_fp8", algo="two_stage", nodes=2),
    "push-changing": push.changing,
    "push-rounds": push.several_rounds,
    "rows-push-given-up": push.given_up,
    "allreduce-multimem-one_stage": partial(repeated, op="allreduce", algo="one_stage", multimem=True),
    "allreduce-multimem-two_stage": partial(repeated, op="allreduce", algo="two_stage", multimem=True),
    "rows-multimem": partial(repeated, op="allreduce_rmsnorm_fp8", algo="two_stage", multimem=True),
    "multimem-in-place": sums.multimem_in_place,
    "multimem-mixed": partial(mixed, multimem=True),
    "rows-push-epochs": partial(near_32_bits, op="allreduce_rmsnorm_fp8", algo="push_two_shot", shape=(3, 520)),
    "coat-rmsnorm": coat.rmsnorm,
    "coat-rmsnorm-few": coat.rmsnorm_few,
    "coat-rmsnorm-tiles": coat.rmsnorm_tiles,
    "coat-rmsnorm-rows": coat.rmsnorm_rows,
    "coat-rmsnorm-gradient": coat.rmsnorm_gradient,
    "coat-division": coat.division,
    "coat-layernorm": coat.layernorm,
    "coat-layernorm-gradient": coat.layernorm_gradient,
    "coat-groups": coat.groups,
    "norm-rows": norm.rows,
    "norm-few": norm.few,
    "norm-forms": norm.forms,
    "gemv": gemv.partial_norm,
    "gemv-fp8": gemv.fp8,
    "moves": moves.moves,
    "moves-rounds": moves.moves_in_rounds,
    "moves-arranged": partial(moves.moves, ops=("arranged",)),
    "moves-nodes": over_nodes.moving,
    "mixed-nodes": over_nodes.mixed,
    "failing-nodes-sums": over_nodes.failing_sums,
    "failing-nodes-bytes": over_nodes.failing_bytes,
    "mixed": mixed,
    "many-push": sums.many,
    "scatter-push": partial(repeated, op="reduce_scatter", algo="push"),
    "scatter-pull": partial(repeated, op="reduce_scatter", algo="pull"),
    "scatter-naive": partial(repeated, op="reduce_scatter", algo="naive"),
    "scatter-changing": sums.changing_parts,
    "rows-scatter-push": partial(repeated, op="reduce_scatter_rmsnorm_fp8", algo="push"),
    "rows-scatter-pull": partial(repeated, op="reduce_scatter_rmsnorm_fp8", algo="pull"),
    "rows-scatter-forms": rows.scattered,
    "rows-scatter-changing": partial(sums.changing_parts, op="reduce_scatter_rmsnorm_fp8"),
    "calls-equal": differing.compared,
    "calls-differing": differing.differing,
}
