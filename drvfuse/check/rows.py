# SPDX-License-Identifier: Apache-2.0
"""Cases of the fused norms in all their forms: each seed runs one form, consecutive seeds run all."""

from __future__ import annotations

from collections.abc import Sequence

from ..ops.collectives.shared.kernel import ALGOS
from .problems import FORMS
from .run import Run
from .shared import FUSED, repeated

ROWS = (9, 512)


def fused(run: Run) -> None:
    """Check all-reduces with norm and quantisation, in the form that the seed selects."""
    _one_form(run, FUSED, ALGOS)


def scattered(run: Run) -> None:
    """Check reduce-scatters with norm and quantisation, in the form that the seed selects."""
    _one_form(run, "reduce_scatter_rmsnorm_fp8", ("push", "pull"))


def _one_form(run: Run, op: str, algos: Sequence[str]) -> None:
    repeated(run, op, run.choice(algos), shape=ROWS, form=FORMS[run.seed % len(FORMS)], side=False)
