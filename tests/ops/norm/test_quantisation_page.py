# SPDX-License-Identifier: Apache-2.0
"""The numbers in docs/quantisation.md follow from the reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from norm_support import Q

from drvfuse import reference

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "quantisation.md").read_text()


def test_the_ocp_rule_differs_for_as_many_groups_as_the_page_says(rng):
    assert "for about one in six groups of normally distributed data" in PAGE
    y = rng.standard_normal((4000, 32)).astype(np.float32)
    scales = reference.bits(reference.quantise(y, Q.mxfp8()).scales)[:, 0]
    ocp = np.floor(np.log2(np.abs(y).max(axis=1))).astype(int) - 8 + 127
    assert abs((scales != ocp).mean() - 1 / 6) < 0.02


def test_the_corner_cases_are_those_of_the_reference():
    y = np.zeros((3, 128), np.float32)
    y[1, 3], y[2, 3] = np.nan, np.inf
    y[1:, 5] = 1.0
    found = {}
    for name, made in (
        ("float32", Q.per_group()),
        ("e8m0", Q.per_group(scales="float8_e8m0fnu")),
        ("FP4", Q.nvfp4(1.0)),
    ):
        output, scales = reference.quantise(y, made)
        codes = output.view(np.uint8) if name != "FP4" else np.stack([output & 15, output >> 4], -1).reshape(3, -1)
        found[name] = [(float(scales[row, 0]), codes[row, 3].item(), codes[row, 5].item()) for row in range(3)]
    assert found["float32"][0] == (0, 0, 0) and found["FP4"][0] == (0, 0, 0)
    assert found["e8m0"][0] == (2.0**-127, 0, 0)
    assert all(np.isnan(rows[1][0]) for rows in found.values())
    assert [rows[1][1:] for rows in found.values()] == [(0x7F, 0), (0x7F, 0x7F), (7, 0)]
    assert found["float32"][2] == (np.inf, 0x7F, 0) and found["e8m0"][2] == (2.0**120, 0x7E, 0)
    assert found["FP4"][2][:2] == (448, 7)
