# SPDX-License-Identifier: Apache-2.0
"""Launch attributes as typed values, for `Kernel.prepare(..., attrs=(Priority(-1), ...))`.

Each is one CUlaunchAttribute. An attribute that the installed bindings do not know raises Unsupported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .driver import enum_value

if TYPE_CHECKING:
    from .stream import Event


class LaunchAttribute:
    """Base of all attributes. `suffix` is the name of the CUlaunchAttributeID without its prefix; `member` is the
    member of the union CUlaunchAttributeValue that the attribute uses."""

    suffix: str
    member: str

    def build(self, types: Any) -> Any:
        """This attribute as a CUlaunchAttribute. `types` is the module of the bindings."""
        attribute = types.CUlaunchAttribute()
        attribute.id = enum_value(types, "CUlaunchAttributeID", f"CU_LAUNCH_ATTRIBUTE_{self.suffix}")
        self.fill(types, attribute.value)
        return attribute

    def fill(self, types: Any, value: Any) -> None:
        """Write this attribute to `value`, a CUlaunchAttributeValue."""
        setattr(value, self.member, self.setting(types))

    def setting(self, types: Any) -> Any:
        """What `fill` writes to the member `self.member`: 1 for an attribute that is only a flag."""
        return 1


@dataclass(frozen=True)
class Cooperative(LaunchAttribute):
    """All blocks run at once, so that a grid-wide barrier cannot hang. The driver refuses a grid that does not fit."""

    suffix, member = "COOPERATIVE", "cooperative"


@dataclass(frozen=True)
class _Blocks(LaunchAttribute):
    x: int
    y: int = 1
    z: int = 1

    def fill(self, types: Any, value: Any) -> None:
        dimensions = getattr(value, self.member)
        dimensions.x, dimensions.y, dimensions.z = self.x, self.y, self.z


@dataclass(frozen=True)
class Cluster(_Blocks):
    """The size of the thread block clusters, as a number of blocks in x, y and z."""

    suffix, member = "CLUSTER_DIMENSION", "clusterDim"


@dataclass(frozen=True)
class PreferredCluster(_Blocks):
    """A larger cluster, a multiple of the launch's cluster, which the device uses where it fits."""

    suffix, member = "PREFERRED_CLUSTER_DIMENSION", "preferredClusterDim"


@dataclass(frozen=True)
class ClusterScheduling(LaunchAttribute):
    """How clusters are distributed over the device: "DEFAULT", "SPREAD" or "LOAD_BALANCING"."""

    policy: str
    suffix, member = "CLUSTER_SCHEDULING_POLICY_PREFERENCE", "clusterSchedulingPolicyPreference"

    def setting(self, types: Any) -> Any:
        return enum_value(types, "CUclusterSchedulingPolicy", f"CU_CLUSTER_SCHEDULING_POLICY_{self.policy}")


@dataclass(frozen=True)
class ProgrammaticStreamSerialization(LaunchAttribute):
    """PDL: the kernel may start when all blocks of the previous kernel in the stream have triggered or exited."""

    suffix, member = "PROGRAMMATIC_STREAM_SERIALIZATION", "programmaticStreamSerializationAllowed"


@dataclass(frozen=True)
class ProgrammaticEvent(LaunchAttribute):
    """`event` is recorded when all blocks have triggered, or at their start if `at_block_start`."""

    event: Event
    at_block_start: bool = False
    flags: int = 0
    suffix = "PROGRAMMATIC_EVENT"

    def fill(self, types: Any, value: Any) -> None:
        value.programmaticEvent.event = types.CUevent(self.event.handle)
        value.programmaticEvent.flags = self.flags
        value.programmaticEvent.triggerAtBlockStart = int(self.at_block_start)


@dataclass(frozen=True)
class LaunchCompletionEvent(LaunchAttribute):
    """`event` is recorded when all blocks of the kernel have begun."""

    event: Event
    flags: int = 0
    suffix = "LAUNCH_COMPLETION_EVENT"

    def fill(self, types: Any, value: Any) -> None:
        value.launchCompletionEvent.event = types.CUevent(self.event.handle)
        value.launchCompletionEvent.flags = self.flags


@dataclass(frozen=True)
class Priority(LaunchAttribute):
    """Priority of the kernel; a lower number runs first."""

    value: int
    suffix, member = "PRIORITY", "priority"

    def setting(self, types: Any) -> int:
        return self.value


@dataclass(frozen=True)
class MemSyncDomain(LaunchAttribute):
    """The kernel's memory synchronisation domain: "DEFAULT" or "REMOTE"."""

    domain: str
    suffix, member = "MEM_SYNC_DOMAIN", "memSyncDomain"

    def setting(self, types: Any) -> Any:
        return enum_value(types, "CUlaunchMemSyncDomain", f"CU_LAUNCH_MEM_SYNC_DOMAIN_{self.domain}")


@dataclass(frozen=True)
class MemSyncDomainMap(LaunchAttribute):
    """The physical domains to which the default and the remote domain are mapped."""

    default: int
    remote: int
    suffix = "MEM_SYNC_DOMAIN_MAP"

    def fill(self, types: Any, value: Any) -> None:
        value.memSyncDomainMap.default_, value.memSyncDomainMap.remote = self.default, self.remote


@dataclass(frozen=True)
class AccessPolicyWindow(LaunchAttribute):
    """L2 residency of an address range: `hit` and `miss` are "NORMAL", "STREAMING" or (hit only) "PERSISTING"."""

    ptr: int
    nbytes: int
    hit_ratio: float
    hit: str = "PERSISTING"
    miss: str = "STREAMING"
    suffix = "ACCESS_POLICY_WINDOW"

    def fill(self, types: Any, value: Any) -> None:
        window = value.accessPolicyWindow
        window.base_ptr, window.num_bytes, window.hitRatio = self.ptr, self.nbytes, self.hit_ratio
        window.hitProp = enum_value(types, "CUaccessProperty", f"CU_ACCESS_PROPERTY_{self.hit}")
        window.missProp = enum_value(types, "CUaccessProperty", f"CU_ACCESS_PROPERTY_{self.miss}")


@dataclass(frozen=True)
class SynchronizationPolicy(LaunchAttribute):
    """How a host thread waits for the kernel: "AUTO", "SPIN", "YIELD" or "BLOCKING_SYNC"."""

    policy: str
    suffix, member = "SYNCHRONIZATION_POLICY", "syncPolicy"

    def setting(self, types: Any) -> Any:
        return enum_value(types, "CUsynchronizationPolicy", f"CU_SYNC_POLICY_{self.policy}")


@dataclass(frozen=True)
class SharedMemoryCarveout(LaunchAttribute):
    """Percentage of the on-chip memory that is preferably shared memory; -1 leaves it to the driver."""

    percent: int
    suffix, member = "PREFERRED_SHARED_MEMORY_CARVEOUT", "sharedMemCarveout"

    def setting(self, types: Any) -> int:
        return self.percent


@dataclass(frozen=True)
class NvlinkCentricScheduling(LaunchAttribute):
    """Schedule blocks for NVLink use (CUDA 13)."""

    suffix, member = "NVLINK_UTIL_CENTRIC_SCHEDULING", "nvlinkUtilCentricScheduling"
