# SPDX-License-Identifier: Apache-2.0
"""The benchmark of `rmsnorm_fp8`, the norm on one device, on the emulated driver, where its times have no meaning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import drvfuse as df
from drvfuse.__main__ import main
from drvfuse.bench import norm

pytestmark = pytest.mark.emulated

ELEMENT = {"row": 3, "row, residual": 7, "group": 3 + 4 / 128, "MXFP8": 3 + 1 / 32, "NVFP4": 2.5 + 1 / 16}


def test_every_time_is_measured_and_floors_are_the_times_to_copy_as_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drvfuse.bench.timing.REPLAYS", 1)
    monkeypatch.setattr(norm, "_ROTATED_BYTES", 4)
    monkeypatch.setattr(norm, "FORMS", {name: norm.FORMS[name] for name in ("row", "NVFP4")})
    rows, columns = 128, 256
    with df.emu.Machine(devices=1, sm_count=8) as machine:
        result = norm.measure(df.device(0, driver=machine), rows, columns, bandwidth=2.0)
        assert not machine.reports
    for name in norm.FORMS:
        rest = 2 * result[name]["floor_us"] - ELEMENT[name] * rows * columns
        # `rest` is the bytes of gamma and of the scales of rows.
        assert 0 <= rest <= 4 * rows + 2 * columns and result[name]["us"] > 0
    assert [len(line) for line in norm.lines(result)] == [len(norm.HEAD)] * 2
    assert json.loads(json.dumps(result)) == result


def test_groups_that_do_not_divide_the_columns_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drvfuse.bench.timing.REPLAYS", 1)
    monkeypatch.setattr(norm, "_ROTATED_BYTES", 4)
    monkeypatch.setattr(norm, "FORMS", {name: norm.FORMS[name] for name in ("row", "group")})
    with df.emu.Machine(devices=1, sm_count=8) as machine:
        result = norm.measure(df.device(0, driver=machine), 2, 64, bandwidth=2.0)
    assert "row" in result and "group" not in result and len(norm.lines(result)) == 1


def test_a_plot_is_written_as_a_picture(tmp_path: Path) -> None:
    figures = {name: {"us": 3.0, "spread": 0.1, "floor_us": 2.0, "compiled_us": 4.0} for name in norm.FORMS}
    norm.plot([{"rows": 4, "columns": 32, **figures}], tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_rows_that_are_too_long_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "rmsnorm-fp8", "--shape", "2x16385"]) == 2
    assert "at most 16384 columns" in capsys.readouterr().err
