# SPDX-License-Identifier: Apache-2.0
"""Comparisons with the file of recorded results: they name a differing word with the GPU's value, notice changed forms,
and accept results within bounds."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tools.fidelity import fixture, forms, operands, verdict
from tools.fidelity.__main__ import show
from tools.fidelity.fixture import Answer, differing
from tools.fidelity.forms import form
from tools.fidelity.rules import RULES

SOURCE = b"12345678"
ADD = form("add.s32", "i32 i32", "i32")


def random_words(kind: str = "<u4", count: int = 2048) -> np.ndarray:
    return operands.Stream("words").words(count).astype(kind)


def stored(path: Path, answer: Answer) -> fixture.Stored:
    fixture.save(path / "answers.npz", {"name": answer}, {"gpu": "none"})
    found, about = fixture.load(path / "answers.npz")
    assert about["gpu"] == "none"
    return found["name"]


@pytest.mark.parametrize("kind", ["<u2", "<u4", "<u8"])
@pytest.mark.parametrize("count", [64, 1003, 2048])
def test_a_differing_word_is_named_with_the_value_of_the_gpu(tmp_path: Path, kind: str, count: int) -> None:
    words = random_words(kind, count)
    kept = stored(tmp_path, Answer(SOURCE, words))
    assert differing(kept, Answer(SOURCE, words)) is None
    for row in (0, 33, count - 1):
        changed = words.copy()
        changed[row] ^= 0x400
        found = differing(kept, Answer(SOURCE, changed))
        assert found is not None and found.sure
        assert found.rows == (row,) and found.gpu == (int(words[row]),)


def test_several_differing_words_are_named(tmp_path: Path) -> None:
    words = random_words()
    kept = stored(tmp_path, Answer(SOURCE, words))
    assert kept.words is None
    changed = words.copy()
    rows = (5, 37, 41, 1999)  # two words in one line and two in one column, with the same bit changed
    changed[list(rows)] ^= 1
    found = differing(kept, Answer(SOURCE, changed))
    assert found is not None and not found.sure
    assert set(rows) <= set(found.rows) and len(found.rows) <= 9


def test_words_that_compress_well_are_stored_whole(tmp_path: Path) -> None:
    words = (np.arange(2048) % 3 == 0).astype("<u4")
    kept = stored(tmp_path, Answer(SOURCE, words))
    assert kept.words is not None
    found = differing(kept, Answer(SOURCE, 1 - words))
    assert found is not None and len(found.rows) == 2048 and found.gpu == tuple(map(int, words))


def test_nans_compare_equal_where_ptx_leaves_their_bits_open(tmp_path: Path) -> None:
    words = random_words("<u8")
    words[7] = 0x7FF8_0000_0000_0001
    kept = stored(tmp_path, Answer(SOURCE, words, "nan"))
    words[7] = 0xFFFF_FFFF_FFFF_FFFF
    assert differing(kept, Answer(SOURCE, words, "nan")) is None
    words[7] = 0x7FF0_0000_0000_0000
    assert differing(kept, Answer(SOURCE, words, "nan")) is not None


def test_another_version_of_the_generator_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fixture.save(tmp_path / "old.npz", {}, {})
    monkeypatch.setattr(fixture, "VERSION", fixture.VERSION + 1)
    with pytest.raises(ValueError, match="record the file again"):
        fixture.load(tmp_path / "old.npz")


def test_a_changed_form_is_stale_and_a_differing_one_shows_its_operands(tmp_path: Path) -> None:
    x, y = operands.rows(ADD.sources)
    right = (x + y).astype("<u4")
    kept = stored(tmp_path, verdict.answer(ADD, right))
    assert verdict.judge(ADD, kept, right).status == "equal"
    assert verdict.judge(form("add.s32", "i32 i32", "i32", "add.s32 r, y, x;"), kept, right).status == "stale"
    assert verdict.judge(ADD, None, right).status == "stale"
    wrong = right.copy()
    wrong[100] += 1
    found = verdict.judge(ADD, kept, wrong)
    assert found.status == "differs" and not found.fine
    assert f"{int(x[100]):#010x}, {int(y[100]):#010x}" in found.detail[1]
    assert found.detail[1].endswith(f"GPU {int(right[100]):#010x}")


def test_the_command_prints_what_differs_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    fine = [verdict.Verdict("add.s32", "equal"), verdict.Verdict("sin.approx.f32", "within bound", ("3 differ",))]
    assert show(fine) == 0
    assert show([*fine, verdict.Verdict("sub.s32", "differs", ("row 7: (0x1, 0x2) gives 0x3, GPU 0x4",))]) == 1
    out = capsys.readouterr().out
    assert "differs: sub.s32\n    row 7: (0x1, 0x2) gives 0x3, GPU 0x4" in out
    assert out.splitlines()[-1].split() == ["all", "1", "1", "1", "0"]


@pytest.mark.parametrize("rule", sorted(set(RULES) - {"exact", "nan"}))
def test_a_bound_holds_for_equal_results_and_refuses_far_ones_and_nan(rule: str) -> None:
    kind = "f64" if rule in ("gross", "rsqrt.approx.f64") else "f16" if rule.endswith("half") else "f32"
    float_type, word = {"f64": ("<f8", "<u8"), "f32": ("<f4", "<u4"), "f16": ("<f2", "<u2")}[kind]
    values = np.array([1.0, -3.5, 0.25, 1.75, 2.0], float_type)
    compare = RULES[rule].wrong
    assert compare is not None
    sources = (values.view(word).astype(np.uint64),)
    assert not compare(values.view(word), values.view(word), sources, kind).any()
    for other in (
        values * np.array(1.02, float_type),
        -values,
        np.full_like(values, np.nan),
        np.full_like(values, np.inf),
    ):
        assert compare(values.view(word), other.view(word), sources, kind).all()
        assert compare(other.view(word), values.view(word), sources, kind).all()


def test_operands_include_every_pair_of_special_values() -> None:
    for kind, specials in (
        ("f32", (0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 1, 0x7F7FFFFF)),
        ("f64", (0, 1 << 63, 0x7FF << 52, 0xFFF << 52, 0xFFF << 51, 0x7FF0000000000001, 1)),
        ("i32", (0, 1, 0xFFFFFFFF, 0x7FFFFFFF, 0x80000000)),
    ):
        pairs = set(zip(*(column.tolist() for column in operands.rows((kind, kind))), strict=True))
        assert {(a, b) for a in specials for b in specials} <= pairs
    assert set(range(256)) <= set(operands.rows(("i32", "amount"))[1].tolist())


def test_the_page_has_the_figures_and_bounds(recorded) -> None:
    page = (Path(__file__).parents[3] / "docs" / "emulator.md").read_text()
    table = forms.table()
    names = {f.name for f in table}
    by_rule = Counter(f.rule for f in table)
    outputs = len([name for name in recorded[0] if name not in names])
    exact, nan = by_rule.pop("exact"), by_rule.pop("nan")
    text = " ".join(page.split())
    assert f"answered {len(table):,} instruction forms" in text and f"behind {outputs} outputs" in text
    assert f"{exact:,} forms have the GPU's bits and {nan} of fp64 too" in text
    assert f"The other {by_rule.total()} are approximate" in text
    bounds = dict(re.findall(r"^\| (`.*?) \| (.*?) \|$", page, re.M))
    stated = dict.fromkeys(("ex2.half", "tanh.half"), bounds.pop("`ex2.approx`, `tanh.approx` of 16 bits"))
    stated |= {name: bound for row, bound in bounds.items() for name in re.findall("`(.*?)`", row)}
    stated["gross"] = stated.pop("rcp.approx.ftz.f64")
    assert stated.pop("rsqrt.approx.ftz.f64") == stated["gross"]
    assert stated == {rule: RULES[rule].bound for rule in by_rule}
