# SPDX-License-Identifier: Apache-2.0
"""The loading of PTX as native code: translate, compile to an object, load the object into this process. Objects are
cached on disk.

A cache entry has an object and the description of its kernels. Its key is a hash of the PTX, the translator's sources,
the versions of llvmlite and LLVM, and the CPU; so an entry is never out of date.

The native runtime is compiled from runtime.cu at its first use and then cached. A wheel contains it as runtime.ptx, so
that the emulator needs no NVRTC. The libraries of `abi.LIBRARIES` are loaded in the same way with modules that need
them.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...compiler import cache
from ...compiler.library import library
from ...compiler.nvrtc import compile_source
from ...errors import CompileError, DriverUnavailable
from .. import abi
from ..abi.header import HEADER_NAME, header
from . import notice

if TYPE_CHECKING:
    from ..translate.code import GlobalVar, KernelCode

_HERE = Path(__file__).parent
RUNTIME = "runtime"
_OBJECT, _DESCRIPTION = "code.o", "kernels.json"
_PLAIN, _OPTIMISED = 0, 1  # optimisation levels of LLVM's code generator
_PASSES = (
    *("always_inliner", "sroa", "simplify_cfg", "instruction_combine", "post_order_function_attributes"),
    *("jump_threading", "simplify_cfg", "instruction_combine", "dead_store_elimination"),
)
"""LLVM's passes for raw modules. NVRTC has inlined functions and optimised loops, so these few give code as fast as the
passes of -O2 do, in an eighth of their time."""
_lock = threading.RLock()

# LLVM IR of functions that CUDA C++ cannot express: rt_call calls a function of the host by its address, and rt_now
# returns the host's time.
_SUPPORT = """
declare i32 @clock_gettime(i32, ptr)
define i32 @rt_call(ptr %function, ptr %thread) alwaysinline {
  %status = call i32 %function(ptr %thread)
  ret i32 %status
}
define i64 @rt_now() {
  %time = alloca [2 x i64]
  %code = call i32 @clock_gettime(i32 1, ptr %time)
  %seconds = load i64, ptr %time
  %rest = getelementptr i64, ptr %time, i64 1
  %nanoseconds = load i64, ptr %rest
  %scaled = mul i64 %seconds, 1000000000
  %sum = add i64 %scaled, %nanoseconds
  ret i64 %sum
}
"""


class NativeModule:
    """A loaded module: its kernels by name, its module variables, the total size of these in bytes, and its code,
    which stays loaded as long as the object exists.
    """

    def __init__(
        self, kernels: dict[str, KernelCode], variables: tuple[GlobalVar, ...], nbytes: int, code: Any
    ) -> None:
        self.kernels = kernels
        self.globals = variables
        self.globals_bytes = nbytes
        self._code = code

    def address(self, symbol: str) -> int:
        """The address of a function. Raises KeyError if the module has none of that name."""
        found = int(self._code.get_function_address(symbol))
        if not found:
            raise KeyError(symbol)
        return found

    def function(self, symbol: str, result: Any, *arguments: Any) -> Any:
        """A function as a Python callable. `result` and `arguments` are its ctypes types."""
        return ctypes.CFUNCTYPE(result, *arguments)(self.address(symbol))


@functools.cache
def _llvm() -> Any:
    try:
        import llvmlite.binding as llvm
    except ImportError:
        raise DriverUnavailable(
            'the emulated driver needs llvmlite, which is not installed: pip install "drvfuse[emu]"'
        ) from None
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    libm = ctypes.CDLL("libm.so.6")
    for name in abi.MATH_FUNCTIONS:
        llvm.add_symbol(name, ctypes.cast(getattr(libm, name), ctypes.c_void_p).value)
    return llvm


@functools.cache
def _identity() -> bytes:
    """A hash of all that the native code of a module depends on besides its PTX: the translator's sources, llvmlite,
    LLVM and the CPU.
    """
    llvm = _llvm()
    import llvmlite

    digest = hashlib.sha256()
    emulator = _HERE.parent
    for folder in (emulator.parent / "ptx", emulator / "abi", emulator / "translate", _HERE):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    cpu = llvm.get_host_cpu_name() + llvm.get_host_cpu_features().flatten()
    digest.update(f"{llvmlite.__version__} {llvm.llvm_version_info} {llvm.get_process_triple()} {cpu}".encode())
    return digest.digest()


def load(ptx: str) -> NativeModule:
    """Return the native code of a PTX module, from the cache or translated now. The process keeps the 32 modules used
    last.

    Raises PtxError for PTX that the translator refuses. Thread-safe.
    """
    with _lock:
        runtime()
        return _last(ptx)


@functools.lru_cache(maxsize=32)
def _last(ptx: str) -> NativeModule:
    return _load(ptx, raw=False)


def runtime() -> NativeModule:
    """The native runtime. It is loaded once per process, with its functions made known to LLVM. Thread-safe."""
    with _lock:  # functools.cache alone would let two threads load two runtimes
        return _runtime()


@functools.cache
def _runtime() -> NativeModule:
    with notice.while_compiling():
        return _published(RUNTIME, tuple(abi.RUNTIME_FUNCTIONS))


@functools.cache
def _library(name: str) -> NativeModule:
    return _published(name, abi.LIBRARIES[name])


def _published(name: str, functions: tuple[str, ...]) -> NativeModule:
    """Load a native library, and make its functions known to LLVM, so that code which is loaded later can call them."""
    in_wheel = _HERE / f"{name}.ptx"
    module = _load(in_wheel.read_text() if in_wheel.exists() else compile_native(name), raw=True)
    for function in functions:
        _llvm().add_symbol(function, module.address(function))
    return module


def _load(ptx: str, raw: bool) -> NativeModule:
    key = hashlib.sha256(_identity() + (b"raw" if raw else b"") + ptx.encode()).hexdigest()
    entry = cache.entry_path("runtime.o" if raw else "module.o", key)
    if entry is None:
        return _open(*_build(ptx, raw))
    return _open(*(_cached(entry) or _cached_by_one_process(entry, ptx, raw)))


def _cached(entry: Path) -> tuple[dict[str, Any], bytes] | None:
    return cache.load(entry, lambda meta, files: (json.loads(files[_DESCRIPTION]), files[_OBJECT]))


def _cached_by_one_process(entry: Path, ptx: str, raw: bool) -> tuple[dict[str, Any], bytes]:
    """Return a cache entry that is missing: build it, or wait for the process that is building it."""
    with cache.building(entry) as waited:
        found = _cached(entry) if waited else None
        if found is None:
            description, native = found = _build(ptx, raw)
            cache.store(entry, {}, {_DESCRIPTION: json.dumps(description).encode(), _OBJECT: native})
    return found


def _build(ptx: str, raw: bool) -> tuple[dict[str, Any], bytes]:
    from ..translate.module import translate

    translated = translate(ptx, raw=raw)
    kernels = list(translated.kernels.values())
    description = {
        "kernels": [{**vars(k), "params": [vars(p) for p in k.params], "sites": ()} for k in kernels],
        "sites": [vars(site) for site in kernels[0].sites] if kernels else [],
        "globals": [{**vars(g), "init": g.init.hex()} for g in translated.globals],
        "globals_bytes": translated.globals_bytes,
        "libraries": translated.libraries,
    }
    return description, _compile(translated.ir, _SUPPORT if raw else None)


def _compile(ir: str, support: str | None) -> bytes:
    """Compile IR to an object for this CPU.

    Raw modules, such as the runtime, come with `support`, which is LLVM IR that is linked to them; LLVM optimises them
    by `_PASSES`. LLVM does not optimise kernels: NVRTC has optimised their PTX, and an emulated kernel spends most of
    its time in the runtime.
    """
    llvm = _llvm()
    try:
        module = llvm.parse_assembly(ir)
    except RuntimeError as error:
        raise CompileError("translated PTX", str(error)) from None
    if support:
        module.link_in(llvm.parse_assembly(support))
    module.verify()
    machine = _machine(_OPTIMISED if support else _PLAIN)
    if support:
        passes = llvm.create_new_module_pass_manager()
        for name in _PASSES:
            getattr(passes, f"add_{name}_pass")()
        passes.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options()))
    return bytes(machine.emit_object(module))


def _machine(level: int = _PLAIN) -> Any:
    """LLVM's target machine for this CPU. `level` is the optimisation level of the code generator, 0 to 3."""
    llvm = _llvm()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=level,
        reloc="default",
        codemodel="jitdefault",
        jit=True,
    )


