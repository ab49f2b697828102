# SPDX-License-Identifier: Apache-2.0
"""The prototypes of the functions for initialisation, errors, contexts and devices."""

PROTOTYPES = """
// Initialisation, errors
cuInit(unsigned int Flags);
cuDriverGetVersion(int* driverVersion);
cuGetErrorName(CUresult error, const char** pStr);
cuGetErrorString(CUresult error, const char** pStr);
cuGetExportTable(out const void** ppExportTable, const CUuuid* pExportTableId);
cuGetProcAddress(const char* symbol, void** pfn, int cudaVersion, cuuint64_t flags,
    CUdriverProcAddressQueryResult* symbolStatus);
cuLogsCurrent(CUlogIterator* iterator_out, unsigned int flags);
cuLogsDumpToFile(inout CUlogIterator* iterator, const char* pathToFile, unsigned int flags);
cuLogsDumpToMemory(inout CUlogIterator* iterator, in char* buffer @text, inout size_t* size, unsigned int flags);
cuLogsRegisterCallback(CUlogsCallback callbackFunc, in void* userData @host, CUlogsCallbackHandle* callback_out);
cuLogsUnregisterCallback(CUlogsCallbackHandle callback);
cuProfilerStart();
cuProfilerStop();

// Contexts
12: cuCtxCreate(CUcontext* pctx, unsigned int flags, CUdevice dev);
13: cuCtxCreate(CUcontext* pctx, in CUctxCreateParams* ctxCreateParams, unsigned int flags, CUdevice dev);
12: cuCtxCreate_v3(CUcontext* pctx, in CUexecAffinityParam* paramsArray[numParams] @uncounted, int numParams,
    unsigned int flags, CUdevice dev);
12: cuCtxCreate_v4(CUcontext* pctx, in CUctxCreateParams* ctxCreateParams, unsigned int flags, CUdevice dev);
cuCtxDestroy(CUcontext ctx);
cuCtxAttach(CUcontext* pctx, unsigned int flags);
cuCtxDetach(CUcontext ctx);
cuCtxSetCurrent(CUcontext ctx);
cuCtxGetCurrent(CUcontext* pctx);
cuCtxPushCurrent(CUcontext ctx);
cuCtxPopCurrent(CUcontext* pctx);
cuCtxGetDevice(CUdevice* device);
13: cuCtxGetDevice_v2(CUdevice* device, CUcontext ctx);
cuCtxGetFlags(unsigned int* flags);
cuCtxSetFlags(unsigned int flags);
cuCtxGetId(CUcontext ctx, unsigned long long* ctxId);
cuCtxGetApiVersion(CUcontext ctx, unsigned int* version);
cuCtxSynchronize();
13: cuCtxSynchronize_v2(CUcontext ctx);
cuCtxRecordEvent(CUcontext hCtx, CUevent hEvent);
cuCtxWaitEvent(CUcontext hCtx, CUevent hEvent);
cuCtxGetStreamPriorityRange(int* leastPriority, int* greatestPriority);
cuCtxGetLimit(size_t* pvalue, CUlimit limit);
cuCtxSetLimit(CUlimit limit, size_t value);
cuCtxEnablePeerAccess(CUcontext peerContext, unsigned int Flags);
cuCtxDisablePeerAccess(CUcontext peerContext);
cuCtxSetCacheConfig(CUfunc_cache config);
cuCtxGetCacheConfig(CUfunc_cache* pconfig);
cuCtxSetSharedMemConfig(CUsharedconfig config);
cuCtxGetSharedMemConfig(CUsharedconfig* pConfig);
cuCtxResetPersistingL2Cache();
cuCtxGetExecAffinity(CUexecAffinityParam* pExecAffinity, CUexecAffinityType typename);
cuFlushGPUDirectRDMAWrites(CUflushGPUDirectRDMAWritesTarget target, CUflushGPUDirectRDMAWritesScope scope);

// Devices
cuDeviceGet(CUdevice* device, int ordinal);
cuDeviceGetCount(int* count);
cuDeviceGetName(char* name[length], int length, CUdevice dev);
cuDeviceGetUuid(CUuuid* uuid, CUdevice dev);
12: cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice dev);
cuDeviceGetAttribute(int* pi, CUdevice_attribute attrib, CUdevice dev);
cuDeviceGetProperties(CUdevprop* prop, CUdevice dev);
cuDeviceGetLuid(char* luid, unsigned int* deviceNodeMask, CUdevice dev);
cuDeviceGetTexture1DLinearMaxWidth(size_t* maxWidthInElements, CUarray_format pformat, unsigned numChannels,
    CUdevice dev);
cuDeviceGetExecAffinitySupport(int* pi, CUexecAffinityType typename, CUdevice dev);
13: cuDeviceGetHostAtomicCapabilities(unsigned int* capabilities[count],
    const CUatomicOperation* operations[count], unsigned int count, CUdevice dev);
13: cuDeviceGetP2PAtomicCapabilities(unsigned int* capabilities[count],
    const CUatomicOperation* operations[count], unsigned int count, CUdevice srcDevice, CUdevice dstDevice);
cuDeviceRegisterAsyncNotification(CUdevice device, CUasyncCallback callbackFunc, in void* userData @host,
    CUasyncCallbackHandle* callback);
cuDeviceUnregisterAsyncNotification(CUdevice device, CUasyncCallbackHandle callback);
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
"""
