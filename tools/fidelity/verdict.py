# SPDX-License-Identifier: Apache-2.0
"""Compares the results of a driver with the stored results of a GPU, and describes those that differ."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from . import operands
from .batch import Batch, form_digest, width
from .fixture import Answer, Difference, Stored, differing
from .forms import Form
from .rules import RULES

SHOWN = 4  # at most this many differing rows of a form are described


@dataclass(frozen=True)
class Verdict:
    """How a result compares with the stored one. `status` is "equal", "within bound", "differs", or "stale" if the
    result's form has changed since the recording; `detail` is lines of text."""

    name: str
    status: str
    detail: tuple[str, ...] = ()

    @property
    def fine(self) -> bool:
        return self.status in ("equal", "within bound")


def answer(form: Form, words: np.ndarray) -> Answer:
    """The `Answer` that the fixture stores or compares: a form's results in one column of words."""
    return Answer(form_digest(form), words.reshape(-1), form.rule)


def judge(form: Form, stored: Stored | None, words: np.ndarray) -> Verdict:
    """Compare a form's results with the stored ones."""
    given, columns = answer(form, words), operands.rows(form.sources)
    verdict, outside = _verdict(form.name, stored, given, tuple(c[: len(words)] for c in columns), form.result)
    if verdict.status == "stale":
        return replace(verdict, detail=("the form or its operands are not those that the GPU ran: record again",))
    return replace(verdict, detail=tuple(_lines(form, columns, given.words, outside))) if outside else verdict


def _verdict(
    name: str, stored: Stored | None, given: Answer, sources: tuple[np.ndarray, ...], kind: str
) -> tuple[Verdict, Difference | None]:
    """The verdict, and for results that differ the rows outside the rule's bound, which the caller describes."""
    if stored is None or stored.source != given.source:
        return Verdict(name, "stale"), None
    difference = differing(stored, given)
    if difference is None:
        return Verdict(name, "equal"), None
    outside = _outside(stored, given, difference, sources, kind)
    if outside is None:
        within = f"{len(difference.rows)} differ, bound {RULES[given.rule].bound}"
        return Verdict(name, "within bound", (within,)), None
    return Verdict(name, "differs"), outside


def _outside(
    stored: Stored, given: Answer, found: Difference, sources: tuple[np.ndarray, ...], kind: str
) -> Difference | None:
    """The rows of a difference that are outside the rule's bound."""
    wrong = RULES[given.rule].wrong
    if wrong is None or stored.words is None:
        return found
    rows = np.flatnonzero(wrong(given.words, stored.words, sources, kind))
    return Difference(tuple(map(int, rows)), tuple(int(stored.words[r]) for r in rows), True) if len(rows) else None


def _lines(form: Form, columns: tuple[np.ndarray, ...], words: np.ndarray, found: Difference) -> list[str]:
    per_row = 2 if form.result == "b128" else 1
    digits = min(16, width(form.result) // 4)
    out = [f"{len(found.rows)} words{'' if found.sure else ' (or fewer, among these)'}: {form.body}"]
    for k, at in enumerate(found.rows[:SHOWN]):
        row = at // per_row
        inputs = ", ".join(
            f"{int(c[row]):#0{operands.width(s) // 4 + 2}x}" for c, s in zip(columns, form.sources, strict=True)
        )
        gpu = f"{found.gpu[k]:#0{digits + 2}x}" if found.gpu else "?"
        out.append(f"row {row}: ({inputs}) gives {int(words[at]):#0{digits + 2}x}, GPU {gpu}")
    return out


def judge_batch(batch: Batch, stored: dict[str, Stored], results: dict[str, np.ndarray]) -> list[Verdict]:
    return [judge(form, stored.get(form.name), results[form.name]) for form in batch.forms]


def judge_output(name: str, stored: Stored | None, given: Answer) -> Verdict:
    """Compare an output of one of drvfuse's kernels with the stored one."""
    verdict, outside = _verdict(name, stored, given, (given.words,), "f32")
    if verdict.status == "stale":
        return replace(verdict, detail=("the call is not the one that the GPU ran: record again",))
    if outside is None:
        return verdict
    detail = [f"{len(outside.rows)} elements{'' if outside.sure else ' (or fewer, among these)'}"]
    for k, at in enumerate(outside.rows[:SHOWN]):
        gpu = f"{outside.gpu[k]:#x}" if outside.gpu else "?"
        detail.append(f"element {at}: gives {int(given.words[at]):#x}, GPU {gpu}")
    return replace(verdict, detail=tuple(detail))