def _open(description: dict[str, Any], native: bytes) -> NativeModule:
    from ..translate.code import GlobalVar, KernelCode, Param, Site

    llvm = _llvm()
    for name in description["libraries"]:
        _library(name)
    code = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine())
    code.add_object_file(llvm.ObjectFileRef.from_data(native))
    code.finalize_object()
    sites = tuple(Site(**_fields(item)) for item in description["sites"])
    kernels = {}
    for item in description["kernels"]:
        params = tuple(Param(**_fields(p)) for p in item["params"])
        kernels[item["name"]] = KernelCode(**{**_fields(item), "params": params, "sites": sites})
    variables = tuple(
        GlobalVar(**{**_fields(item), "init": bytes.fromhex(item["init"])}) for item in description["globals"]
    )
    return NativeModule(kernels, variables, description["globals_bytes"], code)


def _fields(item: dict[str, Any]) -> dict[str, Any]:
    return {name: _tuples(value) for name, value in item.items()}


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def compile_native(name: str = RUNTIME) -> str:
    """Compile a native library, which is the runtime or one of `abi.LIBRARIES`, and return its PTX. Wheels contain this
    PTX next to the source.

    Raises CompileError, or DriverUnavailable if no NVRTC is installed.
    """
    headers = {HEADER_NAME: header()} | {path.name: path.read_text() for path in sorted(_HERE.glob("*.cuh"))}
    try:
        parallel = ("--split-compile=2",) if library().version >= (12, 9) else ()  # older ones may not know the option
        image = compile_source(
            (_HERE / f"{name}.cu").read_text(),
            name=f"{name}.cu",
            arch="sm_90a",
            options=("-rdc=true", "--device-as-default-execution-space", *parallel),
            headers=headers,
            line_info=False,
            cubin=False,
        )
    except DriverUnavailable as error:
        raise DriverUnavailable(
            "drvfuse was not installed from a wheel, so the emulated driver must compile its native runtime, "
            f"which failed: {error}"
        ) from None
    return image.ptx
