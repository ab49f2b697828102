# SPDX-License-Identifier: Apache-2.0
"""Stores the results of a GPU in one small file, and finds results that differ from them.

An answer is the results of one instruction form: a column of words. The file has a digest of each answer. It also has
the words of an answer for which a bound must be checked, or whose words compress well. For any other answer it has
sums: with the words laid out in lines of 32, a hash of each line, a hash of each column, and the exclusive or of each
column. A word that differs lies where a line and a column differ; if a single line differs, the exclusive or gives the
GPU's word.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .rules import RULES, is_nan64

VERSION = 1  # the version of the file format and of the operands
COLUMNS = 32
_STEP = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Answer:
    """The words of a form's results on one driver. `source` is a digest of the form and its operands; `rule` is a name
    of RULES."""

    source: bytes
    words: np.ndarray
    rule: str = "exact"


@dataclass(frozen=True)
class Sums:
    """The checksums of an answer, with its words laid out in lines of COLUMNS words: a hash of each line, a hash of
    each column, and the exclusive or of each column (`parity`).
    """

    lines: np.ndarray
    columns: np.ndarray
    parity: np.ndarray

    @staticmethod
    def of(words: np.ndarray) -> Sums:
        padded = np.zeros(-(-len(words) // COLUMNS) * COLUMNS, words.dtype)
        padded[: len(words)] = words
        hashed = padded.astype(np.uint64) + np.arange(1, len(padded) + 1, dtype=np.uint64) * np.uint64(_STEP)
        hashed = (hashed ^ hashed >> np.uint64(29)) * np.uint64(0xBF58476D1CE4E5B9)
        hashed = ((hashed ^ hashed >> np.uint64(32)) >> np.uint64(16)).astype("<u2").reshape(-1, COLUMNS)
        exclusive = np.bitwise_xor.reduce
        return Sums(exclusive(hashed, 1), exclusive(hashed, 0), exclusive(padded.reshape(-1, COLUMNS), 0))

    def to_bytes(self) -> bytes:
        return self.lines.tobytes() + self.columns.tobytes() + self.parity.tobytes()

    @staticmethod
    def from_bytes(data: bytes, at: int, count: int, kind: str) -> Sums:
        lines = np.frombuffer(data, "<u2", -(-count // COLUMNS), at)
        columns = np.frombuffer(data, "<u2", COLUMNS, at + lines.nbytes)
        return Sums(lines, columns, np.frombuffer(data, kind, COLUMNS, at + lines.nbytes + columns.nbytes))


@dataclass(frozen=True)
class Stored:
    """A GPU's answer as the file has it: the digests of `Answer.source` and of the words, and the words or their
    sums."""

    source: bytes
    digest: bytes
    words: np.ndarray | None
    sums: Sums | None = None


@dataclass(frozen=True)
class Difference:
    """The indices of the words that differ; if `sure` is false, some of these words may be equal. `gpu` has the GPU's
    words at these indices, or is None if they cannot be computed from the file.
    """

    rows: tuple[int, ...]
    gpu: tuple[int, ...] | None
    sure: bool


def _normal(answer: Answer) -> np.ndarray:
    words = np.ascontiguousarray(answer.words).reshape(-1)
    if answer.rule == "nan":
        words = np.where(is_nan64(words), np.uint64((1 << 63) - 1), words)
    return words.astype(words.dtype.newbyteorder("<"))


def _digest(words: np.ndarray) -> bytes:
    return hashlib.blake2b(words.tobytes(), digest_size=8).digest()


def save(path: Path, answers: dict[str, Answer], about: dict[str, Any]) -> None:
    """Write the file. `about` names the GPU, the driver and the assembler that gave the answers."""
    index: dict[str, Any] = {}
    blobs: list[bytes] = []
    at = 0
    for name, answer in answers.items():
        words = _normal(answer)
        raw, sums = words.tobytes(), Sums.of(words).to_bytes()
        keep = RULES[answer.rule].wrong is not None and answer.rule != "nan"
        keep = keep or len(zlib.compress(raw, 9)) <= len(sums)
        blob = raw if keep else sums
        index[name] = [len(words), words.dtype.itemsize, int(keep), at]
        blobs.append(blob)
        at += len(blob)
    digests = b"".join(a.source + _digest(_normal(a)) for a in answers.values())
    text = json.dumps({"version": VERSION, **about, "answers": index}, separators=(",", ":"))
    arrays = {"about": text.encode(), "digests": digests, "data": b"".join(blobs)}
    np.savez_compressed(path, **{k: np.frombuffer(v, np.uint8) for k, v in arrays.items()})


def load(path: Path) -> tuple[dict[str, Stored], dict[str, Any]]:
    """Read the file: the answers, and the `about` that was given to `save`. ValueError if VERSION has changed since."""
    with np.load(path) as file:
        about = json.loads(file["about"].tobytes())
        digests, data = file["digests"].tobytes(), file["data"].tobytes()
    if about["version"] != VERSION:
        raise ValueError(f"{path} has version {about['version']}, not {VERSION}: record the file again")
    found = {}
    for number, (name, (count, size, whole, at)) in enumerate(about.pop("answers").items()):
        source, digest = (digests[16 * number + k : 16 * number + k + 8] for k in (0, 8))
        kind = f"<u{size}"
        words = np.frombuffer(data, kind, count, at) if whole else None
        sums = None if whole else Sums.from_bytes(data, at, count, kind)
        found[name] = Stored(source, digest, words, sums)
    return found, about


def differing(stored: Stored, answer: Answer) -> Difference | None:
    """The words of an answer that differ from the stored ones; None if all are equal."""
    words = _normal(answer)
    if _digest(words) == stored.digest:
        return None
    if stored.words is not None:
        rows = np.flatnonzero(words != stored.words)
        return Difference(tuple(map(int, rows)), tuple(int(stored.words[r]) for r in rows), True)
    assert stored.sums is not None
    sums, known = Sums.of(words), stored.sums
    lines, columns = (np.flatnonzero(a != b) for a, b in ((sums.lines, known.lines), (sums.columns, known.columns)))
    rows = tuple(int(COLUMNS * a + b) for a in lines for b in columns if COLUMNS * a + b < len(words))
    if len(lines) != 1:
        return Difference(rows, None, len(columns) == 1)
    return Difference(rows, tuple(int(words[r] ^ (sums.parity ^ known.parity)[r % COLUMNS]) for r in rows), True)
