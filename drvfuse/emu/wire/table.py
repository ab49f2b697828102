# SPDX-License-Identifier: Apache-2.0
"""The C prototypes of all functions of the emulated driver, as <cuda.h> has them; each returns a CUresult.

Words that C has no place for say what a prototype leaves open:

    in, out, inout   before a parameter, where its type does not tell: a pointer to something constant is read, any
                     other pointer is written, and a parameter that is no pointer is read
    name[count]      the pointer is to so many elements (bytes, for void and CUdeviceptr) as the parameter `count`
                     says. Memory that the caller lends is so described; cuda.bindings makes all else that is written
    @image           PTX, a cubin or a fat binary, whose size it says itself
    @parameters      the parameters of a kernel, whose sizes the kernel says (`parameters`)
    @options         values of options, of which only the number counts: they steer an assembler that does not run
    @attribute       the type follows from the attribute (`ATTRIBUTES`)
    @descriptor      a file descriptor, as the handle type says
    @host            an address, perhaps of host memory, which is neither read nor written by the call
    @registered      the same, of memory that the devices may use from now on
    @pinned          the address of new host memory that the devices may use

"12:" and "13:" are functions, or forms of them, that only these major versions of cuda.bindings have. The names of
parameters are those of cuda.bindings.
"""

from __future__ import annotations

