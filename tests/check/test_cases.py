# SPDX-License-Identifier: Apache-2.0
"""The cases of `drvfuse check` include every op."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import drvfuse as df
from drvfuse import check, dtypes
from drvfuse.check import problems, rows, shared, sums
from drvfuse.check.cases import CASES
from drvfuse.plans import quantisation

MODULES = {
    inspect.getmodule(getattr(case, "func", case)) for case in CASES.values()
}  # some cases are functools.partial objects


def test_every_op_is_called_by_a_case():
    public = [getattr(module, name) for module in (df, df.coat) for name in dir(module)]
    ops = {value.__name__ for value in public if inspect.isfunction(value) and hasattr(value, "prepare")}
    assert len(ops) > 10
    called = set()
    for path in Path(check.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            called |= {part.id for part in ast.iter_child_nodes(node) if isinstance(part, ast.Name)}
    assert ops <= called


def test_every_function_of_one_device_that_takes_a_run_is_a_case():
    functions = {
        function
        for module in MODULES - {rows, shared, sums}
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and not name.startswith("_")
    }
    assert functions and functions <= set(CASES.values())


def test_the_problems_of_norms_cover_every_quantisation_layout_and_dtype_of_codes():
    made = [*problems.QUANTISATIONS.values(), problems.Problem("", 1).quantisation]
    every = {form[:3] for form in quantisation._FORMS if form[0] != "none"}
    kinds = {(kind, group) for kind, _, group in every}
    assert {(q.kind, q.group) for q in made} == kinds
    assert {q.layout for q in made} == set(quantisation.LAYOUTS)
    assert {str(q.dtype) for q in made} == {codes for _, codes, _ in every}
    assert {q.scales for q in made} == {
        None if scales is None else dtypes.get(scales) for *_, scales in quantisation._FORMS
    }
