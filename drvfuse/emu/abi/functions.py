# SPDX-License-Identifier: Apache-2.0
"""The functions that translated code calls, and the native libraries that have them."""

from __future__ import annotations

RUNTIME_FUNCTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    # thread, address, size, flags, site
    "rt_access": ("i32", ("ptr", "i64", "i32", "i32", "i32")),
    **{f"rt_{kind}{size}": ("i32", ("ptr", "i64", "i32")) for kind in ("read", "write") for size in (4, 8, 16)},
    # rt_read4 to rt_write16 are rt_access for a plain load or store of that size: thread, address, site
    # thread, offset in a parameter, size, flags, bytes of the parameter, site
    "rt_parameter": ("i32", ("ptr", "i64", "i32", "i32", "i32", "i32")),
    "rt_fence": ("void", ("ptr", "i32", "i32")),  # thread, flags, site
    "rt_loop": ("i32", ("ptr", "i32")),  # thread, site; called after every LOOP_SLICE iterations of loops
    # thread, target, source, size, bytes read, site
    "rt_copy": ("i32", ("ptr", "i64", "i64", "i32", "i32", "i32")),
    "rt_copy_commit": ("i32", ("ptr",)),  # thread
    "rt_copy_wait": ("i32", ("ptr", "i32", "i32")),  # thread, groups that may stay pending, site
    "rt_mbarrier": ("i32", ("ptr", "i64", "i32", "i32", "i32", "i64", "i32", "i32")),  # see native/mbarrier.cuh
    # thread, target, source, size, mbarrier, the ranks that receive (see native/bulk.cuh), Reduce, site
    "rt_bulk": ("i32", ("ptr", "i64", "i64", "i32", "i64", "i32", "i32", "i32")),
    # thread, target, low and high half of the stored value, size, mbarrier, Reduce, site
    "rt_st_async": ("i32", ("ptr", "i64", "i64", "i64", "i32", "i64", "i32", "i32")),
    # thread, target, source, size, Reduce, site
    "rt_bulk_store": ("i32", ("ptr", "i64", "i64", "i32", "i32", "i32")),
    "rt_copy_arrive": ("i32", ("ptr", "i64", "i32", "i32")),  # thread, mbarrier, 1 for .noinc, site
    "rt_bulk_commit": ("void", ("ptr",)),
    "rt_bulk_wait": ("i32", ("ptr", "i32", "i32", "i32")),  # thread, groups that may stay pending, 1 for .read, site
    # thread, address, size, flags, Reduce with Element and Accumulate, low and high half of the operand, site; the
    # result of multimem.ld_reduce is in op_value and op_seen
    "rt_multimem": ("i32", ("ptr", "i64", "i32", "i32", "i32", "i64", "i64", "i32")),
    "rt_trigger": ("void", ("ptr",)),
    "rt_clock": ("i64", ("ptr", "i32")),
    "rt_vprintf": ("i32", ("ptr", "i64", "i64")),  # thread, format address, argument block address
    "rt_depth": ("i32", ("ptr", "i32")),  # thread, site; called at the start of recursive functions
    "rt_malloc": ("i64", ("ptr", "i64")),  # thread, bytes -> address, or 0
    "rt_free": ("i32", ("ptr", "i64", "i32")),  # thread, address, site
}
"""The functions of the runtime that translated code calls: name -> (LLVM result type, LLVM argument types).

The comments name the arguments. A result of type i32 is 0 if the thread may continue. Otherwise a fault is recorded,
and the translated code returns `Status.FAULT`.
"""

LIBRARIES = {"matrix": ("mx_multiply", "mx_load_rows", "mx_store_rows", "mx_transpose")}
"""Native libraries besides the runtime, and their functions. A library is loaded with modules that need it. Each
function takes the thread of the first lane, and returns 0, or 1 if it has recorded a fault (native/matrix.cu).
"""

MATH_FUNCTIONS = ("exp2", "log2", "sin", "cos", "tanh")
"""Functions of libm, from double to double, that translated code may call. native/loader.py binds them."""
