# SPDX-License-Identifier: Apache-2.0
"""`drvfuse doctor`: versions, devices, tests of peer access with data, multicast, caches, and problems with remedies.

It allocates a few KiB on each device and never creates a multicast object.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__, config
from ..compiler import library
from ..errors import DrvfuseError
from ..runtime.device import Device, device
from ..runtime.driver import Driver, get_driver
from ..runtime.module import compile as compile_source
from ..runtime.multicast_support import require_multicast, vetoes
from .terminal import progress

_PACKAGES = (
    "numpy", "ml_dtypes", "cuda-bindings", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc", "llvmlite", "rich",
)  # fmt: skip
_WORDS = 4096
_COPY = """
extern "C" __global__ void copy(const unsigned* source, unsigned* target, int count) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) target[i] = source[i];
}
"""


def _versions(findings: list[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {"drvfuse": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    if found["cuda-bindings"] is None:
        findings.append("cuda.bindings is not installed: pip install 'drvfuse[cu12]' or 'drvfuse[cu13]'")
    if found["llvmlite"] is None:
        findings.append("the emulated driver cannot run without llvmlite: pip install 'drvfuse[emu]'")
    try:
        found["NVRTC"] = ".".join(map(str, library.library().version))
    except DrvfuseError as error:
        found["NVRTC"] = None
        findings.append(f"NVRTC cannot be loaded: {error}")
    return found


def _describe(item: Device) -> dict[str, Any]:
    return {
        "index": item.index,
        "name": item.name,
        "arch": item.arch,
        "sms": item.sm_count,
        "multicast_attribute": bool(item.attribute("MULTICAST_SUPPORTED")),
    }


def moves_data(reader: Device, owner: Device) -> bool:
    """Whether a kernel on `reader` reads and writes `owner`'s memory correctly. The device attribute may be wrong."""
    reader.enable_peer(owner)
    owner.allow_peers([reader])
    kernel = compile_source(_COPY, driver=reader.driver, arch=reader.arch)["copy"]
    pattern = np.random.default_rng(reader.index * 8 + owner.index).integers(0, 2**32, _WORDS, np.uint32)
    remote, local, back = owner.array(pattern), reader.zeros(_WORDS, "uint32"), owner.zeros(_WORDS, "uint32")
    owner.synchronize()
    kernel.prepare(4, 128, remote.ptr, local, _WORDS, device=reader)(reader.stream)
    kernel.prepare(4, 128, local, back.ptr, _WORDS, device=reader)(reader.stream)
    reader.synchronize()
    return bool((local.numpy() == pattern).all() and (back.numpy() == pattern).all())


def _peers(devices: list[Device], findings: list[str]) -> list[list[str]]:
    matrix = []
    for reader in devices:
        row = []
        for owner in devices:
            if reader is owner:
                row.append("self")
            elif not reader.can_access_peer(owner):
                row.append("no")
            elif moves_data(reader, owner):
                row.append("ok")
            else:
                row.append("LIES")
                findings.append(
                    f"device {reader.index} says that it can access device {owner.index}, but data does not arrive: "
                    "check IOMMU/ACS settings; use algo='naive' on this machine"
                )
        matrix.append(row)
    return matrix


def _multicast(driver: Driver, devices: list[Device]) -> dict[str, Any]:
    """Whether a multicast object over all devices might be created: "supported", "vetoed" or "unsupported", and why."""
    state, why = "supported", ""
    try:
        require_multicast(devices)
    except DrvfuseError as error:
        state, why = "unsupported", str(error)
    found = vetoes() if driver.name == "cuda" else []
    return {"state": "vetoed" if found else state, "why": ", ".join(found) or why}


def _driver_section(driver: Driver, findings: list[str]) -> dict[str, Any]:
    version = int(driver.cuDriverGetVersion())
    devices = [device(index, driver=driver) for index in range(int(driver.cuDeviceGetCount()))]
    if not devices:
        findings.append("the driver sees no device: check CUDA_VISIBLE_DEVICES and nvidia-smi")
    for item in devices:
        if item.capability < (8, 9):
            findings.append(
                f"device {item.index} ({item.name}) has no FP8 conversions: compute capability 8.9 is needed"
            )
    return {
        "name": driver.name,
        "version": f"{version // 1000}.{version % 1000 // 10}",
        "devices": [_describe(item) for item in devices],
        "peers": _peers(devices, findings),
        "multicast": _multicast(driver, devices),
    }


def _cache() -> dict[str, Any]:
    root, sizes = config.get("cache_dir"), []
    for folder, _, names in os.walk(root):  # os.walk skips folders that are deleted meanwhile
        for name in names:
            with contextlib.suppress(OSError):  # another process may remove the file meanwhile
                sizes.append(os.lstat(os.path.join(folder, name)).st_size)
    return {"enabled": config.get("cache"), "directory": str(Path(root)), "files": len(sizes), "bytes": sum(sizes)}


def examine(asked: str | None) -> dict[str, Any]:
    """The whole report, as a dictionary that can be written as JSON. `findings` lists problems with their remedies."""
    findings: list[str] = []
    report: dict[str, Any] = {"versions": _versions(findings), "driver": None, "cache": _cache()}
    report["multicast_vetoes"] = vetoes()
    try:
        report["driver"] = _driver_section(get_driver(asked), findings)
    except DrvfuseError as error:
        findings.append(str(error))
    report["findings"] = findings
    report["ok"] = not findings
    return report


def _filled(title: str, text: str) -> str:
    return textwrap.fill(f"{title:<10} {text}", 100, subsequent_indent=" " * 11, break_long_words=False)


def _print(report: dict[str, Any]) -> None:
    for index, (name, value) in enumerate(report["versions"].items()):
        print(f"{'' if index else 'versions':<10} {name} {value or 'not found'}")
    driver = report["driver"]
    if driver:
        print(f"driver     {driver['name']} {driver['version']}")
        for item in driver["devices"]:
            multicast = "multicast attribute set" if item["multicast_attribute"] else "no multicast"
            print(f"device {item['index']}   {item['name']}, {item['arch']}, {item['sms']} SMs, {multicast}")
        print("peers      (row reads and writes column; 'ok' = data was moved and compared)")
        for index, row in enumerate(driver["peers"]):
            print(f"  {index}  " + " ".join(f"{cell:>4}" for cell in row))
    if driver:
        multicast = driver["multicast"]
        text = {"supported": "supported", "vetoed": "vetoed by {why}", "unsupported": "unsupported: {why}"}
        print(_filled("multicast", text[multicast["state"]].format(**multicast)))
    cache = report["cache"]
    state = "on" if cache["enabled"] else "off"
    print(f"cache      {state}, {cache['directory']}: {cache['files']} files, {cache['bytes'] / 1e6:.1f} MB")
    for finding in report["findings"]:
        print(_filled("problem", finding))
    if report["ok"]:
        print("no problem found")


def run_doctor(arguments: argparse.Namespace) -> int:
    """Print the report. Returns 0 if there are no findings, else 1."""
    with progress("checking devices", show=not arguments.json):
        report = examine(arguments.driver)
    if arguments.json:
        print(json.dumps(report))
    else:
        _print(report)
    return 0 if report["ok"] else 1
