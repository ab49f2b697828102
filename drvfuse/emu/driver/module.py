# SPDX-License-Identifier: Apache-2.0
"""Modules and libraries, which are PTX only, and their kernels and variables."""

from __future__ import annotations

import logging
import re
from typing import Any

import numpy as np

from ...errors import DriverUnavailable
from ...ptx.ir import NotEmulated, PtxError
from ...ptx.text import head
from ..abi import Kind
from ..bindings import R, T
from ..findings.reports import Report
from ..machine.objects import Context, Function, Library, Module
from ..machine.process import interrupts
from ..machine.process.failure import Failure
from ..machine.process.process import Process
from ..machine.run import residency
from ..machine.run.engine import EngineModule
from ..wire.jit_options import ErrorLog
from .entry import check, entry, present, text
from .error import NEWEST_PTX
from .image import errors_logged, file_content, ptx_of, refused, suits

log = logging.getLogger("drvfuse.emu")

# Loading ------------------------------------------------------------------------------------------------------------


def refused_kernel(image: EngineModule, name: str) -> Failure:
    """The failure for the use of a kernel with an instruction that the emulator does not support."""
    refused = image.kernels[name].refused
    assert refused is not None
    reason, file, line = refused
    return Failure(R.CUDA_ERROR_NOT_SUPPORTED, Report("unsupported", reason, name, file, line))


def load(proc: Process, image: Any) -> EngineModule:
    """Return the translation of an image, which the machine makes once and keeps. An error in the image becomes a
    report.

    A kernel with an opcode that `translate/refused.py` lists fails when it is used. If all kernels have such opcodes,
    the load fails.
    """
    ptx = ptx_of(proc, image)
    known = proc.machine.images.get(ptx)
    if known is not None:
        return known
    version, architecture = head(ptx)
    if re.fullmatch(r"sm_\d{2,3}[af]?", architecture) is None or version == (0, 0):
        raise refused(R.CUDA_ERROR_INVALID_IMAGE, "the image is not PTX: it has no .version and .target")
    if version > NEWEST_PTX:
        newest = "{}.{}".format(*NEWEST_PTX)
        words = f"the PTX is of version {version[0]}.{version[1]}, and the emulated driver accepts up to {newest}"
        raise refused(R.CUDA_ERROR_UNSUPPORTED_PTX_VERSION, words)
    if not suits(proc, architecture):
        arch = proc.machine.arch
        raise refused(R.CUDA_ERROR_INVALID_PTX, f"the PTX is for {architecture} and the devices are {arch}")
    try:
        engine = proc.machine.engine
        with interrupts.taken():
            loaded = engine.load(ptx)
    except PtxError as error:
        file, line = error.source or (None, error.line)
        code, kind = R.CUDA_ERROR_INVALID_PTX, "module"
        if isinstance(error, NotEmulated):
            code, kind = R.CUDA_ERROR_NOT_SUPPORTED, "unsupported"
        raise Failure(code, Report(kind, str(error), file=file, line=line)) from None
    except DriverUnavailable:
        raise
    except Exception as error:  # a fault of the translator, which must not end the program that made the call
        log.exception("the translation of PTX failed")
        words = f"the PTX cannot be translated: {type(error).__name__}: {error}"
        raise refused(R.CUDA_ERROR_INVALID_PTX, words) from None
    if loaded.kernels and all(kernel.refused for kernel in loaded.kernels.values()):
        raise refused_kernel(loaded, next(iter(loaded.kernels)))
    for kernel in loaded.kernels.values():
        if kernel.shared_static > residency.SHARED_DEFAULT:
            words = f"{kernel.name} has {kernel.shared_static} bytes of static shared memory, and a kernel can have"
            words += f" {residency.SHARED_DEFAULT}; more must be dynamic"
            raise refused(R.CUDA_ERROR_INVALID_PTX, words)
    proc.machine.images[ptx] = loaded
    return loaded


