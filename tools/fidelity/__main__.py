# SPDX-License-Identifier: Apache-2.0
"""Compares the emulated driver with a GPU, instruction by instruction and kernel by kernel.

    python -m tools.fidelity record --out tests/tools/fidelity/h200.npz    # on a machine with a GPU
    python -m tools.fidelity compare tests/tools/fidelity/h200.npz tests/tools/fidelity/h200_more.npz
    python -m tools.fidelity both --rows 100000                            # on a machine with a GPU: more operands
    python -m tools.fidelity record-matrix --out tests/tools/fidelity/h200_matrix.npz   # on a machine with a GPU
    python -m tools.fidelity compare-matrix tests/tools/fidelity/h200_matrix.npz        # anywhere

`record` runs the generated PTX on a GPU, by the assembler of its driver, and writes the results to a file; with
`--families`, only those of some families of forms. `compare` prints every form whose results are not equal, and a table
of verdicts by opcode; its status is 1 if a form differs. `both` runs the GPU and the emulated driver and compares them.
The commands with `matrix` do the same for matrix instructions; `--times N` takes N times as many operands.
"""

from __future__ import annotations

import argparse
import datetime
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

import drvfuse as df
from drvfuse.errors import DriverError

from . import collectives, execute, fixture, matrix, matrix_forms, operands, rules, verdict
from .batch import batches
from .forms import FAMILIES, table


def about(device: df.Device) -> dict[str, Any]:
    """The names and versions of the GPU, the driver and the assembler, for the file of results."""
    from cuda.bindings import nvrtc

    code, major, minor = nvrtc.nvrtcVersion()
    version = Path("/proc/driver/nvidia/version")
    text = version.read_text() if version.exists() and device.driver.name == "cuda" else ""
    release = re.search(r"\d+\.\d+(\.\d+)?", text)
    return {
        "gpu": device.name,
        "capability": device.capability,
        "driver": device.driver.cuDriverGetVersion(),
        "driver_release": release[0] if release else "",
        "assembler": "the driver's own",
        "nvrtc": f"{major}.{minor}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "numpy": np.__version__,
    }


def group_of_one(driver: Any) -> df.Group:
    return df.Group.local(1, driver=driver, max_blocks=4, workspace_bytes=1 << 20)


def record(driver: str, out: Path, families: tuple[str, ...]) -> int:
    device = df.device(0, driver=driver)
    answers: dict[str, fixture.Answer] = {}
    refused = []
    for batch in batches(families):
        try:
            results = execute.run(device, batch)
        except DriverError as error:
            refused.append(f"{batch.name}: {error}")
            continue
        answers.update((form.name, verdict.answer(form, results[form.name])) for form in batch.forms)
    if families == FAMILIES:
        with group_of_one(driver) as group:
            for case in collectives.cases():
                answers.update(collectives.run(group, case))
    fixture.save(out, answers, about(device) | {"forms": len(table(families))})
    print(f"{len(answers)} answers, {out.stat().st_size} bytes")
    for line in refused:
        print("refused", line)
    return len(refused) > 0


def verdicts(driver: str, stored: dict[str, fixture.Stored]) -> list[verdict.Verdict]:
    device = df.device(0, driver=driver)
    found = []
    for batch in batches():
        found += verdict.judge_batch(batch, stored, execute.run(device, batch))
    with group_of_one(driver) as group:
        for case in collectives.cases():
            for name, given in collectives.run(group, case).items():
                found.append(verdict.judge_output(name, stored.get(name), given))
    return found


def compare(driver: str, paths: list[Path]) -> int:
    stored: dict[str, fixture.Stored] = {}
    for path in paths:
        answers, origin = fixture.load(path)
        print(", ".join(f"{key} {value}" for key, value in origin.items()))
        stored |= answers
    return show(verdicts(driver, stored))


def record_matrix(driver: str, times: int, out: Path, whole: Path | None) -> int:
    """Write the fixture `out`. The file `whole`, if given, gets every word of the results, too many for a fixture."""
    device = df.device(0, driver=driver)
    answers = matrix.answers(device, times)
    fixture.save(out, answers, about(device) | {"forms": len(matrix_forms.table())})
    print(f"{len(answers)} answers, {out.stat().st_size} bytes")
    if whole is not None:
        np.savez_compressed(whole, **{name: answer.words for name, answer in answers.items()})  # type: ignore[arg-type]
    return 0


