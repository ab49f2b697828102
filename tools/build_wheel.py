# SPDX-License-Identifier: Apache-2.0
"""Build the wheel of a release: `python -m tools.build_wheel [FOLDER]`, by default into dist/.

The wheel holds the emulator's native runtime compiled, so that its users run PTX without NVRTC. It is compiled into a
copy of the tree: a checkout never has it, and `pip install -e .` neither needs NVRTC nor fetches it. What the build
needs must be installed (`[build-system]` of pyproject.toml, the extras cu12 or cu13, and emu); nothing is downloaded.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from drvfuse.emu import abi
from drvfuse.emu.native.loader import RUNTIME, compile_native

from . import long_description

ROOT = Path(__file__).resolve().parents[1]
NATIVE = "drvfuse/emu/native"


def build(folder: Path) -> None:
    """Build the wheel and write it to `folder`. Raises CompileError or DriverUnavailable if the emulator's native
    runtime cannot be compiled."""
    with tempfile.TemporaryDirectory() as temporary:
        tree = Path(temporary) / "drvfuse"
        shutil.copytree(ROOT / "drvfuse", tree / "drvfuse", ignore=shutil.ignore_patterns("__pycache__"))
        for file in ROOT.iterdir():
            if file.is_file():
                shutil.copy(file, tree)
        long_description.rewrite(tree)
        for name in (RUNTIME, *abi.LIBRARIES):
            (tree / NATIVE / f"{name}.ptx").write_text(compile_native(name))
        options = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "--no-index")
        command = [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(folder), str(tree)]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    build(Path(sys.argv[1] if len(sys.argv) > 1 else "dist"))
