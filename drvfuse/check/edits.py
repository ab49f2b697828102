# SPDX-License-Identifier: Apache-2.0
"""Edits of the library's own sources, applied for the length of a `with` block: how faults are planted.

Edited kernel sources are written beside the compiled kernels (setting `cache_dir`) under a hash of their text, so that
what is compiled from them is found again; with the cache off they are in a temporary folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import os
import shutil
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import config
from ..errors import DrvfuseError
from ..ops.call import specialisation

CU = Path(__file__).parent / "cu"
_own: ContextVar[Path] = ContextVar("drvfuse_check_sources", default=CU)


class EditError(DrvfuseError):
    """An edit does not fit its source any more."""


@dataclass(frozen=True)
class SourceEdit:
    """`old`, which stands `times` times in `file`, becomes `new`. The file is one of drvfuse/cu or drvfuse/check/cu."""

    file: str
    old: str
    new: str
    times: int = 1


@dataclass(frozen=True)
class HostEdit:
    """`old`, which stands once in the function or method `name` of `module`, becomes `new`."""

    module: str
    name: str
    old: str
    new: str


Edit = SourceEdit | HostEdit


def source(name: str) -> Path:
    """The file of drvfuse/check/cu, or its edited copy."""
    return _own.get() / name


@contextlib.contextmanager
def applied(edits: Iterable[Edit]) -> Iterator[None]:
    """Calls prepared in the block are made from edited sources. Raises EditError for an edit that does not fit."""
    edits = list(edits)
    sources = [edit for edit in edits if isinstance(edit, SourceEdit)]
    with contextlib.ExitStack() as stack:
        for base, use in ((specialisation.CU, specialisation.sources_from), (CU, _own_sources)):
            fitting = [edit for edit in sources if (base / edit.file).is_file()]
            if fitting:
                stack.enter_context(use(stack.enter_context(_edited(base, fitting))))
            sources = [edit for edit in sources if edit not in fitting]
        if sources:
            raise EditError(f"there is no source {sources[0].file}")
        for edit in edits:
            if isinstance(edit, HostEdit):
                stack.enter_context(_edited_function(edit))
        yield


def _replaced(text: str, old: str, new: str, times: int, where: str) -> str:
    if text.count(old) != times:
        raise EditError(f"{where} has {text.count(old)} times, and should have {times} times, the text {old!r}")
    return text.replace(old, new)


@contextlib.contextmanager
def _own_sources(folder: Path) -> Iterator[None]:
    token = _own.set(folder)
    try:
        yield
    finally:
        _own.reset(token)


@contextlib.contextmanager
def _edited(base: Path, edits: Sequence[SourceEdit]) -> Iterator[Path]:
    """A folder with the files of `base`, edited."""
    texts = {str(path.relative_to(base)): path.read_text() for path in sorted(base.rglob("*.cu*")) if path.is_file()}
    for edit in edits:
        texts[edit.file] = _replaced(texts[edit.file], edit.old, edit.new, edit.times, edit.file)
    if not config.get("cache"):
        with tempfile.TemporaryDirectory(prefix="drvfuse-") as folder:
            _write(Path(folder), texts)
            yield Path(folder)
        return
    digest = hashlib.sha256(repr(texts).encode()).hexdigest()
    home = Path(config.get("cache_dir")) / "edited"
    final = home / digest[:40]
    if not final.is_dir():
        home.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix="tmp-", dir=home))
        _write(building, texts)
        try:
            os.rename(building, final)
        except OSError:  # another process was first, with the same files
            shutil.rmtree(building)
            if not final.is_dir():
                raise
    yield final


def _write(folder: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


@contextlib.contextmanager
def _edited_function(edit: HostEdit) -> Iterator[None]:
    owner: Any = importlib.import_module(edit.module)
    space = vars(owner)
    *outer, name = edit.name.split(".")
    for part in outer:
        owner = getattr(owner, part)
    original: Callable[..., Any] = vars(owner)[name]
    text = textwrap.dedent(inspect.getsource(original))
    text = _replaced(text, edit.old, edit.new, 1, f"{edit.module}.{edit.name}")
    made: dict[str, Any] = {}
    exec(compile("from __future__ import annotations\n" + text, f"<edited {edit.name}>", "exec"), space, made)
    setattr(owner, name, made[name])
    try:
        yield
    finally:
        setattr(owner, name, original)
