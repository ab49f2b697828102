# SPDX-License-Identifier: Apache-2.0
"""What `drvfuse check` runs leaves nothing out."""

from __future__ import annotations

import ast
import inspect

import drvfuse as df
from drvfuse.check import collectives, fp8, gemv
from drvfuse.check.cases import CASES

NO_LAUNCH = {"fp8_workspace_bytes"}


def test_every_op_is_called_by_a_case():
    ops = {name for name in (*df.__all__, *dir(df.coat)) if name.startswith(("allreduce", "fp8_", "gemv_"))} - NO_LAUNCH
    assert len(ops) > 10
    called = set()
    for module in (collectives, fp8, gemv):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            called |= {part.id for part in ast.iter_child_nodes(node) if isinstance(part, ast.Name)}
    assert ops <= called


def test_every_function_of_one_device_that_takes_a_run_is_a_case():
    functions = {
        function
        for module in (fp8, gemv)
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and not name.startswith("_")
    }
    assert functions and functions <= set(CASES.values())
