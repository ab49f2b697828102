# SPDX-License-Identifier: Apache-2.0
"""The functions that the emulated driver refuses, each with its reason.

A call of one of them returns CUDA_ERROR_NOT_SUPPORTED, with None for each result, as cuda.bindings do for a failure.
The first call of each function makes a report of kind "unsupported", which is one line of the log. Functions of newer
bindings that are not in this list are refused in the same way.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from ..bindings import FUNCTIONS, R
from ..findings.reports import Report
from ..machine.process.process import Process

ARRAYS = "arrays, textures and surfaces are not emulated"
CONDITIONAL = "conditional nodes of graphs are not emulated"
GREEN = "green contexts are not emulated"
COREDUMPS = "there are no coredumps of emulated devices"
CHECKPOINTS = "checkpoints of processes are not emulated"
GRAPHICS = "interoperability with graphics is not emulated"
EXTERNAL = "external memory and semaphores are not emulated"
TENSOR_MAPS = "tensor maps are not emulated"
NEWER = "it is newer than CUDA 12.9 and 13.0, the versions that are emulated"

BY_REASON = {
    ARRAYS: """
        cuArrayCreate cuArrayDestroy cuArrayGetDescriptor cuArrayGetMemoryRequirements cuArrayGetPlane
        cuArrayGetSparseProperties cuArray3DCreate cuArray3DGetDescriptor cuMipmappedArrayCreate
        cuMipmappedArrayDestroy cuMipmappedArrayGetLevel cuMipmappedArrayGetMemoryRequirements
        cuMipmappedArrayGetSparseProperties cuMemMapArrayAsync cuMemcpyAtoA cuMemcpyAtoD cuMemcpyAtoH
        cuMemcpyAtoHAsync cuMemcpyDtoA cuMemcpyHtoA cuMemcpyHtoAAsync cuModuleGetSurfRef cuModuleGetTexRef
        cuParamSetTexRef cuSurfObjectCreate cuSurfObjectDestroy cuSurfObjectGetResourceDesc cuSurfRefGetArray
        cuSurfRefSetArray cuTexObjectCreate cuTexObjectDestroy cuTexObjectGetResourceDesc
        cuTexObjectGetResourceViewDesc cuTexObjectGetTextureDesc cuTexRefCreate cuTexRefDestroy cuTexRefGetAddress
        cuTexRefGetAddressMode cuTexRefGetArray cuTexRefGetBorderColor cuTexRefGetFilterMode cuTexRefGetFlags
        cuTexRefGetFormat cuTexRefGetMaxAnisotropy cuTexRefGetMipmapFilterMode cuTexRefGetMipmapLevelBias
        cuTexRefGetMipmapLevelClamp cuTexRefGetMipmappedArray cuTexRefSetAddress cuTexRefSetAddress2D
        cuTexRefSetAddressMode cuTexRefSetArray cuTexRefSetBorderColor cuTexRefSetFilterMode cuTexRefSetFlags
        cuTexRefSetFormat cuTexRefSetMaxAnisotropy cuTexRefSetMipmapFilterMode cuTexRefSetMipmapLevelBias
        cuTexRefSetMipmapLevelClamp cuTexRefSetMipmappedArray""",
    CONDITIONAL: "cuGraphConditionalHandleCreate",
    GREEN: """
        cuCtxFromGreenCtx cuCtxGetDevResource cuDeviceGetDevResource cuDevResourceGenerateDesc cuDevSmResourceSplit
        cuDevSmResourceSplitByCount cuGreenCtxCreate cuGreenCtxDestroy cuGreenCtxGetDevResource cuGreenCtxGetId
        cuGreenCtxRecordEvent cuGreenCtxStreamCreate cuGreenCtxWaitEvent cuStreamGetDevResource cuStreamGetGreenCtx""",
    COREDUMPS: """
        cuCoredumpGetAttribute cuCoredumpGetAttributeGlobal cuCoredumpSetAttribute cuCoredumpSetAttributeGlobal
        cuCoredumpRegisterStartCallback cuCoredumpDeregisterStartCallback cuCoredumpRegisterCompleteCallback
        cuCoredumpDeregisterCompleteCallback""",
    CHECKPOINTS: """
        cuCheckpointProcessCheckpoint cuCheckpointProcessGetRestoreThreadId cuCheckpointProcessGetState
        cuCheckpointProcessLock cuCheckpointProcessRestore cuCheckpointProcessUnlock cuCheckpointOperationComplete""",
    GRAPHICS: """
        cuEGLStreamConsumerAcquireFrame cuEGLStreamConsumerConnect cuEGLStreamConsumerConnectWithFlags
        cuEGLStreamConsumerDisconnect cuEGLStreamConsumerReleaseFrame cuEGLStreamProducerConnect
        cuEGLStreamProducerDisconnect cuEGLStreamProducerPresentFrame cuEGLStreamProducerReturnFrame
        cuEventCreateFromEGLSync cuGLGetDevices cuGraphicsEGLRegisterImage cuGraphicsGLRegisterBuffer
        cuGraphicsGLRegisterImage cuGraphicsMapResources cuGraphicsResourceGetMappedEglFrame
        cuGraphicsResourceGetMappedMipmappedArray cuGraphicsResourceGetMappedPointer cuGraphicsResourceSetMapFlags
        cuGraphicsSubResourceGetMappedArray cuGraphicsUnmapResources cuGraphicsUnregisterResource
        cuGraphicsVDPAURegisterOutputSurface cuGraphicsVDPAURegisterVideoSurface cuVDPAUCtxCreate cuVDPAUGetDevice""",
    EXTERNAL: """
        cuDestroyExternalMemory cuDestroyExternalSemaphore cuDeviceGetNvSciSyncAttributes
        cuExternalMemoryGetMappedBuffer cuExternalMemoryGetMappedMipmappedArray
        cuGraphAddExternalSemaphoresSignalNode cuGraphAddExternalSemaphoresWaitNode
        cuGraphExecExternalSemaphoresSignalNodeSetParams cuGraphExecExternalSemaphoresWaitNodeSetParams
        cuGraphExternalSemaphoresSignalNodeGetParams cuGraphExternalSemaphoresSignalNodeSetParams
        cuGraphExternalSemaphoresWaitNodeGetParams cuGraphExternalSemaphoresWaitNodeSetParams
        cuImportExternalMemory cuImportExternalSemaphore cuSignalExternalSemaphoresAsync
        cuWaitExternalSemaphoresAsync""",
    TENSOR_MAPS: """
        cuTensorMapEncodeIm2col cuTensorMapEncodeIm2colWide cuTensorMapEncodeTiled cuTensorMapReplaceAddress""",
    NEWER: """
        cuDeviceGetCliqueCount cuDeviceGetCliqueInfo cuDeviceGetFabricClusterUuid cuKernelGetParamCount
        cuLaunchHostFunc_v2 cuLogicalEndpointAddDevice cuLogicalEndpointBindAddr
        cuLogicalEndpointBindMem cuLogicalEndpointCreate cuLogicalEndpointDestroy
        cuLogicalEndpointExport cuLogicalEndpointGetLimits cuLogicalEndpointIdRelease cuLogicalEndpointIdReserve
        cuLogicalEndpointImport cuLogicalEndpointQuery cuLogicalEndpointUnbind cuMemGetLocationInfo
        cuMemcpy3DWithAttributesAsync cuMemcpyWithAttributesAsync cuStreamBeginCaptureToCig
        cuStreamBeginRecaptureToGraph cuStreamEndCaptureToCig""",
}
_RESULTS = dict.fromkeys(("cuCoredumpGetAttribute", "cuCoredumpGetAttributeGlobal"), 1)
_RESULTS |= dict.fromkeys(("cuCoredumpSetAttribute", "cuCoredumpSetAttributeGlobal"), 0)
"""The number of results of functions whose docstrings do not list them."""
REFUSED = {name: reason for reason, names in BY_REASON.items() for name in names.split()}
"""By name of a function: why it is refused. It has the functions of cuda.bindings 12.9 and 13."""


def refuse(process: Process, name: str) -> tuple[Any, ...]:
    """The result of a call of a refused function."""
    machine = process.machine
    nothing = (None,) * results(name)
    if process.closed:
        return (R.CUDA_ERROR_DEINITIALIZED, *nothing)
    report = Report("unsupported", refusal(name), process=process.title)
    with machine.lock:
        machine.report(report)
    process.refusal = report
    return (R.CUDA_ERROR_NOT_SUPPORTED, *nothing)


def refusal(name: str) -> str:
    """The sentence that says why a function is refused."""
    return f"{name} is refused: {REFUSED.get(name, NEWER)}"


@cache
def results(name: str) -> int:
    """The number of results that a function of cuda.bindings returns after the CUresult, by its docstring."""
    if name in _RESULTS:
        return _RESULTS[name]
    _, _, listed = (FUNCTIONS[name].__doc__ or "").partition("Returns\n")
    entries = re.split(r"\n *\n", re.sub(r"^ *-+\n", "", listed))[0].split("\n")
    indent = len(entries[0]) - len(entries[0].lstrip())
    return max(0, sum(bool(line.strip()) and line[indent : indent + 1] != " " for line in entries) - 1)
