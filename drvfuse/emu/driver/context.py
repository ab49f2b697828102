# SPDX-License-Identifier: Apache-2.0
"""Contexts: creation, the calling thread's stack of them, peer access between them."""

from __future__ import annotations

from typing import Any

from ..bindings import R, T
from ..findings.reports import Report
from ..machine.machine import Machine
from ..machine.objects import Context
from .entry import check, entry, is_enum, number, present
from .error import DRIVER_VERSION

_LIMITS = {
    T.CUlimit.CU_LIMIT_STACK_SIZE: 1024,
    T.CUlimit.CU_LIMIT_PRINTF_FIFO_SIZE: 8 << 20,
    T.CUlimit.CU_LIMIT_MALLOC_HEAP_SIZE: 8 << 20,
    T.CUlimit.CU_LIMIT_MAX_L2_FETCH_GRANULARITY: 128,
    T.CUlimit.CU_LIMIT_PERSISTING_L2_CACHE_SIZE: 0,
}


def _context(m: Machine, ctx: Any) -> Context:
    """A context argument, or the current one for 0."""
    if number(ctx) == 0:
        return m.current()
    return m.get(ctx, Context, R.CUDA_ERROR_INVALID_CONTEXT)


def destroy(m: Machine, context: Context) -> None:
    """Finish a context's work, as the driver does, then drop all that belongs to it."""
    if context.error is None:
        m.progress.wait(m.context_ops(context))
    context.destroyed = True
    m.progress.fail(context, R.CUDA_ERROR_CONTEXT_IS_DESTROYED)
    for allocation in m.memory.owned(context):
        m.memory.free(allocation)
    functions = [function for module in context.modules for function in module.functions.values()]
    for item in (context, *context.streams, *context.events, *context.modules, *functions):
        m.orphan(item, context.device)
    for other in list(m.handles.values()):
        if isinstance(other, Context):
            other.peers.discard(context)
    for owner in context.peers:
        m.memory.refresh_context(owner)


def report_unfinished(m: Machine, context: Context) -> None:
    """A context is about to be destroyed under kernels that have not ended: say so."""
    kernels = m.progress.kernels(context)
    if kernels:
        message = (
            f"the context is destroyed before its kernels have ended ({', '.join(sorted(set(kernels)))}): the call "
            "waits for them, and what they leave in the context's memory is lost; synchronise first"
        )
        m.report(Report("context", message, kernels[0], device=context.device.index))


@entry(1, bindings=12)
def cuCtxCreate(m: Machine, flags: int, dev: Any) -> Any:
    check(0 <= flags < 0x100)
    context = m.add(Context(m.device(dev), flags))
    m.threads.contexts.append(context)
    return T.CUcontext(context.handle)


@entry(1, bindings=12)
def cuCtxCreate_v3(m: Machine, paramsArray: Any, numParams: int, flags: int, dev: Any) -> Any:
    check(numParams == 0, R.CUDA_ERROR_NOT_SUPPORTED)
    return cuCtxCreate(m, flags, dev)


@entry(1, bindings=12)
@entry(1, bindings=13, name="cuCtxCreate")
def cuCtxCreate_v4(m: Machine, ctxCreateParams: Any, flags: int, dev: Any) -> Any:
    check(ctxCreateParams is None, R.CUDA_ERROR_NOT_SUPPORTED)
    return cuCtxCreate(m, flags, dev)


@entry()
def cuCtxDestroy(m: Machine, ctx: Any) -> None:
    context = m.get(ctx, Context, R.CUDA_ERROR_INVALID_CONTEXT)
    check(not context.primary, R.CUDA_ERROR_INVALID_CONTEXT)
    report_unfinished(m, context)
    destroy(m, context)
    stack = m.threads.contexts
    if stack and stack[-1] is context:
        stack.pop()


@entry()
def cuCtxSetCurrent(m: Machine, ctx: Any) -> None:
    """Replaces the top of the thread's stack; None pops it."""
    top = [m.get(ctx, Context, R.CUDA_ERROR_INVALID_CONTEXT)] if number(ctx) else []
    m.threads.contexts[-1:] = top


@entry(1)
def cuCtxGetCurrent(m: Machine) -> Any:
    stack = m.threads.contexts
    return T.CUcontext(stack[-1].handle if stack and stack[-1] else 0)


@entry()
def cuCtxPushCurrent(m: Machine, ctx: Any) -> None:
    m.threads.contexts.append(m.get(ctx, Context, R.CUDA_ERROR_INVALID_CONTEXT))


@entry(1)
def cuCtxPopCurrent(m: Machine) -> Any:
    stack = m.threads.contexts
    check(stack, R.CUDA_ERROR_INVALID_CONTEXT)
    context = stack.pop()
    return T.CUcontext(context.handle if context else 0)


@entry(1)
def cuCtxGetDevice(m: Machine) -> Any:
    stack = m.threads.contexts
    return T.CUdevice(present(stack[-1] if stack else None, R.CUDA_ERROR_INVALID_CONTEXT).device.index)


@entry(1)
def cuCtxGetFlags(m: Machine) -> int:
    return m.current().flags


@entry(1)
def cuCtxGetId(m: Machine, ctx: Any) -> int:
    return _context(m, ctx).handle


@entry(1)
def cuCtxGetApiVersion(m: Machine, ctx: Any) -> int:
    _context(m, ctx)
    return DRIVER_VERSION


@entry(unsafe=True)
def cuCtxSynchronize(m: Machine) -> None:
    context = m.current()
    for stream in context.streams:
        stream.refuse_captured(R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
    m.synchronise(context)


@entry(2)
def cuCtxGetStreamPriorityRange(m: Machine) -> tuple[int, int]:
    """(least, greatest)."""
    m.current()
    return 0, -5


@entry(1)
def cuCtxGetLimit(m: Machine, limit: Any) -> int:
    is_enum(limit, T.CUlimit, "limit")
    check(limit in _LIMITS, R.CUDA_ERROR_UNSUPPORTED_LIMIT)
    return m.current().limits.get(int(limit), _LIMITS[limit])


@entry()
def cuCtxSetLimit(m: Machine, limit: Any, value: int) -> None:
    """Kept and given back; nothing emulated depends on a limit."""
    is_enum(limit, T.CUlimit, "limit")
    check(limit in _LIMITS, R.CUDA_ERROR_UNSUPPORTED_LIMIT)
    m.current().limits[int(limit)] = value


@entry()
def cuCtxEnablePeerAccess(m: Machine, peerContext: Any, Flags: int) -> None:
    """The current context may reach the cuMemAlloc memory and module variables of the peer."""
    context = m.current()
    peer = m.get(peerContext, Context, R.CUDA_ERROR_INVALID_CONTEXT)
    check(Flags == 0)
    check(peer is not context, R.CUDA_ERROR_INVALID_CONTEXT)
    check(m.can_reach(context.device, peer.device), R.CUDA_ERROR_PEER_ACCESS_UNSUPPORTED)
    check(peer not in context.peers, R.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)
    context.peers.add(peer)
    m.memory.refresh_context(peer)


@entry()
def cuCtxDisablePeerAccess(m: Machine, peerContext: Any) -> None:
    context = m.current()
    peer = m.get(peerContext, Context, R.CUDA_ERROR_INVALID_CONTEXT)
    check(peer in context.peers, R.CUDA_ERROR_PEER_ACCESS_NOT_ENABLED)
    m.synchronise(context)
    context.peers.discard(peer)
    m.memory.refresh_context(peer)


@entry()
def cuCtxSetCacheConfig(m: Machine, config: Any) -> None:
    m.current()
