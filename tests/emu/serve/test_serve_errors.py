# SPDX-License-Identifier: Apache-2.0
"""Errors in serving a machine and in attaching to one, and the command that serves one."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from driver_helpers import ok, primary

import drvfuse as df
from drvfuse import emu
from drvfuse.emu.machine.process import interrupts
from drvfuse.emu.serve import address as addresses
from drvfuse.emu.serve import channel, client, server
from drvfuse.emu.serve.hello import greeting
from drvfuse.emu.serve.line import Line
from drvfuse.errors import ArgumentError, DriverUnavailable

pytestmark = pytest.mark.emulated


@pytest.fixture
def served() -> Iterator[emu.Server]:
    with emu.Machine(devices=2, served=True) as machine, emu.Server(machine) as made:
        yield made
        made.wait_for_clients()


@pytest.mark.parametrize("text", ["", "unix:", "unix:name", "tcp:1.2.3.4:5", "unix:@" + "x" * 200])
def test_a_malformed_address_is_refused(text):
    with pytest.raises(ArgumentError, match=r"unix:@NAME.* or .*unix:/PATH"):
        emu.AttachedMachine(text)


def test_an_address_without_a_server_is_an_error(tmp_path):
    for text in (f"unix:{tmp_path}/socket", "unix:@drvfuse-nobody"):
        with pytest.raises(DriverUnavailable, match=f"no emulated machine is served at {text}"):
            emu.AttachedMachine(text)


def test_an_error_in_the_setting_names_the_setting(monkeypatch):
    monkeypatch.setenv("DRVFUSE_EMU_MACHINE", "nonsense")
    monkeypatch.setattr("drvfuse.emu.machine.machine._default", None)
    with pytest.raises(ArgumentError, match="DRVFUSE_EMU_MACHINE"):
        emu.default_machine()


def test_another_version_is_refused(served, monkeypatch):
    greeting = client.greeting
    monkeypatch.setattr(client, "greeting", lambda kind, **more: {**greeting(kind, **more), "version": "0.0.1"})
    with pytest.raises(DriverUnavailable, match=rf"served by drvfuse {df.__version__}, and this process has .* 0.0.1"):
        emu.AttachedMachine(served.address)
    monkeypatch.setattr(client, "greeting", lambda kind, **more: {**greeting(kind, **more), "table": "other"})
    with pytest.raises(DriverUnavailable, match="another build"):
        emu.AttachedMachine(served.address)


def test_a_machine_of_another_user_is_not_used(served, monkeypatch):
    monkeypatch.setattr(addresses.os, "getuid", lambda: 4711)
    with pytest.raises(DriverUnavailable, match="belongs to user"):
        emu.AttachedMachine(served.address)


def test_a_client_of_another_user_is_not_served(served, monkeypatch):
    peer = addresses.peer
    monkeypatch.setattr(server.addresses, "peer", lambda connection: (1, os.getuid() + 1))
    monkeypatch.setattr(client.addresses, "connect", lambda address, argument: _connected(address, peer))
    with pytest.raises(DriverUnavailable, match="has ended"):
        emu.AttachedMachine(served.address)


def _connected(address: str, peer: Any) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.connect(addresses.parse(address, "address"))
    return made


def test_a_server_closes_while_a_connection_s_thread_starts(served, monkeypatch):
    """Thread.join raises for a thread that has been created but has not started yet."""
    start, join = threading.Thread.start, threading.Thread.join
    begins, closing = threading.Event(), threading.Event()

    def late(thread: threading.Thread) -> None:
        if thread.name == "drvfuse-line":
            begins.set()
            closing.wait(0.2)
        start(thread)

    def unless_it_accepts(thread: threading.Thread, timeout: float | None = None) -> None:
        # close() must not wait for the accepting thread, which is still in `late`, before `start`
        if thread.name != "drvfuse-accept":
            join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "start", late)
    monkeypatch.setattr(threading.Thread, "join", unless_it_accepts)
    with _connected(served.address, None):
        assert begins.wait(10)
        served.close()
        closing.set()


def test_an_occupied_address_is_named_in_the_error(served):
    """A client must map the machine's memory at the addresses that it has in the server. Here both are one process, so
    these addresses are occupied."""
    with pytest.raises(DriverUnavailable, match=f"needs the addresses 0x{served.machine.window.base:x} to"):
        emu.AttachedMachine(served.address)


def test_connections_that_send_garbage_do_no_harm(served):
    for sent in (b"", b"\0" * 12, b"x" * 100, (5).to_bytes(8, "little") + b"\0\xff\0\0" + b"hello"):
        with socket.socket(socket.AF_UNIX) as made:
            made.connect(addresses.parse(served.address, "address"))
            made.sendall(sent)
            made.shutdown(socket.SHUT_WR)
            assert made.recv(100) == b""
    assert not served.sessions


def test_a_header_of_a_huge_greeting_takes_no_memory_and_ends_the_connection(served, monkeypatch):
    asked = []
    monkeypatch.setattr(channel, "_rest", lambda connection, begun, nbytes: asked.append(nbytes))
    for nbytes in (1 << 17, 8 << 30, (1 << 64) - 1):
        with socket.socket(socket.AF_UNIX) as made:
            made.connect(addresses.parse(served.address, "address"))
            made.sendall(channel._HEAD.pack(nbytes, channel.Tag.HELLO, 0))
            made.settimeout(5)
            assert made.recv(100) == b""
    assert not asked and not served.sessions


@pytest.mark.parametrize("name", ["", "a\nb", 5])
def test_a_client_with_an_invalid_name_is_refused(served, name):
    with addresses.connect(served.address, "address") as made:
        channel.send(made, channel.Tag.HELLO, channel.packed(greeting("life", name=name)))
        made.settimeout(10)
        assert made.recv(100) == b""


def test_clients_are_served_after_the_server_ran_out_of_files(served, monkeypatch):
    listening = served._listening
    refused = iter([OSError(errno.EMFILE, "too many open files")])

    def accept() -> Any:
        for error in refused:
            raise error
        return listening.accept()

    monkeypatch.setattr(served, "_listening", SimpleNamespace(accept=accept))
    for _ in range(2):  # the first client arrives while the server is still in the earlier accept
        with addresses.connect(served.address, "address") as made:
            channel.send(made, channel.Tag.HELLO, channel.packed(greeting("life")))
            made.settimeout(10)
            assert channel.receive(made)[0] == channel.Tag.RESULT
    monkeypatch.undo()
    assert not list(refused)


def test_a_second_ctrl_c_does_not_kill_a_client(served):
    """The server may receive both interrupts in one read."""
    with addresses.connect(served.address, "address") as made:
        channel.send(made, channel.Tag.HELLO, channel.packed(greeting("life")))
        channel.receive(made)
        interrupt = channel._HEAD.pack(16, channel.Tag.INTERRUPT, 0) + bytes(16)
        made.sendall(2 * interrupt)
        made.settimeout(0.3)
        with pytest.raises(TimeoutError):
            made.recv(1)
        assert len(served.sessions) == 1


def test_an_early_or_late_interrupt_affects_only_its_own_call():
    """The interrupt and the call arrive by different connections, so either may be first."""
    line = Line(1, SimpleNamespace(), SimpleNamespace())
    line._thread = threading.get_ident()
    for interrupted, expected in ((1, False), (4, True)):
        with line._call_under_way():
            pass
        line.interrupt(interrupted)
        assert not interrupts.pending()
        with line._call_under_way():
            assert interrupts.pending() == expected
    assert not interrupts.pending()


def test_a_served_address_and_machine_are_checked(served, tmp_path):
    with pytest.raises(ArgumentError, match="free and writable"):
        emu.Server(served.machine, served.address)
    with pytest.raises(ArgumentError, match="free and writable"):
        emu.Server(served.machine, f"unix:{tmp_path}/none/socket")
    with emu.Machine(devices=1) as machine, pytest.raises(ArgumentError, match="served=True"):
        emu.Server(machine)


def test_a_unix_socket_file_is_removed(tmp_path):
    path = tmp_path / "socket"
    with emu.Machine(devices=1, served=True) as machine, emu.Server(machine, f"unix:{path}"):
        assert path.is_socket() and path.stat().st_mode & 0o777 == 0o600
    assert not path.exists()


def test_a_closed_machine_accepts_no_client(served):
    served.machine.close()
    with pytest.raises(DriverUnavailable, match="was closed"):
        emu.AttachedMachine(served.address)


PROGRAM = """
import sys, drvfuse as df, numpy as np
device = df.device(0)
assert (device.array(np.arange(9)).numpy() == np.arange(9)).all()
if "fault" in sys.argv:
    device.empty(1 << 50, "uint8")