TABLE = """
// Initialisation, errors
cuInit(unsigned int Flags);
cuDriverGetVersion(int* driverVersion);
cuGetErrorName(CUresult error, const char** pStr);
cuGetErrorString(CUresult error, const char** pStr);
cuProfilerStart();
cuProfilerStop();

// Contexts
12: cuCtxCreate(CUcontext* pctx, unsigned int flags, CUdevice dev);
13: cuCtxCreate(CUcontext* pctx, in CUctxCreateParams* ctxCreateParams, unsigned int flags, CUdevice dev);
12: cuCtxCreate_v3(CUcontext* pctx, in CUexecAffinityParam* paramsArray[numParams], int numParams, unsigned int flags,
    CUdevice dev);
12: cuCtxCreate_v4(CUcontext* pctx, in CUctxCreateParams* ctxCreateParams, unsigned int flags, CUdevice dev);
cuCtxDestroy(CUcontext ctx);
cuCtxSetCurrent(CUcontext ctx);
cuCtxGetCurrent(CUcontext* pctx);
cuCtxPushCurrent(CUcontext ctx);
cuCtxPopCurrent(CUcontext* pctx);
cuCtxGetDevice(CUdevice* device);
cuCtxGetFlags(unsigned int* flags);
cuCtxGetId(CUcontext ctx, unsigned long long* ctxId);
cuCtxGetApiVersion(CUcontext ctx, unsigned int* version);
cuCtxSynchronize();
cuCtxGetStreamPriorityRange(int* leastPriority, int* greatestPriority);
cuCtxGetLimit(size_t* pvalue, CUlimit limit);
cuCtxSetLimit(CUlimit limit, size_t value);
cuCtxEnablePeerAccess(CUcontext peerContext, unsigned int Flags);
cuCtxDisablePeerAccess(CUcontext peerContext);
cuCtxSetCacheConfig(CUfunc_cache config);

// Copies and fills
cuMemcpy(out CUdeviceptr dst[ByteCount], in CUdeviceptr src[ByteCount], size_t ByteCount);
cuMemcpyAsync(out CUdeviceptr dst[ByteCount], in CUdeviceptr src[ByteCount], size_t ByteCount, CUstream hStream);
cuMemcpyHtoD(CUdeviceptr dstDevice, const void* srcHost[ByteCount], size_t ByteCount);
cuMemcpyHtoDAsync(CUdeviceptr dstDevice, const void* srcHost[ByteCount], size_t ByteCount, CUstream hStream);
cuMemcpyDtoH(void* dstHost[ByteCount], CUdeviceptr srcDevice, size_t ByteCount);
cuMemcpyDtoHAsync(void* dstHost[ByteCount], CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream);
cuMemcpyDtoD(CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount);
cuMemcpyDtoDAsync(CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream);
cuMemcpyPeer(CUdeviceptr dstDevice, CUcontext dstContext, CUdeviceptr srcDevice, CUcontext srcContext,
    size_t ByteCount);
cuMemcpyPeerAsync(CUdeviceptr dstDevice, CUcontext dstContext, CUdeviceptr srcDevice, CUcontext srcContext,
    size_t ByteCount, CUstream hStream);
cuMemcpy2D(const CUDA_MEMCPY2D* pCopy);
cuMemcpy2DAsync(const CUDA_MEMCPY2D* pCopy, CUstream hStream);
cuMemsetD8(CUdeviceptr dstDevice, unsigned char uc, size_t N);
cuMemsetD16(CUdeviceptr dstDevice, unsigned short us, size_t N);
cuMemsetD32(CUdeviceptr dstDevice, unsigned int ui, size_t N);
cuMemsetD8Async(CUdeviceptr dstDevice, unsigned char uc, size_t N, CUstream hStream);
cuMemsetD16Async(CUdeviceptr dstDevice, unsigned short us, size_t N, CUstream hStream);
cuMemsetD32Async(CUdeviceptr dstDevice, unsigned int ui, size_t N, CUstream hStream);

// Devices
cuDeviceGet(CUdevice* device, int ordinal);
cuDeviceGetCount(int* count);
cuDeviceGetName(char* name[length], int length, CUdevice dev);
cuDeviceGetUuid(CUuuid* uuid, CUdevice dev);
12: cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice dev);
cuDeviceGetAttribute(int* pi, CUdevice_attribute attrib, CUdevice dev);
cuDeviceTotalMem(size_t* bytes, CUdevice dev);
cuDeviceComputeCapability(int* major, int* minor, CUdevice dev);
cuDeviceCanAccessPeer(int* canAccessPeer, CUdevice dev, CUdevice peerDev);
cuDeviceGetP2PAttribute(int* value, CUdevice_P2PAttribute attrib, CUdevice srcDevice, CUdevice dstDevice);
cuDeviceGetPCIBusId(char* pciBusId[length], int length, CUdevice dev);
cuDeviceGetByPCIBusId(CUdevice* dev, const char* pciBusId);
cuDeviceGetDefaultMemPool(CUmemoryPool* pool_out, CUdevice dev);
cuDeviceGetMemPool(CUmemoryPool* pool, CUdevice dev);
cuDeviceSetMemPool(CUdevice dev, CUmemoryPool pool);
cuDevicePrimaryCtxRetain(CUcontext* pctx, CUdevice dev);
cuDevicePrimaryCtxRelease(CUdevice dev);
cuDevicePrimaryCtxReset(CUdevice dev);
cuDevicePrimaryCtxGetState(CUdevice dev, unsigned int* flags, int* active);
cuDevicePrimaryCtxSetFlags(CUdevice dev, unsigned int flags);

// Events
cuEventCreate(CUevent* phEvent, unsigned int Flags);
cuEventDestroy(CUevent hEvent);
cuEventRecord(CUevent hEvent, CUstream hStream);
cuEventRecordWithFlags(CUevent hEvent, CUstream hStream, unsigned int flags);
cuEventQuery(CUevent hEvent);
cuEventSynchronize(CUevent hEvent);
cuEventElapsedTime(float* pMilliseconds, CUevent hStart, CUevent hEnd);
12: cuEventElapsedTime_v2(float* pMilliseconds, CUevent hStart, CUevent hEnd);

// Modules and libraries
cuModuleLoadData(CUmodule* module, const void* image @image);
cuModuleLoadDataEx(CUmodule* module, const void* image @image, unsigned int numOptions,
    in CUjit_option* options[numOptions], in void** optionValues[numOptions] @options);
cuModuleLoad(CUmodule* module, const char* fname);
cuModuleUnload(CUmodule hmod);
cuModuleGetFunction(CUfunction* hfunc, CUmodule hmod, const char* name);
cuModuleGetFunctionCount(unsigned int* count, CUmodule mod);
cuModuleEnumerateFunctions(CUfunction* functions[numFunctions], unsigned int numFunctions, CUmodule mod);
cuModuleGetGlobal(CUdeviceptr* dptr, size_t* bytes, CUmodule hmod, const char* name);
cuModuleGetLoadingMode(CUmoduleLoadingMode* mode);
cuLibraryLoadData(CUlibrary* library, const void* code @image, in CUjit_option* jitOptions[numJitOptions],
    in void** jitOptionsValues[numJitOptions] @options, unsigned int numJitOptions,
    in CUlibraryOption* libraryOptions[numLibraryOptions], in void** libraryOptionValues[numLibraryOptions] @options,
    unsigned int numLibraryOptions);
cuLibraryUnload(CUlibrary library);
cuLibraryGetKernel(CUkernel* pKernel, CUlibrary library, const char* name);
cuLibraryGetKernelCount(unsigned int* count, CUlibrary lib);
cuLibraryEnumerateKernels(CUkernel* kernels[numKernels], unsigned int numKernels, CUlibrary lib);
cuLibraryGetModule(CUmodule* pMod, CUlibrary library);
cuLibraryGetGlobal(CUdeviceptr* dptr, size_t* bytes, CUlibrary library, const char* name);
cuKernelGetFunction(CUfunction* pFunc, CUkernel kernel);
cuKernelGetName(const char** name, CUkernel hfunc);

// Functions
cuFuncGetAttribute(int* pi, CUfunction_attribute attrib, CUfunction hfunc);
cuFuncSetAttribute(CUfunction hfunc, CUfunction_attribute attrib, int value);
cuFuncSetCacheConfig(CUfunction hfunc, CUfunc_cache config);
cuFuncGetName(const char** name, CUfunction hfunc);
cuFuncGetModule(CUmodule* hmod, CUfunction hfunc);
cuFuncLoad(CUfunction function);
cuFuncIsLoaded(CUfunctionLoadingState* state, CUfunction function);
cuFuncGetParamInfo(CUfunction func, size_t paramIndex, size_t* paramOffset, size_t* paramSize);
cuKernelGetParamInfo(CUkernel kernel, size_t paramIndex, size_t* paramOffset, size_t* paramSize);
cuKernelGetAttribute(int* pi, CUfunction_attribute attrib, CUkernel kernel, CUdevice dev);
cuKernelSetAttribute(CUfunction_attribute attrib, int val, CUkernel kernel, CUdevice dev);
13: cuFuncGetParamCount(CUfunction func, size_t* paramCount);

// Graphs
cuGraphCreate(CUgraph* phGraph, unsigned int flags);
cuGraphDestroy(CUgraph hGraph);
cuGraphGetNodes(CUgraph hGraph, CUgraphNode* nodes[numNodes], inout size_t* numNodes);
cuGraphGetRootNodes(CUgraph hGraph, CUgraphNode* rootNodes[numRootNodes], inout size_t* numRootNodes);
12: cuGraphGetEdges_v2(CUgraph hGraph, CUgraphNode* from_[numEdges], CUgraphNode* to[numEdges],
    CUgraphEdgeData* edgeData[numEdges], inout size_t* numEdges);
12: cuGraphNodeGetDependencies_v2(CUgraphNode hNode, CUgraphNode* dependencies[numDependencies],
    CUgraphEdgeData* edgeData[numDependencies], inout size_t* numDependencies);
12: cuGraphGetEdges(CUgraph hGraph, CUgraphNode* from_[numEdges], CUgraphNode* to[numEdges], inout size_t* numEdges);
13: cuGraphGetEdges(CUgraph hGraph, CUgraphNode* from_[numEdges], CUgraphNode* to[numEdges],
    CUgraphEdgeData* edgeData[numEdges], inout size_t* numEdges);
12: cuGraphNodeGetDependencies(CUgraphNode hNode, CUgraphNode* dependencies[numDependencies],
    inout size_t* numDependencies);
13: cuGraphNodeGetDependencies(CUgraphNode hNode, CUgraphNode* dependencies[numDependencies],
    CUgraphEdgeData* edgeData[numDependencies], inout size_t* numDependencies);
cuGraphNodeGetType(CUgraphNode hNode, CUgraphNodeType* type);
cuGraphInstantiateWithParams(CUgraphExec* phGraphExec, CUgraph hGraph,
    in CUDA_GRAPH_INSTANTIATE_PARAMS* instantiateParams);
cuGraphInstantiate(CUgraphExec* phGraphExec, CUgraph hGraph, unsigned long long flags);
cuGraphLaunch(CUgraphExec hGraphExec, CUstream hStream);
cuGraphUpload(CUgraphExec hGraphExec, CUstream hStream);
cuGraphExecGetFlags(CUgraphExec hGraphExec, cuuint64_t* flags);
cuGraphExecDestroy(CUgraphExec hGraphExec);

// Launches
cuLaunchKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ,
    unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ, unsigned int sharedMemBytes,
    CUstream hStream, in void** kernelParams @parameters, in void** extra @parameters);
cuLaunchCooperativeKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ,
    unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ, unsigned int sharedMemBytes,
    CUstream hStream, in void** kernelParams @parameters);
cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction f, in void** kernelParams @parameters,
    in void** extra @parameters);

// Memory
cuMemAlloc(CUdeviceptr* dptr, size_t bytesize);
cuMemAllocPitch(CUdeviceptr* dptr, size_t* pPitch, size_t WidthInBytes, size_t Height, unsigned int ElementSizeBytes);
cuMemFree(CUdeviceptr dptr);
cuMemGetInfo(size_t* free, size_t* total);
cuMemGetAddressRange(CUdeviceptr* pbase, size_t* psize, CUdeviceptr dptr);
cuMemAllocHost(void** pp @pinned, size_t bytesize);
cuMemHostAlloc(void** pp @pinned, size_t bytesize, unsigned int Flags);
cuMemFreeHost(in void* p @host);
cuMemHostGetDevicePointer(CUdeviceptr* pdptr, in void* p @host, unsigned int Flags);
cuMemHostGetFlags(unsigned int* pFlags, in void* p @host);
cuMemHostRegister(in void* p[bytesize] @registered, size_t bytesize, unsigned int Flags);
cuMemHostUnregister(in void* p @host);

// Multicast objects
cuMulticastGetGranularity(size_t* granularity, const CUmulticastObjectProp* prop,
    CUmulticastGranularity_flags option);
cuMulticastCreate(CUmemGenericAllocationHandle* mcHandle, const CUmulticastObjectProp* prop);
cuMulticastAddDevice(CUmemGenericAllocationHandle mcHandle, CUdevice dev);
cuMulticastBindMem(CUmemGenericAllocationHandle mcHandle, size_t mcOffset, CUmemGenericAllocationHandle memHandle,
    size_t memOffset, size_t size, unsigned long long flags);
cuMulticastBindAddr(CUmemGenericAllocationHandle mcHandle, size_t mcOffset, CUdeviceptr memptr, size_t size,
    unsigned long long flags);
cuMulticastUnbind(CUmemGenericAllocationHandle mcHandle, CUdevice dev, size_t mcOffset, size_t size);
13: cuMulticastBindMem_v2(CUmemGenericAllocationHandle mcHandle, CUdevice dev, size_t mcOffset,
    CUmemGenericAllocationHandle memHandle, size_t memOffset, size_t size, unsigned long long flags);
13: cuMulticastBindAddr_v2(CUmemGenericAllocationHandle mcHandle, CUdevice dev, size_t mcOffset, CUdeviceptr memptr,
    size_t size, unsigned long long flags);

// Occupancy
cuOccupancyMaxActiveBlocksPerMultiprocessor(int* numBlocks, CUfunction func, int blockSize, size_t dynamicSMemSize);
cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* numBlocks, CUfunction func, int blockSize,
    size_t dynamicSMemSize, unsigned int flags);
cuOccupancyMaxPotentialBlockSize(int* minGridSize, int* blockSize, CUfunction func,
    CUoccupancyB2DSize blockSizeToDynamicSMemSize, size_t dynamicSMemSize, int blockSizeLimit);
cuOccupancyAvailableDynamicSMemPerBlock(size_t* dynamicSmemSize, CUfunction func, int numBlocks, int blockSize);
cuOccupancyMaxPotentialClusterSize(int* clusterSize, CUfunction func, const CUlaunchConfig* config);
cuOccupancyMaxActiveClusters(int* numClusters, CUfunction func, const CUlaunchConfig* config);

// Pointers
cuPointerGetAttribute(void* data @attribute, CUpointer_attribute attribute, CUdeviceptr ptr @host);
cuPointerGetAttributes(unsigned int numAttributes, in CUpointer_attribute* attributes[numAttributes],
    void** data[numAttributes] @attribute, CUdeviceptr ptr @host);

// Pools
cuMemPoolCreate(CUmemoryPool* pool, const CUmemPoolProps* poolProps);
cuMemPoolDestroy(CUmemoryPool pool);
cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc* map[count], size_t count);
cuMemPoolGetAccess(CUmemAccess_flags* flags, CUmemoryPool memPool, in CUmemLocation* location);
cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, in void* value @attribute);
cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, void* value @attribute);
cuMemPoolTrimTo(CUmemoryPool pool, size_t minBytesToKeep);
cuMemAllocAsync(CUdeviceptr* dptr, size_t bytesize, CUstream hStream);
cuMemAllocFromPoolAsync(CUdeviceptr* dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream);
cuMemFreeAsync(CUdeviceptr dptr, CUstream hStream);

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
cuStreamGetDevice(CUstream hStream, CUdevice* device);
cuStreamCopyAttributes(CUstream dst, CUstream src);
cuLaunchHostFunc(CUstream hStream, CUhostFn fn, in void* userData @host);
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
12: cuStreamUpdateCaptureDependencies_v2(CUstream hStream, in CUgraphNode* dependencies[numDependencies],
    const CUgraphEdgeData* dependencyData[numDependencies], size_t numDependencies, unsigned int flags);
12: cuStreamUpdateCaptureDependencies(CUstream hStream, in CUgraphNode* dependencies[numDependencies],
    size_t numDependencies, unsigned int flags);
13: cuStreamUpdateCaptureDependencies(CUstream hStream, in CUgraphNode* dependencies[numDependencies],
    const CUgraphEdgeData* dependencyData[numDependencies], size_t numDependencies, unsigned int flags);
cuThreadExchangeStreamCaptureMode(inout CUstreamCaptureMode* mode);

// Virtual memory
cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp* prop,
    CUmemAllocationGranularity_flags option);
cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* prop,
    unsigned long long flags);
cuMemRelease(CUmemGenericAllocationHandle handle);
cuMemAddressReserve(CUdeviceptr* ptr, size_t size, size_t alignment, CUdeviceptr addr, unsigned long long flags);
cuMemAddressFree(CUdeviceptr ptr, size_t size);
cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags);
cuMemUnmap(CUdeviceptr ptr, size_t size);
cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc* desc[count], size_t count);
cuMemGetAccess(unsigned long long* flags, const CUmemLocation* location, CUdeviceptr ptr);
cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, in void* addr @host);
cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* prop, CUmemGenericAllocationHandle handle);
cuMemExportToShareableHandle(void* shareableHandle @descriptor, CUmemGenericAllocationHandle handle,
    CUmemAllocationHandleType handleType, unsigned long long flags);
cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, in void* osHandle @descriptor,
    CUmemAllocationHandleType shHandleType);
"""

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
