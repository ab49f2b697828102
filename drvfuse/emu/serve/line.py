# SPDX-License-Identifier: Apache-2.0
"""The server's end of the connection of one thread of a client."""

from __future__ import annotations

import contextlib
import pickle
import socket
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..driver import ENTRIES, perform
from ..machine.process import interrupts
from ..wire.coder import numbered
from ..wire.message import Incoming, Outgoing
from ..wire.parameters import Layout
from .channel import Ended, Tag, close_rest, packed, receive, send, unpacked
from .questions import QUESTIONS

if TYPE_CHECKING:
    from .session import Session


class Line:
    """The server's end of the connection of one thread of a client. `run` answers the calls that arrive on it."""

    def __init__(self, number: int, session: Session, connection: socket.socket) -> None:
        self.number, self.session, self.connection = number, session, connection
        self._thread = 0
        self._lock = threading.Lock()
        # The number of calls that have arrived, and the number of the call that `interrupt` was given last, 0 for none.
        self._calls = self._interrupted = 0
        self._under_way = False

    def run(self) -> None:
        self._thread = threading.get_ident()
        try:
            while True:
                tag, incoming = receive(self.connection)
                try:
                    with self._call_under_way():
                        reply, out = self._answer(tag, incoming)
                finally:
                    close_rest(incoming)
                send(self.connection, reply, out)
        except (Ended, OSError):
            pass  # the client, or its thread, has ended
        finally:
            self.session.leave(self)
            self.connection.close()

    @contextlib.contextmanager
    def _call_under_way(self) -> Iterator[None]:
        with self._lock:
            self._calls += 1
            self._under_way = True
            if self._interrupted == self._calls:
                interrupts.interrupt(self._thread)
        try:
            yield
        finally:
            with self._lock:
                self._under_way = False
                interrupts.forget(self._thread)

    def interrupt(self, call: int) -> None:
        """Interrupt the call with the number `call` on this connection, so that it stops waiting. The request for this
        comes by another connection. So the call may have ended already; then nothing happens. If the call has not
        arrived yet, it is interrupted when it arrives.
        """
        with self._lock:
            self._interrupted = call
            if self._under_way and call == self._calls:
                interrupts.interrupt(self._thread)

    def _answer(self, tag: int, incoming: Incoming) -> tuple[int, Outgoing]:
        try:
            if tag == Tag.ASK:
                name, arguments = unpacked(incoming)
                return Tag.RESULT, packed(QUESTIONS[name](self.session.process, *arguments))
            return Tag.RESULT, self._call(tag, incoming)
        except Ended:
            raise
        except BaseException as error:  # an error of any kind is sent to the caller
            return Tag.RAISED, packed(_sendable(error))

    def _call(self, number: int, incoming: Incoming) -> Outgoing:
        coder = numbered(number)
        if coder is None:
            raise RuntimeError(f"no function of the driver has the number {number}")
        process = self.session.process
        run = coder.read_call(incoming, self)
        done = False
        self.session.offer_file(run.file)
        try:
            code, *results = perform(process, ENTRIES[coder.signature.name], run.values)
            done = not code
        finally:
            for descriptor in run.received:
                incoming.descriptors.append(descriptor)  # put back, so that `close_rest` closes it after the answer
            if not done and run.keep:
                self.session.kept.append(run.keep)
        out = Outgoing()
        out.word(int(code))
        if code:
            refusal = process.refusal
            out.data(None if refusal is None else pickle.dumps(refusal))
            coder.write_filled(out, run)
        else:
            coder.write_result(out, results, run)
        return out

    # The machine's side of a call (`wire.calls.Machine`) --------------------------------------------------------------

    def pinned(self, address: int) -> int:
        return self.session.process.machine.window.host_file(address)

    def managed(self, address: int) -> tuple[int, int, int] | None:
        process = self.session.process
        found = process.memory.find(address)
        if found is None or found.managed is None:
            return None
        return found.base, found.nbytes, process.machine.window.host_file(found.base)

    def layout(self, function: int) -> Layout | None:
        return QUESTIONS["layout"](self.session.process, function)

    def call_back(self, function: int, argument: int) -> int:
        out = Outgoing()
        out.word(function)
        out.word(argument)
        try:
            with self.session.process.machine.lock.released():  # the function may take long
                send(self.connection, Tag.CALLBACK, out)
                _, incoming = receive(self.connection)
            return incoming.word()
        except (Ended, OSError):
            return 0  # the caller has exited, so no answer is needed


def _sendable(error: BaseException) -> BaseException:
    """The exception itself or, if it cannot be pickled, an exception with its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
