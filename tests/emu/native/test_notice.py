# SPDX-License-Identifier: Apache-2.0
"""The notice that a terminal shows while the native runtime is compiled."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from drvfuse.emu.native import notice

pytestmark = pytest.mark.emulated


class Stderr(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal, self.written = terminal, threading.Event()

    def isatty(self) -> bool:
        return self.terminal

    def flush(self) -> None:
        self.written.set()


def test_a_terminal_shows_a_message_when_the_compilation_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Stderr(terminal=True)
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(notice, "PATIENCE", 0.0)
    with notice.while_compiling():
        assert stderr.written.wait(30)
    assert (
        stderr.getvalue().startswith("drvfuse: the emulated driver is being compiled") and stderr.getvalue()[-1] == "\n"
    )


@pytest.mark.parametrize("terminal", [True, False])
def test_nothing_is_printed_if_the_compilation_is_quick_or_stderr_is_no_terminal(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr = Stderr(terminal)
    monkeypatch.setattr(sys, "stderr", stderr)
    if not terminal:
        monkeypatch.setattr(notice, "PATIENCE", 0.0)
    with notice.while_compiling():
        threads = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
        assert len(threads) == terminal
    for thread in threads:
        thread.join()
    assert stderr.getvalue() == ""


@pytest.mark.parametrize("stderr", [None, object(), "closed"])
def test_a_program_without_a_usable_stderr_gets_no_error(stderr: object, monkeypatch: pytest.MonkeyPatch) -> None:
    if stderr == "closed":
        stderr = io.StringIO()
        stderr.close()
    monkeypatch.setattr(sys, "stderr", stderr)
    with notice.while_compiling():
        pass
