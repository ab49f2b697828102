# SPDX-License-Identifier: Apache-2.0
"""`drvfuse bench fused-forms` on emulated GPUs, where its times mean nothing, and the numbers of bytes from which
its wire times are computed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drvfuse.__main__ import main
from drvfuse.bench import rows_forms
from drvfuse.bench.forms import FORMS
from drvfuse.bench.rows_forms import received_bytes

ALLREDUCE, SCATTER = "allreduce_rmsnorm_fp8", "reduce_scatter_rmsnorm_fp8"


@pytest.mark.emulated
def test_a_form_is_timed_beside_the_plain_one_and_its_own_wire_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("drvfuse.bench.timing.REPLAYS", 1)
    out = tmp_path / "bench.json"
    options = ["--driver", "emu", "--max-blocks", "4", "--op", "reduce-scatter-rmsnorm-fp8", "--form", "normed"]
    assert main(["bench", "fused-forms", *options, "--shape", "5x64", "--out", str(out)]) == 0
    results = json.loads(out.read_text())
    assert [(r["op"], r["form"], r["times"]["algo"]) for r in results] == [
        (SCATTER, "row", "push"),
        (SCATTER, "normed", "push"),
    ]
    row, normed = results
    assert row["x_row"] == {"off": 1.0, "early": 1.0}
    assert normed["x_row"]["off"] == pytest.approx(normed["times"]["off"]["us"] / row["times"]["off"]["us"])
    assert row["wire_us"] == pytest.approx(5 * 128 / 2 / row["link_bytes_per_us"])
    printed = capsys.readouterr().out.splitlines()
    assert "mean nothing" in printed[0]
    assert [line.split()[:4] for line in printed[2:6]] == [
        [SCATTER, "5x64", form, level] for form in ("row", "normed") for level in ("off", "early")
    ]
    assert "equal to the reference bit for bit" in printed[6]


@pytest.mark.parametrize(
    ("form", "sent"),
    [
        ("row", 1024 + 4),
        ("static", 1024),
        ("group-64", 1024 + 16 * 4),
        ("group-128-e8m0", 1024 + 8),
        ("mxfp8-tiles", 1024 + 32),
        ("nvfp4", 512 + 64),
        ("normed", 1024 + 4 + 2048),
        ("heads-128", 1024 + 8 * 4),
        ("residual", 2048),
        ("residual-float32", 4096),
    ],
)
def test_received_bytes_of_two_shots_are_inputs_of_owned_rows_and_results_of_other_rows(form: str, sent: int) -> None:
    assert received_bytes(ALLREDUCE, "push_two_shot", 4, 8, 1024, FORMS[form]) == 0.75 * 8 * (2048 + sent)
    for algo in ("push_one_shot", "one_stage"):
        assert received_bytes(ALLREDUCE, algo, 4, 8, 1024, FORMS[form]) == 3 * 8 * 2048
    assert received_bytes(SCATTER, "push", 4, 8, 1024, FORMS[form]) == 0.75 * 8 * 2048
    if FORMS[form].gathered:
        assert received_bytes("all_gather", "push", 4, 8, 1024, FORMS[form]) == 0.75 * 8 * sent


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--form", "fp7"], "--form is 'fp7'; it must be one of 'row', 'row-bfloat16-scales'"),
        (
            ["--form", "heads-128", "--shape", "2x64"],
            "it must be rows x columns, columns a multiple of the group or head size of the form heads-128",
        ),
        (["--op", "allreduce"], "--op is 'allreduce'; it must be one of 'allreduce-rmsnorm-fp8', 'reduce-scatter"),
        (["--shape", "2x16392"], "--shape is '2x16392'; it must be of at most 16384 columns"),
    ],
)
def test_options_are_checked_before_any_work(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_forms, "measure", None)
    assert main(["bench", "fused-forms", "--driver", "emu", *options]) == 2
    assert message in capsys.readouterr().err
