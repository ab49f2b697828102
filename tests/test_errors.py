# SPDX-License-Identifier: Apache-2.0
"""Every exception of drvfuse survives what processes and debuggers do with it."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

import drvfuse
from drvfuse.errors import ArgumentError, DrvfuseError, ranks_text

ROOT = Path(drvfuse.__file__).parent
SAMPLES = {"str": "text", "int": 3, "object": "a list", "Sequence[str]": ["cuInit(0)", "cuCtxSynchronize()"]}
SAMPLES |= {"float": 0.5, "Sequence[int]": [2, 4], "Mapping[int, str]": {2: "text", 4: "export"}}


def _kinds() -> list[type[DrvfuseError]]:
    """DrvfuseError and all that derive from it, wherever they are defined."""
    for path in ROOT.rglob("*.py"):
        if "Error)" in path.read_text():
            importlib.import_module(".".join(("drvfuse", *path.relative_to(ROOT).with_suffix("").parts)))
    found = [DrvfuseError]
    for kind in found:
        found += [other for other in kind.__subclasses__() if other not in found]
    return [kind for kind in found if kind.__module__.startswith("drvfuse.")]


def _example(kind: type[DrvfuseError]) -> DrvfuseError:
    if "__init__" not in vars(kind) and kind.__init__ is Exception.__init__:
        return kind("the text")
    parameters = inspect.signature(kind).parameters.values()
    values: list[Any] = [SAMPLES[str(parameter.annotation).removesuffix(" | None")] for parameter in parameters]
    return kind(*values)


@pytest.mark.parametrize("kind", _kinds(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "again", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy], ids=["pickle", "copy", "deep"]
)
def test_an_error_is_the_same_after_pickling_and_copying(kind: type[DrvfuseError], again: Any) -> None:
    error = _example(kind)
    error.add_note("a note")
    found = again(error)
    assert type(found) is kind and str(found) == str(error) and found.args == error.args
    assert vars(found) == vars(error)


def _refuse() -> None:
    drvfuse.device("first", driver="emu")  # type: ignore[arg-type]


@pytest.mark.emulated
def test_errors_pass_from_a_worker_process_to_its_parent() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool, pytest.raises(ArgumentError) as caught:
        pool.submit(_refuse).result(timeout=100)
    assert (caught.value.argument, caught.value.expected) == ("index", "an int")


def test_lists_of_ranks_are_printed_as_ranges() -> None:
    assert [ranks_text(ranks) for ranks in ([2], [5, 2], [4, 2, 5, 6, 9], range(3), [0, 1])] == [
        "rank 2",
        "ranks 2 and 5",
        "ranks 2, 4 to 6 and 9",
        "ranks 0 to 2",
        "ranks 0 and 1",
    ]
