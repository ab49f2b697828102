# SPDX-License-Identifier: Apache-2.0
"""An example of a user-defined engine between ranks in threads. It blocks the thread and copies through host memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from drvfuse.errors import ExchangeError, Unsupported
from drvfuse.nodes.exchange import Gather, Member, Part, Pieces
from drvfuse.nodes.layout import Nodes


class Table:
    """The table through which the ranks of a group exchange their numbers."""

    def __init__(self) -> None:
        self.values: dict[tuple[Any, ...], Any] = {}
        self.changed = threading.Condition()


class ThreadExchange:
    """The engine of one rank. The engines of all ranks share one table."""

    name = "threads"
    watched = False

    def __init__(self, table: Table) -> None:
        self._table, self._number, self._opened = table, 0, 0
        self.greetings: list[bytes] = []

    def open(self, nodes: Nodes, members: Sequence[Member], gather: Gather, timeout: float) -> None:
        self.greetings = list(gather([b"rank %d" % member.rank for member in members]))
        self._nodes, self._timeout = nodes, timeout
        self._opened += 1
        self._number = 0

    def check_captures(self, captures: Sequence[int | None]) -> None:
        if captures[0] is not None:
            raise Unsupported("an exchange by host threads cannot be captured in a graph")

    def all_gather(self, parts: Sequence[Part]) -> None:
        (part,) = parts
        found = self._meet(part, part.address + 4 * part.count * part.member.node)
        self._copy(part, np.concatenate(found), part.address)

    def all_reduce(self, parts: Sequence[Part]) -> None:
        (part,) = parts
        total = np.zeros(part.count, np.float32)
        for each in reversed(self._meet(part, part.address)):
            total += each
        self._copy(part, total, part.address)

    def all_to_all(self, parts: Sequence[Pieces]) -> None:
        (part,) = parts
        part.stream.synchronize()
        own = [(piece.node, self._read(part, piece.address, piece.nbytes)) for piece in part.sent]
        for node, sent in enumerate(self._exchange_values(part, own)):
            found = [values for to, values in sent if to == part.member.node]
            places = [piece for piece in part.received if piece.node == node]
            for values, place in zip(found, places, strict=True):
                assert values.nbytes == place.nbytes
                self._copy(part, values, place.address)

    def _meet(self, part: Part, address: int) -> list[np.ndarray]:
        """Exchange the `part.count` float32 values at `address` with the peers in the other nodes. Return the values of
        all nodes, in the order of the nodes."""
        part.stream.synchronize()
        return self._exchange_values(part, self._read(part, address, 4 * part.count).view(np.float32))

    def _read(self, part: Part | Pieces, address: int, nbytes: int) -> np.ndarray:
        values = np.empty(nbytes, np.uint8)
        with part.member.device.use():
            part.member.device.driver.cuMemcpyDtoH(values.ctypes.data, address, nbytes)
        return values

    def _exchange_values(self, part: Part | Pieces, own: Any) -> list[Any]:
        """Give `own` to the peers in all nodes. Return the values of all nodes, in the order of the nodes."""
        member = part.member
        self._number += 1
        keys = [(self._opened, self._number, member.place, node) for node in range(self._nodes.count)]
        with self._table.changed:
            self._table.values[keys[member.node]] = own
            self._table.changed.notify_all()
            if not self._table.changed.wait_for(lambda: all(key in self._table.values for key in keys), self._timeout):
                raise ExchangeError(member.rank, self.name, "found nobody")
            return [self._table.values[key] for key in keys]

    def _copy(self, part: Part | Pieces, numbers: np.ndarray, address: int) -> None:
        with part.member.device.use():
            part.member.device.driver.cuMemcpyHtoD(address, numbers.ctypes.data, numbers.nbytes)

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass
