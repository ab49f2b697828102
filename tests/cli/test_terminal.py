# SPDX-License-Identifier: Apache-2.0
"""What commands say on standard error while they work."""

from __future__ import annotations

import pytest

from drvfuse.cli import terminal


def test_long_work_says_how_much_of_it_is_done_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "EVERY", 0.001)
    with terminal.counting("shapes measured", 3, show=True) as done:
        done()
        said = ""
        while "1 of 3 shapes measured after 0 s" not in said:  # the time limit of the suite bounds this wait
            said += capsys.readouterr().err
    capsys.readouterr()
    with terminal.counting("shapes measured", 3, show=False) as done:
        done()
    assert capsys.readouterr().err == ""


def test_short_work_says_nothing_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.counting("shapes measured", 3, show=True) as done:
        done()
    captured = capsys.readouterr()
    assert captured.err == captured.out == ""
