# SPDX-License-Identifier: Apache-2.0
"""Attributes of streams. All except the priority are hints, which are only kept for queries."""

from __future__ import annotations

import ctypes
from typing import Any

from ..bindings import R, T
from ..machine.objects import Stream
from ..machine.process.process import Process
from .entry import check, entry, present

_ID = T.CUstreamAttrID
_NAMES = ("ACCESS_POLICY_WINDOW", "SYNCHRONIZATION_POLICY", "PRIORITY", "MEM_SYNC_DOMAIN_MAP", "MEM_SYNC_DOMAIN")
_NBYTES = 64


def _known(attr: Any) -> str:
    """The name of a stream attribute. Raises Failure for an attribute that streams do not have."""
    name: str = attr.name.split("ATTRIBUTE_", 1)[-1]
    check(name in _NAMES)
    return name


def _value(stream: Stream, name: str) -> Any:
    value = T.CUstreamAttrValue()
    if name in stream.attributes:
        ctypes.memmove(int(value.getPtr()), stream.attributes[name], _NBYTES)
    elif name == "SYNCHRONIZATION_POLICY":
        value.syncPolicy = T.CUsynchronizationPolicy.CU_SYNC_POLICY_AUTO
    elif name == "MEM_SYNC_DOMAIN_MAP":
        ctypes.memmove(int(value.getPtr()), b"\0\1", 2)  # the default domain is 0, the remote domain is 1
    if name == "PRIORITY":
        value.priority = stream.priority
    return value


@entry(1)
def cuStreamGetAttribute(proc: Process, hStream: Any, attr: Any) -> Any:
    """Returns the value that was set, or the default."""
    return _value(proc.stream(hStream), _known(attr))


@entry()
def cuStreamSetAttribute(proc: Process, hStream: Any, attr: Any, value: Any) -> None:
    """Sets an attribute. The priority is clamped to the range of priorities, and takes effect for later work."""
    stream, name = proc.stream(hStream), _known(attr)
    content = ctypes.string_at(int(present(value).getPtr()), _NBYTES)
    if name == "SYNCHRONIZATION_POLICY":
        known = [int(policy) for policy in T.CUsynchronizationPolicy]
        check(int.from_bytes(content[:4], "little") in known)
    elif name == "MEM_SYNC_DOMAIN":
        check(int.from_bytes(content[:4], "little") in (0, 1))
    elif name == "PRIORITY":
        stream.priority = max(-5, min(0, int.from_bytes(content[:4], "little", signed=True)))
        return
    stream.attributes[name] = content


@entry()
def cuStreamCopyAttributes(proc: Process, dst: Any, src: Any) -> None:
    """Copies attributes between two streams of one context."""
    target, source = proc.stream(dst), proc.stream(src)
    check(target.context is source.context, R.CUDA_ERROR_INVALID_VALUE)
    target.priority, target.attributes = source.priority, dict(source.attributes)
