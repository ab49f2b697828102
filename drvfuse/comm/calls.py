# SPDX-License-Identifier: Apache-2.0
"""How a group detects calls that differ between its ranks: hashes of calls, and their names by hash.

Kernels compare the hashes (cu/sync/calls.cuh). A kernel's report of two different calls has only their hashes. So every
rank keeps the names of its calls in a `CallTable`, in memory that all ranks of its host map and that this rank alone
writes.

    ENTRIES entries of ENTRY_BYTES, a ring:
    0   u64 hash, 0 in an entry that has no name
    8   the name in UTF-8, followed by zeros

The writer of an entry first stores 0 as its hash, then the name, then the hash. A reader takes the name only if it
reads the same hash before and after the name. A name that is too long is cut, but the hash is that of the whole name.
When the ring is full, a new name replaces the oldest one, so a call that was prepared 256 calls ago is reported without
its name.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

ENTRIES, ENTRY_BYTES = 256, 256
TABLE_BYTES = ENTRIES * ENTRY_BYTES
"""The size of the memory of a `CallTable`, which holds zeros at first."""

_HASH_BYTES, _NUMBER_BITS = 6, 16
_NAME_BYTES = ENTRY_BYTES - 8
_ENTRY = np.dtype([("hash", "<u8"), ("name", f"S{_NAME_BYTES}")])


def hash_of(name: str) -> int:
    """The hash of the call named `name`: a 64-bit number whose upper 48 bits are not all 0 and whose lower 16 are 0."""
    digest = hashlib.blake2b(name.encode(), digest_size=_HASH_BYTES).digest()
    return max(1, int.from_bytes(digest, "little")) << _NUMBER_BITS


def number_in(word: int) -> int:
    """The low 16 bits of a call's number. `word` is the sum of these bits and the call's hash."""
    return word % (1 << _NUMBER_BITS)


def hash_in(word: int) -> int:
    """The hash of a call, as `hash_of` returns it. `word` is the hash plus the low 16 bits of the call's number."""
    return word - number_in(word)


class CallTable:
    """The names of one rank's last calls in `memory`, which has at least TABLE_BYTES bytes and outlives the table."""

    def __init__(self, memory: Any) -> None:
        self._entries: npt.NDArray[Any] = np.frombuffer(memory, _ENTRY, ENTRIES)
        self._hashes, self._names = self._entries["hash"], self._entries["name"]

    def write(self, position: int, hash_: int, name: str) -> None:
        """Write the hash and the name of a call to entry `position`. Only the rank that owns the table calls this, one
        thread at a time."""
        self._hashes[position] = 0
        encoded = name.encode()
        cut = len(encoded) > _NAME_BYTES
        self._names[position] = encoded[: _NAME_BYTES - 3] + b"..." if cut else encoded
        self._hashes[position] = hash_

    def find(self, hash_: int) -> str | None:
        """The name of the call with the hash `hash_`; None if the table lacks it. Any rank may call this."""
        for position in np.flatnonzero(self._hashes == hash_):
            name = bytes(self._names[position])
            if self._hashes[position] == hash_:
                return name.decode(errors="ignore")
        return None


class ComparedCalls:
    """The names of the calls of a group whose kernels check that all ranks make the same call. `own` is the table of
    this process; `others` are the tables of ranks in other processes of the host.

    With `first` a separate kernel checks each call before any data moves; else the kernels of the call check while they
    wait for data or flags.
    """

    def __init__(self, own: CallTable, others: Sequence[CallTable] = (), *, first: bool = False) -> None:
        self.first = first
        self._own, self._tables = own, (own, *others)
        self._kept: OrderedDict[int, int] = OrderedDict()  # hash -> its position in `own`, oldest first
        self._lock = threading.Lock()

    @classmethod
    def of_one_process(cls, *, first: bool) -> ComparedCalls:
        """The calls of a group whose ranks are all in this process."""
        return cls(CallTable(bytearray(TABLE_BYTES)), first=first)

    def announce(self, name: str) -> int:
        """Keep the name of a call, and return its hash."""
        found = hash_of(name)
        with self._lock:
            if found not in self._kept:
                position = len(self._kept)
                if position == ENTRIES:
                    _, position = self._kept.popitem(last=False)
                self._own.write(position, found, name)
                self._kept[found] = position
        return found

    def name(self, word: int) -> str:
        """The name of the call that belongs to `word`, which a rank has sent. If no table has the name, a text with the
        hash of the call."""
        found = hash_in(word)
        for table in self._tables:
            name = table.find(found)
            if name is not None:
                return name
        return f"a call that no table of this host names (hash {found >> _NUMBER_BITS:012x})"
