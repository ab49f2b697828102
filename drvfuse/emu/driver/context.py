# SPDX-License-Identifier: Apache-2.0
"""Contexts: creation, the calling thread's stack of contexts, peer access between contexts."""

from __future__ import annotations

from typing import Any

from ..bindings import R, T
from ..findings.reports import Report
from ..machine.memory import heap
from ..machine.objects import Context
from ..machine.process.process import Process
from ..wire.structs import Structure
from .entry import check, entry, present
from .error import DRIVER_VERSION

_PARAMS = Structure("CUctxCreateParams")
_LIMITS = {
    T.CUlimit.CU_LIMIT_STACK_SIZE: 1024,
    T.CUlimit.CU_LIMIT_PRINTF_FIFO_SIZE: 8 << 20,
    T.CUlimit.CU_LIMIT_MALLOC_HEAP_SIZE: heap.DEFAULT_BYTES,
    T.CUlimit.CU_LIMIT_MAX_L2_FETCH_GRANULARITY: 128,
    T.CUlimit.CU_LIMIT_PERSISTING_L2_CACHE_SIZE: 0,
}


def _context(proc: Process, ctx: Any) -> Context:
    """The context of a context argument. 0 is the current context."""
    if ctx == 0:
        return proc.current()
    return proc.get(ctx, Context, R.CUDA_ERROR_INVALID_CONTEXT)


def destroy(proc: Process, context: Context) -> None:
    """Finish all work of a context, as the driver does, then destroy the context with all that belongs to it."""
    if context.error is None:
        proc.machine.waits.wait(proc.context_ops(context))
    proc.drop_context(context)


def report_unfinished(proc: Process, context: Context) -> None:
    """Make a report if a context is destroyed while its kernels run."""
    kernels = proc.machine.progress.kernels(context)
    if kernels:
        message = (
            f"the context is destroyed before its kernels have ended ({', '.join(sorted(set(kernels)))}): the call "
            "waits for them, and what they leave in the context's memory is lost; synchronise first"
        )
        proc.machine.report(Report("context", message, kernels[0], device=context.device.index, process=proc.title))


@entry(1, bindings=12)
def cuCtxCreate(proc: Process, flags: int, dev: Any) -> Any:
    check(0 <= flags < 0x100)
    context = proc.add(Context(proc, proc.device(dev), flags))
    proc.threads.contexts.append(context)
    return T.CUcontext(context.handle)


@entry(1, bindings=12)
def cuCtxCreate_v3(proc: Process, paramsArray: Any, numParams: int, flags: int, dev: Any) -> Any:
    check(numParams == 0, R.CUDA_ERROR_NOT_SUPPORTED)
    return cuCtxCreate(proc, flags, dev)


@entry(1, bindings=12)
@entry(1, bindings=13, name="cuCtxCreate")
def cuCtxCreate_v4(proc: Process, ctxCreateParams: Any, flags: int, dev: Any) -> Any:
    # all parameters are refused: execution affinity needs MPS, and the others need a graphics context
    check(ctxCreateParams is None or not any(_PARAMS.bytes_of(ctxCreateParams)), R.CUDA_ERROR_NOT_SUPPORTED)
    return cuCtxCreate(proc, flags, dev)


@entry()
def cuCtxDestroy(proc: Process, ctx: Any) -> None:
    context = proc.get(ctx, Context, R.CUDA_ERROR_INVALID_CONTEXT)
    check(not context.primary, R.CUDA_ERROR_INVALID_CONTEXT)
    report_unfinished(proc, context)
    destroy(proc, context)
    stack = proc.threads.contexts
    if stack and stack[-1] is context:
        stack.pop()


@entry(1)
def cuCtxAttach(proc: Process, flags: int) -> Any:
    """Increments the use count of the current context, which `cuCtxDetach` decrements."""
    check(flags == 0)
    context = proc.current()
    context.uses += 1
    return T.CUcontext(context.handle)


@entry()
def cuCtxDetach(proc: Process, ctx: Any) -> None:
    """Decrements the use count. At 0 the context is destroyed."""
    context = proc.get(ctx, Context, R.CUDA_ERROR_INVALID_CONTEXT)
    if context.uses == 1:
        cuCtxDestroy(proc, ctx)
    else:
        context.uses -= 1