def _module(proc: Process, context: Context, image: EngineModule) -> Module:
    """A module of a context, with its own copy of the variables."""
    module = Module(context, image)
    if image.globals_bytes:
        # one managed variable makes all of them managed, as the variables of a module are in one allocation
        if any(variable.managed for variable in image.globals):
            allocation = proc.memory.managed_alloc(context, image.globals_bytes)
        else:
            allocation = proc.memory.alloc(context, image.globals_bytes, kind=Kind.GLOBALS)
        allocation.of_module = True
        module.globals_address = allocation.base
        for variable in image.globals:
            start = allocation.base + variable.offset
            proc.machine.window.view(start, len(variable.init))[:] = np.frombuffer(variable.init, np.uint8)
            for at, target in variable.relocations:
                proc.machine.window.view(start + at, 8).view("<u8")[:] = allocation.base + target
    proc.add(module)
    context.modules.add(module)
    return module


def _function(proc: Process, home: Module | Library, name: str) -> Function:
    check(name in home.image.kernels, R.CUDA_ERROR_NOT_FOUND)
    if name not in home.functions:
        owners = (home, None) if isinstance(home, Module) else (None, home)
        home.functions[name] = proc.add(Function(name, home.image, *owners))
    return home.functions[name]


@entry(1, unsafe=True)
def cuModuleLoadData(proc: Process, image: Any) -> Any:
    context = proc.current()
    return T.CUmodule(_module(proc, context, load(proc, image)).handle)


@entry(1, unsafe=True)
def cuModuleLoadDataEx(proc: Process, image: Any, numOptions: int, options: Any, optionValues: Any) -> Any:
    """Loads a module. Of the options, only the error buffer has an effect, as no assembler runs here."""
    context = proc.current()
    with errors_logged(ErrorLog.of(options, optionValues)):
        return T.CUmodule(_module(proc, context, load(proc, image)).handle)


@entry(1, unsafe=True)
def cuModuleLoadFatBinary(proc: Process, fatCubin: Any) -> Any:
    """Loads a fat binary that contains PTX, or any other image that cuModuleLoadData accepts."""
    return cuModuleLoadData(proc, fatCubin)


@entry(1, unsafe=True)
def cuModuleLoad(proc: Process, fname: bytes) -> Any:
    context = proc.current()
    image = file_content(fname)
    return T.CUmodule(_module(proc, context, load(proc, image)).handle)


@entry(unsafe=True)
def cuModuleUnload(proc: Process, hmod: Any) -> None:
    """Waits for all work of the context, then unloads the module."""
    _unload(proc, proc.get(hmod, Module))


def _unload(proc: Process, module: Module) -> None:
    proc.machine.waits.wait(proc.context_ops(module.context))
    if module.globals_address:
        allocation = proc.memory.at(module.globals_address)
        if allocation is not None:
            proc.memory.free(allocation)
    module.context.modules.discard(module)
    for item in (module, *module.functions.values()):
        proc.remove(item)


@entry(1)
def cuModuleGetFunction(proc: Process, hmod: Any, name: bytes) -> Any:
    return T.CUfunction(_function(proc, proc.get(hmod, Module), text(name)).handle)


@entry(1)
def cuModuleGetFunctionCount(proc: Process, mod: Any) -> int:
    return len(proc.get(mod, Module).image.kernels)


@entry(1)
def cuModuleEnumerateFunctions(proc: Process, numFunctions: int, mod: Any) -> list[Any]:
    module = proc.get(mod, Module)
    names = list(module.image.kernels)[:numFunctions]
    return [T.CUfunction(_function(proc, module, name).handle) for name in names]


@entry(2)
def cuModuleGetGlobal(proc: Process, hmod: Any, name: bytes) -> tuple[Any, int]:
    return _global(proc.get(hmod, Module), text(name))


def _global(module: Module, name: str) -> tuple[Any, int]:
    variable = present(next((v for v in module.image.globals if v.name == name), None), R.CUDA_ERROR_NOT_FOUND)
    return T.CUdeviceptr(module.globals_address + variable.offset), variable.size


@entry(1)
def cuModuleGetLoadingMode(proc: Process) -> Any:
    return T.CUmoduleLoadingMode.CU_MODULE_EAGER_LOADING


# Libraries ----------------------------------------------------------------------------------------------------------


@entry(1, unsafe=True)
def cuLibraryLoadData(
    proc: Process,
    code: Any,
    jitOptions: Any,
    jitOptionsValues: Any,
    numJitOptions: int,
    libraryOptions: Any,
    libraryOptionValues: Any,
    numLibraryOptions: int,
) -> Any:
    with errors_logged(ErrorLog.of(jitOptions, jitOptionsValues)):
        return T.CUlibrary(proc.add(Library(load(proc, code))).handle)


