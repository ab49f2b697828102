# SPDX-License-Identifier: Apache-2.0
"""Whether multicast objects may be created on some devices: whether a veto forbids multicast, and whether the devices
support it.

Multicast depends on software outside the process, the fabric manager of the NVSwitches. If a set-up fails there, the
GPUs of a host can become unusable. So environment variables, also variables of other libraries, can forbid multicast (a
*veto*). Every path that could create a multicast object calls `require_multicast` before its first driver call:
`df.Multicast`, `Group.symmetric(multicast=True)` and `use_multimem=True`. Support is read from a device attribute; no
object is created to find out.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .. import config
from ..errors import ArgumentError, Unsupported

if TYPE_CHECKING:
    from .device import Device
    from .driver import Driver

VETOES = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
"""Environment variables of other libraries, and the value by which each forbids multicast."""

_FALSE = ("", "0", "n", "no", "f", "false", "off")
_TRUE = ("y", "yes", "t", "true", "on")


def _enables(word: str) -> bool:
    return word in _TRUE or (word.isdecimal() and int(word) > 0)


def _disables(word: str) -> bool:
    return word in _FALSE


def vetoes() -> list[str]:
    """The vetoes that are set, as `NAME=value`; empty if multicast is allowed.

    A variable of `VETOES` with any text is a veto unless its value clearly allows multicast. A variable that forbids
    multicast with "0" allows it with numbers above 0 and words such as "true". A variable that forbids multicast with
    "1" allows it with "0" and words such as "false". The setting `multicast` can forbid multicast in code even if the
    environment allows it, but it cannot lift a veto of the environment.
    """
    found = []
    for name, value in VETOES.items():
        text = os.environ.get(name)
        if text and not (_enables if value == "0" else _disables)(text.strip().lower()):
            found.append(f"{name}={text}")
    if not (config.environment("multicast") and config.get("multicast")):
        found.append("DRVFUSE_MULTICAST=0")
    return found


def require_allowed(driver: Driver) -> None:
    """Raise Unsupported, naming the vetoes, if any veto forbids multicast on `driver`. Makes no driver call.

    Vetoes bind the CUDA driver only: emulated devices have no fabric that could break.
    """
    if driver.name == "cuda":
        refuse_vetoed()


def refuse_vetoed() -> None:
    """Raise Unsupported, naming the vetoes, if any veto forbids multicast on the CUDA driver. Needs no driver."""
    found = vetoes()
    if found:
        raise Unsupported(
            f"this site forbids multicast ({', '.join(found)}), and no multicast object was created; "
            "use_multimem=False and multicast=False need none"
        )


def require_multicast(devices: Sequence[Device], count: int | None = None) -> None:
    """Raise a typed error unless a multicast object over `devices` may be created and all of them support it.

    Raises Unsupported for a veto, which is checked first, for a single device, and for a device without multicast;
    ArgumentError for devices of several drivers and for two ranks on one GPU. Creates nothing, and makes no driver call
    if there is a veto. `count` is the number of devices in all processes, if `devices` are not all.
    """
    if not devices:
        raise ArgumentError("devices", "empty", "two devices or more")
    driver = devices[0].driver
    require_allowed(driver)
    driver.require_open()
    if any(device.driver is not driver for device in devices):
        raise ArgumentError("devices", "devices of several drivers", "devices of one driver")
    indices = [device.index for device in devices]
    if len(set(indices)) != len(indices):
        raise ArgumentError("devices", indices, "distinct: a multicast object holds each GPU once")
    if (len(indices) if count is None else count) == 1:
        raise Unsupported("multicast needs two devices or more; one device was given")
    lacking = [device.index for device in devices if not device.attribute("MULTICAST_SUPPORTED")]
    if lacking:
        raise Unsupported(
            f"devices {lacking} have no multicast (attribute MULTICAST_SUPPORTED): it needs GPUs of compute capability "
            "9.0 or newer behind NVSwitches, and a running fabric manager"
        )
