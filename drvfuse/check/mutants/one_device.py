# SPDX-License-Identifier: Apache-2.0
"""Planted faults of ops on one device: in grid barriers, in words with a launch number, and in shared memory."""

from __future__ import annotations

from functools import partial

from ...ops.call.options import PDLLevel
from .. import coat, gemv, norm
from ..mutant import WRONG, Mutant
from ..run import HANGS

MUTANTS = (
    Mutant(
        "grid-barrier-relaxed",
        "blocks arrive at the barrier of a grid without releasing what they wrote",
        "hand-written grid barriers, split reductions",
        coat.layernorm,
    ),
    Mutant(
        "grid-barrier-no-fence",
        "the slots of a grid barrier are polled by relaxed loads, and no fence follows",
        "hand-written grid barriers, split reductions",
        coat.layernorm,
    ),
    Mutant(
        "no-block-barrier-after-grid-spin",
        "threads continue after a grid barrier without waiting for warps of their block that still poll",
        "hand-written grid barriers",
        coat.division,
    ),
    Mutant(
        "fp8-operand-before-pdl-wait",
        "the FP8 forward pass reads its operands before the wait for the kernels that write them",
        "norm kernels launched with programmatic dependence",
        partial(coat.rmsnorm, pdl=PDLLevel.ON),
    ),
    Mutant(
        "fp8-word-of-any-launch",
        "blocks of the FP8 forward pass take words of the previous launch",
        "messages that carry their own readiness, with a sentinel that is not restored",
        coat.rmsnorm_rows,
    ),
    Mutant(
        "fp8-pair-of-any-launch",
        "blocks of the FP8 forward pass that hold tiles in registers take sums of the previous launch",
        "messages that carry their own readiness, with a sentinel that is not restored",
        coat.rmsnorm_tiles,
    ),
    Mutant(
        "fp8-launch-number-too-early",
        "block 0 of the FP8 forward pass advances the launch number before other blocks have read it",
        "words with a launch number that one block advances",
        coat.rmsnorm_rows,
        (*WRONG, *HANGS),
    ),
    Mutant(
        "norm-scratch-reused",
        "every reduction of a row in shared memory uses the same words",
        "reductions of consecutive rows or values in one block",
        norm.rows,
    ),
    Mutant(
        "norm-input-before-pdl-wait",
        "a norm reads its first row before the wait for the kernel that writes it",
        "norm kernels launched with programmatic dependence",
        partial(norm.rows, pdl=PDLLevel.ON),
    ),
    Mutant(
        "gemv-word-of-any-launch",
        "the block that normalises takes words of the previous launch",
        "messages that carry their own readiness, with a sentinel that is not restored",
        gemv.partial_norm,
    ),
    Mutant(
        "gemv-flag-before-value",
        "a word that is its own flag is stored in two halves, the flag first",
        "messages that carry their own readiness, in stores that are split",
        gemv.partial_norm,
    ),
    Mutant(
        "gemv-act-before-pdl-wait",
        "the warps that multiply do not wait for the kernel that writes act",
        "matrix products launched with programmatic dependence",
        partial(gemv.partial_norm, pdl=PDLLevel.OVERLAP_AT_BEGINNING),
        (*WRONG, *HANGS),
    ),
    Mutant(
        "gemv-sums-without-spare-slots",
        "there are as many places for group sums as stages in flight, so sums are overwritten before they are added",
        "matrix products whose stages are a ring",
        gemv.partial_norm,
    ),
    Mutant(
        "gemv-copy-over-weights-in-use",
        "a stage is copied to shared memory before the weights in the same place have been multiplied",
        "matrix products whose stages are a ring that the copy engine fills",
        gemv.partial_norm,
        (*WRONG, *HANGS),
    ),
    Mutant(
        "gemv-no-block-barrier-before-norm",
        "the sum of squares is added up without waiting for the warps that still poll",
        "matrix products with a fused norm",
        gemv.partial_norm,
    ),
)
