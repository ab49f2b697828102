# SPDX-License-Identifier: Apache-2.0
"""What the documentation site (docs/conf.py) takes from the code: the API, the errors and the command line.

    sphinx-build -W -q docs site

A page asks for such text by a line `<!-- generated: api -->`, or with `errors` or `command-line` in place of `api`. The
public names and their order are those of `drvfuse/__init__.pyi`, so a new op appears without a change here.
"""

from __future__ import annotations

import argparse
import ast
import enum
import importlib
import inspect
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drvfuse import coat, errors
from drvfuse.cli.commands import command_line as command_line_parser

ROOT = Path(__file__).resolve().parent.parent
MARK = re.compile(r"^<!-- generated: ([\w-]+) -->$", re.MULTILINE)
NAMED_LINK = re.compile(r"\[([\w-]+\.md)\](?=\(\1(?:#[\w-]+)?\))")
"""A link whose text is the name of a page: on the site its text is the title of that page."""

SECTIONS = {
    "comm": "Groups and ranks",
    "ops": "Ops",
    "trace": "Traces",
    "runtime": "Devices, arrays, streams, kernels",
}
"""Folder of `drvfuse` -> heading of its public names, in the order of the page. The ops have those of other folders."""

BESIDES = {
    "comm": [f"drvfuse.nodes.exchange.{name}" for name in ("Exchange", "Member", "Part", "Pieces", "Piece")],
    "ops": [
        "drvfuse.ops.call.prepared.Prepared",
        "drvfuse.ops.collectives.rows.arguments.NormResult",
        "drvfuse.ops.norm.rmsnorm_fp8.Normed",
    ],
    "runtime": ["drvfuse.dtypes.DType", "drvfuse.dtypes.get"],
}
"""Folder -> names without a short form: what calls return, and what an engine of one's own has to implement."""

TYPES = {
    "DriverLike": "drvfuse.runtime.driver",
    "ShapeLike": "drvfuse.runtime.array",
    "DTypeLike": "drvfuse.dtypes",
    "ArrayLike": "drvfuse.runtime.interop",
    "StreamLike": "drvfuse.runtime.stream",
    "StreamArgument": "drvfuse.ops.call.streams",
    "Streams": "drvfuse.ops.call.streams",
    "Argument": "drvfuse.runtime.packing",
    "Arrays": "drvfuse.ops.collectives.moves.all_gather",
    "Outputs": "drvfuse.ops.coat.quantised",
    "Gradients": "drvfuse.ops.coat.rmsnorm_backward",
    "Peers": "drvfuse.emu.machine.machine",
    "Index": "drvfuse.emu.findings.places",
    "NDArray": "drvfuse.reference.arithmetic",
    "Floats": "drvfuse.reference.arithmetic",
}
"""Name of a type in signatures -> the module that defines it. Signatures show the name, with a link to its meaning."""

RETURNED = {
    *("Group", "Rank", "RankGraphs", "Prepared", "Array", "Device", "DType", "Exchange"),
    *("Graph", "Kernel", "Launch", "Module", "Process", "Quantisation"),
}
"""Classes whose objects programs get from functions: how they are constructed is not shown."""

INTERNAL = {
    "Group": "of_board require_multicast multicast_staging",
    "Rank": "wrap require_no_capture drain",
    "RankGraphs": "capture",
    "Quantisation": "given check scales_alignment row_bytes row_scale_bytes definitions",
    "Prepared": "give_back",
    "Array": "layout pooled used_before order require_open",
    "Device": "pool",
    "Graph": "before_launch after_launch admit queue launchable",
    "Kernel": "configure",
    "Launch": "resize",
    "Stream": "foreign unchecked mark follow last_event",
    "SymmetricBuffer": "of",
    "Machine": "engine refusal report finding note can_reach resident_blocks",
    "Process": "title alive blocking blocked finding add open_handle orphan get tenancy contexts listeners current "
    "healthy stream drop_context enqueue refuse_implicit refuse_in_capture context_ops synchronise",
    "AttachedMachine": "call refuse finding",
}
"""Class -> its members without an underscore that are for other folders of the package, and not for programs."""


