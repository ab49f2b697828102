# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the FP8 RMSNorm on the emulated driver, where its times have no meaning."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import drvfuse as df
from drvfuse.__main__ import main
from drvfuse.bench import coat
from drvfuse.bench.timing import copy_launch, microseconds_per_call
from drvfuse.cli.bench_options import require
from drvfuse.errors import ArgumentError
from drvfuse.reference import coat_rmsnorm

pytestmark = pytest.mark.emulated


@pytest.fixture(scope="module")
def device() -> df.Device:
    return df.device(0, driver=df.emu.Machine(devices=1))


def test_timed_calls_alternate_and_run_equally_often(device: df.Device) -> None:
    counts = device.zeros(3, "uint32")
    kernel = df.compile('extern "C" __global__ void count(unsigned* n, int i) { n[i] += 1; }', driver=device.driver)[
        "count"
    ]
    launches = [kernel.prepare(1, 1, counts, i, device=device) for i in range(3)]
    microseconds_per_call(device, [lambda launch=launch: launch(device.stream) for launch in launches], 7)
    a, b, c = counts.numpy().tolist()
    assert a == b == c
    assert (a - 1) % 3 == 0  # one call precedes the capture; each of the three kernels runs three times in the graph


def test_the_copy_moves_every_byte(device: df.Device) -> None:
    host = np.random.default_rng(3).integers(0, 256, 16 * 5001, np.uint8)  # not a multiple of the size of the grid
    target = device.zeros(host.size, "uint8")
    copy_launch(device.array(host), target, 2)(device.stream)
    assert (target.numpy() == host).all()


def test_every_time_is_measured_and_the_floor_is_the_time_to_copy_as_many_bytes(device: df.Device) -> None:
    result = coat.measure(device, 2, 64, bandwidth=2.0)
    assert result["forward_floor_us"] == (3 * 128 + 2 * 8 + 4 * 2) / 2
    assert result["backward_floor_us"] == (5 * 128 + 2 * 8 + 4 * 2 + 4 * 64) / 2
    assert all(result[f"{way}_{figure}"] > 0 for way in ("forward", "backward") for figure in ("us", "chain_us"))
    assert len(coat.lines(result)[0]) == len(coat.HEAD)
    assert json.loads(json.dumps(result)) == result


def test_inputs_are_values_with_group_scales_of_a_quantiser() -> None:
    x, s_x, w, g = coat.inputs(3, 96)
    assert (x.shape, s_x.shape, w.shape, g.shape) == ((3, 96), (3, 6), (96,), (3, 96))
    values = coat_rmsnorm.dequantise(x, s_x, coat.QB)
    peaks = np.abs(values).reshape(3, 6, 16).max(axis=2) / s_x.astype(np.float32)
    assert (peaks == 448).all()
    assert np.unique(values).size > 100


@pytest.mark.parametrize("shape", ["12", "0x16", "4x24", "axb", "4x16x2"])
def test_a_bad_shape_is_an_argument_error(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "fp8-rmsnorm", "--shape", shape]) == 2
    assert "--shape" in capsys.readouterr().err


def test_without_a_gpu_the_benchmark_refuses_and_never_times_the_emulated_driver() -> None:
    code = (
        "import sys, drvfuse.runtime.driver as d, drvfuse.errors as e\n"
        "from drvfuse.__main__ import main\n"
        "def none(name): raise e.DriverUnavailable(f'no {name} driver; ask for driver=emu')\n"
        "import drvfuse.runtime.device as v; v.get_driver = none\n"
        "sys.exit(main(['bench', 'fp8-rmsnorm', '--shape', '2x64']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"DRVFUSE_DRIVER": "emu", "PATH": ""}
    )
    assert done.returncode == 2 and not done.stdout
    assert "a benchmark needs a GPU" in done.stderr and "drvfuse doctor" in done.stderr
    assert "driver=emu" not in done.stderr  # the suggestion of the emulated driver would not help here


def test_the_error_names_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(df.errors.Unsupported, match="--plot needs the package matplotlib"):
        require("--plot", "matplotlib")


def test_an_image_that_cannot_be_written_is_refused_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    for command, option in (("bench", "--plot"), ("trace", "--png")):
        for name in ("t.nothing", "t"):
            assert main([command, "gemv", option, name]) == 2
            assert f"{option} is '{name}'; it must be a file name that ends in" in capsys.readouterr().err


def test_row_counts_that_are_not_positive_are_refused() -> None:
    from drvfuse.cli.bench import _fp8_shape

    assert _fp8_shape("8192X4096") == (8192, 4096)
    with pytest.raises(ArgumentError, match="multiple of 16"):
        _fp8_shape("4x24")


def test_a_plot_is_written_even_if_another_library_has_no_time(tmp_path: Path) -> None:
    results = [{"rows": 4, "columns": 32, **{f"{way}_{what}": 2.0 for way in coat.WAYS for what in ("us", "floor_us")}}]
    results[0] |= {f"{way}_{peer}_us": None for way in coat.WAYS for peer in ("coat", "torch")}
    coat.plot(results, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
