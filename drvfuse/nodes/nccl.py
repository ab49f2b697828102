# SPDX-License-Identifier: Apache-2.0
"""The engine on NCCL, by the low-level functions of nccl4py. Its work is ordered by streams and can be captured, and it
works on any number of hosts.

One communicator joins the ranks that have the same number inside their nodes. Communicators are non-blocking, so the
host bounds every wait for NCCL's set-up. NCCL's waits on the device have no bound; the group watches them (`NodeLink`).
NCCL chooses algorithms by the NCCL_ variables of the environment. On ranks that share an NVSwitch, NCCL's NVLS may make
multicast objects, which the user has not requested. So nodes on one host are refused unless NCCL_NVLS_ENABLE is 0 in
all processes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from ..bootstrap.host import host_identity
from ..errors import ExchangeError, Unsupported
from .exchange import Gather, Member, Part, Pieces

if TYPE_CHECKING:
    from .layout import Nodes

_FLOAT = 4
_UINT8, _FLOAT32, _SUM = 1, 7, 0  # values of ncclDataType_t and ncclRedOp_t
_SUCCESS, _IN_PROGRESS = 0, 7
_POLL_SECONDS = 0.0002
_ABORT_PATIENCE = 1.0  # seconds that `abort` waits for another thread's call to return


_MAY_MULTICAST = " with NVLS"


def _nvls() -> bool:
    return os.environ.get("NCCL_NVLS_ENABLE", "").strip() != "0"


def _refuse_multicast(nodes: Nodes, hosts: Sequence[str]) -> None:
    """Raise Unsupported, on all ranks alike, if NCCL might make a multicast object. `hosts[i]` is rank i's host."""
    for place in range(nodes.inside):
        together = [hosts[nodes.ranks(node)[place]] for node in range(nodes.count)]
        names = [host.removesuffix(_MAY_MULTICAST) for host in together]
        if len({*names}) < len(names) and any(host.endswith(_MAY_MULTICAST) for host in together):
            raise Unsupported(
                "NCCL may make multicast objects for nodes on one host, although none are requested: set "
                "NCCL_NVLS_ENABLE=0 in the environment of all processes"
            )


