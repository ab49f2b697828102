# SPDX-License-Identifier: Apache-2.0
"""The prototypes of the functions for events, streams, captures, stream memory operations and user objects."""

PROTOTYPES = """
// Events
cuEventCreate(CUevent* phEvent, unsigned int Flags);
cuEventDestroy(CUevent hEvent);
cuEventRecord(CUevent hEvent, CUstream hStream);
cuEventRecordWithFlags(CUevent hEvent, CUstream hStream, unsigned int flags);
cuEventQuery(CUevent hEvent);
cuEventSynchronize(CUevent hEvent);
cuEventElapsedTime(float* pMilliseconds, CUevent hStart, CUevent hEnd);
12: cuEventElapsedTime_v2(float* pMilliseconds, CUevent hStart, CUevent hEnd);
cuIpcGetEventHandle(CUipcEventHandle* pHandle, CUevent event);
cuIpcOpenEventHandle(CUevent* phEvent, CUipcEventHandle handle);

// Streams and captures
cuStreamCreate(CUstream* phStream, unsigned int Flags);
cuStreamCreateWithPriority(CUstream* phStream, unsigned int flags, int priority);
cuStreamDestroy(CUstream hStream);
cuStreamSynchronize(CUstream hStream);
cuStreamQuery(CUstream hStream);
cuStreamWaitEvent(CUstream hStream, CUevent hEvent, unsigned int Flags);
cuStreamGetPriority(CUstream hStream, int* priority);
cuStreamGetFlags(CUstream hStream, unsigned int* flags);
cuStreamGetId(CUstream hStream, unsigned long long* streamId);
cuStreamGetCtx(CUstream hStream, CUcontext* pctx);
cuStreamGetCtx_v2(CUstream hStream, CUcontext* pCtx, CUgreenCtx* pGreenCtx);
cuStreamGetDevice(CUstream hStream, CUdevice* device);
cuStreamCopyAttributes(CUstream dst, CUstream src);
cuStreamGetAttribute(CUstream hStream, CUstreamAttrID attr, CUstreamAttrValue* value_out);
cuStreamSetAttribute(CUstream hStream, CUstreamAttrID attr, const CUstreamAttrValue* value);
cuLaunchHostFunc(CUstream hStream, CUhostFn fn, in void* userData @host);
cuStreamAddCallback(CUstream hStream, CUstreamCallback callback, in void* userData @host, unsigned int flags);
cuStreamBeginCapture(CUstream hStream, CUstreamCaptureMode mode);
cuStreamEndCapture(CUstream hStream, CUgraph* phGraph);
cuStreamIsCapturing(CUstream hStream, CUstreamCaptureStatus* captureStatus);
12: cuStreamGetCaptureInfo_v3(CUstream hStream, CUstreamCaptureStatus* captureStatus_out, cuuint64_t* id_out,
    CUgraph* graph_out, const CUgraphNode** dependencies_out[numDependencies_out],
    const CUgraphEdgeData** edgeData_out[numDependencies_out], size_t* numDependencies_out);
12: cuStreamGetCaptureInfo(CUstream hStream, CUstreamCaptureStatus* captureStatus_out, cuuint64_t* id_out,
    CUgraph* graph_out, const CUgraphNode** dependencies_out[numDependencies_out], size_t* numDependencies_out);
13: cuStreamGetCaptureInfo(CUstream hStream, CUstreamCaptureStatus* captureStatus_out, cuuint64_t* id_out,
    CUgraph* graph_out, const CUgraphNode** dependencies_out[numDependencies_out],
    const CUgraphEdgeData** edgeData_out[numDependencies_out], size_t* numDependencies_out);
12: cuStreamUpdateCaptureDependencies_v2(CUstream hStream, in CUgraphNode* dependencies[numDependencies] @uncounted,
    const CUgraphEdgeData* dependencyData[numDependencies] @uncounted, size_t numDependencies, unsigned int flags);
12: cuStreamUpdateCaptureDependencies(CUstream hStream, in CUgraphNode* dependencies[numDependencies],
    size_t numDependencies, unsigned int flags);
13: cuStreamUpdateCaptureDependencies(CUstream hStream, in CUgraphNode* dependencies[numDependencies] @uncounted,
    const CUgraphEdgeData* dependencyData[numDependencies] @uncounted, size_t numDependencies, unsigned int flags);
cuThreadExchangeStreamCaptureMode(inout CUstreamCaptureMode* mode);

// Values in memory
cuStreamWriteValue32(CUstream stream, CUdeviceptr addr, cuuint32_t value, unsigned int flags);
cuStreamWriteValue64(CUstream stream, CUdeviceptr addr, cuuint64_t value, unsigned int flags);
cuStreamWaitValue32(CUstream stream, CUdeviceptr addr, cuuint32_t value, unsigned int flags);
cuStreamWaitValue64(CUstream stream, CUdeviceptr addr, cuuint64_t value, unsigned int flags);
cuStreamBatchMemOp(CUstream stream, unsigned int count, in CUstreamBatchMemOpParams* paramArray[count],
    unsigned int flags);

// User objects
cuUserObjectCreate(CUuserObject* object_out, in void* ptr @host, CUhostFn destroy, unsigned int initialRefcount,
    unsigned int flags);
cuUserObjectRetain(CUuserObject object, unsigned int count);
cuUserObjectRelease(CUuserObject object, unsigned int count);
"""
