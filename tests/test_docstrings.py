# SPDX-License-Identifier: Apache-2.0
"""The examples in the docstrings of public names print what they show."""

from __future__ import annotations

import doctest
import inspect

import numpy as np
import pytest

import drvfuse as df

EXAMPLES = ("Array", "Epilogue", "Graph", "Quantisation", "compile")


def test_the_list_has_every_public_name_with_an_example() -> None:
    public = {name: inspect.getdoc(getattr(df, name)) or "" for name in df.__all__}
    assert {name for name, text in public.items() if ">>> " in text} == set(EXAMPLES)


@pytest.mark.emulated
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_prints_what_it_shows(name: str) -> None:
    text = inspect.cleandoc(getattr(df, name).__doc__)
    test = doctest.DocTestParser().get_doctest(text, {"df": df, "np": np}, name, name, 0)
    failed = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=failed.append)
    assert not failed, "".join(failed)
