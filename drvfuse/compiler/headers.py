# SPDX-License-Identifier: Apache-2.0
"""Finds the headers that a source includes. Their texts are a part of the key of the source's cache entry."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>|(\S+))', re.M)


def included(source: str, folder: Path | None, include: Sequence[Path]) -> dict[str, str]:
    """Path -> text of every header that `source` (in `folder`) may include, directly or not.

    A header that is not found is left out: it is built into NVRTC, or the compilation will fail. An `#include MACRO`
    cannot be resolved here: then the result has every file of the include folders.
    """
    texts: dict[str, str] = {}
    pending = [(source, folder)]
    while pending:
        text, here = pending.pop()
        for quoted, bracketed, macro in _INCLUDE.findall(text):
            if macro:
                found = [path for base in include for path in sorted(base.rglob("*")) if path.is_file()]
            else:
                bases = [here] if quoted and here is not None else []
                candidates = [base / (quoted or bracketed) for base in (*bases, *include)]
                found = [path for path in candidates if path.is_file()][:1]
            for path in found:
                if str(path) not in texts:
                    texts[str(path)] = path.read_text(errors="replace")
                    pending.append((texts[str(path)], path.parent))
    return texts
