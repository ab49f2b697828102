# SPDX-License-Identifier: Apache-2.0
"""Calls of all-gather, broadcast and all-to-all, for benchmarks."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from .. import reference
from ..comm.group import Group
from ..comm.rank import Rank
from ..ops.collectives.moves.all_gather import all_gather
from ..ops.collectives.moves.all_to_all import all_to_all
from ..ops.collectives.moves.broadcast import broadcast
from ..runtime.array import Array, view
from ..runtime.vmm import SymmetricBuffer
from .collective_calls import CollectiveCalls, Host, Result
from .sizes import input_bytes, unit_of

OPS: dict[str, Any] = {"all_gather": all_gather, "broadcast": broadcast, "all_to_all": all_to_all}


def moves(group: Group, op: str, nbytes: int, sets: int, private: bool = False) -> CollectiveCalls:
    """Calls with random bytes, at least `nbytes` of them in the output of a rank. A broadcast is in place, as in torch.
    If `private` is true, no peer can read the inputs, so they are staged, as in a group of several processes."""
    unit, ranks = unit_of(group.size), range(group.size)
    of_input = input_bytes(op, group.size, -(-nbytes // unit) * unit)
    shape = (group.size, of_input // group.size)  # a row per rank, as all_to_all exchanges rows
    hosts = [np.random.default_rng([rank, nbytes]).integers(0, 256, shape, np.uint8) for rank in ranks]
    inputs = [[_private(rank, shape) if private else rank.empty(shape, "uint8") for rank in group] for _ in range(sets)]
    for turn, members in enumerate(inputs):
        for rank, array in zip(group, members, strict=True):
            array.copy_from(np.roll(hosts[rank.index], turn))
    rows = group.size * (group.size if op == "all_gather" else 1)
    outputs: list[Array] = [] if op == "broadcast" else [rank.empty((rows, shape[1]), "uint8") for rank in group]

    def expected() -> list[Host]:
        if op == "all_to_all":
            found = reference.all_to_all(hosts)
            return [found[rank.index] for rank in group]
        of_all = reference.all_gather(hosts) if op == "all_gather" else reference.broadcast(hosts)
        return [of_all] * len(group)

    prepare = partial(OPS[op].prepare, group)

    def in_place(members: Any, **options: Any) -> Any:
        return prepare(members, outputs or members, **options)

    before = None if outputs else [hosts[rank.index] for rank in group]
    return CollectiveCalls(group, in_place, inputs, [Result("the bytes", outputs or inputs[0], expected, before)])


def _private(rank: Rank, shape: tuple[int, ...]) -> Array:
    """An array of bytes that no other device can read."""
    memory = SymmetricBuffer([rank.device], math.prod(shape))
    return view(memory.ptrs[0], shape, "uint8", rank.device, owner=memory)
