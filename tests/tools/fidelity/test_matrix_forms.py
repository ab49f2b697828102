# SPDX-License-Identifier: Apache-2.0
"""On the emulated driver every matrix instruction gives the bits of a GPU for the same operands."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("llvmlite")
from drvfuse.ptx.fragments import LANES, Shape, of_mma, quads  # noqa: E402
from tools.fidelity import matrix, matrix_forms, verdict  # noqa: E402
from tools.fidelity.matrix_operands import MODES, tiles  # noqa: E402

pytestmark = pytest.mark.emulated
BATCHES = tuple(matrix.batches())


@pytest.mark.parametrize("forms", BATCHES, ids=lambda forms: forms[0].name.replace(" ", "-"))
def test_matrix_instructions_have_the_results_of_the_gpu(device, recorded_matrix, forms) -> None:
    answers = matrix.run(device, forms)
    found = [verdict.judge_output(name, recorded_matrix[0].get(name), answer) for name, answer in answers.items()]
    wrong = [v for v in found if v.status != "equal"]
    assert len(found) == len(forms) and not wrong, "\n".join(f"{v.status}: {v.name} {v.detail}" for v in wrong)


def test_the_recorded_results_match_the_forms(recorded_matrix) -> None:
    stored, about = recorded_matrix
    assert set(stored) == {form.name for form in matrix_forms.table()} and about["forms"] == len(stored)
    assert "H200" in about["gpu"] and about["driver"] >= 12000


def test_the_page_has_the_figures() -> None:
    table = matrix_forms.table()
    products = [form for form in table if form.name.startswith(("mma.", "wmma.mma."))]
    elements = sum(form.warps * form.out_bytes // (2 if result_of(form.name) == "f16" else 4) for form in products)
    page = " ".join((Path(__file__).parents[3] / "docs" / "matrix.md").read_text().split())
    assert f"answered {len(table)} forms of these instructions: {elements:,} elements of products" in page


def result_of(name: str) -> str:
    """The type of D, which is the first of the types in the name of an instruction."""
    return next(part for part in name.split(".") if part in ("f16", "f32", "s32"))


def test_inputs_of_tiles_have_the_properties_of_their_names() -> None:
    shape, kinds = Shape(16, 8, 16), ("f16", "f16", "f16")
    made = dict(zip(MODES, tiles("any", shape, kinds, len(MODES)), strict=True))
    values = {
        mode: [x.astype(np.uint16).view(np.float16).astype(np.float64) for x in tile] for mode, tile in made.items()
    }
    assert all([x.shape for x in tile] == [(16, 16), (16, 8), (16, 8)] for tile in values.values())
    finite = {mode for mode, tile in values.items() if all(np.isfinite(x).all() for x in tile)}
    assert set(MODES) - finite == {"bits", "special"}
    a, b, c = values["cancelling"]
    assert np.median(abs(a @ b) / (abs(a) @ abs(b))) < 0.1
    a, b, c = values["cancelling c"]
    assert np.median(abs(a @ b + c) / abs(c)) < 0.1
    assert (abs(values["subnormal"][0]) < 2.0**-14).all() and (abs(values["zeros"][0]) <= 1).all()
    a, b, c = values["overflow"]
    assert abs(a @ b).max() > 65504 and abs(c).max() > 32768
    again = tiles("any", shape, kinds, len(MODES))
    assert all(
        (x == y).all() for mode, tile in zip(MODES, again, strict=True) for x, y in zip(made[mode], tile, strict=True)
    )


@pytest.mark.parametrize(
    ("which", "shape", "kind", "layout"),
    [
        *(("a", shape, "f16", "") for shape in ("m16n8k8", "m16n8k16")), ("b", "m16n8k32", "s8", ""),
        ("c", "m16n8k16", "f16", ""), ("d", "m8n8k16", "s32", ""), ("a", "m8n8k4", "f16", "col"),
        ("c", "m8n8k4", "f32", ""),
    ],
)  # fmt: skip
def test_fragments_hold_each_element_once(which: str, shape: str, kind: str, layout: str) -> None:
    sizes = Shape.parse(shape)
    fragment = of_mma(which, sizes, kind, layout)
    cells = [
        (lane % 16 // 4 if quads(sizes) == 4 else 0, *cell)
        for lane in range(LANES)
        for r in fragment[lane]
        for cell in r
    ]
    rows, columns = sizes.of(which)
    assert len(cells) == len(set(cells)) == rows * columns * quads(sizes)
