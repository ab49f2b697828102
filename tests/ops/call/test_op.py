# SPDX-License-Identifier: Apache-2.0
"""Signatures of ops in `help` and for type checkers: a call returns results, and `prepare` a `Prepared` of them."""

from __future__ import annotations

import inspect
import pydoc

import pytest

import drvfuse as df
from drvfuse import coat
from drvfuse.ops.call.planned import PlanCache

OPS = {
    "allreduce": "list[Array]",
    "allreduce_rmsnorm_fp8": "NormResult",
    "gemv_partial_norm": "tuple[Array, Array]",
    "fp8_rmsnorm_backward": "tuple[Array, Array]",
    "fp8_layernorm_noparam_backward": "Array",
    "fp8_division": "tuple[Array, ...]",
}


@pytest.mark.parametrize("name", OPS)
def test_help_shows_what_a_call_and_what_prepare_return(name):
    op = getattr(coat if name.startswith("fp8_") else df, name)
    assert inspect.signature(op).return_annotation == op.__annotations__["return"] == OPS[name]
    assert inspect.signature(op.prepare).return_annotation == f"Prepared[{OPS[name]}]"
    assert list(inspect.signature(op).parameters) == list(inspect.signature(op.prepare).parameters)
    text = pydoc.plain(pydoc.render_doc(op))
    assert f"{name}(" in text and f"-> '{OPS[name]}'" in text and "Prepared[" not in text
    assert f"-> 'Prepared[{OPS[name]}]'" in pydoc.plain(pydoc.render_doc(op.prepare))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: df.allreduce_rmsnorm_fp8("group", "inputs", "gammas"),
            r"^allreduce_rmsnorm_fp8\(\) missing .*'epsilon'",
        ),
        (lambda: df.allreduce("group", "inputs", colour=1), r"^allreduce\(\) .*'colour'"),
        (
            lambda: df.allreduce_rmsnorm_fp8("group", "inputs", "gammas", eps=1),
            r"unexpected .* 'eps'.*mean 'epsilon'\?",
        ),
        (lambda: df.gemv_partial_norm("act", "weight", "gamma", eps=1), r"unexpected .* 'eps'.*mean 'epsilon'\?"),
        (lambda: df.allreduce.prepare("group"), r"^allreduce\.prepare\(\) missing .*'inputs'"),
    ],
)
def test_wrong_arguments_are_reported_under_the_name_that_was_called(call, text):
    with pytest.raises(TypeError, match=text):
        call()


def test_every_op_has_prepare():
    functions = [getattr(coat, name) for name in dir(coat) if name.startswith("fp8_") and name != "fp8_workspace_bytes"]
    assert len(functions) == 11
    assert all(
        hasattr(op, "prepare") for op in (*functions, df.allreduce, df.allreduce_rmsnorm_fp8, df.gemv_partial_norm)
    )


def test_the_number_of_plans_is_bounded_and_the_most_recently_used_are_kept():
    plans = PlanCache(None)
    first = plans.get(0, object)
    for number in range(1, 1000):
        plans.get(number, object)
        assert plans.get(0, object) is first
    assert len(plans) == 256
    plans.clear()
    assert len(plans) == 0
