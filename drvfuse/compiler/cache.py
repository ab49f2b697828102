# SPDX-License-Identifier: Apache-2.0
"""The disk cache of compiled kernels: one directory an entry, holding {kernel.cubin, kernel.ptx, meta.json} and the
source under its own name.

An entry is built in a temporary directory and renamed into place, so other processes see all of it or nothing; where
two build the same entry, the first rename wins and the other's copy, which is the same, is dropped. Files are checked
against the hashes in meta.json when they are read, and a damaged entry counts as missing and is replaced.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import config

_log = logging.getLogger("drvfuse.compile")
_SCHEMA = 2
_unwritable: set[Path] = set()  # folders that were warned of
_FILES = ("kernel.cubin", "kernel.ptx")


def key_of(parts: Mapping[str, Any]) -> str:
    """Hash of everything that decides the output; `parts` must be plain JSON data."""
    text = json.dumps({"schema": _SCHEMA, **parts}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def entry_path(label: str, key: str) -> Path | None:
    """Where the entry of that key lies or would lie; None when the cache is off."""
    if not config.get("cache"):
        return None
    return Path(config.get("cache_dir")) / "kernels" / f"{_readable(label)}-{key[:40]}"


def source_name(label: str) -> str:
    """The name of the source's file in its entry, which line information shows."""
    name = _readable(label)
    return "source.cu" if name in (*_FILES, "meta.json", "", ".", "..") else name


def _readable(label: str) -> str:
    return re.sub(r"[^\w.-]+", "_", os.path.basename(label))[:48]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def load(entry: Path) -> tuple[dict[str, Any], dict[str, bytes]] | None:
    """(metadata, files by name), or None if the entry is missing or damaged."""
    try:
        meta = json.loads((entry / "meta.json").read_text())
        files = {name: (entry / name).read_bytes() for name in meta["sha256"]}
        if not files.keys() >= {*_FILES} or any(meta["sha256"][n] != _digest(data) for n, data in files.items()):
            raise ValueError("a file does not match its hash")
    except FileNotFoundError:
        if entry.exists():
            _log.warning("cache entry %s is incomplete and is rebuilt", entry)
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.warning("cache entry %s is damaged and is rebuilt: %s", entry, error)
        return None
    return meta, files


def store(entry: Path, meta: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
    """Write an entry, replacing a damaged one. A cache that cannot be written is only logged, as a warning once."""
    building = entry.parent / f"tmp-{os.getpid()}-{uuid.uuid4().hex}"
    try:
        building.mkdir(parents=True)
        for name, data in files.items():
            (building / name).write_bytes(data)
        digests = {name: _digest(data) for name, data in files.items()}
        (building / "meta.json").write_text(json.dumps({**meta, "sha256": digests}, indent=1))
        _publish(building, entry)
    except OSError as error:
        level = logging.DEBUG if entry.parent in _unwritable else logging.WARNING
        _unwritable.add(entry.parent)
        _log.log(
            level, "the kernel cache %s cannot be written, so kernels are compiled each time: %s", entry.parent, error
        )
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _publish(building: Path, entry: Path) -> None:
    for _ in range(2):
        try:
            os.rename(building, entry)
            return
        except OSError:
            if not entry.exists():
                raise
            if load(entry) is not None:
                return  # another process was first
            discarded = building.with_name(f"{building.name}-old")
            os.rename(entry, discarded)  # a rename, so that no reader sees half an entry go
            shutil.rmtree(discarded, ignore_errors=True)
