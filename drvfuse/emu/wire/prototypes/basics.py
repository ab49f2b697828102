# SPDX-License-Identifier: Apache-2.0
"""Initialisation, errors, contexts and devices."""

PROTOTYPES = """
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
12: cuCtxCreate_v3(CUcontext* pctx, in CUexecAffinityParam* paramsArray[numParams] @uncounted, int numParams,
    unsigned int flags, CUdevice dev);
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
"""