@entry()
def cuCtxSetCurrent(proc: Process, ctx: Any) -> None:
    """Replaces the top of the thread's stack of contexts. None removes it."""
    top = [proc.get(ctx, Context, R.CUDA_ERROR_INVALID_CONTEXT)] if ctx else []
    proc.threads.contexts[-1:] = top


@entry(1)
def cuCtxGetCurrent(proc: Process) -> Any:
    stack = proc.threads.contexts
    return T.CUcontext(stack[-1].handle if stack and stack[-1] else 0)


@entry()
def cuCtxPushCurrent(proc: Process, ctx: Any) -> None:
    proc.threads.contexts.append(proc.get(ctx, Context, R.CUDA_ERROR_INVALID_CONTEXT))


@entry(1)
def cuCtxPopCurrent(proc: Process) -> Any:
    stack = proc.threads.contexts
    check(stack, R.CUDA_ERROR_INVALID_CONTEXT)
    context = stack.pop()
    return T.CUcontext(context.handle if context else 0)


@entry(1)
def cuCtxGetDevice(proc: Process) -> Any:
    stack = proc.threads.contexts
    return T.CUdevice(present(stack[-1] if stack else None, R.CUDA_ERROR_INVALID_CONTEXT).device.index)


@entry(1)
def cuCtxGetFlags(proc: Process) -> int:
    return proc.current().flags


@entry(1)
def cuCtxGetId(proc: Process, ctx: Any) -> int:
    return _context(proc, ctx).handle


@entry(1)
def cuCtxGetApiVersion(proc: Process, ctx: Any) -> int:
    _context(proc, ctx)
    return DRIVER_VERSION


@entry(unsafe=True)
def cuCtxSynchronize(proc: Process) -> None:
    _synchronise(proc, proc.current())


def _synchronise(proc: Process, context: Context) -> None:
    for stream in context.streams:
        stream.refuse_captured(R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
    proc.synchronise(context)


@entry(1, bindings=13)
def cuCtxGetDevice_v2(proc: Process, ctx: Any) -> Any:
    return T.CUdevice(_context(proc, ctx).device.index)


@entry(bindings=13, unsafe=True)
def cuCtxSynchronize_v2(proc: Process, ctx: Any) -> None:
    _synchronise(proc, _context(proc, ctx))


@entry(2)
def cuCtxGetStreamPriorityRange(proc: Process) -> tuple[int, int]:
    """Returns (least priority, greatest priority)."""
    proc.current()
    return 0, -5


@entry(1)
def cuCtxGetLimit(proc: Process, limit: Any) -> int:
    check(limit in _LIMITS, R.CUDA_ERROR_UNSUPPORTED_LIMIT)
    return proc.current().limits.get(int(limit), _LIMITS[limit])


@entry()
def cuCtxSetLimit(proc: Process, limit: Any, value: int) -> None:
    """Sets a limit, which is kept for queries. Only the limit of the heap has an effect; it cannot be changed after a
    kernel has allocated from the heap.
    """
    check(limit in _LIMITS, R.CUDA_ERROR_UNSUPPORTED_LIMIT)
    context = proc.current()
    check(int(limit) != heap.LIMIT or context.heap is None or not context.heap.settled)
    context.limits[int(limit)] = value


@entry()
def cuCtxEnablePeerAccess(proc: Process, peerContext: Any, Flags: int) -> None:
    """Gives the current context access to the memory that the peer context has allocated with cuMemAlloc, and to the
    variables of its modules.
    """
    context = proc.current()
    peer = proc.get(peerContext, Context, R.CUDA_ERROR_INVALID_CONTEXT)
    check(Flags == 0)
    check(peer is not context, R.CUDA_ERROR_INVALID_CONTEXT)
    check(proc.machine.can_reach(context.device, peer.device), R.CUDA_ERROR_PEER_ACCESS_UNSUPPORTED)
    check(peer not in context.peers, R.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)
    context.peers.add(peer)
    proc.memory.refresh_context(peer)


@entry()
def cuCtxDisablePeerAccess(proc: Process, peerContext: Any) -> None:
    context = proc.current()
    peer = proc.get(peerContext, Context, R.CUDA_ERROR_INVALID_CONTEXT)
    check(peer in context.peers, R.CUDA_ERROR_PEER_ACCESS_NOT_ENABLED)
    proc.synchronise(context)
    context.peers.discard(peer)
    proc.memory.refresh_context(peer)
