# SPDX-License-Identifier: Apache-2.0
"""All driver calls go through this module: it selects the driver, hides differences between versions of the bindings,
raises errors, and records calls.

`get_driver("cuda").cuMemAlloc(4096)` calls `cuda.bindings.driver.cuMemAlloc`, raises `DriverError` unless it succeeds,
and returns the values after the status: None, one value, or a tuple. The emulated driver is called in the same way.

Nothing here runs at import. A process forked after a driver was opened must not use it: every call then raises
`ClosedError` at once, because neither CUDA contexts nor the emulated machine survive a fork.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar

from .. import config
from ..compiler.library import cuda_version
from ..errors import ArgumentError, ClosedError, DriverError, DriverUnavailable, Unsupported, shown
from . import calls
from .calls import last_calls as last_calls
from .driver_errors import HINTS, HOW_TO_EMULATE, NO_LIBRARY, error_of, translate

if TYPE_CHECKING:
    from ..emu import Machine, Process
    from .device import Device

DriverLike: TypeAlias = "Driver | Machine | Process | str | None"
"""A driver: "cuda" for the installed one, "emu" for the default emulated machine, a `drvfuse.emu.Machine`, a `Process`
of one, or a Driver. None means the setting `driver`."""

# Bindings 12.x have both names, and the one with a suffix has the newest signature. In bindings 13.x the name without a
# suffix has this signature, and the other name is missing.
_NEWEST = {
    "cuCtxCreate": "cuCtxCreate_v4",
    "cuDeviceGetUuid": "cuDeviceGetUuid_v2",
    "cuGraphAddDependencies": "cuGraphAddDependencies_v2",
    "cuGraphAddNode": "cuGraphAddNode_v2",
    "cuGraphGetEdges": "cuGraphGetEdges_v2",
    "cuGraphNodeGetDependencies": "cuGraphNodeGetDependencies_v2",
    "cuGraphRemoveDependencies": "cuGraphRemoveDependencies_v2",
    "cuMemAdvise": "cuMemAdvise_v2",
    "cuMemPrefetchAsync": "cuMemPrefetchAsync_v2",
    "cuStreamGetCaptureInfo": "cuStreamGetCaptureInfo_v3",
    "cuStreamUpdateCaptureDependencies": "cuStreamUpdateCaptureDependencies_v2",
}

_forked = False
_lock = threading.Lock()
_drivers: dict[str, Driver] = {}


def _after_fork() -> None:
    global _forked
    _forked = bool(_drivers) or _machines_opened


_machines_opened = False
os.register_at_fork(after_in_child=_after_fork)


def forked() -> bool:
    """True in a process that was forked after a driver was opened."""
    return _forked


Part = TypeVar("Part")


class Owner:
    """Base of objects to which other modules attach objects, the parts, that live as long as the owner. `part(kind)`
    returns the part of class `kind`, and makes it if it is missing.
    """

    def __init__(self) -> None:
        self._parts: dict[Any, Any] = {}

    def part(self, kind: Callable[[Self], Part]) -> Part:
        """The part of this object whose class is `kind`. The first call makes the part as `kind(self)`."""
        found: Part | None = self._parts.get(kind)
        return self._parts.setdefault(kind, kind(self)) if found is None else found


class Driver(Owner):
    """One driver: `name` is "cuda" or "emu", and `types` has the enums and structures of the bindings. `machine` is the
    emulated machine or one of its processes; for "cuda" it is None.

    `driver.cuXxx(*args)` is a checked call. All methods may be used from any thread.
    """

    def __init__(self, name: str, functions: Any, types: Any, machine: Machine | Process | None = None) -> None:
        super().__init__()
        self.name, self.machine, self.types = name, machine, types
        self.devices: dict[int, Device] = {}
        # Functions that free something, with their arguments. `owned` has those of the objects that are open, each
        # under a key of its own. `retired` has those that the next `lifetime.flush` calls.
        self.owned: dict[object, tuple[Callable[..., None], tuple[Any, ...]]] = {}
        self.retired: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self.abandoned: list[Any] = []  # memory that could not be freed safely; it is kept as long as the driver lives
        self.lost = False  # whether an error has reported the loss of a context
        self.lock = threading.RLock()
        self._functions = functions
        mode = config.get("trace_driver")
        self._sink = calls.sink(mode)
        self._recording = mode != "off"

    def __repr__(self) -> str:
        return f"<Driver {self.name}>"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("cu"):
            raise AttributeError(f"Driver has no attribute {name!r}")
        call = self._checked(name, self.raw(name))
        self.__dict__[name] = call  # cached so that later look-ups do not call __getattr__
        return call

    def raw(self, name: str) -> Callable[..., Any]:
        """The driver's function `name`, which returns `(CUresult, values...)`. Raises Unsupported if the bindings lack
        it."""
        for candidate in (_NEWEST.get(name), name):
            function = getattr(self._functions, candidate, None) if candidate else None
            if function is not None:
                vetoable = (self.name, name) == ("cuda", "cuMulticastCreate")
                return self._under_veto(function) if vetoable else function
        raise Unsupported(f"the {self.name} driver's bindings have no {name}")

    def _under_veto(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that calls `function`, or raises Unsupported if a veto forbids multicast."""
        from .multicast_support import require_allowed

        def call(*args: Any) -> Any:
            require_allowed(self)
            return function(*args)

        return call

    @functools.cached_property
    def launch(self) -> Callable[..., Any]:
        """cuLaunchKernelEx with an additional first argument, a `calls.LaunchNote`. Errors and the record of calls show
        this note in place of the arguments."""
        name, append, sink = "cuLaunchKernelEx", self._recorder(""), self._sink
        function = self.raw(name)

        def call(note: calls.LaunchNote, *args: Any) -> None:
            if _forked:
                raise ClosedError(FORKED)
            try:
                code = (function(*args) if sink is None else sink(name, function, args, note))[0]
            except (RuntimeError, ValueError, TypeError, OverflowError) as error:
                translate(self, name, note, error)
                raise
            append((name, note, code))
            if code:
                raise self.error(name, note, code)

        return call

    def _recorder(self, name: str) -> Callable[[calls.Entry], None]:
        return calls.ring_of(name).append if self._recording else lambda entry: None

    def _checked(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        append, append_failure, sink = self._recorder(name), self._recorder(""), self._sink

        def call(*args: Any) -> Any:
            if _forked:
                raise ClosedError(FORKED)
            try:
                result = function(*args) if sink is None else sink(name, function, args, args)
            except (RuntimeError, ValueError, TypeError, OverflowError) as error:
                translate(self, name, args, error)
                raise
            code = result[0]
            if code:
                append_failure((name, args, code))
                raise self.error(name, args, code)
            append((name, args, code))
            count = len(result)
            if count == 2:
                return result[1]
            return None if count == 1 else result[1:]

        call.__name__ = name
        return call

    def unrecorded(self, name: str) -> Callable[..., None]:
        """The driver's function `name` as a checked call that returns nothing and is not kept in `calls.ring`. If the
        setting `trace_driver` writes calls to stderr or a file, calls of the function are written too."""
        if self._sink is not None:
            return getattr(self, name)
        function = self.raw(name)

        def call(*args: Any) -> None:
            code = function(*args)[0]
            if code:
                raise ClosedError(FORKED) if _forked else self.error(name, args, code)

        return call

    @functools.cached_property
    def capture_status(self) -> Callable[..., tuple[Any, ...]]:
        """cuStreamIsCapturing, which returns `(CUresult, values...)`. These calls are left out of the record of
        the last calls, since every launch makes one."""
        name = "cuStreamIsCapturing"
        function, sink = self.raw(name), self._sink

        def call(*args: Any) -> tuple[Any, ...]:
            if _forked:
                raise ClosedError(FORKED)
            found: tuple[Any, ...] = function(*args) if sink is None else sink(name, function, args, args)
            return found

        return call

    def result(self, name: str, *args: Any) -> tuple[Any, ...]:
        """Call `name` and return its raw `(CUresult, values...)`, for queries where a failure is an answer."""
        if _forked:
            raise ClosedError(FORKED)
        function = self.raw(name)
        try:
            result = function(*args) if self._sink is None else self._sink(name, function, args, args)
        except (RuntimeError, ValueError, TypeError, OverflowError) as error:
            translate(self, name, args, error)
            raise
        self._recorder(name)((name, args, result[0]))
        return tuple(result)

    def pointer_device(self, ptr: int) -> int | None:
        """Index of the device whose memory `ptr` is in; None if the driver does not know the pointer."""
        attribute = self.types.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        if self.name != "cuda":
            code, index = self.result("cuPointerGetAttribute", attribute, ptr)
            return None if code else int(index)
        # libcuda is called directly, since cuda-bindings up to 12.9 and 13.x up to 13.3 return device 0 for every
        # pointer (NVIDIA/cuda-python issue 2928).
        value = ctypes.c_int(-1)
        query = ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute
        status = query(ctypes.byref(value), ctypes.c_int(int(attribute)), ctypes.c_uint64(ptr))
        return None if status or value.value < 0 else value.value

    def has(self, name: str) -> bool:
        """True if the bindings of this driver have the function."""
        return any(hasattr(self._functions, n) for n in (name, _NEWEST.get(name, name)))

    @property
    def takes_cubins(self) -> bool:
        """Whether the driver loads cubins. The emulated driver does not: it runs PTX, so kernels for it are compiled to
        PTX only."""
        return self.machine is None

    @property
    def closed(self) -> bool:
        """True if the emulated machine was closed. Its memory is freed then, and every call fails."""
        return self.machine is not None and bool(self.machine.closed)

    def require_open(self) -> None:
        """Raise ClosedError if the driver cannot be used any more."""
        if _forked:
            raise ClosedError(FORKED)
        if self.machine is not None and self.machine.closed:
            raise ClosedError(f"{self.machine!r} was closed, and its devices, arrays and groups with it")

    def error(self, name: str, args: tuple[Any, ...], code: Any) -> DriverError | ClosedError:
        """The error for a call that gave `code`: a DriverError, unless the emulated machine was closed."""
        return error_of(self, name, args, code)


FORKED = (
    "this process was forked after the driver was opened, and a driver does not survive a fork; "
    "start workers with multiprocessing's 'spawn' method, or fork before the first use"
)


def _bindings() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        version = cuda_version()
        wanted = "cu13" if version and version[0] >= 13 else "cu12"
        other = "cu12" if wanted == "cu13" else "cu13"
        raise DriverUnavailable(
            f"cuda.bindings is not installed: pip install 'drvfuse[{wanted}]' (or 'drvfuse[{other}]' for the other CUDA"
            f" major version); the emulated driver needs it as well, for its types ({error})"
        ) from error
    return driver


def _open_cuda() -> Driver:
    bindings = _bindings()
    try:
        (code,) = bindings.cuInit(0)
    except RuntimeError as error:  # without a driver library, the bindings raise a subclass of RuntimeError
        raise DriverUnavailable(f"{NO_LIBRARY} ({error})") from error
    count = 0
    if not code:
        code, count = bindings.cuDeviceGetCount()
    if code or not count:
        name = calls.code_name(code) if code else "no device"
        hint = HINTS.get(int(code) or 100, "see the NVIDIA driver's kernel log")
        raise DriverUnavailable(f"the CUDA driver has no usable device: {name}: {hint}. {HOW_TO_EMULATE}")
    return Driver("cuda", bindings, bindings)


def _open_machine(machine: Machine | Process) -> Driver:
    global _machines_opened
    found: Driver | None = machine.runtime_driver
    if found is None:
        if machine.closed:
            raise ClosedError(f"{machine!r} was closed")
        found = Driver("emu", machine.driver, _bindings(), machine)
        found.cuInit(0)
        machine.runtime_driver = found
        _machines_opened = True
    return found


def _check_emulator() -> None:
    if importlib.util.find_spec("llvmlite") is None:
        raise DriverUnavailable("the emulated driver needs llvmlite: pip install 'drvfuse[emu]'")
    _bindings()


def _default_machine() -> Machine:
    _check_emulator()
    from .. import emu

    return emu.driver.default_machine()


_DRIVERS = '"cuda", "emu", a drvfuse.emu.Machine, one of its processes, or a Driver'


def get_driver(spec: DriverLike = None) -> Driver:
    """The driver for `spec`: "cuda", "emu" (one process-wide machine), an emulated machine or process, or a Driver.

    None selects the setting `driver`. Equal values give the same object. Raises DriverUnavailable, whose message says
    what to install or set; the emulated driver is never selected silently. The setting `trace_driver` is read when a
    driver is opened.
    """
    if spec is None:
        spec = config.get("driver")
    if isinstance(spec, Driver):
        return spec
    if _forked:
        raise ClosedError(FORKED)
    if not isinstance(spec, str):
        if not hasattr(spec, "driver") or not hasattr(spec, "reports"):
            raise ArgumentError("driver", shown(spec), _DRIVERS)
        _check_emulator()
        with _lock:
            return _open_machine(spec)
    if spec not in ("cuda", "emu"):
        raise ArgumentError("driver", shown(spec), _DRIVERS)
    with _lock:
        if spec not in _drivers or _drivers[spec].closed:
            _drivers[spec] = _open_cuda() if spec == "cuda" else _open_machine(_default_machine())
        return _drivers[spec]


def enum_value(types: Any, enum: str, name: str) -> Any:
    """Member `name` of an enum of the bindings; Unsupported if these bindings do not have it."""
    try:
        return getattr(getattr(types, enum), name)
    except AttributeError:
        raise Unsupported(f"the installed cuda-bindings have no {name}") from None
