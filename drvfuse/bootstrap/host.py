# SPDX-License-Identifier: Apache-2.0
"""Which host this is, and which addresses it has."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path


def host_identity() -> str:
    """A string that two processes share if and only if they run under one kernel and see the same Unix sockets."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}, {os.readlink('/proc/self/ns/net')}"


def is_local(address: str) -> bool:
    """Whether the host name or address `address` belongs to this host."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, where in socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(where)
                return True
    return False


def own_addresses() -> list[str]:
    """Addresses by which other hosts may reach this host, the most likely one first."""
    found = []
    for family, somewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((somewhere, 9))  # sends nothing: the kernel only chooses a route
            found.append(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        found += [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None)]
    return list(dict.fromkeys(found))
