# SPDX-License-Identifier: Apache-2.0
"""The calls that benchmarks time have the results of the reference, and a wrong bit is found before anything is
timed."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import drvfuse as df
from drvfuse import errors
from drvfuse.bench import moves, moves_gather, ops, sizes
from drvfuse.bench.collective_calls import BANK, bank, repeated
from drvfuse.bench.forms import FORMS
from drvfuse.bench.settings import EMULATED

pytestmark = pytest.mark.emulated
ROWS = BANK + 3  # more rows than the bank of random rows has, so a rank's tensor repeats some of them


@pytest.fixture(scope="module")
def group():
    with df.emu.Machine(devices=2, sm_count=2) as machine, df.Group.local(2, driver=machine, max_blocks=2) as made:
        yield made
        assert not machine.reports


@pytest.mark.parametrize("op", ops.ALGORITHMS)
def test_results_are_those_of_the_reference(group, op):
    ops.calls_of(group, op, ROWS, 64, sets=2).check("auto")


def test_rows_of_their_owners_with_groups_and_residual_have_the_results_of_the_reference(group):
    form = FORMS["residual-group-128"]
    ops.calls_of(group, "reduce_scatter_rmsnorm_fp8", ROWS, 128, sets=1, form=form).check("auto")


@pytest.mark.parametrize("form", ["row", "mxfp8-tiles", "nvfp4"])
def test_rows_are_gathered_with_their_scales(group, form):
    moves_gather.gathers(group, 5, 64, sets=1, made=FORMS[form].quantisation).check("auto")


@pytest.mark.parametrize("op", ops.ALGORITHMS)
def test_one_wrong_bit_on_one_rank_is_named(group, op):
    calls = ops.calls_of(group, op, ROWS, 64, sets=1)
    expected = calls.results[-1].expected()
    wrong = [array.copy() for array in expected]
    wrong[1].view(np.uint8).reshape(-1)[-1] ^= 1
    calls.results[-1].expected = lambda: wrong
    with pytest.raises(errors.DrvfuseError, match=f"^{op} .*{calls.results[-1].name} of rank 1 are wrong"):
        calls.check("auto")


@pytest.mark.parametrize("op", ["allreduce_rmsnorm_fp8", "broadcast"])
def test_a_call_that_writes_nothing_does_not_pass_by_earlier_results(group, op):
    calls = ops.calls_of(group, op, ROWS, 64, sets=1)
    calls.check("auto")
    (made,) = calls.prepared("auto")
    calls.prepare = lambda inputs, **options: SimpleNamespace(launch=lambda: None, describe=made.describe)
    with pytest.raises(errors.DrvfuseError, match="are wrong"):
        calls.check("auto")


def test_forms_are_measured_where_their_groups_and_heads_divide_the_columns():
    assert all(form.fits(8192) for form in FORMS.values())
    assert {name for name, form in FORMS.items() if not form.fits(64)} == {name for name in FORMS if "128" in name}


def test_the_measured_forms_cover_every_quantisation_and_option_of_a_norm():
    made = [form.quantisation for form in FORMS.values()]
    assert {(q.kind, q.group) for q in made} == {
        ("row", 0), ("static", 0), ("group", 64), ("group", 128), ("group", 32), ("group", 16)
    }  # fmt: skip
    assert {(q.group, q.layout) for q in made if q.group in (16, 32)} == {
        (group, layout) for group in (16, 32) for layout in ("row", "column", "tiles")
    }
    every = FORMS.values()
    assert {form.residual for form in every} == {None, "bfloat16", "float32"}
    assert {(form.norm, form.beta) for form in every} == {("rms", False), ("layer", False), ("layer", True)}
    assert any(form.head_columns for form in every) and any(form.normed for form in every)
    assert any(form.gamma == "float32" for form in every)


def test_rows_of_large_inputs_are_repeated_from_a_bank_of_random_rows():
    values = bank(1, 1000, 8)
    assert values.shape == (BANK, 8) and not np.array_equal(values, bank(2, 1000, 8))
    tensor = repeated(values, 1000)
    assert all((tensor[row] == values[row % BANK]).all() for row in (0, BANK, 999))


@pytest.mark.parametrize("op", ["allreduce_many", "reduce_scatter_rmsnorm_fp8"])
def test_an_op_is_measured_beside_its_wire_time(monkeypatch, group, op):
    monkeypatch.setattr("drvfuse.bench.timing.REPLAYS", 1)
    results = list(moves.measure(group, op, [1], ["auto"], EMULATED, with_peers=False))
    (result,) = results
    assert result["kib"] == 1 and result["wire_us"] > 0
    assert set(result["ours"]["auto"]) == {"off", "early", "algo"}
    assert result["ours"]["auto"]["algo"] in ops.ALGORITHMS[op]
    lines = moves.lines(result)
    assert [len(line) for line in lines] == [len(moves.HEAD)] * 2
    assert "sizes are those of an input" in moves.notes(results)[0]


def test_an_input_has_a_row_for_each_rank_and_is_cut_into_tensors_of_whole_packs():
    for ranks in (1, 2, 3, 6, 7, 8):
        unit = sizes.unit_of(ranks)
        for kib in moves.KIB:
            nbytes = -(-kib * 1024 // unit) * unit
            columns = sizes.columns_of(nbytes, ranks)
            part, exact = divmod(nbytes // 2, ranks)
            assert exact == part % columns == columns % 8 == 0 and columns <= 4096
            assert columns == min(4096, part) or ranks not in (1, 2, 8)
            assert nbytes % sizes.tensors_of(nbytes) == 0
