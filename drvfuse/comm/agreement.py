# SPDX-License-Identifier: Apache-2.0
"""The facts that the ranks of a group send one another before they share anything, and the conclusions that all ranks
draw from these facts.

Every rank gathers the records of all ranks and calls `agree`, whose result depends on these records only. So all ranks
raise the same error, or none does.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__, config
from ..bootstrap.host import host_identity
from ..errors import ArgumentError, GroupMismatch, Unsupported, ranks_text
from ..nodes.layout import Nodes, find_nodes, find_order
from ..runtime.vmm import granularity
from . import alone
from .transport import Identity, Member

if TYPE_CHECKING:
    from ..nodes.joint import NodesWanted
    from ..runtime.device import Device


@dataclass(frozen=True)
class Record:
    """The facts that a rank sends to all others about itself.

    `host` identifies its host, and `gpu` is the UUID of its device. `number` is random; rank 0's number becomes the
    number of the group. `alone` is true if no group is open on its device. `filling` has the numbers and sizes of open
    groups whose launches may fill all multiprocessors of its device (`comm.alone`). Only ranks with equal `domain` may
    form a node.
    """

    host: str
    gpu: str
    device: str
    capability: tuple[int, int]
    sm_count: int
    multicast: bool
    unit: int
    driver: str
    version: str
    workspace_bytes: int
    max_blocks: int | None
    spin_timeout: float
    check_calls: bool
    tuning: str
    number: int
    alone: bool
    filling: tuple[tuple[int, int], ...]
    domain: str
    nodes: str | int
    node_order: str | None
    exchange: str

    @classmethod
    def of(cls, device: Device, workspace_bytes: int, max_blocks: int | None, wanted: NodesWanted) -> Record:
        """The record of this process's rank, whose device is `device`."""
        driver, host = device.driver, host_identity()
        return cls(
            host=host,
            domain=host + wanted.domain,
            nodes=wanted.nodes if wanted.nodes == "auto" else int(wanted.nodes),
            node_order=wanted.node_order,
            exchange=wanted.engine,
            gpu=bytes(driver.cuDeviceGetUuid(device.handle).bytes).hex(),
            device=device.name,
            capability=device.capability,
            sm_count=device.sm_count,
            multicast=bool(device.attribute("MULTICAST_SUPPORTED")),
            unit=granularity(device),
            driver=f"{driver.name} {driver.cuDriverGetVersion()}",
            version=__version__,
            workspace_bytes=workspace_bytes,
            max_blocks=max_blocks,
            spin_timeout=config.get("spin_timeout"),
            check_calls=config.get("check_calls"),
            tuning=_tuning(),
            number=secrets.randbits(63) | 1,
            alone=alone.is_free(device),
            filling=tuple(alone.counting(device)),
        )

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Record:
        """The record whose bytes `encode` has made. A record of another version may have other fields; `agree` refuses
        it by its version.
        """
        found: dict[str, Any] = json.loads(data)
        values: dict[str, Any] = {name: found.get(name) for name in cls.__dataclass_fields__}
        values["capability"] = tuple(values["capability"] or (0, 0))
        values["filling"] = tuple((number, size) for number, size in values["filling"] or ())
        return cls(**values)


_EQUAL = {
    "version": "drvfuse's version",
    "driver": "the driver and its version",
    "workspace_bytes": "workspace_bytes",
    "max_blocks": "max_blocks",
    "spin_timeout": "the setting spin_timeout",
    "check_calls": "the setting check_calls",
    "tuning": "the constants of `drvfuse tune` (setting tuning)",
    "nodes": "nodes",
    "node_order": "node_order",
    "exchange": "exchange",
}
"""The fields that must be equal on all ranks, with their names in messages. The version comes first, since the other
fields of another version are unknown."""


@dataclass(frozen=True)
class Agreement:
    """The facts that hold for all ranks: their devices and GPUs, the granularity of memory (`unit`), the identity of
    the group, and its nodes (`layout`).

    `disturbed` are the numbers of open groups whose launches must no longer fill all multiprocessors, since this group
    opens on some of their devices.
    """

    members: tuple[Member, ...]
    gpus: tuple[str, ...]
    unit: int
    identity: Identity
    disturbed: tuple[int, ...]
    layout: Nodes

    def of(self, ranks: Sequence[int]) -> Agreement:
        """The part of the agreement that concerns `ranks`, the ranks of one node."""
        members, gpus = tuple(self.members[rank] for rank in ranks), tuple(self.gpus[rank] for rank in ranks)
        return replace(self, members=members, gpus=gpus, layout=Nodes((0,) * len(ranks)))


def agree(records: Sequence[Record]) -> Agreement:
    """The facts that the ranks agree on; `records[i]` is the record of rank i.

    Raises GroupMismatch if a field that must be equal differs, ArgumentError for two ranks on one GPU and for nodes
    that `find_nodes` refuses. Raises Unsupported if the launches of an open group may fill all multiprocessors, and
    only some ranks of that group take part here: that group can go back to its budget only on all of its ranks.
    """
    for name, what in _EQUAL.items():
        values = {rank: str(getattr(record, name)) for rank, record in enumerate(records)}
        if len(set(values.values())) > 1:
            raise GroupMismatch(what, values)
    _require_own_devices(records)
    layout = find_nodes([record.domain for record in records], records[0].nodes)
    find_order(records[0].node_order, layout.count)
    return Agreement(
        members=tuple(Member(r.device, r.capability, r.sm_count, r.multicast) for r in records),
        gpus=tuple(record.gpu for record in records),
        unit=max(record.unit for record in records),
        identity=Identity(records[0].number, len(records), all(r.alone and r.max_blocks is None for r in records)),
        disturbed=_disturbed(records),
        layout=layout,
    )


def _require_own_devices(records: Sequence[Record]) -> None:
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, record in enumerate(records):
        ranks.setdefault((record.host, record.gpu), []).append(rank)
    for (_, gpu), those in ranks.items():
        if len(those) > 1:
            expected = "a GPU of its own for each rank: pass device=, or set CUDA_VISIBLE_DEVICES for each process"
            raise ArgumentError("device", f"one GPU ({gpu}) on {ranks_text(those)}", expected)


def _disturbed(records: Sequence[Record]) -> tuple[int, ...]:
    ranks: dict[tuple[int, int], list[int]] = {}
    for rank, record in enumerate(records):
        for found in record.filling:
            ranks.setdefault(found, []).append(rank)
    for (_, size), those in ranks.items():
        if len(those) < size:
            raise Unsupported(
                f"the devices of {ranks_text(those)} belong to an open group of {size} ranks, whose calls rely on "
                "being alone on all of its devices: open the new group by split() of the open group, or give the open "
                "group a max_blocks"
            )
    return tuple(number for number, _ in ranks)


def tuning_file() -> Path:
    """The file of the setting `tuning`."""
    return Path(config.get("tuning") or Path(config.get("cache_dir")) / "tuning.json")


def _tuning() -> str:
    """A text that identifies the constants by which this rank chooses algorithms: a hash of `tuning_file()`, or
    "built in" if there is no such file."""
    file = tuning_file()
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.is_file() else "built in"
    except OSError:
        return "built in"
