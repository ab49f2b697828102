# SPDX-License-Identifier: Apache-2.0
"""cuda-python's modules, switched to an emulated machine.

    cuda.bindings.driver, cuda.cuda      the functions are those of the machine's driver
    cuda.bindings.runtime, cuda.cudart   those of the runtime API on that driver (`emu.cudart`)
    cuda.bindings.nvrtc, cuda.nvrtc      NVRTC's own, which give PTX where a cubin is requested (`nvrtc`);
                                         also in cuda.bindings._v2.nvrtc, where that exists

The module objects stay, and only the functions in them are replaced. So it does not matter when, under which name and
where a module was imported; types, enums and constants are still those of cuda-python. But if another module has
imported a function by its name, that function would still call the real driver; in this case nothing is switched, and
Unsupported is raised.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from ...errors import ArgumentError, ClosedError, DriverUnavailable, Unsupported, shown
from ..cudart import EmulatedRuntime
from ..cudart.types import is_function
from ..machine.machine import default_machine
from . import nvrtc

Functions = Mapping[str, Callable[..., Any]]
Exchanged = list[tuple[ModuleType, Functions]]

_OLD_NAMES = {
    "cuda.bindings.driver": "cuda.cuda",
    "cuda.bindings.runtime": "cuda.cudart",
    "cuda.bindings.nvrtc": "cuda.nvrtc",
}
_V2_NVRTC = "cuda.bindings._v2.nvrtc"
_lock = threading.Lock()
_active: Any = None


@contextlib.contextmanager
def switched(machine: Any = None) -> Iterator[Any]:
    """Switch cuda-python's modules to `machine` for a `with` block, in all threads. The value of the `with`
    statement is the machine.

    `machine` is a Machine, a Process of a Machine or an AttachedMachine; None is the default machine. Raises
    Unsupported, and switches nothing, inside another switch of this process, or if a module has imported a function of
    the real driver by its name. Raises ArgumentError if `machine` is no machine, and ClosedError for a closed machine.
    """
    machine = default_machine() if machine is None else machine
    if not hasattr(machine, "driver") or not hasattr(machine, "reports"):
        expected = "a drvfuse.emu.Machine, a Process of a Machine, an AttachedMachine, or None"
        raise ArgumentError("machine", shown(machine), expected)
    if machine.closed:
        raise ClosedError(f"{machine!r} was closed")
    before = _switch(machine)
    try:
        yield machine
    finally:
        _switch_back(before)


def switch_for_good(machine: Any) -> None:
    """Make cuda-python's modules use `machine` until this process ends. Raises what `switched` raises."""
    _switch(machine)


def _switch(machine: Any) -> Exchanged:
    """Replace the functions of all modules. Returns the original ones, by module."""
    global _active
    with _lock:
        if _active is not None:
            raise Unsupported(f"cuda-python is switched to {_active!r} already; end that switch before another begins")
        exchanged = [(module, _replaced(module, machine)) for module in _modules()]
        _refuse_held_functions(exchanged)
        _active = machine
        return [(module, _exchange(module, functions)) for module, functions in exchanged]


def _switch_back(before: Exchanged) -> None:
    global _active
    with _lock:
        for module, functions in before:
            _exchange(module, functions)
        _active = None


def _modules() -> list[ModuleType]:
    try:
        found = [importlib.import_module(name) for name in _OLD_NAMES]
        with contextlib.suppress(ModuleNotFoundError):  # only the newest bindings have this module
            found.append(importlib.import_module(_V2_NVRTC))
        return found
    except ImportError as error:
        raise DriverUnavailable(
            "a program can be switched to the emulated driver only if cuda.bindings is installed: "
            f"pip install 'drvfuse[cu12]' or 'drvfuse[cu13]' ({error})"
        ) from error


def _replaced(module: ModuleType, machine: Any) -> Functions:
    """The replacements for a module's functions, which call the machine."""
    if module.__name__ == "cuda.bindings.nvrtc":
        return nvrtc.functions(module)
    if module.__name__ == _V2_NVRTC:
        return nvrtc.functions_v2(module)
    api = machine.driver
    if module.__name__ == "cuda.bindings.runtime":
        api = EmulatedRuntime(api)
    found = {name: getattr(api, name) for name, value in vars(module).items() if is_function(name, value)}
    # Programs may inspect a function, so each replacement has the signature and the docstring of the original.
    for name, function in found.items():
        if function is not vars(module)[name]:
            function.__wrapped__, function.__doc__ = vars(module)[name], vars(module)[name].__doc__
    return {name: function for name, function in found.items() if function is not vars(module)[name]}


def _refuse_held_functions(exchanged: Exchanged) -> None:
    """Raise Unsupported if a function that would be replaced is a global variable of another module."""
    real = [(vars(module)[name], f"{module.__name__}.{name}") for module, new in exchanged for name in new]
    names = {id(function): name for function, name in real if function.__module__.startswith("cuda.bindings.")}
    for home, module in list(sys.modules.items()):
        if home in _OLD_NAMES.values() or home.startswith(("cuda.bindings.", "drvfuse.")):
            continue
        values = list(getattr(module, "__dict__", {}).values())
        held = next((names[id(value)] for value in values if id(value) in names), None)
        if held is not None:
            raise Unsupported(
                f"module {home} has imported {held} before the switch to the emulated driver and would go on calling "
                f"the real one: switch before {home} is imported, or let it import the module in place of the function"
            )


def _exchange(module: ModuleType, functions: Functions) -> Functions:
    """Put functions into a module and, if it is imported, into the module with the older name, such as `cuda.cuda`.
    Returns the original functions.
    """
    before = {name: vars(module)[name] for name in functions}
    old = sys.modules.get(_OLD_NAMES.get(module.__name__, ""))
    for place in (module, *((old,) if old else ())):
        for name, function in functions.items():
            if name in vars(place):
                setattr(place, name, function)
    return before
