# SPDX-License-Identifier: Apache-2.0
"""Cases of ops that have several forms. Each seed runs one form; consecutive seeds run all forms of the fused norms."""

from __future__ import annotations

from collections.abc import Sequence

from ..ops.collectives.shared.kernel import ALGOS, PUSH
from .collectives import FUSED, repeated
from .problems import FORMS
from .run import Run

ROWS = (9, 512)


def fused(run: Run) -> None:
    """Check all-reduces with norm and quantisation, in the form that the seed selects."""
    _one_form(run, FUSED, ALGOS)


def scattered(run: Run) -> None:
    """Check reduce-scatters with norm and quantisation, in the form that the seed selects."""
    _one_form(run, "reduce_scatter_rmsnorm_fp8", ("push", "pull"))


def many(run: Run) -> None:
    """Check all-reduces of several tensors, by the push algorithm that the seed selects."""
    repeated(run, "allreduce_many", PUSH[run.seed % len(PUSH)], side=False)


def _one_form(run: Run, op: str, algos: Sequence[str]) -> None:
    repeated(run, op, run.choice(algos), shape=ROWS, form=FORMS[run.seed % len(FORMS)], side=False)
