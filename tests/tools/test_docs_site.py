# SPDX-License-Identifier: Apache-2.0
"""The documentation site has every page, and the text that it takes from the code is complete."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import drvfuse as df
from drvfuse import errors, reference
from tools import docs_site

DOCS = Path(docs_site.__file__).parents[1] / "docs"


def test_every_public_name_is_in_the_api() -> None:
    text = docs_site.api()
    named = set(re.findall(r"^\.\. (?:auto\w+:: drvfuse\.|py:type:: )(\S+)$", text, re.MULTILINE))
    modules = {"coat", "config", "dtypes", "emu", "errors", "reference", "reference_gemv"}
    assert {name for name in df.__all__ if name not in modules} <= named
    assert {f"emu.{name}" for name in df.emu.__all__ if name not in ("driver", "program")} <= named
    assert {f"reference.{name}" for name, value in vars(reference).items() if callable(value)} <= named
    assert {"reference.gemv.gemv_partial_norm", "reference.coat_layernorm.fp8_layernorm_backward"} <= named
    assert "coat.fp8_rmsnorm_forward" in named and "ops.call.prepared.Prepared" in named


def test_every_exception_is_on_the_page_of_errors() -> None:
    listed = docs_site.all_errors()
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, errors.DrvfuseError):
            assert f":: drvfuse.errors.{name}\n" in listed


def test_every_command_is_on_the_page_of_the_command_line() -> None:
    text = docs_site.command_line()
    for command in ("demo", "check", "bench gemv", "emu run", "emu serve", "tune"):
        assert f"`drvfuse {command}`\n\n```text\nusage: drvfuse {command} " in text


def test_every_page_is_in_the_table_of_contents() -> None:
    toctrees = "\n".join(re.findall(r"```{toctree}\n(.*?)```", (DOCS / "index.md").read_text(), re.DOTALL))
    entries = [line for line in toctrees.splitlines() if line and not line.startswith(":")]
    for page in DOCS.glob("*.md"):
        assert page.stem == "index" or entries.count(page.stem) == 1, page.name


def test_text_that_pages_include_exists() -> None:
    asked = {name for page in DOCS.glob("*.md") for name in docs_site.MARK.findall(page.read_text())}
    assert asked == set(docs_site.GENERATED)


@pytest.mark.parametrize(
    ("text", "rst"),
    [
        ("`name` and *args", r"``name`` and \*args"),
        ("|x| of a_ and a_b", r"\|x\| of a\_ and a_b"),
        ("see docs/nodes.md.", "see :doc:`nodes`."),
        ("made by :meth:`local`", "made by :meth:`local`"),
        ("`a\nb` c*", "``a\nb`` c\\*"),
    ],
)
def test_docstrings_are_plain_text(text: str, rst: str) -> None:
    lines = text.split("\n")
    docs_site.docstring(None, "function", "f", None, None, lines)
    assert "\n".join(lines) == rst


def test_lists_of_names_in_docstrings_become_definition_lists() -> None:
    lines = ["Things:", "", "one   the first", "      and more", "second  the other", "Then text."]
    docs_site.docstring(None, "class", "C", None, None, lines)
    assert lines == [
        *("Things:", "", "", "``one``", "    the first", "    and more"),
        *("", "``second``", "    the other", "", "Then text."),
    ]


def test_what_the_api_leaves_out_exists() -> None:
    public = {path.rpartition(".")[2]: path for path in re.findall(r"autoclass:: (\S+)", docs_site.api())}
    for name, members in docs_site.INTERNAL.items():
        module, _, kind = public[name].rpartition(".")
        found = vars(getattr(importlib.import_module(module), kind))
        assert set(members.split()) <= set(found), name


def test_a_link_that_names_a_page_gets_the_title_of_its_target() -> None:
    source = ["see [nodes.md](nodes.md#engines), [all](nodes.md), [changelog.md](changelog.md)"]
    docs_site.fill(None, "page", source)
    assert source == ["see [More than one node](nodes.md#engines), [all](nodes.md), [Changelog](changelog.md)"]
