# SPDX-License-Identifier: Apache-2.0
"""Several PTX modules linked into one, which is PTX again.

A symbol that one module declares `.extern` is defined by another module. A `.visible` function or variable may have one
definition. A `.weak` function or variable may have any number of definitions: a `.visible` definition is kept, else the
first. A `.common` variable may also have any number of definitions: the largest is kept. All other symbols belong to
their module, and are renamed if two modules use the same name. In the result variables come first, then functions, each
in the order of the modules. Sections of debug information are left out; `.file` and `.loc` are kept. `.extern .shared`
is the shared memory of a launch, not a symbol of another module.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .ir import PtxError
from .text import head, without_comments

BUILTIN = frozenset({"vprintf", "__assertfail", "malloc", "free"})
"""Functions that every module may call and no module defines."""

_FUNCTION = re.compile(r"(?:\.(?:visible|extern|weak|common)\s*)*\.(entry|func)\b\s*(?:\([^()]*\)\s*)?([\w$%]+)")
_VARIABLE = re.compile(r"[^=]*?\.\w+\s+([\w$%]+)\s*(?:\[[^=]*)?(?:=|\Z)", re.S)
_FILE = re.compile(r'\.file\s+(\d+)\s+("(?:\\.|[^"\\])*"[^\n]*)')
_PLACE = re.compile(r"(\.loc\s+|\binlined_at\s+)(\d+)")
_WORD = re.compile(r"\.(\w+)")
_NAME = re.compile(r"(?<![\w$%.])[A-Za-z_$%][\w$]*")
_TARGET = re.compile(r"sm_(\d+)([af]?)")


class LinkError(Exception):
    """Modules cannot be linked. The message has every reason, one on each line."""


@dataclass
class _Item:
    """The text of a function or variable of a module."""

    name: str
    text: str
    function: bool
    entry: bool
    linkage: str  # "extern", "visible", "weak", "common" or "" for a private symbol of its module
    defined: bool

    @property
    def shared(self) -> bool:
        return not self.function and ".shared" in self.text.split(self.name, 1)[0]

    @property
    def elements(self) -> int:
        """How many elements a `.common` variable has."""
        return math.prod(int(size) for size in re.findall(r"\[\s*(\d+)\s*\]", self.text))


@dataclass
class Unit:
    """One module. `name` is its name in messages."""

    name: str
    version: tuple[int, int]
    target: str
    files: dict[int, str] = field(default_factory=dict)
    items: list[_Item] = field(default_factory=list)

    @classmethod
    def of(cls, name: str, ptx: str) -> Unit:
        """Split the text of a module into its functions and variables. Raises PtxError."""
        version, target = head(ptx)
        unit = cls(name, version, target)
        text = without_comments(ptx)
        at = 0
        while True:
            found = re.compile(r"\S").search(text, at)
            if found is None:
                return unit
            at = unit._take(text, found.start())

    def _take(self, text: str, start: int) -> int:
        """Read the directive that begins at `start`. Returns where it ends."""
        word = _WORD.match(text, start)
        if word is None:
            raise _error(text, start, "a directive is expected here")
        kind = word[1]
        line = text.find("\n", start)
        line = len(text) if line < 0 else line
        if kind == "file":
            file = _FILE.match(text, start)
            if file is not None:
                self.files[int(file[1])] = file[2].strip()
        if kind in ("version", "target", "address_size", "file", "loc"):
            return line
        if kind == "section":
            return _after(text, start, "}")
        if kind == "pragma":
            return _after(text, start, ";")
        function = _FUNCTION.match(text, start)
        brace, semicolon = text.find("{", start), text.find(";", start)
        if function is not None and brace >= 0 and not 0 <= semicolon < brace:
            end = _body_end(text, brace)
        else:
            end = _after(text, start, ";")
        self._add(text[start:end], text, start, function)
        return end

    def _add(self, part: str, text: str, start: int, function: re.Match[str] | None) -> None:
        variable = None if function is not None else _VARIABLE.match(part.rstrip("; \n"))
        found = function if function is not None else variable
        if found is None:
            raise _error(text, start, "unsupported declaration")
        name = found[2] if function is not None else found[1]
        before = part[: found.start(2 if function is not None else 1)]
        linkage = next((word for word in ("extern", "weak", "common", "visible") if f".{word}" in before), "")
        entry = function is not None and function[1] == "entry"
        defined = linkage != "extern" and (function is None or part.endswith("}"))
        self.items.append(_Item(name, part, function is not None, entry, "visible" if entry else linkage, defined))

    def rename(self, names: dict[str, str]) -> None:
        """Rename symbols everywhere in this module."""

        def renamed(match: re.Match[str]) -> str:
            return names.get(match[0], match[0])

        for item in self.items if names else ():
            item.text = _NAME.sub(renamed, item.text)
            item.name = names.get(item.name, item.name)


def link(units: Sequence[Unit]) -> str:
    """The linked module. Raises LinkError for a symbol that no module defines, or that two modules define."""
    wrong: list[str] = []
    kept = _kept(units, wrong)
    defined = {item.name: item for _, item in kept.values()}
    for unit in units:
        for item in unit.items:
            if item.linkage == "extern" and not item.shared and item.name not in BUILTIN:
                found = defined.get(item.name)
                if found is None:
                    wrong.append(f"Undefined reference to '{item.name}' in '{unit.name}'")
                elif found.function != item.function:
                    wrong.append(f"'{item.name}' is a function in one module and a variable in '{unit.name}'")
    if wrong:
        raise LinkError("\n".join(wrong))
    taken = {*defined, *BUILTIN, *(i.name for unit in units for i in unit.items if i.linkage == "extern")}
    files: dict[str, int] = {}
    parts: tuple[list[str], list[str]] = ([], [])
    declared: set[str] = set()
    for unit in units:
        unit.rename(_own_names(unit, taken))
        places = {number: files.setdefault(text, len(files) + 1) for number, text in unit.files.items()}
        for item in unit.items:
            if item.linkage in ("visible", "weak", "common"):
                wanted = item.defined and kept[item.name][1] is item
            elif item.linkage == "extern":
                wanted = (item.shared or item.name in BUILTIN) and item.name not in declared
                declared.add(item.name)
            else:
                wanted = True
            if wanted:
                parts[item.function].append(_PLACE.sub(_moved(places), item.text))
    version = max(unit.version for unit in units)
    lines = [f".version {version[0]}.{version[1]}", f".target {_target(units)}", ".address_size 64"]
    lines += [f".file {number} {text}" for text, number in files.items()]
    return "\n".join((*lines, *parts[0], *parts[1])) + "\n"


def _kept(units: Sequence[Unit], wrong: list[str]) -> dict[str, tuple[Unit, _Item]]:
    """The symbols that several modules may define, each with the module and the definition that is kept. For a symbol
    with two definitions of which neither may be dropped, a message is added to `wrong`.
    """
    kept: dict[str, tuple[Unit, _Item]] = {}
    for unit in units:
        for item in unit.items:
            if not item.defined or item.linkage not in ("visible", "weak", "common"):
                continue
            before = kept.get(item.name)
            if before is None or _stronger(item, before[1]):
                kept[item.name] = unit, item
            elif item.linkage == before[1].linkage == "visible":
                wrong.append(
                    f"Multiple definition of '{item.name}' in '{unit.name}', first defined in '{before[0].name}'"
                )
    return kept


def _stronger(item: _Item, other: _Item) -> bool:
    if item.linkage == other.linkage:
        return item.linkage == "common" and item.elements > other.elements
    return item.linkage == "visible" or other.linkage == "common"


def _own_names(unit: Unit, taken: set[str]) -> dict[str, str]:
    """A dict of old and new names, for those private symbols of a module whose names are already in `taken`. The names
    that all its private symbols then have are added to `taken`.
    """
    names: dict[str, str] = {}
    for name in dict.fromkeys(item.name for item in unit.items if not item.linkage):
        new, number = name, 1
        while new in taken:
            number += 1
            new = f"{name}${number}"
        if new != name:
            names[name] = new
        taken.add(new)
    return names


def _moved(places: dict[int, int]) -> Callable[[re.Match[str]], str]:
    """A function that replaces, in a line of PTX, the file numbers of one module by those of the linked module."""
    return lambda match: f"{match[1]}{places.get(int(match[2]), int(match[2]))}"


def _target(units: Sequence[Unit]) -> str:
    """The newest target of all modules. Whether it fits a device is checked when the result is loaded."""

    def demand(target: str) -> tuple[int, int]:
        found = _TARGET.fullmatch(target)
        return (int(found[1]), "fa".find(found[2]) if found[2] else -1) if found else (0, 0)

    return max((unit.target for unit in units), key=demand)


def _after(text: str, start: int, end: str) -> int:
    at = text.find(end, start)
    if at < 0:
        raise _error(text, start, f"a {end!r} is missing")
    return at + 1


def _body_end(text: str, brace: int) -> int:
    """The offset after the body whose opening brace is at `brace`."""
    depth = 0
    for found in re.compile(r'"(?:\\.|[^"\\])*"|[{}]').finditer(text, brace):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if depth == 0:
            return found.end()
    raise _error(text, brace, "a '}' is missing")


def _error(text: str, at: int, reason: str) -> PtxError:
    line = text.find("\n", at)
    return PtxError(text.count("\n", 0, at) + 1, text[at : line if line >= 0 else None][:200], reason)
