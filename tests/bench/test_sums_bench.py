# SPDX-License-Identifier: Apache-2.0
"""`drvfuse bench reduce-scatter` and its like: that they measure, as times of the emulated driver mean nothing."""

from __future__ import annotations

import pytest

import drvfuse as df
from drvfuse.bench import moves, sum_worker, sums
from drvfuse.bench.settings import EMULATED

pytestmark = pytest.mark.emulated


@pytest.mark.parametrize("op", sums.OPS)
def test_each_op_is_measured_beside_the_wire_time(op):
    with df.emu.Machine(devices=2, sm_count=2) as machine, df.Group.local(2, driver=machine, max_blocks=2) as group:
        results = list(moves.measure(group, op, [1], ["auto"], EMULATED, with_peers=False))
    (result,) = results
    assert result["kib"] == 1 and result["wire_us"] > 0
    assert set(result["ours"]["auto"]) == {"off", "early", "algo"}
    assert result["ours"]["auto"]["algo"] in moves.algorithms(op)
    lines = moves.lines(result)
    assert [len(line) for line in lines] == [len(moves.HEAD)] * 2
    assert "sizes are those of an input" in moves.notes(results)[0]


def test_an_input_has_a_row_for_each_rank_and_is_cut_into_tensors_of_whole_packs():
    for ranks in (1, 2, 8):
        for kib in moves.KIB:
            nbytes = kib * 1024
            columns = sum_worker.columns_of(nbytes, ranks)
            assert nbytes // 2 % columns == 0 and nbytes // 2 // columns >= ranks and columns <= 4096
            assert nbytes % sum_worker.tensors_of(nbytes) == 0
