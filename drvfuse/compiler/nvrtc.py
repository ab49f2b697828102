# SPDX-License-Identifier: Apache-2.0
"""Compiling CUDA C++ to PTX and a cubin, with a disk cache. Needs neither GPU nor driver."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import ArgumentError, CompileError, Unsupported, require_text, shown
from ..ptx.facts import KernelInfo as KernelInfo
from ..ptx.facts import Param as Param
from ..ptx.facts import kernels
from ..ptx.parser import parse
from . import cache
from .library import Library, Output, library

_log = logging.getLogger("drvfuse.compile")
_ARCH = re.compile(r"sm_(\d+)[af]?$")
_TAKEN = ("-I", "--include-path", "-arch", "--gpu-architecture")
_LOCATION = re.compile(r"^(?P<file>[^\n(]+)\((?P<line>\d+)\): (?:catastrophic )?error", re.M)
_MISSING = re.compile("(could not|cannot) open source file")
_NO_HEADER = (
    "hint: headers are looked for in the folders of include= and beside the source's own file; drvfuse finds no CUDA "
    'headers by itself: pass theirs, e.g. include=["/usr/local/cuda/include"]'
)
_AROUND = 3
_PTX, _CUBIN = "kernel.ptx", "kernel.cubin"


@dataclass(frozen=True)
class Image:
    """A compiled source: its PTX, the cubin that was assembled from the PTX (None if only PTX was requested), and its
    kernels by name expression and by symbol."""

    cubin: bytes | None = field(repr=False)
    ptx: str = field(repr=False)
    kernels: dict[str, KernelInfo]
    log: str
    name: str
    arch: str


_images: dict[str, Image] = {}
_building: dict[str, threading.Lock] = {}
_lock = threading.Lock()


def compile_source(
    source: str,
    *,
    name: str,
    arch: str,
    defines: Mapping[str, str | int] | None = None,
    names: Sequence[str] = (),
    options: Sequence[str] = (),
    include: Sequence[str | Path] = (),
    headers: Mapping[str, str] | None = None,
    line_info: bool = True,
    cubin: bool = True,
) -> Image:
    """Compile `source` for `arch` ("sm_90a"): to PTX and a cubin, or with `cubin=False` to the same PTX alone.

    `name` is the path of the source's file, which line information shows, or a label if there is no file. `defines`
    become -D options, and the folders `include` -I options. `names` are name expressions such as "kernel<float, 4>",
    and `options` are any other NVRTC options. The language is C++17 unless an option changes it. `headers` maps names
    that `source` includes to their texts; they need no files.

    Images are kept in memory and, if the setting `cache` allows it, on disk. Raises CompileError with the log and the
    source lines that the log names, and Unsupported for an architecture that this NVRTC does not know.
    """
    nvrtc = library()
    _check(nvrtc, arch, names, options)
    macros, headers = _texts("defines", defines, (str, int)), _texts("headers", headers, (str,))
    folders = _folders(include)
    file = Path(name).absolute() if Path(name).is_file() else None
    target = arch if cubin else arch.replace("sm_", "compute_")
    flags = [f"--gpu-architecture={target}", *(["-lineinfo"] if line_info else [])]
    if not any(option.startswith(("-std", "--std")) for option in options):
        flags.append("--std=c++17")
    flags += [f"-I{folder}" for folder in folders]
    flags += [f"-D{key}={value}" for key, value in macros.items()]
    flags += options
    key = cache.key_of(
        {
            "version": __version__,
            "nvrtc": nvrtc.identity,
            "options": flags,
            "name": str(file or name),
            "names": list(names),
            "source": source,
            "headers": included(source, file.parent if file else None, folders) | headers,
        }
    )
    entry = cache.entry_path(name, key)

    def build() -> Image:
        # The line information of a source that is not a file has the path of the source's copy in the cache entry, so
        # that debuggers find the copy.
        copy = cache.source_name(name, (_PTX, _CUBIN))
        shown = str(file) if file else str(entry / copy) if entry is not None else name
        output = _compile(nvrtc, source, name, shown, flags, names, headers, cubin)
        found = kernels(parse(output.ptx, bodies=False), output.lowered)
        image = Image(output.cubin, output.ptx, found, output.log, name, arch)
        if entry is not None:
            _store(entry, image, {copy: source.encode()}, {"nvrtc": nvrtc.identity, "options": flags})
        return image

    with _lock:
        lock = _building.setdefault(key, threading.Lock())
    with lock:
        image = _images.get(key)
        if image is None:
            image = _images[key] = build() if entry is None else _found_or_built(entry, name, arch, build)
    return image


def _found_or_built(entry: Path, name: str, arch: str, build: Callable[[], Image]) -> Image:
    image = _load(entry, name, arch)
    if image is None:
        with cache.building(entry) as look_again:
            image = (_load(entry, name, arch) if look_again else None) or build()
    return image


def _check(nvrtc: Library, arch: str, names: Sequence[str], options: Sequence[str]) -> None:
    match = _ARCH.match(arch) if isinstance(arch, str) and len(arch) < 10 else None
    if match is None:
        raise ArgumentError("arch", shown(arch), 'an architecture such as "sm_90a"')
    if int(match[1]) not in nvrtc.archs:
        known = " ".join(f"sm_{number}" for number in nvrtc.archs)
        raise Unsupported(f"NVRTC {nvrtc.version[0]}.{nvrtc.version[1]} does not compile for {arch}; it knows {known}")
    for argument, values in (("names", names), ("options", options)):
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise ArgumentError(argument, shown(values), "a sequence of strings")
        for value in values:
            require_text(argument, value, "a sequence of strings without NUL")
    for option in options:
        if option.startswith(_TAKEN):
            raise ArgumentError("options", shown(option), "given as `include` or `arch`")


def _texts(argument: str, values: Any, allowed: tuple[type, ...]) -> dict[str, Any]:
    """The mapping `values` from names to texts or other values of the `allowed` types. None is an empty one."""
    expected = f"a mapping from names to values of type {' or '.join(kind.__name__ for kind in allowed)}, or None"
    if not isinstance(values, Mapping | None):
        raise ArgumentError(argument, shown(values), expected)
    for key, value in (values or {}).items():
        require_text(argument, key, expected)
        if not isinstance(value, allowed) or (isinstance(value, str) and "\0" in value):
            raise ArgumentError(f"{argument}[{key!r}]", shown(value), expected)
    return dict(values or {})


def _folders(include: Sequence[str | Path]) -> list[Path]:
    expected = "a sequence of folders"
    if isinstance(include, (str, bytes, os.PathLike)) or not isinstance(include, Sequence):
        raise ArgumentError("include", shown(include), expected)
    for folder in include:
        require_text("include", os.fspath(folder) if isinstance(folder, os.PathLike) else folder, expected)
    return [Path(folder).absolute() for folder in include]


def _load(entry: Path, name: str, arch: str) -> Image | None:
    def image(meta: dict[str, Any], files: dict[str, bytes]) -> Image:
        known = {
            key: KernelInfo(**{**info, "params": tuple(Param(**param) for param in info["params"])})
            for key, info in meta["kernels"].items()
        }
        return Image(files.get(_CUBIN), files[_PTX].decode(), known, meta["log"], name, arch)

    return cache.load(entry, image)


def _store(entry: Path, image: Image, source: Mapping[str, bytes], origin: Mapping[str, Any]) -> None:
    known = {key: asdict(info) for key, info in image.kernels.items()}
    meta = {"name": image.name, "arch": image.arch, **origin, "log": image.log, "kernels": known}
    binary = {} if image.cubin is None else {_CUBIN: image.cubin}
    cache.store(entry, meta, {**source, _PTX: image.ptx.encode(), **binary})


def _compile(
    nvrtc: Library,
    source: str,
    name: str,
    shown: str,
    flags: Sequence[str],
    names: Sequence[str],
    headers: Mapping[str, str],
    cubin: bool,
) -> Output:
    start = time.perf_counter()
    try:
        output = nvrtc.compile(source, shown, flags, names, headers, cubin)
    except CompileError as error:
        log = _with_source(error.log, source, shown).replace(shown, name)
        raise CompileError(name, f"{log}\n{_NO_HEADER}" if _MISSING.search(log) else log) from None
    _log.info("compiled %s by %s in %.0f ms", name, flags[0], (time.perf_counter() - start) * 1000)
    if output.log:
        _log.warning("%s: %s", name, output.log)
    return output


def _with_source(log: str, source: str, shown: str) -> str:
    """The log, followed by the numbered source lines around each place that the log names."""
    parts, seen = [log], set()
    for match in _LOCATION.finditer(log):
        place = (match["file"], int(match["line"]))
        if place in seen:
            continue
        seen.add(place)
        if place[0] == shown:
            lines = source.splitlines()
        else:
            try:
                lines = Path(place[0]).read_text(errors="replace").splitlines()
            except OSError:
                continue
        first = max(place[1] - 1 - _AROUND, 0)
        numbered = [
            f"{'>' if number == place[1] else ' '} {number:5} | {text}"
            for number, text in enumerate(lines[first : place[1] + _AROUND], first + 1)
        ]
        parts.append(f"{place[0]}:\n" + "\n".join(numbered))
    return "\n".join(parts)


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