def api() -> str:
    """The public names of `drvfuse`, `drvfuse.coat`, `drvfuse.reference` and `drvfuse.emu` with their docstrings."""
    package = ROOT / "drvfuse"
    names: dict[str, list[str]] = {folder: [] for folder in SECTIONS}
    for home, name in _listed(package / "__init__.pyi"):
        folder = home.split(".")[1]
        if name not in TYPES:
            names[folder if folder in SECTIONS else "ops"].append(f"drvfuse.{name}")
    sections = [_section(heading, names[folder] + BESIDES.get(folder, [])) for folder, heading in SECTIONS.items()]
    sections.append(_section("FP8 norms: `drvfuse.coat`", [f"drvfuse.coat.{n}" for n in dir(coat) if n[0] != "_"]))
    sections.append(_section("The ops in numpy: `drvfuse.reference`", list(_references(package / "reference"))))
    emulated = [f"drvfuse.emu.{name}" for _, name in _listed(package / "emu" / "__init__.pyi")]
    emulated.append("drvfuse.emu.findings.reports.Place")
    sections.append(_section("The emulated driver: `drvfuse.emu`", emulated))
    sections.append(_section("Settings: `drvfuse.config`", ["drvfuse.config.get", "drvfuse.config.override"]))
    sections.append(_types())
    return "\n".join(sections)


def all_errors() -> str:
    """Every exception, in the order of the module."""
    kinds = [name for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, Exception)]
    return _described([f"drvfuse.errors.{name}" for name in kinds], members="no-members")


def command_line() -> str:
    """The help of every command, as `drvfuse COMMAND --help` prints it."""
    return "\n".join(
        f"{'#' * level} `{parser.prog}`\n\n```text\n{parser.format_help()}```\n"
        for parser, level in _commands(command_line_parser(), 2)
    )


GENERATED = {"api": api, "errors": all_errors, "command-line": command_line}


def _listed(stub: Path) -> Iterator[tuple[str, str]]:
    """The module and the public name of every line of a stub that imports a name."""
    yield from re.findall(r"^from (\.[\w.]+) import \w+ as (\w+)$", stub.read_text(), re.MULTILINE)


def _references(folder: Path) -> Iterator[str]:
    """The names that `drvfuse.reference` has itself, then the ops in its modules."""
    yield from (f"drvfuse.reference.{name}" for home, name in _listed(folder / "__init__.py"))
    yield "drvfuse.reference.gemv.gemv_partial_norm"
    for module in ("coat_rmsnorm", "coat_layernorm", "coat_groups"):
        named = vars(importlib.import_module(f"drvfuse.reference.{module}")).items()
        own = (name for name, value in named if getattr(value, "__module__", "").endswith(module))
        yield from (f"drvfuse.reference.{module}.{name}" for name in own if name.startswith("fp8_"))


def _section(heading: str, names: list[str]) -> str:
    return f"## {heading}\n\n{_described(names)}"


def _described(names: list[str], members: str = "members") -> str:
    """autodoc's directives for these names."""
    lines = []
    for name in names:
        module, _, attribute = name.rpartition(".")
        value = getattr(importlib.import_module(module), attribute)
        if inspect.isclass(value):
            lines += [f".. autoclass:: {name}", f"   :{members}:", ""]
        else:
            lines += [f".. autofunction:: {name}", ""]
    return "\n".join(("```{eval-rst}", *lines, "```\n"))


def _types() -> str:
    """The text of the section "Types in signatures": each type with the docstring below its definition."""
    lines = []
    for name, module in TYPES.items():
        text = _escaped(_text_below(module, name))
        lines += [f".. py:type:: {name}", "", *(f"   {line}" for line in text.split("\n")), ""]
    return "\n".join(("## Types in signatures", "", "```{eval-rst}", *lines, "```\n"))


