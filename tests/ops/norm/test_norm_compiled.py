# SPDX-License-Identifier: Apache-2.0
"""The machine code of `rmsnorm_fp8`, and how its plans divide rows among threads."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drvfuse import dtypes
from drvfuse.ops.call.specialisation import Specialisation
from drvfuse.plans.definitions import defines
from drvfuse.plans.limits import Limits, ceil_div
from drvfuse.plans.norm import NormShape
from drvfuse.plans.quantisation import Quantisation

LIMITS = Limits(132, 227 << 10, (9, 0))
BF16 = dtypes.get("bfloat16")


def compiled(rows, columns, quantisation, residual=None):
    shape = NormShape.of(LIMITS, rows, columns, 2, residual is not None)
    of = defines(dtype=BF16, gamma_dtype=BF16, residual_dtype=BF16, residual=residual is not None)
    of += defines(layer=0, beta=0, normed=0, ragged=0, **shape._asdict())
    spec = Specialisation("norm", "rmsnorm_fp8", (*quantisation.definitions(BF16), *of))
    return spec.compile("sm_90a", ("--ptxas-options=-v",))


@pytest.mark.parametrize(
    ("rows", "columns", "quantisation", "residual"),
    [
        (4096, 8192, Quantisation.per_group(), BF16),
        (4096, 128, Quantisation.per_row(), None),
        (4, 8192, Quantisation.per_row(), BF16),
    ],
    ids=str,
)
def test_kernels_spill_nothing_move_whole_packs_and_use_ieee_arithmetic(rows, columns, quantisation, residual):
    image = compiled(rows, columns, quantisation, residual)
    assert re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", image.log) == [("0", "0")]
    assert "ld.global.v4.u32" in image.ptx and not re.search(r"ld\.global\.(?:nc|u8|u16)", image.ptx)
    assert not re.search(r"\b(?:fma|mad)\.\w+\.f32|\.approx|\.ftz|\bdiv\.full|\badd\.f32|\bmul\.f32", image.ptx)
    before, wait, _ = image.ptx.partition("griddepcontrol.wait")
    assert wait and not re.search(r"\bst\.(?:global|release|relaxed)", before)
    assert image.kernels["rmsnorm_fp8"].has_pdl_trigger


@settings(max_examples=200)
@given(
    rows=st.integers(1, 1 << 20),
    columns=st.integers(1, 16384),
    itemsize=st.sampled_from([2, 4]),
    resident=st.integers(132, 132 * 16),
    clusters=st.booleans(),
    residual=st.booleans(),
)
def test_the_threads_of_a_plan_hold_whole_rows(rows, columns, itemsize, resident, clusters, residual):
    limits = LIMITS if clusters else LIMITS.__class__(132, 100 << 10, (8, 9))
    shape = NormShape.of(limits, rows, columns, itemsize, residual)
    row_packs = ceil_div(columns * itemsize, 16)
    team = shape.lanes or shape.threads * shape.cluster
    assert team * shape.packs >= row_packs and shape.exact == (team * shape.packs == row_packs)
    assert shape.threads % 32 == 0 and shape.threads <= 512 and shape.packs & (shape.packs - 1) == 0
    assert shape.packs * 16 // itemsize <= 32 and shape.packs * shape.threads <= 128 * 32
    assert not shape.lanes or shape.lanes * shape.packs <= 32
    assert clusters or shape.cluster == 1
    grid = shape.grid(rows, resident)
    assert grid % shape.cluster == 0 and 1 <= grid <= max(resident, shape.cluster)
    assert shape.cluster == 1 or shape.cluster * rows <= limits.sm_count
    assert shape.phases(rows, grid) >= 2 + 3
