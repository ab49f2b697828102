# SPDX-License-Identifier: Apache-2.0
"""The README as a package index shows it, where a path in the repository is no link.

With `Source` in `[project.urls]` of pyproject.toml, links and pictures become addresses below it, at the tag of the
version. Without it links become their text, and pictures are left out.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import drvfuse

README = "README.md"
_LINK = re.compile(r"(!?)\[([^]]*)\]\((?!https?:|#|mailto:)([^)\s]+)\)")
_CODE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


def rewrite(tree: Path) -> None:
    """Rewrite the README of a copy of the checkout, in place."""
    project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    readme = tree / README
    readme.write_text(published(readme.read_text(), project.get("urls", {}).get("Source")))


def published(text: str, source: str | None) -> str:
    """`text` without relative links outside of its blocks of code; `source` is the address of the repository."""

    def absolute(link: re.Match[str]) -> str:
        picture, label, path = link.groups()
        if source is None:
            return "" if picture else label
        return f"{picture}[{label}]({source.rstrip('/')}/{'raw' if picture else 'blob'}/v{drvfuse.__version__}/{path})"

    parts = _CODE.split(text)
    parts[::2] = [_LINK.sub(absolute, part) for part in parts[::2]]
    return "".join(parts)


def relative_links(text: str) -> list[str]:
    """The targets of links and pictures that are paths."""
    return [path for part in _CODE.split(text)[::2] for _, _, path in _LINK.findall(part)]
