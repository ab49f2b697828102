# SPDX-License-Identifier: Apache-2.0
"""User objects: creation, and the references of the program."""

from __future__ import annotations

from typing import Any

from ...bindings import R, T
from ...machine.graphs.user_objects import UserObject
from ...machine.process.process import Process
from ..entry import check, entry

_NO_DESTRUCTOR_SYNC = 1
_MOST = 2**31 - 1


def user_object(proc: Process, value: Any) -> UserObject:
    return proc.get(value, UserObject, R.CUDA_ERROR_INVALID_VALUE)


@entry(1)
def cuUserObjectCreate(proc: Process, ptr: Any, destroy: Any, initialRefcount: int, flags: int) -> Any:
    """Makes a user object. The call that releases its last reference calls `destroy` with `ptr`; `destroy` may not call
    the driver.

    `flags` has to be CU_USER_OBJECT_NO_DESTRUCTOR_SYNC.
    """
    check(destroy and 0 < initialRefcount <= _MOST and flags == _NO_DESTRUCTOR_SYNC)
    made = proc.add(UserObject(int(ptr), destroy, initialRefcount, ptr))
    return T.CUuserObject(made.handle)


@entry()
def cuUserObjectRetain(proc: Process, object: Any, count: int) -> None:
    found = user_object(proc, object)
    check(0 < count <= _MOST - found.references)
    found.retain(count)


@entry()
def cuUserObjectRelease(proc: Process, object: Any, count: int) -> None:
    """Releases references of the program, at most as many as it has."""
    found = user_object(proc, object)
    check(0 < count <= found.references)
    found.release(proc, count)
