# SPDX-License-Identifier: Apache-2.0
"""The source lines of instructions, which PTX names by .file and .loc directives."""

from __future__ import annotations

import re

from .ir import Location, PtxError

_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', re.M)
_LOC = re.compile(r"\s*(\d+)\s+(\d+)\s+(\d+)(?:.*inlined_at\s+(\d+)\s+(\d+)\s+(\d+))?")
_DEEPEST = 16  # the maximum number of inlined calls that a location lists


class Locations:
    """Appends the locations of a module to the list `found`. `current` is the index in this list of the location of the
    next instruction, 0 if it has none."""

    def __init__(self, found: list[Location]):
        self.current = 0
        self._found = found
        self._files: dict[int, str] = {}
        self._indices: dict[str, int] = {}
        self._last: dict[tuple[int, int, int], Location] = {}

    def read_files(self, text: str) -> None:
        """Read the .file directives of a module."""
        self._files = {int(m[1]): m[2] for m in _FILE.finditer(text)}

    def enter(self, text: str) -> None:
        """Read a .loc directive; `text` is the text after its name.

        Line 0 means that the compiler can name no line, for example for a load that was moved out of a loop. The
        location of the previous .loc directive then stays in effect.
        """
        m = _LOC.match(text)
        if m is None:
            self.current = 0
            return
        key = (int(m[1]), int(m[2]), int(m[3]))
        if not key[1]:
            return
        inlined: tuple[tuple[str, int], ...] = ()
        if m[4]:
            # inlined_at gives the position of the call that was inlined. An earlier .loc has described this position.
            # If that .loc has calls of its own (the call was itself in inlined code), `inlined` has these calls too.
            caller = self._last.get((int(m[4]), int(m[5]), int(m[6])))
            here = (self._files.get(int(m[4]), "?"), int(m[5]))
            inlined = (here, *(caller.inlined if caller and len(caller.inlined) < _DEEPEST else ()))
        location = Location(self._files.get(key[0], "?"), key[1], inlined)
        self._last[key] = location
        index = self._indices.get(text)
        if index is None or self._found[index] != location:
            index = self._indices[text] = len(self._found)
            self._found.append(location)
        self.current = index

    def add_to(self, error: PtxError) -> PtxError:
        """The error with the location of the instruction that was read when the error occurred."""
        location = self._found[self.current]
        if self.current and location.file != "?":
            error.source = (location.file, location.line)
        return error
