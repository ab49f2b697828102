# SPDX-License-Identifier: Apache-2.0
"""The cases that `drvfuse check` runs. Every kernel must run in at least one of them."""

from __future__ import annotations

from functools import partial

from . import coat as fp8
from . import differing, forms, gemv, moves, norm, push, scatter
from . import nodes as over_nodes
from .collectives import epilogue, in_place, mixed, multimem_in_place, near_32_bits, repeated, two_streams
from .run import Case

form_of_rows = partial(repeated, op="allreduce_rmsnorm_fp8", shape=(9, 512), side=False)

CASES: dict[str, Case] = {
    "allreduce-one_stage": partial(repeated, op="allreduce", algo="one_stage"),
    "allreduce-two_stage": partial(repeated, op="allreduce", algo="two_stage"),
    "allreduce-naive": partial(repeated, op="allreduce", algo="naive"),
    "allreduce-in-place": in_place,
    "allreduce-epilogue": epilogue,
    "allreduce-two-streams": two_streams,
    "allreduce-ordinals": near_32_bits,
    "allreduce-push_one_shot": partial(repeated, op="allreduce", algo="push_one_shot"),
    "allreduce-push_two_shot": partial(repeated, op="allreduce", algo="push_two_shot"),
    "allreduce-push-epochs": partial(near_32_bits, algo="push_one_shot"),
    "fused-one_stage": partial(repeated, op="allreduce_rmsnorm_fp8", algo="one_stage"),
    "fused-two_stage": partial(repeated, op="allreduce_rmsnorm_fp8", algo="two_stage"),
    "fused-naive": partial(repeated, op="allreduce_rmsnorm_fp8", algo="naive"),
    "fused-push_one_shot": partial(repeated, op="allreduce_rmsnorm_fp8", algo="push_one_shot"),
    "fused-push_two_shot": partial(repeated, op="allreduce_rmsnorm_fp8", algo="push_two_shot"),
    "fused-layer": partial(form_of_rows, algo="push_two_shot", form="layer"),
    "fused-mxfp8": partial(form_of_rows, algo="two_stage", form="mxfp8"),
    "fused-nvfp4": partial(form_of_rows, algo="push_two_shot", form="nvfp4"),
    "fused-forms": forms.fused,
    "allreduce-nodes": partial(repeated, op="allreduce", algo="two_stage", nodes=2),
    "scatter-nodes": over_nodes.reducing,
    "fused-nodes": partial(repeated, op="allreduce_rmsnorm_fp8", algo="two_stage", nodes=2),
    "push-changing": push.changing,
    "push-rounds": push.several_rounds,
    "fused-push-given-up": push.given_up,
    "allreduce-multimem-one_stage": partial(repeated, op="allreduce", algo="one_stage", multimem=True),
    "allreduce-multimem-two_stage": partial(repeated, op="allreduce", algo="two_stage", multimem=True),
    "fused-multimem": partial(repeated, op="allreduce_rmsnorm_fp8", algo="two_stage", multimem=True),
    "multimem-in-place": multimem_in_place,
    "multimem-mixed": partial(mixed, multimem=True),
    "fused-push-epochs": partial(near_32_bits, op="allreduce_rmsnorm_fp8", algo="push_two_shot", shape=(3, 520)),
    "fp8-rmsnorm": fp8.rmsnorm,
    "fp8-rmsnorm-few": fp8.rmsnorm_few,
    "fp8-rmsnorm-tiles": fp8.rmsnorm_tiles,
    "fp8-rmsnorm-rows": fp8.rmsnorm_rows,
    "fp8-rmsnorm-gradient": fp8.rmsnorm_gradient,
    "fp8-division": fp8.division,
    "fp8-layernorm": fp8.layernorm,
    "fp8-layernorm-gradient": fp8.layernorm_gradient,
    "fp8-groups": fp8.groups,
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
    "many-push": forms.many,
    "scatter-push": partial(repeated, op="reduce_scatter", algo="push"),
    "scatter-pull": partial(repeated, op="reduce_scatter", algo="pull"),
    "scatter-naive": partial(repeated, op="reduce_scatter", algo="naive"),
    "scatter-changing": scatter.changing_parts,
    "scatter-fused-push": partial(repeated, op="reduce_scatter_rmsnorm_fp8", algo="push"),
    "scatter-fused-pull": partial(repeated, op="reduce_scatter_rmsnorm_fp8", algo="pull"),
    "scatter-fused-forms": forms.scattered,
    "scatter-fused-changing": partial(scatter.changing_parts, op="reduce_scatter_rmsnorm_fp8"),
    "calls-equal": differing.compared,
    "calls-differing": differing.differing,
}