@entry(1, unsafe=True)
def cuLibraryLoadFromFile(
    proc: Process,
    fileName: bytes,
    jitOptions: Any,
    jitOptionsValues: Any,
    numJitOptions: int,
    libraryOptions: Any,
    libraryOptionValues: Any,
    numLibraryOptions: int,
) -> Any:
    with errors_logged(ErrorLog.of(jitOptions, jitOptionsValues)):
        return T.CUlibrary(proc.add(Library(load(proc, file_content(fileName)))).handle)


@entry(unsafe=True)
def cuLibraryUnload(proc: Process, library: Any) -> None:
    found = proc.get(library, Library)
    for module in found.modules.values():
        if not module.context.destroyed:
            _unload(proc, module)
    for item in (found, *found.functions.values()):
        proc.remove(item)


def _library_module(proc: Process, library: Library, context: Context) -> Module:
    if context not in library.modules:
        library.modules[context] = _module(proc, context, library.image)
    return library.modules[context]


@entry(1)
def cuLibraryGetKernel(proc: Process, library: Any, name: bytes) -> Any:
    return T.CUkernel(_function(proc, proc.get(library, Library), text(name)).handle)


@entry(1)
def cuLibraryGetKernelCount(proc: Process, lib: Any) -> int:
    return len(proc.get(lib, Library).image.kernels)


@entry(1)
def cuLibraryEnumerateKernels(proc: Process, numKernels: int, lib: Any) -> list[Any]:
    library = proc.get(lib, Library)
    names = list(library.image.kernels)[:numKernels]
    return [T.CUkernel(_function(proc, library, name).handle) for name in names]


@entry(1)
def cuLibraryGetModule(proc: Process, library: Any) -> Any:
    return T.CUmodule(_library_module(proc, proc.get(library, Library), proc.current()).handle)


@entry(2)
def cuLibraryGetGlobal(proc: Process, library: Any, name: bytes) -> tuple[Any, int]:
    return _global(_library_module(proc, proc.get(library, Library), proc.current()), text(name))


@entry(2)
def cuLibraryGetManaged(proc: Process, library: Any, name: bytes) -> tuple[Any, int]:
    """Returns a `__managed__` variable. Here each context has one of its own, where CUDA has one for all contexts."""
    found = proc.get(library, Library)
    variable = next((v for v in found.image.globals if v.name == text(name)), None)
    check(variable is not None and variable.managed, R.CUDA_ERROR_NOT_FOUND)
    return _global(_library_module(proc, found, proc.current()), text(name))


@entry(1)
def cuLibraryGetUnifiedFunction(proc: Process, library: Any, symbol: bytes) -> int:
    """Finds no function, as no emulated device has unified function pointers (UNIFIED_FUNCTION_POINTERS is 0)."""
    proc.get(library, Library)
    raise Failure(R.CUDA_ERROR_NOT_FOUND)


@entry(1)
def cuKernelGetFunction(proc: Process, kernel: Any) -> Any:
    found = proc.get(kernel, Function)
    check(found.library is not None, R.CUDA_ERROR_INVALID_HANDLE)
    return T.CUfunction(resolve(proc, found, proc.current()).handle)


@entry(1)
def cuKernelGetLibrary(proc: Process, kernel: Any) -> Any:
    library = proc.get(kernel, Function).library
    return T.CUlibrary(present(library, R.CUDA_ERROR_INVALID_HANDLE).handle)


@entry(1)
def cuKernelGetName(proc: Process, hfunc: Any) -> bytes:
    check(hfunc)
    return proc.get(hfunc, Function).name.encode()


def resolve(proc: Process, function: Function, context: Context) -> Function:
    """For a CUkernel, the kernel of the same name in the module that its library has in `context`. For a CUfunction,
    `function` itself.
    """
    if function.library is None:
        return function
    module = _library_module(proc, function.library, context)
    found = _function(proc, module, function.name)
    found.attributes = function.on_device.setdefault(context.device.index, {})
    return found


def function_of(proc: Process, value: Any) -> Function:
    """The function of a CUfunction, or that of a CUkernel in the current context."""
    found = proc.get(value, Function)
    return resolve(proc, found, proc.current()) if found.library is not None else found
