# SPDX-License-Identifier: Apache-2.0
"""The disk cache of compiled code: one directory for each entry, with its files and meta.json.

Any number of processes may share it. An entry is built in a temporary directory, which is then renamed, so other
processes see a complete entry or none. Processes that need the same missing entry at once wait until the first of them
has built it (`building`). If two processes build an entry nevertheless, the first rename succeeds, and the other copy,
which is equal, is deleted. Files are checked against the hashes in meta.json when they are read; a damaged entry counts
as missing and is replaced.

The setting `cache_limit` bounds the size of all entries. Above the limit, the entries whose last use is the oldest are
deleted; the modification time of an entry's directory is the time of its last use. An entry is renamed before it is
deleted, so that no reader sees a partly deleted entry. A process that needs the entry later builds it again.

Entries hold machine code that the process runs, so an entry counts as missing, with one warning per process, if the
entry or a folder from the cache directory on belongs to neither this user nor root, or may be written by others. Then
nothing is stored either. New folders have mode 0700 and new files 0600. The cache directory itself may be a link. What
an installed wheel contains is no part of the cache.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from .. import config, own_files
from ..own_files import Untrusted

T = TypeVar("T")
_log = logging.getLogger("drvfuse.compile")
_SCHEMA = 3
_META = "meta.json"
_TEMPORARY = "~"  # prefix of temporary names; no entry's name begins with it
_USE_SECONDS = 60  # the time of an entry's last use is recorded at most once in this many seconds
_ABANDONED_SECONDS = 3600  # older temporary directories were left by a process that was killed
_BUILD_SECONDS, _POLL_SECONDS = 60, 0.01  # limit and interval of polls for an entry that another process builds
_SPARED = 0.9  # the share of the limit that a clean-up leaves, so that not every new entry needs a clean-up
_PUBLISH_TRIES = 8  # attempts to store an entry, as another process may store and delete it during each of them
_EXISTS = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)  # errors of a rename to an entry that exists
_DAMAGE = (OSError, ValueError, KeyError, TypeError, RecursionError)  # what reading a damaged entry raises
_warned: set[tuple[str, Path]] = set()  # (what, folder) of the warnings that were logged
_sizes: dict[Path, int] = {}  # bytes per folder: those at the last scan, plus those added after it


def key_of(parts: Mapping[str, Any]) -> str:
    """The key of the entry for `parts`, which must be plain JSON data and hold all inputs that determine the output of
    the compiler: a hash.
    """
    text = json.dumps({"schema": _SCHEMA, **parts}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def entry_path(label: str, key: str) -> Path | None:
    """The path of the entry with the key `key`, whether or not the entry exists; None if the cache is off."""
    if not config.get("cache"):
        return None
    return Path(config.get("cache_dir")) / "kernels" / f"{_readable(label)}-{key[:40]}"


def source_name(label: str, others: tuple[str, ...]) -> str:
    """The name of the source's file in its cache entry. It differs from `others`, the names of the entry's other files.
    Line information shows this name.
    """
    name = _readable(label)
    return "source.cu" if name in (*others, _META, "", ".", "..") else name


def _readable(label: str) -> str:
    return re.sub(r"[^\w.-]+", "_", os.path.basename(label))[:48]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def load(entry: Path, read: Callable[[dict[str, Any], dict[str, bytes]], T]) -> T | None:
    """Return `read(metadata, files by name)`, or None if the entry is missing, damaged (then `read` may raise a
    ValueError, KeyError or TypeError) or not to be trusted. Records a use of the entry.
    """
    try:
        found = read(*_read(entry))
    except (FileNotFoundError, NotADirectoryError):
        if entry.exists():
            _log.warning("cache entry %s is incomplete and is rebuilt", entry)
        return None
    except Untrusted as error:
        _warn_once(
            "untrusted",
            entry.parent,
            "the cache %s is not used: %s. Its code would run with your rights: delete it, or, if you trust what it "
            "holds, make it yours alone (chmod -R go-w)",
            entry.parent.parent,
            error,
        )
        return None
    except _DAMAGE as error:
        _log.warning("cache entry %s is damaged and is rebuilt: %s", entry, error)
        return None
    # Errors are ignored: the folder may belong to another user, or the entry may just have been deleted.
    with contextlib.suppress(OSError):
        if time.time() - entry.stat().st_mtime > _USE_SECONDS:
            os.utime(entry)
    return found


def _warn_once(what: str, folder: Path, message: str, *values: object) -> None:
    """Log a warning, or at level DEBUG if one of this kind was logged for the folder."""
    level = logging.DEBUG if (what, folder) in _warned else logging.WARNING
    _warned.add((what, folder))
    _log.log(level, message, *values)


def _read(entry: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Read the metadata and the files of an entry. Raises Untrusted, or one of `_DAMAGE` for a damaged entry."""
    folder = own_files.open_folder(entry, below=entry.parent.parent)
    try:
        record = json.loads(own_files.read(_META, folder))
        meta = record["meta"]
        files = {name: own_files.read(name, folder) for name in record["sha256"]}
    finally:
        os.close(folder)
    hashes = {name: _digest(data) for name, data in files.items()}
    if hashes != record["sha256"] or _digest(json.dumps(meta).encode()) != record["meta_sha256"]:
        raise ValueError("a file does not match its hash")
    return meta, files


