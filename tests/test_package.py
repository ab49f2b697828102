# SPDX-License-Identifier: Apache-2.0
"""The package as a whole: the cost of importing it, the directions of its imports, settings and dtypes."""

from __future__ import annotations

import ast
import inspect
import pickle
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import drvfuse as df
from drvfuse import config, dtypes, errors

ROOT = Path(df.__file__).parent

GROUND = {"errors", "config", "dtypes", "lazy", "own_files", "structures", "tables"}
EXCEPTIONS = {("runtime.driver", "emu")}  # the one import that is allowed and not in the table


def _allowed() -> dict[str, set[str]]:
    """For each folder, the folders that it may import, from the table of docs/architecture.md."""
    page = (ROOT.parent / "docs/architecture.md").read_text().partition("## Families")[0]
    rows = re.findall(r"^\| `([\w.]+)` \|[^|]*\|([^|]*)\|$", page, re.M)
    return {folder: set(re.findall(r"`([\w.]+)`", others)) for folder, others in rows}


ALLOWED = _allowed()
FOLDERS = {*ALLOWED, "emu.bindings", "emu"}
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in ROOT.rglob("*.py")
    if path != ROOT / "__init__.py"
}


def _folder(module: str) -> str | None:
    """The folder in which a module lies."""
    parts = module.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((name for name in names if name in FOLDERS), None)


def _imported(module: str) -> set[str]:
    """The modules of drvfuse that a module imports anywhere in its text."""
    path = MODULES[module]
    package = ("drvfuse", *path.relative_to(ROOT).parts[:-1])
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            source = ".".join(part for part in (base, node.module or "") if part)
            submodules = [f"{source}.{alias.name}" for alias in node.names]
            names = [name if name.removeprefix("drvfuse.") in MODULES else source for name in submodules]
        found |= {name.removeprefix("drvfuse.") for name in names if name.startswith("drvfuse.")}
    return found


@pytest.mark.parametrize("folder", ALLOWED)
def test_imports_follow_the_layers_of_the_architecture(folder: str) -> None:
    allowed = ALLOWED[folder] | {folder} | GROUND
    for module in MODULES:
        if _folder(module) != folder:
            continue
        for other in _imported(module):
            where = _folder(other) or other
            inside = any(where.startswith(f"{name}.") for name in ALLOWED[folder])
            assert where in allowed or inside or (module, where) in EXCEPTIONS, f"{module} imports {other}"


def test_every_folder_has_a_docstring_that_states_its_purpose() -> None:
    for folder in {path.parent for path in MODULES.values()} - {ROOT}:
        name = ".".join(folder.relative_to(ROOT).parts)
        assert any(f"{known}.".startswith(f"{name}.") for known in FOLDERS) or _folder(name), (
            f"docs/architecture.md does not name {name}"
        )
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), f"{name} has no docstring"


def _families() -> list[tuple[str, str]]:
    """The pairs of a family and a layer in the table of families of docs/architecture.md."""
    page = (ROOT.parent / "docs/architecture.md").read_text().partition("## Families")[2]
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|$", page, re.M)
    return [(family, layer) for family, layers in rows for layer in re.findall(r"`([\w.]+)`", layers)]


@pytest.mark.parametrize(("family", "layer"), _families())
def test_a_family_has_its_name_in_every_layer(family: str, layer: str) -> None:
    base = ROOT.parent if layer.startswith("tests") else ROOT
    folder = base.joinpath(*layer.split("."))
    names = {path.stem for path in folder.iterdir() if path.is_dir() or path.suffix == ".py"}
    assert any(f"{name}_".startswith(f"{family}_") for name in names), f"{folder} has {sorted(names)}"


def test_every_folder_of_ops_and_of_their_kernels_is_a_family() -> None:
    families = {family for family, _ in _families()}
    assert len(families) >= 8
    for layer in ("ops", "cu"):
        inside = [path.name for path in (ROOT / layer / "collectives").iterdir() if path.is_dir()]
        ops = {path.name for path in (ROOT / layer).iterdir() if path.is_dir()}
        ops -= {"collectives", "call", "common", "ptx", "sync", "trace"}
        assert {*inside, *ops} - {"__pycache__"} == families


@pytest.mark.parametrize("name", sorted(GROUND))
def test_the_lowest_layer_imports_nothing_of_the_package(name: str) -> None:
    assert _imported(name) <= GROUND


@pytest.mark.parametrize(
    "folder", sorted(name for name in ALLOWED if not name.startswith("emu") and name != "reference")
)
def test_public_class_names_are_unique_in_a_folder(folder: str) -> None:
    """`emu` and `reference` are left out: the emulator has a class for each kind of handle in several folders, and
    results of several reference ops have the same class name."""
    found = [
        node.name
        for module, path in MODULES.items()
        if _folder(module) == folder
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert sorted(found) == sorted(set(found))


def test_importing_loads_no_driver_and_nothing_heavy() -> None:
    code = "import sys; before = set(sys.modules); import drvfuse; print(*sorted(set(sys.modules) - before))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = set(output.split())
    assert {module for module in loaded if module.startswith("drvfuse")} == {"drvfuse", "drvfuse.lazy"}
    assert {module.split(".")[0] for module in loaded} <= set(sys.stdlib_module_names) | {"drvfuse"}
    assert "ctypes" not in loaded


def _listed(module: ModuleType) -> set[str]:
    """The names that a type checker finds in a module: those that it imports with `as` under the same name."""
    path = Path(module.__file__ or "")
    nodes = ast.parse((path.with_suffix(".pyi") if path.name == "__init__.py" else path).read_text()).body
    aliases = [alias for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names]
    return {alias.name for alias in aliases if alias.asname == alias.name}


@pytest.mark.parametrize("module", [df, df.emu, df.coat], ids=lambda module: module.__name__)
def test_modules_and_their_stubs_have_the_same_names(module: ModuleType) -> None:
    names = _listed(module)
    assert names and set(getattr(module, "__all__", names)) == names
    for name in names:
        assert getattr(module, name) is not None
    import drvfuse.emu.machine.machine  # noqa: F401  it sets `emu` and `machine` as attributes of their packages
    import drvfuse.runtime.array  # noqa: F401

    assert {name for name in dir(module) if not name.startswith("__")} == names
    with pytest.raises(AttributeError, match="no_such_name"):
        module.no_such_name  # noqa: B018


def test_a_wheel_has_the_stubs_that_packages_read() -> None:
    patterns = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][
        "drvfuse"
    ]
    stubs = [path.relative_to(ROOT) for path in ROOT.rglob("*.pyi")]
    assert stubs and all(any(fnmatch(str(stub), pattern) for pattern in patterns) for stub in stubs)


