# SPDX-License-Identifier: Apache-2.0
"""Options, the mark `emu` and fixtures of pytest for tests on emulated GPUs. docs/testing.md describes them for users.

pytest imports this module in every run if drvfuse is installed, so only the fixtures import the emulator. Without the
mark and the fixtures no hook does anything.

A test that uses one of the fixtures gets its own machine (`emu_machine`). A test that has the mark and uses no fixture
gets `emu_cuda`, since it is written for cuda-python or for drvfuse's default driver. With several seeds the fixture
`emu_seed` is parametrised, so that selecting, repeating and distributing tests works as usual. A report that the test
has not expected fails the test at the end of its function; a later report fails its teardown.
"""

from __future__ import annotations

import argparse
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ..emu import Machine
    from ..runtime.device import Device
    from .run import Reports, Run

OPTIONS = ("devices", "race", "seeds", "arch", "peers", "sm_count", "memory_bytes", "check_initialised", "delay_stores")
"""The arguments of the mark: `seeds`, and options of `drvfuse.emu.Machine`."""
_RUN: pytest.StashKey[Run] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    _keep_as_written(pluginmanager)
    group = parser.getgroup("emu", "emulated CUDA driver (drvfuse)")
    # --emu-race and --emu-race=hardware are two flags, and not an option with an optional value, because such an option
    # would take a test path after `--emu-race` as its value.
    group.addoption(
        "--emu-race",
        "--emu-race=hardware",
        dest="emu_race",
        action="store_const",
        const="hardware",
        help="look for data races in all tests on emulated GPUs whose mark says nothing of it",
    )
    group.addoption(
        "--emu-race=strict",
        dest="emu_race",
        action="store_const",
        const="strict",
        help="the same by the PTX memory model alone, without what GPUs order beyond it",
    )
    group.addoption(
        "--emu-seeds",
        dest="emu_seeds",
        type=_count,
        metavar="N",
        help="run each test on emulated GPUs with the seeds 0 to N - 1, whatever its mark says",
    )


def _keep_as_written(pluginmanager: pytest.PytestPluginManager) -> None:
    """Let pytest import drvfuse's modules as they are.

    pytest rewrites the `assert` statements of all modules of a distribution that has a plugin. For drvfuse that takes
    seconds and is useless. pytest has only a private switch for it; without the switch tests start more slowly.
    """
    marked = getattr(getattr(pluginmanager, "rewrite_hook", None), "_must_rewrite", None)
    if isinstance(marked, set):
        marked.discard("drvfuse")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer of at least 1")
    return int(text)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "emu(devices=, race=, seeds=, ...): run with an emulated machine of these options (drvfuse.emu.Machine), once "
        "for each of so many seeds, or of the seeds of a list",
    )


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("emu") is None and "emu_machine" not in metafunc.fixturenames:
        return
    seeds = _seeds(metafunc.definition)
    if seeds is not None:
        if "emu_seed" not in metafunc.fixturenames:
            metafunc.fixturenames.append("emu_seed")
        metafunc.parametrize("emu_seed", seeds, indirect=True, ids=[f"seed{seed}" for seed in seeds])


def pytest_itemcollected(item: pytest.Item) -> None:
    names = getattr(item, "fixturenames", None)
    if names is not None and item.get_closest_marker("emu") is not None and "emu_machine" not in names:
        names.append("emu_cuda")


def marked_options(item: Any) -> dict[str, Any]:
    """The options of the marks `emu` of a test, its class and its module; the closest mark decides each option."""
    found: dict[str, Any] = {}
    for mark in item.iter_markers("emu"):
        unknown = [name for name in mark.kwargs if name not in OPTIONS]
        if unknown or mark.args:
            wrong = f"has no option {unknown[0]}" if unknown else "takes no argument without a name"
            pytest.fail(f"{item.nodeid}: the mark emu {wrong}; it takes {', '.join(OPTIONS)}", pytrace=False)
        found = {**mark.kwargs, **found}
    return found


def _seeds(item: Any) -> Sequence[int] | None:
    """The seeds of a test; None if it is to run once with seed 0."""
    marked, count = marked_options(item).get("seeds"), item.config.getoption("emu_seeds")
    chosen = marked if count is None else count
    if chosen is None:
        return None
    seeds = list(range(chosen)) if isinstance(chosen, int) and not isinstance(chosen, bool) else chosen
    valid = isinstance(seeds, Sequence) and seeds and all(type(seed) is int and seed >= 0 for seed in seeds)
    if not valid or len(set(seeds)) < len(seeds):
        must = "a number of at least 1, or a list of different integers of at least 0"
        pytest.fail(f"{item.nodeid}: seeds={marked!r} of the mark emu; it must be {must}", pytrace=False)
    return list(seeds)


# Fixtures ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def emu_seed(request: pytest.FixtureRequest) -> int:
    """The seed of this run of the test."""
    return int(getattr(request, "param", 0))


@pytest.fixture
def emu_machine(request: pytest.FixtureRequest, emu_seed: int) -> Iterator[Machine]:
    """An emulated machine for this test, `drvfuse.emu.Machine`, with the options of the mark `emu`."""
    from ..errors import ArgumentError
    from .run import Run

    options = marked_options(request.node)
    if options.pop("seeds", None) is not None and not hasattr(request.node, "callspec"):
        pytest.fail("seeds of the mark emu: a test method of unittest runs once; use a function or a plain class")
    race = request.config.getoption("emu_race")
    try:
        run = request.node.stash[_RUN] = Run(request.node, emu_seed, options, race)
    except ArgumentError as error:
        text = f"{request.node.nodeid}: an option of the mark emu: {error}"
        raise pytest.fail.Exception(text, pytrace=False) from None
    yield run.machine
    run.close()


@pytest.fixture
def emu_devices(emu_machine: Machine) -> list[Device]:
    """The devices of `emu_machine`, as `drvfuse.Device`."""
    from ..runtime.device import device

    return [device(index, driver=emu_machine) for index in range(len(emu_machine.devices))]


@pytest.fixture
def emu_device(emu_machine: Machine) -> Device:
    """The first device of `emu_machine`, as `drvfuse.Device`."""
    from ..runtime.device import device

    return device(0, driver=emu_machine)


@pytest.fixture
def emu_driver(emu_machine: Machine) -> Any:
    """The driver API of `emu_machine`, with the names of `cuda.bindings.driver`, initialised."""
    emu_machine.driver.cuInit(0)
    return emu_machine.driver


@pytest.fixture
def emu_cuda(emu_machine: Machine) -> Iterator[Any]:
    """`cuda.bindings.driver`, which uses `emu_machine` during the test, as `cuda.bindings.runtime` and `.nvrtc` do. The
    machine is also drvfuse's default driver.
    """
    from .. import config, emu

    with emu.program.switched(emu_machine), config.override(driver=emu_machine):
        from cuda.bindings import driver

        yield driver


@pytest.fixture
def emu_reports(request: pytest.FixtureRequest, emu_machine: Machine) -> Reports:
    """The reports of `emu_machine`. `emu_reports.expect(kind)` takes a report that the test provokes on purpose."""
    return request.node.stash[_RUN].reports


# Results -------------------------------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    result = yield
    run = item.stash.get(_RUN, None)
    if run is not None:
        run.check()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    run = item.stash.get(_RUN, None)
    if run is not None:
        if report.failed:
            run.failed = True
            report.sections.append(("emulated driver", run.section()))
        if call.when == "teardown":
            del item.stash[_RUN]
    return report
