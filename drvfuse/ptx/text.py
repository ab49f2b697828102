# SPDX-License-Identifier: Apache-2.0
"""The text of a PTX module: its comments, its first directives, its numbers and its line numbers."""

from __future__ import annotations

import functools
import re
from bisect import bisect_right

from .ir import PtxError

_COMMENT = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/\*.*?\*/', re.S)
_HEAD = re.compile(
    r"(?:\s|//[^\n]*|/\*.*?\*/)*+\.(version|target|address_size)[ \t]+([\w.]+)(?:[ \t]*,[ \t]*\w+)*", re.S
)
NUMBER = re.compile(r"(-?)(?:0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})|(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)[uU]?)\Z")
"""A number; its groups are the sign, the digits of a 32-bit or 64-bit floating-point constant, and an integer."""


def _blank(match: re.Match[str]) -> str:
    text = match.group()
    return text if text[0] == '"' else " " + "\n" * text.count("\n")


def without_comments(ptx: str) -> str:
    """A PTX text without its comments, with the same line numbers."""
    return _COMMENT.sub(_blank, ptx.rstrip("\0"))


class Source:
    """A PTX text without its comments. Errors name the lines of the original text, which have the same numbers."""

    def __init__(self, ptx: str):
        self.text = without_comments(ptx)

    @functools.cached_property
    def newlines(self) -> list[int]:
        return [m.start() for m in re.finditer("\n", self.text)]

    def line(self, pos: int) -> int:
        return bisect_right(self.newlines, pos - 1) + 1

    def error(self, pos: int, reason: str) -> PtxError:
        end = self.text.find("\n", pos)
        return PtxError(self.line(pos), self.text[pos : end if end >= 0 else None][:200], reason)


def integer(text: str) -> int:
    """The value of an integer literal, which is octal where it begins with 0."""
    if len(text) > 1 and text[0] == "0" and text[1].isdigit():
        return int(text, 8)
    return int(text, 0)


def skip_head(ptx: str) -> tuple[tuple[int, int], str, int]:
    """(.version, .target, the offset after them) of a text; (0, 0) and "" if it does not begin with them."""
    version, target, end = (0, 0), "", 0
    while (found := _HEAD.match(ptx, end)) is not None:
        end = found.end()
        if found[1] == "target":
            target = found[2]
        elif found[1] == "version":
            major, _, minor = found[2].partition(".")
            if len(found[2]) < 10 and major.isdecimal() and minor.isdecimal():
                version = int(major), int(minor)
    return version, target, end


def head(ptx: str) -> tuple[tuple[int, int], str]:
    """(.version, .target) of a PTX text; (0, 0) and "" if the text does not begin with these directives. The rest is
    not parsed."""
    return skip_head(ptx)[:2]
