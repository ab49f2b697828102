# SPDX-License-Identifier: Apache-2.0
"""Traced all-gather, broadcast and all-to-all: the same bytes as without a trace, and the phases of every block."""

from __future__ import annotations

import numpy as np
import pytest
from test_traced_collectives import consistent
from trace_support import bytes_of

import drvfuse as df
from drvfuse.ops.collectives.moves.kernel import ALGOS
from drvfuse.trace import decode, layout

pytestmark = pytest.mark.gpus(2)

ROLES = {
    "push": {"push", "receive", "store"},
    "pull": {"load", "store", "sync", "wait", "barrier"},
    "put": {"load", "store", "sync", "wait", "barrier"},
    "relay": {"push", "receive", "store"},
}


@pytest.fixture(scope="module")
def wide(group):
    """A group with so many blocks that, with `put`, some blocks only copy a rank's own bytes."""
    with df.Group.local(group.size, driver=group.driver, max_blocks=8) as found:
        yield found


@pytest.mark.parametrize("algo", [*ALGOS, pytest.param("relay", marks=pytest.mark.gpus(3))])
def test_tracing_changes_no_byte_and_there_is_room_for_all_phases(group, wide, rng, algo):
    group = wide if algo == "put" else group
    rows, n = 200, group.size
    aligned = [rank.array(rng.integers(0, 256, (n * rows, 256 if algo == "put" else 64), np.uint8)) for rank in group]
    odd = [rank.array(rng.integers(0, 256, (n * rows, 63), np.uint8)) for rank in group]
    call = {
        "push": lambda trace: df.all_gather(group, aligned, algo=algo, trace=trace),
        "put": lambda trace: df.all_gather(group, aligned, algo=algo, trace=trace),
        # odd addresses, so that the inputs are staged
        "pull": lambda trace: df.all_to_all(group, odd, algo=algo, max_num_blocks=3, trace=trace),
        "relay": lambda trace: df.broadcast(group, odd, root=1, algo=algo, max_num_blocks=1, trace=trace),
    }[algo]
    trace = df.Trace(group)
    plain = bytes_of(call(None))
    assert bytes_of(call(trace)) == plain
    group.synchronize()
    for section in trace._sections:
        table = decode._words(section, section.array.numpy())
        counts = 1 + (table[:, layout.HEADER_WORDS + section.rounds * section.peers :] != 0).sum(axis=1)
        assert counts.min() > 1 and counts.max() <= section.phases
    records = trace.records()
    consistent(records, n)
    assert set(records["kernel"]) == {f"move_{algo}"}
    assert {"block", "producer", "finish", *ROLES[algo]} <= set(records["role"])
