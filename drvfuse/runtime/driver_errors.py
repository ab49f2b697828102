# SPDX-License-Identifier: Apache-2.0
"""Makes the errors of driver calls. Their texts say what the driver reports, give a hint, and show what the emulated
machine has found and which calls came before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError, ClosedError, DriverError, DriverUnavailable, Unsupported
from . import calls

if TYPE_CHECKING:
    from .driver import Driver

HINTS = {
    1: "an argument is out of range, misaligned, or a handle of another device or context",
    2: "the device is out of memory; other processes and framework caches count too",
    3: "no driver call was made before in this process, or it was forked after the first one",
    4: "the driver is shutting down: the interpreter is exiting",
    100: "no GPU is visible: check CUDA_VISIBLE_DEVICES and the container's device list",
    200: "the image is damaged or is not a cubin or PTX for this device",
    201: "no context, or another device's context, is current: wrap the call in `with device.use():`",
    209: "the cubin was built for another architecture: compile for device.arch",
    214: "an uncorrectable memory error: the GPU needs a reset",
    217: "these devices cannot reach one another's memory: see `nvidia-smi topo -p2p r`",
    218: "the PTX does not assemble",
    222: "the PTX is newer than the driver: use an NVRTC of the driver's CUDA version or older",
    400: "the handle was destroyed, or belongs to another context",
    500: "the module has no symbol of that name: C++ names are mangled, see the module's kernels",
    600: "work queued before is still running",
    700: "a kernel touched memory it may not touch",
    701: "block size times registers, or the shared memory, is more than the multiprocessor has",
    702: "a kernel ran longer than the display watchdog allows",
    704: "harmless: peer access was enabled before",
    705: "call Device.enable_peer before the access",
    708: "the primary context is in use already",
    709: "the context was destroyed under its user, e.g. by another library's device reset",
    710: "an assert() in a kernel failed",
    715: "a kernel executed an instruction that this device does not have",
    716: "a kernel accessed memory at an address that is not a multiple of the access size",
    717: "a kernel used an address outside the space its instruction needs",
    718: "a kernel jumped to an invalid address",
    719: "a kernel failed (trap, bad instruction, hardware)",
    720: "a cooperative launch has more blocks than fit on the device at once",
    801: "this device or driver does not have the feature",
    802: "the fabric is not ready: the fabric manager may still be starting",
    803: "the installed driver is too old for the CUDA libraries in use",
    900: "the operation is not allowed while a stream is being captured",
    901: "an operation that capture forbids was made on the stream: the capture is lost",
    904: "a stream forked into the capture was not joined again",
    905: "the event or stream belongs to another capture",
    906: "the legacy default stream cannot take part in a capture",
    912: "the launch attributes do not go together or are wrong for this kernel",
    914: "another process sharing this GPU through MPS failed",
}

_EMULATED_HINTS = {
    218: "what is wrong with the PTX, or what of it is not emulated",
    702: "the kernel could not go on, made more steps than the limit allows, or was ended by Ctrl-C",
}  # the hints of the emulated driver for these codes

_CONTEXT_LOST = frozenset({700, 702, 710, 714, 715, 716, 717, 718, 719})
_GO_ON = {
    "cuda": "the context is lost, and the process must be started again to use this GPU; driver='emu' finds the line",
    "emu": "the context is lost: go on with a fresh drvfuse.emu.Machine, or with Device.close() and a new df.device()",
}
# Kinds of reports of the emulated machine after which the context is still usable.
_HARMLESS = frozenset({"context", "descriptor", "module", "multicast", "out_of_memory", "race"})

HOW_TO_EMULATE = (
    'To run on emulated GPUs instead ask for them: driver="emu", or DRVFUSE_DRIVER=emu in the environment '
    "(they need llvmlite: pip install 'drvfuse[emu]')."
)
NO_LIBRARY = (
    "the NVIDIA driver library libcuda.so.1 cannot be loaded; install the NVIDIA driver "
    f"(in a container: run it with --gpus). {HOW_TO_EMULATE}"
)


def error_of(driver: Driver, name: str, args: tuple[Any, ...], code: Any) -> DriverError | ClosedError:
    """The error for a call that gave `code`, with its causes, as `Driver.error` returns it."""
    if driver.closed:
        return ClosedError(f"{name}: {driver.machine!r} was closed, and its devices, arrays and groups with it")
    number = int(code)
    driver.lost |= number in _CONTEXT_LOST
    report = _report(driver, number)  # the report is read first, since the driver calls below may replace it
    label, text = calls.code_name(code), ""
    try:
        status, raw = driver.raw("cuGetErrorName")(code)
        label = raw.decode() if not status and raw else label
        status, raw = driver.raw("cuGetErrorString")(code)
        text = raw.decode() if not status and raw else ""
    except Exception:  # the explanation must never hide the error itself
        text = text or "the driver gives no text for this code"
    emulated = _EMULATED_HINTS.get(number) if driver.name == "emu" else None
    hints = [emulated or HINTS.get(number), _GO_ON[driver.name] if number in _CONTEXT_LOST else None]
    hint = "; ".join(part for part in hints if part)
    explanation = f"{text} ({hint})" if hint and text else hint or text
    if report is not None:
        explanation += f"\n{report}"
    return DriverError(name, calls.format_args(args), number, label, explanation, _before(name, code))


def _report(driver: Driver, number: int) -> Any:
    """The emulated machine's report on the failed call, or its last report on the device whose context is lost."""
    if driver.machine is None:
        return None
    if number not in _CONTEXT_LOST:
        return driver.machine.refusal
    status, *values = driver.raw("cuCtxGetDevice")()
    failing = None if status else int(values[0])
    found = None if failing is None else driver.machine.finding(failing)
    if found is not None:
        return found
    for report in reversed(driver.machine.reports):
        if report.kind in _HARMLESS:
            continue
        # A deadlock or an interrupt concerns all devices, but its report names only the first one.
        if failing is None or report.device in (None, failing) or report.kind in ("deadlock", "interrupted"):
            return report
    return None


def _before(name: str, code: Any) -> list[str]:
    """The recorded calls before a failed call, as text. The failed call itself is left out, whether it is recorded or
    not."""
    recent = list(calls.ring)[-9:]
    if recent and recent[-1][0] == name and recent[-1][2] == code:
        recent.pop()
    return [calls.format_entry(entry) for entry in recent[-8:]]


def translate(driver: Driver, name: str, args: tuple[Any, ...], error: Exception) -> None:
    """Raise drvfuse's error for `error`, an exception of the CUDA bindings. Return if drvfuse has no error for it."""
    if driver.name != "cuda":
        return
    kind, text = type(error).__name__, str(error)
    if kind == "FunctionNotFoundError":
        raise Unsupported(f"the installed driver has no {name}: it is older than this feature") from error
    if kind == "DynamicLibNotFoundError":
        raise DriverUnavailable(NO_LIBRARY) from error
    if isinstance(error, ValueError) and "CUresult" in text:  # a code newer than the bindings
        digits = "".join(ch for ch in text.split("is not")[0] if ch.isdigit())
        why = "the installed cuda-bindings do not know this result: they are older than the driver"
        shown = calls.format_args(args)
        raise DriverError(name, shown, int(digits or -1), "unknown", why, calls.last_calls(8)) from error
    if isinstance(error, (TypeError, OverflowError, ValueError)):
        shown = calls.format_args(args)
        raise ArgumentError(f"arguments of {name}", f"({shown})", f"what cuda.bindings take: {text}") from error
