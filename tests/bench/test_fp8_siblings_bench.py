# SPDX-License-Identifier: Apache-2.0
"""The benchmark of COAT's FP8 ops other than RMSNorm, on the emulated driver, where its times have no meaning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import drvfuse as df
from drvfuse.bench import coat_siblings

pytestmark = pytest.mark.emulated

# For each op, the bytes that a call reads and writes, per element of the input. Arrays of the input's shape and scales
# of groups count; smaller arrays do not.
ELEMENT = (3, 3, 4, 4, 3.125, 3.125, 5.125, 5.125, 2.25, 7.125, 8.25, 7.125, 9.125)


@pytest.fixture
def device() -> df.Device:
    return df.device(0, driver=df.emu.Machine(devices=1))


def test_each_op_runs_and_its_floor_is_the_time_to_copy_as_many_bytes(device: df.Device) -> None:
    rows, columns = 64, 512
    for name, (call, arrays), expected in zip(
        coat_siblings.OPS, coat_siblings._calls(device, rows, columns), ELEMENT, strict=True
    ):
        rest = sum(a.nbytes for a in arrays) - expected * rows * columns
        # `rest` is the bytes of the rows' statistics, of the vectors over columns and of the tensor's scale.
        assert 0 <= rest <= 4 * (2 * rows + 2 * columns), name
        assert len({a.ptr for a in arrays}) == len(arrays), name
        call()
    device.stream.synchronize()


def test_every_time_is_measured_for_a_shape(device: df.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drvfuse.bench.timing.REPLAYS", 1)
    monkeypatch.setattr(coat_siblings, "_ROTATED_BYTES", 4)
    chosen = [i for i, op in enumerate(coat_siblings.OPS) if op in ("division, s_y given", "add")]
    every, ops = coat_siblings._calls, coat_siblings.OPS
    monkeypatch.setattr(coat_siblings, "OPS", tuple(ops[i] for i in chosen))
    monkeypatch.setattr(coat_siblings, "_calls", lambda *shape: (c for i, c in enumerate(every(*shape)) if i in chosen))
    result = coat_siblings.measure(device, 2, 64, bandwidth=2.0)
    assert result["division, s_y given"]["floor_us"] == (3 * 128 + 2) / 2
    assert all(result[op]["us"] > 0 for op in coat_siblings.OPS)
    assert [len(line) for line in coat_siblings.lines(result)] == [len(coat_siblings.HEAD)] * 2
    assert json.loads(json.dumps(result)) == result


def test_a_plot_is_written_as_a_picture(tmp_path: Path) -> None:
    figures = {op: {"us": 3.0, "spread": 0.1, "floor_us": 2.0} for op in coat_siblings.OPS}
    coat_siblings.plot([{"rows": 4, "columns": 32, **figures}], tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
