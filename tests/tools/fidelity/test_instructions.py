# SPDX-License-Identifier: Apache-2.0
"""On the emulated driver every instruction form gives the results of a GPU for the same operands."""

from __future__ import annotations

import pytest

pytest.importorskip("llvmlite")
from drvfuse.emu.translate import module  # noqa: E402, F401  (registers the opcodes)
from drvfuse.emu.translate.opcode import HANDLERS  # noqa: E402
from tools.fidelity import execute, forms, matrix_forms, verdict  # noqa: E402
from tools.fidelity.batch import Batch, batches, form_digest  # noqa: E402

pytestmark = pytest.mark.emulated


@pytest.mark.parametrize("batch", batches(), ids=lambda b: b.name.replace(" ", "-"))
def test_instruction_forms_have_the_results_of_the_gpu(device, recorded, batch: Batch) -> None:
    found = verdict.judge_batch(batch, recorded[0], execute.run(device, batch))
    assert len(found) == len(batch.forms)
    wrong = [v for v in found if not v.fine]
    assert not wrong, "\n".join(line for v in wrong[:10] for line in (f"{v.status}: {v.name}", *v.detail))


def test_every_opcode_of_the_translator_has_a_form_or_a_reason() -> None:
    table = (*forms.table(), *matrix_forms.table())
    names = [form.name.split()[0].split(".") for form in table]
    covered = {".".join(parts[:2]) if ".".join(parts[:2]) in HANDLERS else parts[0] for parts in names}
    assert covered | set(forms.EXCLUDED) == {name for name in HANDLERS if name[0] != "@"}  # "@..." is no PTX opcode
    assert not covered & set(forms.EXCLUDED)
    assert all(forms.EXCLUDED.values())


def test_every_form_is_named_after_an_opcode_in_its_body() -> None:
    for form in forms.table():
        opcode = form.name.split()[0]
        assert opcode in form.body or opcode in ("ret", "exit"), form.name  # every kernel ends with ret and exit


def test_the_recorded_results_match_the_version_of_the_generator(recorded) -> None:
    stored, about = recorded
    sources = {form.name: form_digest(form) for form in forms.table()}
    assert sum(part["forms"] for part in about) == len(sources)
    assert {name: stored[name].source for name in sources if name in stored} == sources
    for part in about:
        assert "NVIDIA" in part["gpu"] and part["driver"] >= 12000 and part["nvrtc"] and part["date"]
