# SPDX-License-Identifier: Apache-2.0
"""Plans that calls of the same shapes share, and the launches of a plan, in which only parameters that differ between
these calls are not yet written.

A plan depends on shapes, dtypes, options and the alignment of arrays, never on addresses. Each owner of plans, a device
or a group, keeps the plans of its last calls.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from ...plans.limits import Limits
from ...runtime.device import Device
from ...runtime.kernel import Kernel
from ...runtime.launch import Launch
from .options import PDLLevel
from .specialisation import Specialisation, load

Plan = TypeVar("Plan")
_KEPT = 256
POINTER_BYTES = 8


class PlanCache:
    """A cache of the 256 plans that one owner, which is a device or a group, used last. `owner.part(PlanCache)` returns
    it."""

    def __init__(self, owner: Any) -> None:
        self._plans: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._plans)

    def get(self, key: Hashable, make: Callable[[], Plan]) -> Plan:
        """Return the plan with the key `key`, made by `make()` if there is none. The key holds everything that the plan
        depends on."""
        found: Plan | None = self._plans.get(key)
        # While the cache is less than half full, no plan will be dropped soon, so the order of use is not kept.
        if found is not None and len(self._plans) < _KEPT // 2:
            return found
        if found is None:
            found = make()
        with self._lock:
            self._plans[key] = found
            self._plans.move_to_end(key)
            while len(self._plans) > _KEPT:
                self._plans.popitem(last=False)
        return found

    def clear(self) -> None:
        """Drop all plans; later calls make new ones."""
        with self._lock:
            self._plans.clear()


def limits(device: Device) -> Limits:
    """Return the properties of the device that plans depend on."""
    return Limits(device.sm_count, device.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"), device.capability)


class Pointed(Protocol):
    """Memory of the host that holds addresses of arrays: `pointers` has them by their offset in bytes in `parameters`.
    A repeated call replaces these addresses."""

    @property
    def parameters(self) -> Any: ...

    @property
    def pointers(self) -> Mapping[int, int]: ...


class Ready:
    """A launch and its parameters. The parameters that are equal for all calls of the plan are already written.

    `pointers` are the addresses of arrays in the parameters, by their offset in bytes.
    """

    __slots__ = ("__weakref__", "launch", "parameters", "planned", "pointers")

    def __init__(self, planned: Planned, launch: Launch) -> None:
        self.planned, self.launch = planned, launch
        self.parameters: Any = launch.view(0, type(planned.template))
        self.pointers: dict[int, int] = {}

    def point(self, field: str, *addresses: int) -> None:
        """Write the address of an array to a field, or the addresses of several arrays to a field that is a list.

        Every address of an array must be written by this method: a repeated call replaces `pointers` and nothing else.
        """
        kind: Any = type(self.parameters)
        offset = _offset(kind, field)
        struct.pack_into(f"{len(addresses)}Q", self.parameters, offset, *addresses)
        for address in addresses:
            self.pointers[offset] = address
            offset += POINTER_BYTES

    def fix(self, field: str, *addresses: int) -> None:
        """Write addresses that no call changes, such as those of workspaces, to a field. For addresses of arrays use
        `point`."""
        kind: Any = type(self.parameters)
        struct.pack_into(f"{len(addresses)}Q", self.parameters, _offset(kind, field), *addresses)

    def adapt(self, alone: bool, wide: bool) -> None:
        """Change a collective's launch for a group that is alone on its devices, or for a group that shares its devices
        with others.

        `alone`: the kernel may trigger its dependents at once. `wide`: the grid may fill the devices.
        """
        if self.planned.adapts is not None:
            self.planned.adapts(self, alone, wide)

    def give_back(self) -> None:
        """Let another call use this launch. Launches already queued or captured keep their parameters."""
        self.planned.idle.append(self)


@functools.cache
def _offset(kind: Any, field: str) -> int:
    """Return the offset in bytes of a field, or of a field of an inner structure, as "call.input"."""
    outer, _, inner = field.partition(".")
    offset: int = getattr(kind, outer).offset
    within: Any = type(getattr(kind(), outer))
    return offset + _offset(within, inner) if inner else offset


class Planned:
    """A kernel on a device with its grid, and the parameters that all calls of the plan share."""

    def __init__(
        self,
        device: Device,
        spec: Specialisation,
        grid: Callable[[Kernel], int] | int,
        threads: int,
        template: ctypes.Structure,
        *,
        smem: int = 0,
        waits: bool = False,
        pdl: PDLLevel = PDLLevel.OFF,
        cluster: int = 1,
        barriers: int = 0,
        awaits_peers: bool = False,
        compares: bool = False,
        adapts: Callable[[Ready, bool, bool], None] | None = None,
    ) -> None:
        """`grid` is the number of blocks, or a function of the loaded kernel. `waits`: blocks wait for one another, so
        all of them must be resident at once.

        `cluster` blocks form a cluster. A launch advances the epoch of its group by `barriers`. `awaits_peers`: it
        waits for launches of other ranks, and with `compares` it compares its call with theirs. `adapts(ready, alone,
        wide)` changes a launch as `Ready.adapt` says."""
        self.template, self.threads, self.cluster = template, threads, cluster
        self.kernel = load(device, spec)
        self.grid = grid if isinstance(grid, int) else grid(self.kernel)
        self.barriers, self.awaits_peers, self.adapts, self.compares = barriers, awaits_peers, adapts, compares
        self._configuration = self.kernel.configure(
            self.grid,
            threads,
            device=device,
            smem=smem,
            cluster=cluster if cluster > 1 else None,
            cooperative=waits and self.grid > 1,
            pdl=pdl is not PDLLevel.OFF,
        )
        self.idle: list[Ready] = []  # launches that no call uses now; any thread may take one

    def take(self, more: Sequence[Any] = ()) -> Ready:
        """Return a launch whose arguments are the parameters, followed by `more`."""
        try:
            ready = self.idle.pop()
        except IndexError:
            return Ready(self, self._configuration.prepare(self.template, *more))
        for index, value in enumerate(more, 1):
            ready.launch.set(index, value)
        return ready


def resident(kernel: Kernel, device: Device, threads: int, smem: int = 0) -> int:
    """Return the number of blocks of `threads` threads and `smem` bytes of dynamic shared memory that fit on a
    device."""
    return kernel.occupancy(device, threads, smem) * device.sm_count
