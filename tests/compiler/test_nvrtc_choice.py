# SPDX-License-Identifier: Apache-2.0
"""The choice of an NVRTC that the driver supports."""

from __future__ import annotations

import pytest

from drvfuse.compiler import library
from drvfuse.errors import DriverUnavailable, Unsupported

choose = library._choose.__wrapped__


@pytest.mark.parametrize(
    ("installed", "driver", "chosen"),
    [
        ({12: "a", 13: "b"}, (12, 9), "a"),
        ({12: "a", 13: "b"}, (13, 0), "b"),
        ({12: "a"}, (13, 0), "a"),
        ({12: "a", 13: "b"}, None, "b"),
    ],
)
def test_the_newest_nvrtc_that_the_driver_supports_is_chosen(
    installed: dict[int, str], driver: tuple[int, int] | None, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_installed", lambda: installed)
    monkeypatch.setattr(library, "cuda_version", lambda: driver)
    assert choose() == chosen


def test_with_only_a_newer_nvrtc_the_error_names_the_wheel_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_installed", lambda: {13: "b"})
    monkeypatch.setattr(library, "cuda_version", lambda: (12, 4))
    with pytest.raises(Unsupported, match="nvidia-cuda-nvrtc-cu12"):
        choose()


def test_without_nvrtc_the_error_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_installed", dict)
    monkeypatch.setattr(library, "cuda_version", lambda: (13, 0))
    with pytest.raises(DriverUnavailable, match=r"drvfuse\[cu13\]"):
        choose()
