# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a group tell one another before they share anything, and what all of them conclude from it.

Every rank gathers the records of all ranks and calls `agree`, which depends on nothing else. So all ranks raise the
same error, or none does.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__, config
from ..bootstrap.host import host_identity
from ..errors import ArgumentError, GroupMismatch, Unsupported, ranks_text
from ..runtime.vmm import granularity
from . import alone
from .transport import Identity, Member
from .workspace import MAX_RANKS

if TYPE_CHECKING:
    from ..runtime.device import Device


@dataclass(frozen=True)
class Record:
    """What a rank says of itself.

    `host` tells hosts apart; `gpu` the UUID of its device. `number` is a random one, of which that of rank 0
    becomes the group's. `alone`: no group is open on its device. `filling` are the numbers and sizes of the groups that
    fill it, as `comm.alone` says.
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

    @classmethod
    def of(cls, device: Device, workspace_bytes: int, max_blocks: int | None) -> Record:
        """That of the rank of `device` in this process."""
        driver = device.driver
        return cls(
            host=host_identity(),
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
        """What `encode` gives, of this version or of one with other fields, which `agree` then finds by its version."""
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
}
"""What must be the same on all ranks, and what it is called. The version comes first: of others nothing is known."""


@dataclass(frozen=True)
class Agreement:
    """What holds for all ranks: their devices, the granularity of memory, the group itself, and the numbers of those
    groups that fill their devices no longer."""

    members: tuple[Member, ...]
    gpus: tuple[str, ...]
    unit: int
    identity: Identity
    disturbed: tuple[int, ...]


def agree(records: Sequence[Record]) -> Agreement:
    """What the ranks agree on; `records[i]` is rank i's.

    Raises GroupMismatch where they differ in what must be equal, ArgumentError for two ranks on one GPU and for too
    many ranks, Unsupported for ranks on several hosts, and where a group that fills its devices would have to stop
    that on some of its ranks only.
    """
    for name, what in _EQUAL.items():
        values = {rank: str(getattr(record, name)) for rank, record in enumerate(records)}
        if len(set(values.values())) > 1:
            raise GroupMismatch(what, values)
    if len(records) > MAX_RANKS:
        raise ArgumentError("size", len(records), f"at most {MAX_RANKS}, the ranks that one node may have")
    _require_own_devices(records)
    hosts = [record.host for record in records]
    if len(set(hosts)) > 1:
        raise Unsupported(f"the ranks are on {len(set(hosts))} hosts: rank 0 on {hosts[0]}, others on other ones")
    return Agreement(
        members=tuple(Member(r.device, r.capability, r.sm_count, r.multicast) for r in records),
        gpus=tuple(record.gpu for record in records),
        unit=max(record.unit for record in records),
        identity=Identity(records[0].number, len(records), all(r.alone and r.max_blocks is None for r in records)),
        disturbed=_disturbed(records),
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
                f"the devices of {ranks_text(those)} belong to an open group of {size} ranks, whose calls count on "
                "having all of its devices alone: open the new group with split() of that one, or give that one a "
                "max_blocks"
            )
    return tuple(number for number, _ in ranks)


def tuning_file() -> Path:
    """The file of the setting `tuning`."""
    return Path(config.get("tuning") or Path(config.get("cache_dir")) / "tuning.json")


def _tuning() -> str:
    """Which constants algorithms are chosen by."""
    try:
        return hashlib.sha256(tuning_file().read_bytes()).hexdigest()[:16]
    except OSError:
        return "built in"
