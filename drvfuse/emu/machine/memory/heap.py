# SPDX-License-Identifier: Apache-2.0
"""Memory that kernels allocate, by malloc and free (or new and delete) in device code.

Each piece is an allocation of its own in the window, so bounds are exact and a use after free is found. A context has
one heap, whose size is the value of CU_LIMIT_MALLOC_HEAP_SIZE at the first malloc of a kernel. malloc returns a null
pointer if the heap is used up. Memory that is never freed stays until the context is destroyed, and is no finding.
"""

from __future__ import annotations

import ctypes

from ...abi import HeapCall, structs
from ...bindings import T
from ...space.pages import WindowError, round_up
from ..objects import Context

LIMIT = int(T.CUlimit.CU_LIMIT_MALLOC_HEAP_SIZE)
DEFAULT_BYTES = 8 << 20
_ALIGNMENT = 16


class Heap:
    """The heap of one context. `address` is the C function that native code calls with a `structs.Heap`."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._window, self._table = context.process.machine.window, context.process.table
        self._device, self._mask = context.device.index, context.process.memory.reaching(context)
        self._left: int | None = None
        self._live: dict[int, int] = {}
        self._call = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_void_p)(self._serve)
        self.address = ctypes.cast(self._call, ctypes.c_void_p).value

    @property
    def settled(self) -> bool:
        """Whether a kernel has allocated memory, which fixes the size of the heap."""
        return self._left is not None

    def _serve(self, at: int) -> int:
        """Execute a call of native code: malloc, free, or a query of the size of a piece. No exception may reach
        native code, so a failed malloc gives a null pointer.
        """
        call = structs.Heap.from_address(at)
        if call.kind == HeapCall.MALLOC:
            call.address = self._malloc(int(call.nbytes))
        elif call.kind == HeapCall.SIZE:
            call.nbytes = self._live.get(int(call.address), 0)
        else:
            self._free(int(call.address))
        return 0

    def _malloc(self, nbytes: int) -> int:
        if self._left is None:
            self._left = self._context.limits.get(LIMIT, DEFAULT_BYTES)
        size = _size(nbytes)
        if size > self._left:
            return 0
        try:
            found = self._window.alloc(max(nbytes, 1), self._device, self._mask, self._mask, table=self._table)
        except WindowError:
            return 0
        self._left -= size
        self._live[found] = max(nbytes, 1)
        return found

    def _free(self, address: int) -> None:
        assert self._left is not None
        self._left += _size(self._live.pop(address))
        self._window.free(address)

    def close(self) -> None:
        """Free all memory. Called when the context is destroyed."""
        for address in list(self._live):
            self._free(address)


def _size(nbytes: int) -> int:
    return max(round_up(nbytes, _ALIGNMENT), _ALIGNMENT)


def heap_of(context: Context) -> Heap:
    """The heap of a context, which is made at the context's first launch."""
    if context.heap is None:
        context.heap = Heap(context)
    return context.heap
