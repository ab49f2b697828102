# SPDX-License-Identifier: Apache-2.0
"""`drvfuse trace` and `drvfuse bench` refuse files and shapes that they cannot use before they start any work."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from drvfuse.__main__ import main

COMMANDS = (
    ("trace", "allreduce"),
    ("trace", "gemv"),
    ("bench", "gemv"),
    ("bench", "fp8-rmsnorm"),
    ("bench", "allreduce"),
)


@pytest.fixture(autouse=True)
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that tries to open a driver fails the test."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the command opens a driver before it has checked its options")

    monkeypatch.setattr("drvfuse.cli.trace.get_driver", refuse)
    monkeypatch.setattr("drvfuse.cli.bench.device", refuse)
    monkeypatch.setattr("drvfuse.cli.bench_groups.device", refuse)
    monkeypatch.setattr("drvfuse.cli.bench_groups.get_driver", refuse)


def refused(capsys: pytest.CaptureFixture[str], command: tuple[str, ...], *options: str) -> str:
    """The message with which the command ends, at exit status 2."""
    assert main([*command, *options]) == 2
    captured = capsys.readouterr()
    assert not captured.out and captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize("command", COMMANDS)
def test_files_that_cannot_be_written_are_refused(
    command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    image = "--png" if command[0] == "trace" else "--plot"
    for option, name in (("--out", "t.json"), (image, "t.png")):
        inside = tmp_path / "none" / name
        folder = repr(str(inside.parent))
        assert f"{option} is '{inside}'; it must be in a folder that exists; there is no folder {folder}" in refused(
            capsys, command, option, str(inside)
        )
        assert f"{option} is '{tmp_path}', a folder; it must be the path of a file" in refused(
            capsys, command, option, str(tmp_path)
        )
        present = tmp_path / name
        present.write_text("kept")
        for path in (present, tmp_path / f"new-{name}"):
            with monkeypatch.context() as patched:
                patched.setattr(os, "access", lambda path, mode: False)
                message = refused(capsys, command, option, str(path))
            assert f"{option} is '{path}'; it must be the path of a file that can be written" in message
        assert present.read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.json", "t.png"]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("shape", ["12", "0x16", "axb", "4x", "4x16x2x1", "4x\N{SUPERSCRIPT TWO}"])
def test_malformed_shapes_are_refused(command: tuple[str, ...], shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    option = "--shapes" if command == ("bench", "allreduce") else "--shape"
    assert f"{option} is '{shape}'; it must be" in refused(capsys, command, option, shape)


def test_too_many_columns_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, ("trace", "allreduce_rmsnorm_fp8"), "--shape", "2x16392")
    assert "--shape is '2x16392'; it must be of at most 16384 columns" in message


def test_options_of_other_ops_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for options in (("--devices", "2"), ("--algo", "naive")):
        assert options[0] in refused(capsys, ("trace", "gemv"), *options)