class Nccl:
    """The engine on NCCL. It needs nccl4py, and an NCCL library that nccl4py can load."""

    name = "NCCL"
    watched = True

    def __init__(self) -> None:
        """Raises Unsupported where nccl4py or NCCL cannot be loaded."""
        try:
            from nccl.bindings import nccl

            nccl.get_version()
        except Exception as error:  # nccl4py raises various types if something is missing
            raise Unsupported(
                f'exchange="nccl" needs nccl4py and NCCL, which cannot be loaded ({error}): install '
                "drvfuse[nccl-cu12] or drvfuse[nccl-cu13]"
            ) from error
        self._nccl: Any = nccl
        self._communicators: dict[int, Any] = {}  # rank of the group -> its communicator
        self._timeout = 0.0
        self._lock = threading.Lock()  # held during every use of the communicators

    def open(self, nodes: Nodes, members: Sequence[Member], gather: Gather, timeout: float) -> None:
        nccl, self._timeout = self._nccl, timeout
        with self._calls(members):
            own = [bytes(nccl.get_unique_id()) if member.node == 0 else b"" for member in members]
        where = f"{host_identity()}{_MAY_MULTICAST if _nvls() else ''}\n".encode()
        found = [answer.split(b"\n", 1) for answer in gather([where + identity for identity in own])]
        _refuse_multicast(nodes, [host.decode() for host, _ in found])
        ids = [identity for _, identity in found]
        with self._calls(members):
            with self._grouped():
                for member in members:
                    root = next(rank for rank in nodes.ranks(0) if nodes.place(rank) == member.place)
                    config = nccl.Config()
                    config.blocking = 0
                    identity = nccl.UniqueId.from_buffer(bytearray(ids[root]))
                    with member.device.use():
                        made = nccl.comm_init_rank_config(nodes.count, identity, member.node, config)
                    self._communicators[member.rank] = made
            self._settle(members, "connect")

    def check_captures(self, captures: Sequence[int | None]) -> None:
        """Refuse nothing: NCCL's work can be captured in any capture."""

    def all_gather(self, parts: Sequence[Part]) -> None:
        def gather(part: Part, communicator: Any) -> None:
            own = part.address + _FLOAT * part.count * part.member.node
            self._nccl.all_gather(own, part.address, part.count, _FLOAT32, communicator, part.stream.handle)

        self._queue(parts, gather)

    def all_reduce(self, parts: Sequence[Part]) -> None:
        def add(part: Part, communicator: Any) -> None:
            address, stream = part.address, part.stream.handle
            self._nccl.all_reduce(address, address, part.count, _FLOAT32, _SUM, communicator, stream)

        self._queue(parts, add)

    def all_to_all(self, parts: Sequence[Pieces]) -> None:
        def move(part: Pieces, communicator: Any) -> None:
            for piece in part.sent:
                self._nccl.send(piece.address, piece.nbytes, _UINT8, piece.node, communicator, part.stream.handle)
            for piece in part.received:
                self._nccl.recv(piece.address, piece.nbytes, _UINT8, piece.node, communicator, part.stream.handle)

        self._queue(parts, move)

    def _queue(self, parts: Sequence[Part] | Sequence[Pieces], call: Any) -> None:
        members = [part.member for part in parts]
        with self._lock, self._calls(members):
            with self._grouped():
                for part in parts:
                    with part.member.device.use():
                        call(part, self._communicator(part.member))
            self._settle(members, "be queued")

    def _communicator(self, member: Member) -> Any:
        """The communicator of a local rank. An abort that does not wait for this thread may remove it at any time."""
        communicator = self._communicators.get(member.rank)
        if communicator is None:
            raise ExchangeError(member.rank, self.name, "was aborted; group.reset() connects the ranks again")
        return communicator

    @contextmanager
    def _grouped(self) -> Iterator[None]:
        """A `with` block whose NCCL calls are one NCCL group, so that a call for one local rank does not wait for the
        call for another local rank.
        """
        self._nccl.group_start()
        try:
            yield
        finally:
            self._nccl.group_end()

    @contextmanager
    def _calls(self, members: Sequence[Member]) -> Iterator[None]:
        """A `with` block in which an error of NCCL becomes an ExchangeError."""
        try:
            yield
        except self._nccl.NCCLError as error:
            raise ExchangeError(members[0].rank, self.name, f"failed: {error}{self._details()}") from error

    def _details(self) -> str:
        for communicator in list(self._communicators.values()):
            text = str(self._nccl.get_last_error(communicator)).strip()
            if text:
                return f" ({text})"
        return ""

    def _settle(self, members: Iterable[Member], what: str) -> None:
        """Wait, within the time-out of `open`, until NCCL has finished its work on the host for the ranks `members`."""
        deadline = time.monotonic() + self._timeout
        for member in members:
            while (code := int(self._nccl.comm_get_async_error(self._communicator(member)))) != _SUCCESS:
                if code != _IN_PROGRESS:
                    problem = f"failed: {self._nccl.get_error_string(code)}{self._details()}"
                elif time.monotonic() > deadline:
                    problem = f"did not {what} within {self._timeout:g} s; a rank of another node is missing"
                else:
                    time.sleep(_POLL_SECONDS)
                    continue
                self._abandon()
                raise ExchangeError(member.rank, self.name, problem)

    def abort(self) -> None:
        """Abort the communicators. If another thread holds the lock for longer than a moment, that thread waits inside
        NCCL for work that only an abort ends. So this method then aborts without the lock.
        """
        held = self._lock.acquire(timeout=_ABORT_PATIENCE)
        try:
            self._abandon()
        finally:
            if held:
                self._lock.release()

    def _abandon(self) -> None:
        # `popitem` raises KeyError when no communicator is left. A check before it would not do, as another thread may
        # take the last one after the check.
        with suppress(KeyError):
            while True:
                self._nccl.comm_abort(self._communicators.popitem()[1])

    def close(self) -> None:
        """Abort the communicators. They have no queued work when this is called. An abort, unlike ncclCommDestroy, does
        not wait for other ranks."""
        with self._lock:
            self._abandon()