@contextlib.contextmanager
def building(entry: Path) -> Iterator[bool]:
    """A `with` block in which one process at a time builds a missing entry. It yields True if this process has waited;
    then another process may have built the entry.

    The ranks of a job start together and need the same kernels. If the building process ends, its lock is released. A
    process waits a minute at most, since the building process may be suspended. It does not wait if the folder cannot
    be written or if its file system has no locks.
    """
    path = entry.parent / f"{_TEMPORARY}lock-{entry.name}"
    file = None
    try:
        with contextlib.suppress(OSError, Untrusted):
            _make_folder(entry.parent)
            file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, own_files.FILE_MODE)
        begin = time.monotonic()
        waited = False
        while file is not None and _taken(file) and time.monotonic() < begin + _BUILD_SECONDS:
            waited = True
            time.sleep(_POLL_SECONDS)
        yield waited
    finally:
        if file is not None:
            with contextlib.suppress(OSError):
                path.unlink()  # safe while another process waits for the lock: it gets the lock, and finds the entry
            os.close(file)


def _taken(file: int) -> bool:
    """Try to lock a file. Returns whether another process holds the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def store(entry: Path, meta: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
    """Write an entry, or replace a damaged one. Deletes old entries above the limit.

    If the cache cannot be written, one warning is logged. Nothing is written to a cache that is not to be trusted.
    """
    building = _temporary(entry.parent)
    digests = {name: _digest(data) for name, data in files.items()}
    record = {"meta": meta, "meta_sha256": _digest(json.dumps(meta).encode()), "sha256": digests}
    text = json.dumps(record, indent=1).encode()
    try:
        _make_folder(entry.parent)
        building.mkdir(own_files.FOLDER_MODE)
        for name, data in {**files, _META: text}.items():
            own_files.write(building / name, data)
        _publish(building, entry)
        _keep_limit(entry.parent, len(text) + sum(map(len, files.values())))
    except OSError as error:
        message = "the cache %s cannot be written, so kernels are compiled each time: %s"
        _warn_once("unwritable", entry.parent, message, entry.parent, error)
    except Untrusted as error:  # `load` has warned
        _log.debug("nothing is stored: %s", error)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _make_folder(folder: Path) -> None:
    """Make the folder of all entries. Raises Untrusted if other users may write it."""
    own_files.make_folder(folder.parent)
    own_files.make_folder(folder)
    os.close(own_files.open_folder(folder, below=folder.parent))


def _temporary(folder: Path) -> Path:
    return folder / f"{_TEMPORARY}{os.getpid()}-{uuid.uuid4().hex}"


def _publish(building: Path, entry: Path) -> None:
    for _ in range(_PUBLISH_TRIES):
        try:
            os.rename(building, entry)
            return
        except OSError as error:
            if error.errno not in _EXISTS:
                raise
        with contextlib.suppress(*_DAMAGE, Untrusted):
            _read(entry)
            return  # another process has built the entry first
        _remove(entry)  # it is damaged or another user's, or another process is deleting it


def _remove(entry: Path) -> None:
    """Remove an entry. It is renamed first, so that no reader finds a part of it."""
    gone = _temporary(entry.parent)
    with contextlib.suppress(FileNotFoundError):  # another process has deleted the entry first
        os.rename(entry, gone)
        shutil.rmtree(gone, ignore_errors=True)


def _keep_limit(folder: Path, added: int) -> None:
    """Account for `added` bytes. Above the limit, delete the entries that were unused for the longest time."""
    limit = config.get("cache_limit")
    if folder in _sizes and _sizes[folder] + added <= limit:
        _sizes[folder] += added
        return
    found = []  # tuples of the time of the last use, the bytes and the entry
    for entry in list(os.scandir(folder)):
        with contextlib.suppress(OSError):  # another process may delete the entry meanwhile
            used = entry.stat().st_mtime
            if entry.name.startswith(_TEMPORARY):
                if time.time() - used > _ABANDONED_SECONDS:
                    shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.is_dir():
                found.append((used, sum(file.stat().st_size for file in list(os.scandir(entry.path))), entry.path))
    total = sum(size for _, size, _ in found)
    aim = limit if total <= limit else int(limit * _SPARED)
    for _, size, path in sorted(found):
        if total <= aim:
            break
        _remove(Path(path))
        total -= size
    _sizes[folder] = total
