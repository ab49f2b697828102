# SPDX-License-Identifier: Apache-2.0
"""Build the source distribution, and the wheel from it, and use the wheel: `python -m tools.check_distributions`.

What is checked: both contain every file of the package and no other; their metadata and the long description are what
a package index takes (`twine check --strict`), and no link of the description is a path in the repository; the wheel,
installed into an environment without a checkout, runs the demo. The extras `release`, `emu` and `cu12` or `cu13` must
be installed. Nothing is downloaded, and the checkout is not changed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path
from typing import IO

from . import long_description

ROOT = Path(__file__).resolve().parents[1]
DEMO = ("demo", "--driver", "emu", "--gpus", "2", "--rows", "4", "--cols", "512")


def check(folder: Path) -> None:
    """Do all checks in `folder`, which must be empty. Raises CalledProcessError for a step that fails."""
    tree, dist = folder / "tree", folder / "dist"
    shutil.copytree(ROOT / "drvfuse", tree / "drvfuse", ignore=shutil.ignore_patterns("__pycache__", "*.ptx"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tree)
    long_description.rewrite(tree)
    files = {path.relative_to(tree).as_posix() for path in (tree / "drvfuse").rglob("*") if path.is_file()}
    python("-m", "build", "--no-isolation", "--outdir", str(dist), str(tree))
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    with tarfile.open(sdist) as archive:
        members = [member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()]
        same(sdist, files, {name for name in members if name.startswith("drvfuse/")})
        (metadata,) = [name for name in archive.getnames() if name.count("/") == 1 and name.endswith("/PKG-INFO")]
        described(sdist, archive.extractfile(metadata))
    with zipfile.ZipFile(wheel) as contents:
        same(wheel, files, {name for name in contents.namelist() if ".dist-info/" not in name})
        (metadata,) = [name for name in contents.namelist() if name.endswith(".dist-info/METADATA")]
        described(wheel, contents.open(metadata))
    python("-m", "twine", "check", "--strict", str(sdist), str(wheel))
    demo(wheel, folder / "clean")


def same(archive: Path, expected: set[str], found: set[str]) -> None:
    """Exit with the names of missing and unexpected files, if there are any."""
    if expected != found:
        missing, extra = sorted(expected - found), sorted(found - expected)
        raise SystemExit(f"{archive.name}: missing {missing}, unexpected {extra}")


def described(archive: Path, metadata: IO[bytes] | None) -> None:
    """Exit with an error if the long description is missing, or if it has links that are paths; the error names
    them."""
    text = metadata.read().decode() if metadata is not None else ""
    if "\n# drvfuse\n" not in text:
        raise SystemExit(f"{archive.name}: its metadata has no long description, or one that is not the README")
    if paths := long_description.relative_links(text):
        raise SystemExit(f"{archive.name}: its long description links to the paths {paths}; it may have web links only")


def demo(wheel: Path, environment: Path) -> None:
    """Make the virtual environment `environment`, install the wheel into it, and run the demo there. The wheel's
    dependencies are those of the interpreter that runs this tool.
    """
    venv.create(environment)
    own = {"base": str(environment), "platbase": str(environment)}
    packages = Path(sysconfig.get_path("purelib", vars=own))
    interpreter = environment / "bin" / "python"
    python("-m", "pip", "--python", str(interpreter), "install", "-q", "--no-deps", "--no-index", str(wheel))
    # Python ignores .pth files in a folder that a .pth file names, so an editable install is not found there.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    program = environment / "bin" / "drvfuse"
    subprocess.run([str(program), *DEMO], cwd=environment, env=variables, check=True, stdout=subprocess.DEVNULL)
    where = "import drvfuse; print(drvfuse.__file__)"
    command = [str(interpreter), "-c", where]
    file = subprocess.run(command, cwd=environment, env=variables, capture_output=True, text=True).stdout.strip()
    if Path(file) != packages / "drvfuse" / "__init__.py":
        raise SystemExit(f"the demo ran {file}, and not the installed wheel")


def python(*arguments: str) -> None:
    """Run this interpreter; its output is shown only if it fails."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        check(Path(temporary))
    print("the source distribution and the wheel are complete, and the wheel runs")
