# SPDX-License-Identifier: Apache-2.0
"""Completion of names of cases, algorithms, ops and forms, by argcomplete.

The modules that hold the names take a while to import, so each function imports them when a shell asks, and never when
a command is parsed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable


def cases(prefix: str, parsed_args: argparse.Namespace, **more: object) -> Iterable[str]:
    """The names for `drvfuse check --only`."""
    from ..check.cases import CASES
    from ..check.mutants import MUTANTS

    return [*CASES, *MUTANTS]


def algorithms(prefix: str, parsed_args: argparse.Namespace, **more: object) -> Iterable[str]:
    """The names for `--algos` of a benchmark, and for `--algo` of `drvfuse trace`."""
    from ..bench.collectives_report import MULTIMEM
    from ..bench.ops import ALGORITHMS

    if parsed_args.command == "trace":
        known = ALGORITHMS.get(parsed_args.op)
        return ("auto",) if known is None else (*known, "naive")
    every = dict.fromkeys(algo for known in ALGORITHMS.values() for algo in known)
    of_op = ALGORITHMS.get(parsed_args.benchmark.replace("-", "_"), every)
    return (*of_op, *(MULTIMEM if getattr(parsed_args, "multimem", False) else ()))


def ops(prefix: str, parsed_args: argparse.Namespace, **more: object) -> Iterable[str]:
    """The names for `--op` of a benchmark of several collectives."""
    from ..bench import rows_forms
    from ..bench.ops import ALGORITHMS

    known = rows_forms.OPS if parsed_args.benchmark == "fused-forms" else tuple(ALGORITHMS)
    return [op.replace("_", "-") for op in known]


def forms(prefix: str, parsed_args: argparse.Namespace, **more: object) -> Iterable[str]:
    """The names for `drvfuse bench fused-forms --form`."""
    from ..bench.forms import FORMS

    return list(FORMS)
