# SPDX-License-Identifier: Apache-2.0
"""Pages, docstrings and kernels' comments name only files that exist, and the changelog has the version."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import drvfuse as df
from drvfuse.emu.abi.header import HEADER_NAME

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
PYTHON = [*ROOT.glob("*.py"), *(path for top in ("drvfuse", "tests", "tools") for path in (ROOT / top).rglob("*.py"))]
KERNELS = [path for suffix in ("cu", "cuh") for path in (ROOT / "drvfuse").rglob(f"*.{suffix}")]

FOLDERS = "|".join(path.name for path in (ROOT / "drvfuse").iterdir() if path.is_dir() and path.name != "__pycache__")
PATH = re.compile(
    rf"(?<![\w/.~<-])(?:(?:drvfuse|tests|tools|docs|cu)/[\w./*-]*[\w/]|(?:{FOLDERS})/[\w./*-]*\.(?:py|cuh?|ptx)\b)"
)
BASES = (".", "drvfuse", "drvfuse/cu/collectives")  # the folders from which texts name files
LINK = re.compile(r"\]\(([\w./-]+)(?:#[\w-]*)?\)")
SOURCE = re.compile(r"(?<![\w/.*])\w+\.(?:cuh?|py)\b")  # a file name without a folder
EXAMPLE = re.compile(r"`([\w/]+\.\w+)`:\n\n```\w+\n(?:#|//) SPDX")  # a source file that a page shows in full


def docstrings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


@functools.cache
def found(name: str) -> bool:
    patterns = (name, name.replace("/*", "/**/*"))
    return any(next((ROOT / base).glob(pattern), None) for base in BASES for pattern in patterns)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_files_that_a_page_names_exist(path: Path) -> None:
    text = path.read_text()
    added = EXAMPLE.findall(text)
    missing = {name for name in PATH.findall(text) if not found(name) and not any(a.endswith(name) for a in added)}
    missing |= {name for name in LINK.findall(text) if not (path.parent / name).exists()}
    assert not missing


def test_the_files_that_docstrings_and_comments_name_exist() -> None:
    names = {path.name for path in (*PYTHON, *KERNELS)} | {HEADER_NAME}
    naming = [path for path in PYTHON if any(pattern.search(path.read_text()) for pattern in (PATH, SOURCE))]
    texts = [(path, text) for path in naming for text in docstrings(path)]
    texts += [(path, text) for path in KERNELS for text in re.findall("//(.*)", path.read_text())]
    missing = set()
    for path, text in texts:
        missing |= {(path.relative_to(ROOT).as_posix(), name) for name in PATH.findall(text) if not found(name)}
        missing |= {(path.relative_to(ROOT).as_posix(), name) for name in SOURCE.findall(text) if name not in names}
    assert not missing


def test_the_version_has_one_source_and_a_section_in_the_changelog() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"] and project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "drvfuse.__version__"}
    headings = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[0] == "Unreleased" and headings[1] == df.__version__