def compare_matrix(driver: str, times: int, path: Path) -> int:
    stored, origin = fixture.load(path)
    print(", ".join(f"{key} {value}" for key, value in origin.items()))
    given = matrix.answers(df.device(0, driver=driver), times)
    return show([verdict.judge_output(name, stored.get(name), answer) for name, answer in given.items()])


def show(found: list[verdict.Verdict]) -> int:
    """Print the forms whose results do not equal the recorded ones, then the numbers of verdicts by opcode. Returns 1
    if the results of a form are outside its bound, or if a form has changed since the recording; otherwise 0.
    """
    counts: dict[str, Counter[str]] = {}
    for v in found:
        counts.setdefault(v.name.split(".")[0].split()[0], Counter())[v.status] += 1
        if v.status != "equal":
            print(f"{v.status}: {v.name}")
            for line in v.detail:
                print(f"    {line}")
    statuses = ("equal", "within bound", "differs", "stale")
    print(f"{'':16}" + "".join(f"{s:>14}" for s in statuses))
    for base, by in sorted(counts.items()):
        print(f"{base:16}" + "".join(f"{by[s] or '':>14}" for s in statuses))
    total = Counter(v.status for v in found)
    print(f"{'all':16}" + "".join(f"{total[s]:>14}" for s in statuses))
    return not all(v.fine for v in found)


def both(extra: int) -> int:
    """Run all forms on both drivers, with the fixture's operands and `extra` random ones, and print the forms whose
    results differ. Returns 1 if there are any."""
    devices = [df.device(0, driver=name) for name in ("emu", "cuda")]
    wrong = 0
    for batch in batches():
        emulated, real = (execute.run(device, batch, extra) for device in devices)
        columns = operands.rows(batch.sources, extra)
        for form in batch.forms:
            a, b = emulated[form.name], real[form.name]
            check = rules.RULES[form.rule].wrong
            sources = tuple(c[: len(a)] for c in columns)
            bad = np.flatnonzero(check(a, b, sources, form.result) if check else (a != b).reshape(len(a), -1).any(1))
            if len(bad):
                wrong += 1
                print(f"{form.name}: the results of {len(bad)} of {len(a)} rows differ")
                for row in bad[:4]:
                    values = ", ".join(f"{int(c[row]):#x}" for c in sources)
                    print(f"    ({values}) gives {a[row]!r}, GPU {b[row]!r}")
    print(f"{len(table())} forms, {wrong} differ")
    return wrong > 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.fidelity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("--driver", default="cuda")
    recording.add_argument("--out", type=Path, required=True)
    recording.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    comparing = commands.add_parser("compare")
    comparing.add_argument("--driver", default="emu")
    comparing.add_argument("fixtures", type=Path, nargs="+")
    recording = commands.add_parser("record-matrix")
    recording.add_argument("--driver", default="cuda")
    recording.add_argument("--out", type=Path, required=True)
    recording.add_argument("--times", type=int, default=1)
    recording.add_argument("--whole", type=Path, help="a file for every word of the results")
    comparing = commands.add_parser("compare-matrix")
    comparing.add_argument("--driver", default="emu")
    comparing.add_argument("--times", type=int, default=1)
    comparing.add_argument("fixture", type=Path)
    pair = commands.add_parser("both")
    pair.add_argument("--rows", type=int, default=65536, help="random operands more than the fixture has")
    args = parser.parse_args()
    if args.command == "record":
        return record(args.driver, args.out, tuple(args.families))
    if args.command == "compare":
        return compare(args.driver, args.fixtures)
    if args.command == "record-matrix":
        return record_matrix(args.driver, args.times, args.out, args.whole)
    if args.command == "compare-matrix":
        return compare_matrix(args.driver, args.times, args.fixture)
    return both(args.rows)


if __name__ == "__main__":
    sys.exit(main())
