# SPDX-License-Identifier: Apache-2.0
"""The C prototypes of all functions of the emulated driver, as <cuda.h> has them; each returns a CUresult.

Annotations say what a C prototype leaves open:

    in, out, inout   before a parameter, where its type does not tell: a pointer to something constant is read, any
                     other pointer is written, and a parameter that is no pointer is read
    name[count]      the pointer is to so many elements (bytes, for void and CUdeviceptr) as the parameter `count`
                     says. Memory that the caller lends is so described; cuda.bindings makes all else that is written
    @batch           memory of so many bytes as the list `sizes` says, in a list
    @image           PTX, a cubin or a fat binary, whose size it says itself
    @node            parameters of a graph node, whose pointers tell of memory that goes with them (`node_params`)
    @filled          the same, or parameters of an instantiation, in which the call writes some fields
    @code            the address of an image, which a link keeps
    @parameters      the parameters of a kernel, whose sizes the kernel says (`parameters`)
    @options         values of options, whose types follow from the options (`jit_options`)
    @text            memory of the caller, bytes of Python, that the call writes
    @kind            the type of a result follows from it
    @uncounted       a list whose length cuda.bindings do not compare with the count
    @attribute       the type follows from the attribute (`ATTRIBUTES`)
    @descriptor      a file descriptor, as the handle type says
    @host            an address, perhaps of host memory, which is neither read nor written by the call
    @registered      the same, of memory that the devices may use from now on
    @managed         an address, perhaps of managed memory, which the caller then reaches too
    @range           an attribute of a range of managed memory
    @pinned          the address of new host memory that the devices may use

"12:" and "13:" are functions, or forms of them, that only these major versions of cuda.bindings have. The names of
parameters are those of cuda.bindings.
"""

from __future__ import annotations

from .prototypes import basics, graphs, memory, modules, streams

TABLE = "".join(part.PROTOTYPES for part in (basics, memory, modules, streams, graphs))

ATTRIBUTES = {
    "CUpointer_attribute": {
        "CONTEXT": "CUcontext",
        "MEMORY_TYPE": "unsigned int",
        "DEVICE_POINTER": "CUdeviceptr",
        "HOST_POINTER": "void*",
        "SYNC_MEMOPS": "bool",
        "BUFFER_ID": "unsigned long long",
        "IS_MANAGED": "bool",
        "DEVICE_ORDINAL": "int",
        "IS_LEGACY_CUDA_IPC_CAPABLE": "bool",
        "RANGE_START_ADDR": "CUdeviceptr",
        "RANGE_SIZE": "size_t",
        "MAPPED": "bool",
        "ALLOWED_HANDLE_TYPES": "unsigned long long",
        "IS_GPU_DIRECT_RDMA_CAPABLE": "bool",
        "ACCESS_FLAGS": "unsigned long long",
        "MEMPOOL_HANDLE": "CUmemoryPool",
        "MAPPING_SIZE": "size_t",
        "MAPPING_BASE_ADDR": "CUdeviceptr",
        "MEMORY_BLOCK_ID": "unsigned long long",
    },
    "CUgraphMem_attribute": {
        "USED_MEM_CURRENT": "cuuint64_t",
        "USED_MEM_HIGH": "cuuint64_t",
        "RESERVED_MEM_CURRENT": "cuuint64_t",
        "RESERVED_MEM_HIGH": "cuuint64_t",
    },
    "CUmemPool_attribute": {
        "REUSE_FOLLOW_EVENT_DEPENDENCIES": "int",
        "REUSE_ALLOW_OPPORTUNISTIC": "int",
        "REUSE_ALLOW_INTERNAL_DEPENDENCIES": "int",
        "RELEASE_THRESHOLD": "cuuint64_t",
        "RESERVED_MEM_CURRENT": "cuuint64_t",
        "RESERVED_MEM_HIGH": "cuuint64_t",
        "USED_MEM_CURRENT": "cuuint64_t",
        "USED_MEM_HIGH": "cuuint64_t",
    },
}
"""Enum of attributes -> attribute, without its prefix -> C type of its value."""
