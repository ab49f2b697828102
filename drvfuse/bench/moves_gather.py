# SPDX-License-Identifier: Apache-2.0
"""Calls of all-gather of quantised rows with their scales, for benchmarks."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ..comm.group import Group
from ..ops.collectives.moves.all_gather import all_gather
from ..plans.quantisation import Quantisation
from ..plans.sums import split_rows
from ..reference.quantised import arrange
from ..runtime.array import Array
from .collective_calls import CollectiveCalls, Host, Result


def gathers(group: Group, rows: int, columns: int, sets: int, made: Quantisation) -> CollectiveCalls:
    """Calls that gather random codes and scales of `rows` rows in all, divided among the ranks as equally as
    possible."""
    of_codes, of_scales = made.dtype, made.scales
    assert of_codes is not None and of_scales is not None
    counts = split_rows(rows, group.size)
    width = made.output_shape((rows, columns))[1]
    codes = [_random(rank, count, width).view(of_codes.numpy) for rank, count in enumerate(counts)]
    bytes_of_scales = [_random(group.size + rank, n, made.row_scale_bytes(columns)) for rank, n in enumerate(counts)]
    by_row = [of_rank.view(of_scales.numpy) for of_rank in bytes_of_scales]

    def stored(scales: Host) -> Host:
        """The scales [rows, groups] in the layout of this quantisation."""
        return arrange(scales, made) if made.group else scales[:, 0]

    def empty(of_all: bool) -> tuple[list[Array], list[Array]]:
        shapes = [(rows if of_all else counts[rank.index],) for rank in group]
        found = [
            (rank.empty((*lead, width), of_codes), rank.empty(made.scales_shape(lead, columns) or (), of_scales))
            for rank, lead in zip(group, shapes, strict=True)
        ]
        return [of_rank[0] for of_rank in found], [of_rank[1] for of_rank in found]

    inputs: list[Any] = []
    for turn in range(sets):
        inputs.append(empty(of_all=False))
        for rank, array, scales in zip(group, *inputs[-1], strict=True):
            array.copy_from(np.roll(codes[rank.index], turn, axis=1))
            scales.copy_from(stored(by_row[rank.index]))
    outputs, gathered = empty(of_all=True)
    prepare = partial(all_gather.prepare, group, outputs=outputs, gathered_scales=gathered, quantisation=made)
    return CollectiveCalls(
        group,
        lambda pair, **options: prepare(pair[0], scales=pair[1], splits=counts, **options),
        inputs,
        [
            Result("the codes", outputs, lambda: [np.concatenate(codes)] * len(group)),
            Result("the scales", gathered, lambda: [stored(np.concatenate(by_row))] * len(group)),
        ],
    )


def _random(seed: int, rows: int, nbytes: int) -> Host:
    return np.random.default_rng([seed, rows, nbytes]).integers(0, 256, (rows, nbytes), np.uint8)
