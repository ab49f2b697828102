# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the GEMV on the emulated driver, where its times have no meaning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import drvfuse as df
from drvfuse.bench import gemv
from drvfuse.cli.shapes import gemv_shape
from drvfuse.errors import ArgumentError

pytestmark = pytest.mark.emulated


def test_every_time_is_measured_for_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemv, "_ROTATED_BYTES", 3 * 2 * 8 * 64 + 16)
    monkeypatch.setattr(gemv, "_READERS", gemv._READERS[:2])
    monkeypatch.setattr(gemv, "CALLS", 3)
    monkeypatch.setattr("drvfuse.bench.timing.REPLAYS", 1)
    with df.emu.Machine(devices=1, sm_count=2) as machine:
        bench = gemv.Bench(df.device(0, driver=machine))
        starts = [weight.ptr for weight in bench.weights(8, 64)]
        assert len(starts) == 3 and starts[1] - starts[0] == 2 * 8 * 64
        assert len(bench.weights(64, 64)) == 1
        result = bench.measure(8, 64, 6, rows=2)
        assert bench.read(3, 7) > 0  # 42 bytes, which are no multiple of an access of 16 bytes
        assert not machine.reports
    assert all(result[key] > 0 for key in ("read", *gemv.OURS))
    assert len(gemv.lines(result)[0]) == len(gemv.HEAD)
    assert json.loads(json.dumps(result)) == result


def test_options_select_the_measured_shapes() -> None:
    assert gemv_shape("2112x7168x1536") == (2112, 7168, 1536)
    assert gemv_shape("512X1024") == (512, 1024, 384)
    with pytest.raises(ArgumentError, match="must be of at most N = 8 normed columns"):
        gemv_shape("8x8x9")
    for wrong in ("512", "8x8x8x8", "8x0"):
        with pytest.raises(ArgumentError, match="--shape"):
            gemv_shape(wrong)


def test_a_plot_is_written_as_a_picture(tmp_path: Path) -> None:
    results = [{"k": k, "bytes": k << 20, "read": 2.0, **dict.fromkeys(gemv.OURS, 3.0)} for k in (1024, 2048)]
    results[0]["compiled"] = 4.0
    gemv.plot(results, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
