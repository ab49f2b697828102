# SPDX-License-Identifier: Apache-2.0
"""The engine that an argument `exchange` selects, and the error if there is none."""

from __future__ import annotations

import pytest

from drvfuse.errors import Unsupported
from drvfuse.nodes import engines
from drvfuse.nodes.engines import find_engine
from drvfuse.nodes.in_process import InProcess


@pytest.fixture
def installed(monkeypatch):
    """`installed(names)`: only the packages of these engines can be found."""

    def only(*names):
        monkeypatch.setattr(engines, "_installed", lambda name: name in names or name == "in_process")

    return only


def test_a_group_of_one_process_needs_no_library(installed):
    installed()
    assert isinstance(find_engine(None, True, True), InProcess)
    assert isinstance(find_engine("in_process", False, False), InProcess)


def test_without_a_library_the_error_says_what_to_install(installed):
    installed()
    with pytest.raises(Unsupported, match=r"drvfuse\[nccl-cu12\] or drvfuse\[nccl-cu13\] or drvfuse\[mpi\]"):
        find_engine(None, False, False)
    with pytest.raises(Unsupported, match=r"install drvfuse\[mpi\]"):
        find_engine(None, False, True)
    with pytest.raises(Unsupported, match=r'exchange="mpi" needs the package mpi4py'):
        find_engine("mpi", False, False)
    with pytest.raises(Unsupported, match=r'exchange="nccl" needs the package nccl'):
        find_engine("nccl", False, False)


def test_an_installed_library_that_cannot_be_loaded_is_unsupported(installed, monkeypatch):
    installed("nccl", "mpi")
    for module in ("nccl", "mpi4py"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(Unsupported, match=r"cannot be loaded .* install drvfuse\[nccl-cu12\] or"):
        find_engine(None, False, False)
    with pytest.raises(Unsupported, match=r"cannot be loaded .* install drvfuse\[mpi\]"):
        find_engine(None, False, True)


def test_a_user_defined_exchange_is_used_or_refused_with_the_method_it_lacks(refused):
    own = InProcess()
    assert find_engine(own, False, False) is own

    class Half:
        name, watched = "half", False

        def open(self):
            pass

    refused(lambda: find_engine(Half(), True, True), "exchange", "without check_captures, all_gather")
    refused(lambda: find_engine("gloo", True, True), "exchange", 'one of "nccl", "mpi", "in_process"')
    refused(lambda: find_engine(3, True, True), "exchange", "3 without open")