def _text_below(module: str, name: str) -> str:
    """The string that follows the assignment of a name in a module."""
    body = ast.parse(inspect.getsource(importlib.import_module(module))).body
    for statement, below in itertools.pairwise(body):
        match statement, below:
            case (
                ast.Assign(targets=[ast.Name(id=found)]) | ast.AnnAssign(target=ast.Name(id=found)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ) if found == name:
                return inspect.cleandoc(text)
    raise LookupError(f"{module} has no docstring below the assignment of {name}")


def _commands(parser: argparse.ArgumentParser, level: int) -> Iterator[tuple[argparse.ArgumentParser, int]]:
    yield parser, level
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _commands(command, min(level + 1, 4))


def title(page: str) -> str:
    """The title of a page in the folder `docs`. A page that includes another one has the title of that page."""
    lines = (ROOT / "docs" / page).read_text().splitlines()
    if included := re.fullmatch(r"```\{include\} (\S+)", lines[0]):
        lines = (ROOT / "docs" / included[1]).read_text().splitlines()
    return lines[0].removeprefix("# ")


def fill(app: Any, page: str, source: list[str]) -> None:
    """Sphinx's `source-read`: put the generated text where a page asks for it, and titles in place of file names."""
    source[0] = MARK.sub(
        lambda mark: GENERATED[mark[1]](), NAMED_LINK.sub(lambda link: f"[{title(link[1])}]", source[0])
    )


def skip(app: Any, what: str, name: str, member: object, skipped: bool, options: object) -> bool:
    """Sphinx's `autodoc-skip-member`: omit INTERNAL members, and fields of named tuples, which the signature shows."""
    owner = app.env.current_document.autodoc_class
    described = inspect.getdoc(member) or ""
    return skipped or name in INTERNAL.get(owner, "").split() or described.startswith(("Called ", "Alias for field "))


def signature(app: Any, what: str, name: str, value: object, options: object, text: str, returned: str) -> Any:
    """Sphinx's `autodoc-process-signature`: show types by the names that the source gives them, and as links.

    No arguments are shown for classes that programs do not construct.
    """
    if what in ("class", "exception") and name.rpartition(".")[2] in RETURNED:
        return "", None
    if not text or not callable(value) or (inspect.isclass(value) and issubclass(value, enum.Enum)):
        return None
    from sphinx.util.inspect import stringify_signature

    found = inspect.signature(value)
    if what == "method" and inspect.isfunction(value) and next(iter(found.parameters), "") == "self":
        found = found.replace(parameters=list(found.parameters.values())[1:])
    arguments, _, result = stringify_signature(found, unqualified_typehints=True).rpartition(" -> ")
    return (arguments, None if inspect.isclass(value) else result) if arguments else (result, None)


def docstring(app: Any, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Turn the lines of a docstring, which is plain text with names in single backquotes, into RST, in place. Handles
    Sphinx's event `autodoc-process-docstring`."""
    blocks = "\n".join(_definitions(lines)).split("\n\n")  # an example is a block of its own, and shown as it is
    lines[:] = "\n\n".join(text if text.startswith(">>> ") else _escaped(text) for text in blocks).split("\n")


def _definitions(lines: list[str]) -> Iterator[str]:
    """Rows of "name    what it is", with their indented continuations, as definition lists."""
    inside = False
    for line in lines:
        if match := re.fullmatch(r"(\w+)  +(\S.*)", line):
            yield from ("", f"`{match[1]}`", f"    {match[2]}")
            inside = True
        elif inside and line.startswith(" "):
            yield f"    {line.strip()}"
        else:
            if inside and line:
                yield ""  # an empty line ends the list
            inside = False
            yield line


def _escaped(text: str) -> str:
    """Plain text as RST: text in single backquotes becomes a literal, names of pages become links, other markup is
    escaped."""
    parts = re.split(r"(:\w+:`[^`]*`|`[^`]+`|\bdocs/[\w-]+\.md\b)", text)
    parts[::2] = [re.sub(r"([*|\\]|_(?!\w))", r"\\\1", part) for part in parts[::2]]
    parts[1::2] = [_marked(part) for part in parts[1::2]]
    return "".join(parts)


def _marked(part: str) -> str:
    if part.startswith("docs/"):
        return f":doc:`{part.removeprefix('docs/').removesuffix('.md')}`"
    return part if part.startswith(":") else f"`{part}`"
