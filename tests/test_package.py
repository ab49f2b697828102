# SPDX-License-Identifier: Apache-2.0
"""The package as a whole: what importing it costs, that dependencies point down, that settings and dtypes hold."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import drvfuse as df
from drvfuse import config, dtypes, errors

ROOT = Path(df.__file__).parent

# layer -> the layers that it may import; the base modules are open to all
BASE = {"errors", "config", "dtypes", "fp8_backward_shape", *(path.stem for path in ROOT.glob("reference*.py"))}
ALLOWED = {
    "emu": set(),
    "runtime": {"cu"},
    "comm": {"runtime", "cu"},
    "trace": {"comm", "runtime", "cu"},
    "ops": {"trace", "comm", "runtime", "cu"},
    "bench": {"ops", "trace", "comm", "runtime"},
    "check": {"ops", "comm", "runtime", "emu"},
    "cli": {"bench", "check", "ops", "trace", "comm", "runtime"},
}


def _imported_layers(path: Path) -> set[str]:
    package = ("drvfuse", *path.relative_to(ROOT).parts[:-1])
    layers = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            names = [module] if node.module else [f"{module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "drvfuse" and len(parts) > 1:
                layers.add(parts[1])
    return layers


@pytest.mark.parametrize("layer", ALLOWED)
def test_dependencies_point_down(layer: str) -> None:
    for path in (ROOT / layer).rglob("*.py"):
        extra = _imported_layers(path) - BASE - ALLOWED[layer] - {layer, "__version__"}
        if layer == "runtime" and path.name == "driver.py":
            extra.discard("emu")
        assert not extra, f"{path.relative_to(ROOT)} imports {sorted(extra)}"


@pytest.mark.parametrize("name", sorted(BASE))
def test_a_base_module_imports_base_modules_alone(name: str) -> None:
    assert _imported_layers(ROOT / f"{name}.py") <= BASE


@pytest.mark.parametrize("layer", sorted(ALLOWED.keys() - {"emu"}))  # the emulator has an object for each handle
def test_a_layer_has_one_public_class_of_a_name(layer: str) -> None:
    found = [
        node.name
        for path in (ROOT / layer).rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert sorted(found) == sorted(set(found))


def test_importing_loads_no_driver_and_nothing_heavy() -> None:
    code = "import sys; before = set(sys.modules); import drvfuse; print(*sorted(set(sys.modules) - before))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = set(output.split())
    assert {module for module in loaded if module.startswith("drvfuse")} == {"drvfuse"}
    assert {module.split(".")[0] for module in loaded} <= set(sys.stdlib_module_names) | {"drvfuse"}
    assert "ctypes" not in loaded


def test_every_public_name_resolves() -> None:
    for name in df.__all__:
        assert getattr(df, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        df.no_such_name  # noqa: B018


def test_settings_come_from_scope_then_environment_then_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DRVFUSE_SPIN_TIMEOUT", raising=False)
    assert config.get("spin_timeout") == 10.0
    monkeypatch.setenv("DRVFUSE_SPIN_TIMEOUT", "2.5")
    assert config.get("spin_timeout") == 2.5
    with config.override(spin_timeout=0.25):
        assert config.get("spin_timeout") == 0.25
    assert config.get("spin_timeout") == 2.5


def test_bad_settings_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_an_argument_of_a_wrong_type_is_called_by_its_type_and_article(value: object, shown: str) -> None:
    with pytest.raises(errors.ArgumentError, match=f"^where is {shown}; it must be a Group or a Device"):
        df.Trace(value)  # type: ignore[arg-type]


def test_dtype_table_agrees_with_numpy_and_dlpack() -> None:
    for name in dtypes.NAMES:
        dtype = dtypes.get(name)
        assert dtype.numpy.itemsize == dtype.itemsize
        assert dtypes.get(dtype.numpy) is dtype
        assert dtypes.from_dlpack(*dtype.dlpack, 1) is dtype
        if dtype.fp8_max is not None:
            assert float(dtype.numpy.type(dtype.fp8_max)) == dtype.fp8_max
    for wrong in ("float7", None, object(), "complex64", np.dtype(">f4")):
        with pytest.raises(errors.ArgumentError, match="out_dtype"):
            dtypes.get(wrong, "out_dtype")


def test_every_setting_is_documented() -> None:
    page = (ROOT.parent / "docs" / "debugging.md").read_text()
    for name in config.SETTINGS:
        assert f"| `DRVFUSE_{name.upper()}` |" in page
