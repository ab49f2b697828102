# SPDX-License-Identifier: Apache-2.0
"""Stores and communicators of other libraries. Rank 0 uses them only to send the address of its board to other ranks.

`Store` is the interface that a user's key-value store must have. `notice_board` makes a `Notices` of such a store, of
an mpi4py communicator, or of a store or process group of torch.distributed. None of these packages is imported here.

A store serves one group at a time: if two groups connect through the same store at once, one of them fails with an
error that says so. Subgroups need a store of their own (torch's PrefixStore, or a communicator of their ranks), or use
`split`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

from ..errors import ArgumentError, GroupError, Unsupported, kind_of

_KEY = "drvfuse/board"
_TAG = 0x6462
_POLL = 0.005


@runtime_checkable
class Store(Protocol):
    """A key-value store that all processes of a job share. It does not interpret the values.

    `set` replaces the value of a key. `get` returns the value that any process has set last. If there is none, it waits
    at most `timeout` seconds for one, and then may raise or return anything. Values have less than 4 KiB.
    """

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str, timeout: float) -> bytes: ...


class Notices(Protocol):
    """One notice: the bytes that rank 0 writes (`put_up`) and the other ranks read.

    `place` is the rank and the size if a communicator knows them, else None. `read` waits at most `seconds`, and raises
    NotThere, with the reason, if there is no notice. `take_down` removes the notice; it is called when all ranks have
    read it, and raises GroupError if another notice has replaced it.
    """

    place: tuple[int, int] | None

    def put_up(self, notice: bytes, size: int) -> None: ...

    def read(self, seconds: float) -> bytes: ...

    def take_down(self, notice: bytes) -> None: ...


class NotThere(Exception):
    """There is no notice, or the store could not be read."""


def notice_board(store: object) -> Notices:
    """The `Notices` for a store or communicator. Raises ArgumentError for an object of another kind."""
    if _has(store, "Get_rank", "Get_size", "Isend", "Iprobe", "Recv"):
        return _Communicator(store)
    if _has(store, "rank", "size", "allreduce", "broadcast"):
        return _of_process_group(store)
    if _has(store, "set", "get", "wait", "compare_set"):
        return _Keyed(store, lambda seconds: _torch_get(store, seconds))
    if isinstance(store, Store) and not isinstance(store, type):
        return _Keyed(store, lambda seconds: store.get(_KEY, seconds))
    expected = (
        "an mpi4py communicator, a store or process group of torch.distributed, an object with set(key, value) and "
        "get(key, timeout), or None"
    )
    raise ArgumentError("store", kind_of(store), expected)


def _has(store: object, *methods: str) -> bool:
    return not isinstance(store, type) and all(callable(getattr(store, method, None)) for method in methods)


class _Keyed:
    """Rank 0's notice under one key of a store. When all ranks have read the notice, an empty value replaces it."""

    place: tuple[int, int] | None = None

    def __init__(self, store: Any, get: Callable[[float], object]) -> None:
        self._store, self._get = store, get

    def put_up(self, notice: bytes, size: int) -> None:
        self._store.set(_KEY, notice)

    def read(self, seconds: float) -> bytes:
        until = time.monotonic() + seconds
        while True:
            try:
                value = self._get(max(until - time.monotonic(), 0.001))
            except Exception as error:  # each store has its own exception for a missing key
                value, reason = b"", f"get raised {type(error).__name__}: {error}".strip().splitlines()[0]
            else:
                reason = "it holds nothing" if value == b"" else f"get returned {kind_of(value)}, not bytes"
            if isinstance(value, bytes | bytearray | memoryview) and len(value):
                return bytes(value)
            if (remaining := until - time.monotonic()) <= 0:
                raise NotThere(f"the store has no key {_KEY!r}: {reason}")
            time.sleep(min(_POLL, remaining))

    def take_down(self, notice: bytes) -> None:
        try:
            found = self._get(5.0)
        except Exception as error:
            found = error
        if found != notice:
            raise GroupError("use the store", 0, "another group has been connected by the same store at the same time")
        self._store.set(_KEY, b"")


def _torch_get(store: Any, seconds: float) -> object:
    store.wait([_KEY], timedelta(seconds=seconds))
    return store.get(_KEY)


def _of_process_group(group: Any) -> Notices:
    """The `Notices` for a process group of torch, in the store with which the process group was made."""
    if not callable(getattr(group, "get_group_store", None)):
        raise Unsupported(
            "this version of torch gives no access to the store of a process group; pass a torch.distributed store "
            "as `store`"
        )
    store = group.get_group_store()
    notices = _Keyed(store, lambda seconds: _torch_get(store, seconds))
    notices.place = group.rank(), group.size()
    return notices


class _Communicator:
    """`Notices` on an mpi4py communicator: rank 0 sends its notice to each other rank as one message. No thread of
    drvfuse calls MPI, only the thread that calls these methods."""

    def __init__(self, communicator: Any) -> None:
        if communicator.Is_inter():
            raise ArgumentError("store", "an intercommunicator", "an intracommunicator")
        self._communicator = communicator
        self._sends: list[tuple[Any, bytes]] = []
        self.place: tuple[int, int] | None = (communicator.Get_rank(), communicator.Get_size())

    def put_up(self, notice: bytes, size: int) -> None:
        for rank in range(1, size):
            self._sends.append((self._communicator.Isend(notice, rank, _TAG), notice))
        _sending.extend(self._sends)

    def read(self, seconds: float) -> bytes:
        """The newest notice, since notices of groups that have failed may have arrived before it."""
        until, buffer = time.monotonic() + seconds, b""
        while not (waiting := self._communicator.Iprobe(0, _TAG)) and time.monotonic() < until:
            time.sleep(_POLL)
        while waiting:
            received = bytearray(4096)
            self._communicator.Recv(received, 0, _TAG)
            buffer, waiting = bytes(received), self._communicator.Iprobe(0, _TAG)
        if not buffer:
            raise NotThere("no message from rank 0 has arrived by MPI")
        return buffer.rstrip(b"\0")

    def take_down(self, notice: bytes) -> None:
        _sending[:] = [(request, held) for request, held in _sending if not request.Test()]


_sending: list[tuple[Any, bytes]] = []
"""Messages that MPI may not have sent yet, with their bytes, which must stay in place until they are sent."""
