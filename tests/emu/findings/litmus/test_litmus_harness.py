# SPDX-License-Identifier: Apache-2.0
"""The litmus harness itself: a wrong verdict fails, both orders of two accesses occur, reports name both places."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from driver_helpers import ok
from litmus import NOBODY, At, Case, Suite, judge, lab, pairs, place, together

RACE = "P(0) {\nST(weak, x, 1)  // @w\n}\nP(1) {\nLD(weak, x)  // @r\n}"
FINE = "P(0) {\nST(weak, x, 1)  // @w\n}\nP(1) {\nLD(weak, y)  // @r\n}"
BROKEN = "P(0) {\nST(weak, x + (1u << 28), 1)  // @w\n}\nP(1) {\nSPIN(relaxed.gpu, f, 1)  // @r\n}"
TWO_PLACES = place("gpu", 2)


def _suite(**cases: tuple[str, dict[str, Any]]) -> Suite:
    suite = Suite()
    for name, (body, verdict) in cases.items():
        suite.add(name, body, TWO_PLACES, **verdict)
    return suite


@pytest.mark.parametrize(
    ("body", "verdict", "complaint"),
    [
        (RACE, {}, "false report r~w"),
        (RACE, {"races": "w~w", "maybe": "r~w"}, "missed w~w"),
        (RACE, {"races": "w~r", "edge": "no such words"}, "is not named"),
        (RACE, {"races": "w~r", "detail": lambda report: False}, "details are wrong"),
        (FINE, {"races": "w~r"}, "missed r~w"),
        (FINE, {"some": "w~r"}, "missed all of"),
    ],
)
@pytest.mark.parametrize("profile", ["hardware", "strict"])
def test_a_wrong_verdict_fails(body: str, verdict: dict[str, Any], complaint: str, profile: str) -> None:
    suite = _suite(one=(body, verdict))
    for seed in range(3):
        assert any(complaint in text for text in suite.disagreements(suite.cases[0], profile, seed))
    with pytest.raises(pytest.fail.Exception, match=complaint):
        suite.check(suite.cases[0], profile)


@pytest.mark.parametrize("profile", ["hardware", "strict"])
def test_a_right_verdict_passes(profile: str) -> None:
    suite = _suite(race=(RACE, {"races": "w~r"}), some=(RACE, {"some": "w~r"}), fine=(FINE, {}))
    for case in suite.cases:
        suite.check(case, profile)


def test_a_verdict_of_the_strict_profile_is_its_own() -> None:
    suite = _suite(one=(RACE, {"races": "", "strict": "w~r"}))
    suite.check(suite.cases[0], "strict")
    assert suite.disagreements(suite.cases[0], "hardware", 0)


def test_without_the_detector_nothing_is_reported() -> None:
    suite = _suite(one=(RACE, {"races": "w~r"}))
    assert suite.disagreements(suite.cases[0], False, 0) == ["seed 0, nobody late: missed r~w"]


def test_a_launch_that_fails_is_never_a_pass() -> None:
    suite = _suite(one=(BROKEN, {}))
    with pytest.raises(AssertionError, match="ILLEGAL_ADDRESS"):
        suite.check(suite.cases[0], "hardware")


def test_a_report_of_another_kind_is_never_a_pass() -> None:
    other = SimpleNamespace(kind="uninitialised", line=1)
    assert judge(Case("one", FINE, TWO_PLACES), "hardware", [other], {}) != []


def test_marks_have_to_exist_and_names_to_differ() -> None:
    with pytest.raises(ValueError, match="no access is marked v"):
        _suite(one=(RACE, {"races": "w~v"}))
    suite = _suite(one=(RACE, {}))
    with pytest.raises(ValueError, match="two cases"):
        suite.add("one", FINE, TWO_PLACES)
    assert pairs("b~a c~c") == {("a", "b"), ("c", "c")}


@pytest.mark.parametrize("where", ["warp", "block", "gpu", "stream", "peer"])
def test_either_of_two_accesses_comes_first(where: str) -> None:
    """The reader copies the value that it sees, which tells whether it came first."""
    suite = Suite()
    body = "P(0) {\nST(weak, x, 7)  // @w\n}\nP(1) {\nu32 v; GET(v, weak, x)  // @r\nST(weak, y, v)\n}"
    suite.add("one", body, place(where, 2), races="w~r")
    # If each role is a launch of its own, only seed 0 is used: under another seed the launch of the role that is not
    # late may be delayed too.
    for late, seen in ((0, 0), (1, 7)):
        for seed in range(1 if where in ("stream", "peer") else 3):
            with lab(suite, suite.cases[0], "hardware", seed, late) as here:
                suite.cases[0].drive(here)
                here.finish()
                out = np.zeros(1, np.uint32)
                ok(here.cuda.cuMemcpyDtoH(out, here.m + 4096, 4))
                assert out[0] == seen
                assert [report.kind for report in here.machine.reports] == ["race"]


@pytest.mark.parametrize(("late", "finder"), [(0, "w"), (1, "r")])
def test_a_report_names_both_places(late: int, finder: str) -> None:
    suite = Suite()
    suite.add("one", RACE, together(At(block=2, thread=3), At(device=1, block=1, thread=37)), races="w~r")
    case = suite.cases[0]
    kernel = suite.kernel(case)
    expected = {"w": (0, (2, 0, 0), (3, 0, 0)), "r": (1, (1, 0, 0), (37, 0, 0))}
    with lab(suite, case, "hardware", 0, late) as here:
        case.drive(here)
        here.finish()
        (report,) = here.machine.reports
        marks = [kernel.marks[place.line] for place in (report, report.other)]
        assert marks == [finder, "w" if finder == "r" else "r"]
        for mark, at in zip(marks, (report, report.other), strict=True):
            assert (at.device, at.block, at.thread) == expected[mark]
            assert at.kernel == kernel.name
            assert at.file.endswith("test.cu")
        assert report.address == here.m
        assert report.edge


def test_a_pair_of_places_is_reported_once() -> None:
    suite = Suite()
    body = (
        "u32 t = threadIdx.x;\nfor (int i = 0; i < 4; i++) {\nST(weak, x + t, t)  // @w\nLD(weak, x + 63 - t)  // @r\n}"
    )
    suite.add("one", body, lambda here: here.launch(grid=3, block=64), races="w~r", maybe="w~w")
    case = suite.cases[0]
    with lab(suite, case, "hardware", 0, NOBODY) as here:
        for _ in range(3):
            case.drive(here)
        here.finish()
        lines = [frozenset((report.line, report.other.line)) for report in here.machine.reports]
        assert len(lines) <= 4  # not a report for each pair of threads, each round or each launch
        assert not suite.disagreements(replace(case, late=(NOBODY,)), "hardware", 0)
