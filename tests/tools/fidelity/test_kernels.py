# SPDX-License-Identifier: Apache-2.0
"""On the emulated driver drvfuse's own kernels give the results recorded on a GPU, also for NaN, infinities and
subnormals.
"""

from __future__ import annotations

import pytest

pytest.importorskip("llvmlite")
import drvfuse as df  # noqa: E402
from tools.fidelity import collectives, forms, verdict  # noqa: E402

CASES = tuple(collectives.cases())

pytestmark = pytest.mark.emulated


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name.replace(" ", "-"))
def test_kernels_have_the_results_of_the_gpu(device, recorded, case: collectives.Case) -> None:
    with df.Group.local(1, driver=device.driver, max_blocks=4, workspace_bytes=1 << 20) as group:
        given = collectives.run(group, case)
    assert given.keys() == {name for name in recorded[0] if name.startswith(case.name + ": ")}
    found = [verdict.judge_output(name, recorded[0].get(name), answer) for name, answer in given.items()]
    wrong = [v for v in found if not v.fine]
    assert not wrong, "\n".join(line for v in wrong for line in (f"{v.status}: {v.name}", *v.detail))


def test_the_recorded_results_match_the_cases(recorded) -> None:
    names = {form.name for form in forms.table()}
    outputs = [name for name in recorded[0] if name not in names]
    assert {name.rsplit(": ", 1)[0] for name in outputs} == {case.name for case in CASES}
