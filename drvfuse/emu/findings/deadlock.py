# SPDX-License-Identifier: Apache-2.0
"""What led to a deadlock, as text: the words for which threads wait, who wrote them last, and the last events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..abi import EventKind
from .events import decode, of_blocks
from .places import Identity, Index, index_text, short_place
from .timeline import ROWS, WIDTH, Names, Participant, cell_text, cut, render, value_text

if TYPE_CHECKING:
    from ..space.window import Window

# One block is shown for all that wait at the same places for the same words. If these are more blocks than this, one is
# shown for all that wait at the same places.
_APART = 8
_NEAR = 256  # if nobody wrote a polled word, the writes at most this number of bytes from it are mentioned


def of_deadlock(
    waits: Sequence[tuple[str, int, Sequence[Any]]],
    records: np.ndarray,
    identities: Mapping[int, Identity],
    window: Window | None = None,
    without_work: Iterable[str] = (),
    rows: int = ROWS,
) -> str:
    """The timeline of a deadlock: the words for which threads wait, the last writes to these words, and the last events
    of the blocks.

    `waits` are (kernel, device, `Blocked` threads of the launch). Of several blocks that wait at the same places for
    the same words, only the first is shown. If that leaves more than `_APART` blocks, only the first of the blocks
    that wait at the same places is shown, even if they wait for different words.
    `without_work` are lines about the devices that run nothing.
    """
    names = Names(window)
    # Both dicts keep the first block for each key. A key of `by_places` is a kernel, a device and the source places at
    # which the threads of a block wait; a key of `by_words` also contains the words for which these threads wait.
    by_words: dict[tuple[Any, ...], Participant] = {}
    by_places: dict[tuple[Any, ...], Participant] = {}
    words: dict[int, list[tuple[int, Any]]] = {}
    for kernel, device, blocked in waits:
        places: dict[Index, list[tuple[Any, ...]]] = {}
        for b in blocked:
            places.setdefault(b.block, []).append((b.status, b.file, b.line, b.address))
            if b.address:
                words.setdefault(b.address, []).append((device, b))
        for block, found in places.items():
            key = (kernel, device, *dict.fromkeys(found))
            by_words.setdefault(key, Participant(device, block))
            by_places.setdefault((kernel, device, *dict.fromkeys(f[:3] for f in found)), by_words[key])
    lines = []
    for address, pollers in list(words.items())[:rows]:
        lines += _word(address, pollers, records, identities, names, window)
    if len(words) > rows:
        lines.append(f"and {len(words) - rows} other words")
    lines += without_work
    fit = len(by_words) <= _APART
    participants = list((by_words if fit else by_places).values())
    if participants:
        chosen = of_blocks(records, identities, [(p.device, p.block) for p in participants])
        events = decode(chosen, identities)
        which = "alike" if fit else "at the same places"
        lines += ["", f"the last events of the blocks (of several that wait {which}, only the first):"]
        lines.append(render(events, participants, names=names, rows=rows))
    return "\n".join(lines)


def _word(
    address: int,
    pollers: Sequence[tuple[int, Any]],
    records: np.ndarray,
    identities: Mapping[int, Identity],
    names: Names,
    window: Window | None,
) -> list[str]:
    """The lines about a polled word: which threads wait for it, and which thread wrote it last, through any address of
    the same memory. If no thread wrote it, the lines say which devices wrote near it.
    """
    device, first = pollers[0]
    who = f"device {device} block {index_text(first.block)} thread {index_text(first.thread)}"
    more = f" and {len(pollers) - 1} other threads" if len(pollers) > 1 else ""
    holds = "" if first.seen is None or first.mbarrier else f", holds {value_text(first.seen)}"
    lines = [f"{names.of(address)}{holds}: polled by {who}{more} {_place_of_wait(first)}".rstrip()]
    if first.mbarrier:
        lines.append(f"  it is an mbarrier: {first.mbarrier}")
    writes = records[np.isin(records["kind"], (EventKind.STORE, EventKind.ATOMIC))]
    places = np.array([address] if window is None else window.index.same(address), np.int64)
    here = decode(writes[np.isin(writes["address"].astype(np.int64), places)][-1:], identities)
    if here:
        e = here[0]
        by = f"device {e.device} block {index_text(e.block)} thread {index_text(e.thread)}"
        lines.append(f"  last written by {by}: {cell_text([e], names)}")
        return [cut(line, WIDTH) for line in lines]
    lines.append("  nobody wrote it in the events that are kept")
    offsets = writes["address"].astype(np.int64)[:, None] - places
    peers = sorted({e.device for e in decode(writes[(np.abs(offsets) <= _NEAR).any(1)], identities)})
    if peers:
        lines.append(f"  words within {_NEAR} bytes of it were written by device {', '.join(map(str, peers))} only")
    return [cut(line, WIDTH) for line in lines]


def _place_of_wait(blocked: Any) -> str:
    return f"({short_place(blocked.file, blocked.line)})" if blocked.file else ""
