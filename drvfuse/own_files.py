# SPDX-License-Identifier: Apache-2.0
"""Reads files that nobody but this user and root can have written, and writes files that nobody else can read.

Who can write a file, or a folder on its path, decides what it holds. So each is opened before it is examined, by its
name in the folder that was examined before, and without following a link: what is read is what was examined.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

FOLDER_MODE, FILE_MODE = 0o700, 0o600
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class Untrusted(Exception):
    """A file or folder that another user may have written."""


def require_own(status: os.stat_result, path: str, user: int) -> None:
    """Raise Untrusted unless what has this `status` belongs to `user` or to root, and only its owner may write it."""
    if status.st_uid not in (user, 0):
        raise Untrusted(f"{path} belongs to user {status.st_uid}, not to user {user} or root")
    if status.st_mode & _OTHERS_WRITE:
        raise Untrusted(f"{path} may be written by other users (mode {stat.S_IMODE(status.st_mode):04o})")


def open_folder(path: Path, below: Path) -> int:
    """Return a descriptor of the folder `path`, which lies in the folder `below` or is `below` itself.

    Raises Untrusted if one of the folders from `below` to `path` is not this user's own, and OSError if one does not
    exist, or if one inside `below` is a link. `below` itself may be a link, since the user has chosen it.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    at, folder = below, os.open(below, flags)
    try:
        require_own(os.fstat(folder), str(at), os.geteuid())
        for name in path.relative_to(below).parts:
            at = at / name
            inner = os.open(name, flags | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
            require_own(os.fstat(folder), str(at), os.geteuid())
    except BaseException:
        os.close(folder)
        raise
    return folder


def read(name: str, folder: int | None = None) -> bytes:
    """Return the contents of a file in an open folder or, without `folder`, at the path `name`.

    Raises Untrusted if the file is not this user's own, and OSError if it does not exist or is no regular file: a FIFO
    is not waited for.
    """
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    with os.fdopen(file, "rb") as opened:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{name} is not a regular file")
        require_own(status, name, os.geteuid())
        return opened.read()


def make_folder(path: Path) -> None:
    """Make a folder that only this user can use, if it does not exist. Folders that lead to it get the usual mode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(FOLDER_MODE, exist_ok=True)


def write(path: Path, data: bytes) -> None:
    """Write a new file that only this user can read. Raises FileExistsError if there is a file."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    with os.fdopen(file, "wb") as opened:
        opened.write(data)
