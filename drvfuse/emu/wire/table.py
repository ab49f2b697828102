# SPDX-License-Identifier: Apache-2.0
"""The C prototypes of all functions of the emulated driver, as <cuda.h> has them; each returns a CUresult.

Annotations give what a C prototype leaves open:

    in, out, inout   before a parameter: whether the call reads it, writes it, or both. Without one of these, a pointer
                     to a constant is read, any other pointer is written, and a parameter that is no pointer is read
    name[count]      a pointer to an array. The parameter `count` has its number of elements (bytes, for void and
                     CUdeviceptr). Used only for memory of the caller, as cuda.bindings allocate all other arrays
    @batch           a list of memory ranges. The list `sizes` has their sizes in bytes
    @image           PTX, a cubin or a fat binary, from which its size follows
    @node            parameters of a graph node, with the memory to which their pointers point (`node_params`)
    @filled          parameters of a graph node or of an instantiation, in which the call writes some fields
    @code            the address of a linked image, which the linker state owns
    @parameters      the parameters of a kernel, whose sizes depend on the kernel (`parameters`)
    @options         values of options, whose types depend on the options (`jit_options`)
    @text            memory of the caller to which the call writes, given as a bytes object
    @kind            an enum that decides the type of a result
    @uncounted       a list whose length cuda.bindings do not compare with the count
    @attribute       a value whose type depends on the attribute (`ATTRIBUTES`)
    @descriptor      a handle that is a file descriptor if the handle type says so
    @host            an address, possibly of host memory, that the call neither reads nor writes
    @registered      the address of host memory that the devices may use from now on
    @managed         an address, possibly of managed memory, which the caller can access after the call
    @range           an attribute of a range of managed memory
    @pinned          the address of new host memory that the devices may use

Prototypes after "12:" and "13:" are only in that major version of cuda.bindings. The names of parameters are those of
cuda.bindings.
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
"""The C type of the value of an attribute: enum of attributes -> attribute without its prefix -> type."""
