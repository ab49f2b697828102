# SPDX-License-Identifier: Apache-2.0
"""Reports of errors in warp operations and at barriers. These errors do not end the launch."""

from __future__ import annotations

from ..abi import NoticeKind, structs
from .places import Identity
from .reports import Report

KINDS = {
    NoticeKind.SHUFFLE: "absent_lane",
    NoticeKind.VOTE: "absent_lane",
    NoticeKind.BARRIER: "barrier_exited",
}


def report(n: structs.Notice, identity: Identity) -> Report:
    """The report for a notice of the native runtime."""
    kind = NoticeKind(n.kind)
    words = {NoticeKind.SHUFFLE: _shuffle, NoticeKind.VOTE: _vote, NoticeKind.BARRIER: _barrier}[kind](n)
    block, thread = identity.index(n.block, n.thread)
    site = identity.site(n.site)
    return Report(
        KINDS[kind], words + identity.callers(n.site), identity.kernel, *identity.place(n.site), identity.device,
        block, thread, callers=site.inlined if site is not None else (), process=identity.process,
    )  # fmt: skip


def _shuffle(n: structs.Notice) -> str:
    own, bit = n.thread % 32, 1 << n.lane
    if not n.lanes & bit:
        why = f"which the block does not have: this warp has {n.lanes.bit_count()} lanes"
    elif not n.mask & bit:
        why = f"which is not in the mask 0x{n.mask:08x}"
    else:
        why = "which has exited"
    return f"lane {own} reads lane {n.lane} by a shuffle, {why}; the result is undefined (here 0xdeadbeef)"


def _vote(n: structs.Notice) -> str:
    absent, exited = n.mask & ~n.lanes, n.mask & n.lanes & ~n.live
    why = [f"{lanes_text(absent)}, which the block does not have"] if absent else []
    why += [f"{lanes_text(exited)}, which {'has' if exited.bit_count() == 1 else 'have'} exited"] if exited else []
    return (
        f"the mask 0x{n.mask:08x} of this vote, match or reduction names {', and '.join(why)}: "
        "only the lanes that are there are counted"
    )


def _barrier(n: structs.Notice) -> str:
    exited = n.lanes & ~n.live
    return (
        f"{n.live.bit_count()} of the {n.lanes.bit_count()} lanes of this warp are at the barrier; "
        f"{lanes_text(exited)} {'has' if exited.bit_count() == 1 else 'have'} exited and will never reach it"
    )


def lanes_text(mask: int) -> str:
    """The lanes of a mask: "lane 3", "lanes 16 to 31", "lanes 1, 3, 8 to 31"."""
    lanes = [lane for lane in range(32) if mask >> lane & 1]
    runs: list[list[int]] = []
    for lane in lanes:
        if runs and lane == runs[-1][-1] + 1:
            runs[-1].append(lane)
        else:
            runs.append([lane])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return f"lane{'s' if len(lanes) > 1 else ''} {', '.join(texts)}"
