# SPDX-License-Identifier: Apache-2.0
"""The push algorithms send no more bytes than necessary."""

from __future__ import annotations

import pytest
from collective_support import PUSH

import drvfuse as df

pytestmark = pytest.mark.emulated


def prepared(group, op, shape, algo, residual=False):
    xs = [rank.zeros(shape, "bfloat16") for rank in group]
    if op == "allreduce":
        return df.allreduce.prepare(group, xs, algo=algo)
    gammas = [rank.zeros(shape[-1], "bfloat16") for rank in group]
    residuals = [rank.zeros(shape, "bfloat16") for rank in group] if residual else None
    return df.allreduce_rmsnorm_fp8.prepare(group, xs, gammas, epsilon=1.0, residuals=residuals, algo=algo)


CASES = [  # op, shape, and whether there is a residual
    ("allreduce", (2048,), False),
    ("allreduce", (40_000,), False),
    ("allreduce_rmsnorm_fp8", (1, 4096), False),
    ("allreduce_rmsnorm_fp8", (9, 512), False),
    ("allreduce_rmsnorm_fp8", (9, 512), True),
]


@pytest.mark.parametrize(("op", "shape", "residual"), CASES)
@pytest.mark.parametrize("algo", PUSH)
@pytest.mark.parametrize("n", [2, 4])
def test_remote_bytes_agree_with_the_formula(n, algo, op, shape, residual):
    """For an input of S bytes each rank sends (n - 1) S bytes by push_one_shot, and 2 (n - 1) / n S bytes by
    push_two_shot. The latter sends fewer if it gathers FP8 results."""
    with df.emu.Machine(devices=n) as machine, df.Group.local(n, driver=machine, max_blocks=4) as group:
        call = prepared(group, op, shape, algo, residual)
        group.synchronize()
        ended = len(machine.launches)
        call.launch()
        group.synchronize()
        records = list(machine.launches)[ended:]
    totals = [record.counters.total for record in records]
    nbytes, rows = 2, shape[0] if len(shape) > 1 else 0
    for size in shape:
        nbytes *= size
    sent = n * (n - 1) * nbytes
    if algo == "push_two_shot":
        fp8 = op != "allreduce" and not residual
        sent = (n - 1) * (nbytes + (nbytes // 2 + 4 * rows if fp8 else nbytes))
    units = rows or -(-shape[0] // 512)  # a unit of work is one pack for each of the 64 threads of a block
    greetings = 4 * (n - 1) * max(n - units, 0) if algo == "push_two_shot" else 0
    assert call.traffic[1] == sent
    assert sum(total.remote_written for total in totals) == sent + greetings
    assert sum(total.remote_read for total in totals) == 0  # no rank reads memory of a peer


@pytest.mark.parametrize(
    ("made", "columns", "row_bytes"),
    [
        (df.Quantisation.nvfp4(1.0), 416, 416 // 2 + 7 * 4 + 416 * 2),  # 26 scales; the normed rows are sent too
        (df.Quantisation.mxfp8(layout="tiles"), 416, 416 + 4 * 4),  # 13 scales
        (df.Quantisation.per_group(64, scales="float8_e8m0fnu"), 448, 448 + 7 * 4),
        (df.Quantisation.per_group(128), 384, 384 + 3 * 4),
    ],
    ids=str,
)
def test_four_scales_of_small_groups_and_one_of_a_larger_group_are_sent_as_a_word(made, columns, row_bytes):
    shape = (9, columns)
    with df.emu.Machine(devices=2) as machine, df.Group.local(2, driver=machine, max_blocks=4) as group:
        xs, gammas, normed = ([rank.zeros(of, "bfloat16") for rank in group] for of in (shape, columns, shape))
        options = {"quantisation": made, "normed_outputs": normed if made.group == 16 else None}
        call = df.allreduce_rmsnorm_fp8.prepare(group, xs, gammas, epsilon=1.0, algo="push_two_shot", **options)
        group.synchronize()
        ended = len(machine.launches)
        call.launch()
        group.synchronize()
        records = list(machine.launches)[ended:]
    sent = 9 * (columns * 2 + row_bytes)
    assert call.traffic[1] == sum(record.counters.total.remote_written for record in records) == sent