"""


@pytest.mark.parametrize(("words", "status"), [([], 0), (["fault"], 1)])
def test_the_command_serves_until_a_signal_ends_it(tmp_path: Path, words: list[str], status: int) -> None:
    command = [sys.executable, "-m", "drvfuse", "emu", "serve", "--devices", "2", "--seed", "3", "--race"]
    command += ["--record", str(tmp_path / "record"), "--address", f"unix:{tmp_path}/socket"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        line = serving.stdout.readline()
        assert line == f"<Machine of 2 x sm_90a, seed 3> is served at unix:{tmp_path}/socket\n"
        environment = {**os.environ, "DRVFUSE_DRIVER": "emu", "DRVFUSE_EMU_MACHINE": line.split()[-1]}
        done = subprocess.run([sys.executable, "-c", PROGRAM, *words], env=environment, capture_output=True, text=True)
        assert done.returncode == status, done.stderr
        serving.send_signal(signal.SIGTERM)
        output, _ = serving.communicate(timeout=30)
    assert serving.returncode == status
    assert ("out_of_memory" in output) == bool(status)
    assert not (tmp_path / "socket").exists()
    assert (tmp_path / "record").read_text().startswith("drvfuse record 1")


def test_the_module_of_the_driver_attaches_too(pool):
    assert pool.run(1, use_the_module) == [(8, "AttachedMachine")]


def use_the_module(rank: int, size: int) -> tuple[int, str]:
    from drvfuse.emu import driver as cuda

    ok(cuda.cuInit(0))
    primary(cuda)
    return int(ok(cuda.cuDeviceGetCount())), type(emu.default_machine()).__name__