TYPED = ("comm", "dtypes", "ops", "reference", "runtime", "trace")


def _signatures(module: ModuleType) -> Iterator[tuple[str, dict[str, str]]]:
    """The annotations of a module's functions and of its classes' methods and properties, as they are written."""
    for name in (name for name in dir(module) if not name.startswith("_")):
        found = getattr(module, name)
        if not getattr(found, "__module__", "").startswith(tuple(f"drvfuse.{folder}" for folder in TYPED)):
            continue
        members = vars(found) if inspect.isclass(found) else {"": inspect.unwrap(found) if callable(found) else found}
        for key, member in members.items():
            function = getattr(member, "fget", None) or getattr(member, "__func__", member)
            if inspect.isfunction(function) and (not key.startswith("_") or key in ("__init__", "__call__")):
                yield f"{module.__name__}.{name} {key}", function.__annotations__


def test_public_signatures_have_types() -> None:
    # numpy types whose element types are not static
    numpys = r"(np\.ndarray\[Any, Any\]|npt\.NDArray\[Any\]|np\.dtype\[Any\])"
    checked = 0
    for module in (df, df.coat, df.emu, df.dtypes, df.reference, df.reference.coat_rmsnorm, df.reference.coat_groups):
        for where, found in _signatures(module):
            checked += 1
            for argument, text in found.items():
                assert not re.search(r"\bAny\b", re.sub(numpys, "", str(text))), f"{where}: {argument}: {text}"
    assert checked > 100


def test_functions_of_coat_are_public_in_one_module() -> None:
    assert len([name for name in dir(df.coat) if name.startswith("fp8_")]) == 12
    assert not [name for name in df.__all__ if name.startswith("fp8_")]
    code = "import drvfuse.coat; print(drvfuse.coat.fp8_division.__name__)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "fp8_division\n"


def test_settings_come_from_scope_then_environment_then_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DRVFUSE_SPIN_TIMEOUT", raising=False)
    assert config.get("spin_timeout") == 10.0
    monkeypatch.setenv("DRVFUSE_SPIN_TIMEOUT", "2.5")
    assert config.get("spin_timeout") == 2.5
    with config.override(spin_timeout=0.25):
        assert config.get("spin_timeout") == 0.25
    assert config.get("spin_timeout") == 2.5


def test_bad_settings_are_argument_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRVFUSE_SPIN_TIMEOUT", "-1")
    with pytest.raises(errors.ArgumentError, match="DRVFUSE_SPIN_TIMEOUT"):
        config.get("spin_timeout")
    with pytest.raises(errors.ArgumentError, match="no_such_setting"), config.override(no_such_setting=1):
        pass


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (5, "an int"),
        ([], "a list"),
        (np.ones(1), "an ndarray"),
        (np.uint8(1), "a uint8"),
        (object(), "an object"),
        (None, "None"),
    ],
)
def test_an_argument_error_names_the_type_of_the_argument(value: object, shown: str) -> None:
    with pytest.raises(errors.ArgumentError, match=f"^where is {shown}; it must be a Group or a Device"):
        df.Trace(value)  # type: ignore[arg-type]


def test_dtype_table_agrees_with_numpy_and_dlpack() -> None:
    for name in dtypes.NAMES:
        dtype = dtypes.get(name)
        assert dtype.numpy.itemsize == dtype.itemsize
        assert dtypes.get(dtype.numpy) is (dtype if name != dtypes.FP4 else dtypes.get("uint8"))
        assert dtypes.from_dlpack(*dtype.dlpack, dtype.lanes) is dtype
        if dtype.fp8_max is not None:
            assert float(dtype.numpy.type(dtype.fp8_max)) == dtype.fp8_max
    for wrong in ("float7", None, object(), "complex64", np.dtype(">f4")):
        with pytest.raises(errors.ArgumentError, match="out_dtype"):
            dtypes.get(wrong, "out_dtype")


@pytest.mark.parametrize("name", dtypes.NAMES)
def test_a_dtype_equals_its_names_and_nothing_else(name: str) -> None:
    dtype = dtypes.get(name)
    of_numpy = (dtype.numpy, dtype.numpy.type) if name != dtypes.FP4 else ()  # numpy has no FP4 dtype
    for same in (name, *of_numpy, pickle.loads(pickle.dumps(dtype))):
        assert dtype == same and same == dtype
    assert np.dtype(dtype) == dtype.numpy  # type: ignore[call-overload]
    assert {dtype: 1}[name] == {name: 1}[dtype] == 1  # type: ignore[index]
    others = ["int8" if name != "int8" else "int16", np.dtype("complex64"), "V2", "f4,(", "", None, 5, [], {}, object()]
    for other in others:
        assert dtype != other and other != dtype
