# SPDX-License-Identifier: Apache-2.0
"""The first message of a connection, with the purpose of the connection and the version of its sender."""

from __future__ import annotations

from typing import Any

from ... import __version__
from ..wire.signatures import DIGEST


def greeting(kind: str, **more: Any) -> dict[str, Any]:
    """The first message of a connection."""
    return {"version": __version__, "table": DIGEST, "kind": kind, **more}


def refusal_of(hello: dict[str, Any]) -> str:
    """The reason why a client cannot be served, or ""."""
    theirs, table = hello.get("version"), hello.get("table")
    if theirs != __version__:
        return f"the machine is served by drvfuse {__version__}, and this process has drvfuse {theirs}"
    if table != DIGEST:
        return f"the machine is served by another build of drvfuse {__version__}, whose driver calls differ"
    return ""
