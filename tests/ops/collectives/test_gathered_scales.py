# SPDX-License-Identifier: Apache-2.0
"""All-gather of quantised rows: gathered scales have the layout of all rows, wherever those of a rank begin."""

from __future__ import annotations

import numpy as np
import pytest
from collective_support import assert_bits, garbage
from test_moves import ALL_ALGOS, SEVERAL

import drvfuse as df
from drvfuse import reference

Q = df.Quantisation
LAYOUTS = {
    "FP8, columns of floats": (Q.per_group(64, layout="column"), 320),
    "FP8, columns of E8M0": (Q.per_group(64, scales="float8_e8m0fnu", layout="column"), 320),
    "MXFP8, columns": (Q.mxfp8("float8_e5m2", layout="column"), 96),
    "MXFP8, tiles": (Q.mxfp8(layout="tiles"), 416),
    "NVFP4, tiles": (Q.nvfp4(0.5, layout="tiles"), 144),
    "NVFP4, rows": (Q.nvfp4(0.5), 144),
    "FP8, a scale for each row": (Q.per_row(), 48),
}
ROWS = ([1, 2, 1], [5, 0, 130], [128, 256, 3], [33, 96, 127], [300, 4, 8])
"""Rows of the ranks: less than a tile and more, beginning at any row of a tile; one rank has none."""


def quantised(rng, rows, columns, made):
    """Codes and scales of each rank's rows, with every scale another one, and 0xFF among the padding."""
    codes, scales = [], []
    for count in rows:
        y = rng.standard_normal((count, columns)) * np.exp2(rng.integers(-20, 20, (count, columns // 16))).repeat(16, 1)
        found = reference.quantise(y.astype(np.float32), made)
        kept = found.scales.copy()
        if made.layout != "row":
            used = reference.quantised.arrange(np.ones((count, made.groups(columns)), np.uint8), made) != 0
            kept.view(np.dtype(f"u{kept.itemsize}"))[~used] = np.iinfo(np.dtype(f"u{kept.itemsize}")).max
        codes.append(found.output)
        scales.append(kept)
    return codes, scales


def on_ranks(group, hosts, dtype):
    """Arrays of a dtype that numpy may not have."""
    arrays = [rank.empty(host.shape, dtype) for rank, host in zip(group, hosts, strict=True)]
    for array, host in zip(arrays, hosts, strict=True):
        if host.size:
            array.copy_from(host)
    return arrays


@pytest.mark.gpus(SEVERAL)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("algo", ALL_ALGOS)
def test_gathered_scales_have_the_layout_of_all_rows(open_group, rng, algo, layout):
    """Also where the padding of the ranks' own scales is not 0, as that of other libraries."""
    group = open_group(SEVERAL, workspace_bytes=1 << 16)
    made, columns = LAYOUTS[layout]
    for rows in ROWS:
        counts = rows[:SEVERAL]
        codes, scales = quantised(rng, counts, columns, made)
        xs, factors = on_ranks(group, codes, made.dtype), on_ranks(group, scales, made.scales)
        want, wanted = reference.all_gather(codes, scales, made)
        into = garbage(group, wanted.shape, made.scales)
        found = df.all_gather(
            group, xs, splits=counts, scales=factors, gathered_scales=into, quantisation=made, algo=algo
        )
        assert isinstance(found, df.Gathered) and found.scales == into
        assert_bits(found.output, want.view(xs[0].numpy().dtype), f"rows {counts}")
        assert_bits(found.scales, wanted.view(into[0].numpy().dtype), f"scales of {counts} rows")
