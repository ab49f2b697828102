# SPDX-License-Identifier: Apache-2.0
"""The prototypes of the functions for memory: allocation, copies and fills, pointers, pools, virtual memory, multicast
objects.
"""

PROTOTYPES = """
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

// Managed memory
cuMemAllocManaged(CUdeviceptr* dptr @managed, size_t bytesize, unsigned int flags);
12: cuMemAdvise(CUdeviceptr devPtr, size_t count, CUmem_advise advice, CUdevice device);
13: cuMemAdvise(CUdeviceptr devPtr, size_t count, CUmem_advise advice, CUmemLocation location);
12: cuMemAdvise_v2(CUdeviceptr devPtr, size_t count, CUmem_advise advice, CUmemLocation location);
12: cuMemPrefetchAsync(CUdeviceptr devPtr, size_t count, CUdevice dstDevice, CUstream hStream);
13: cuMemPrefetchAsync(CUdeviceptr devPtr, size_t count, CUmemLocation location, unsigned int flags, CUstream hStream);
12: cuMemPrefetchAsync_v2(CUdeviceptr devPtr, size_t count, CUmemLocation location, unsigned int flags,
    CUstream hStream);
cuMemRangeGetAttribute(void* data @range, size_t dataSize, CUmem_range_attribute attribute @kind, CUdeviceptr devPtr,
    size_t count);
cuMemRangeGetAttributes(void** data[numAttributes] @range, in size_t* dataSizes[numAttributes],
    in CUmem_range_attribute* attributes[numAttributes], size_t numAttributes, CUdeviceptr devPtr, size_t count);
13: cuMemPrefetchBatchAsync(in CUdeviceptr* dptrs[count], in size_t* sizes[count], size_t count,
    in CUmemLocation* prefetchLocs[numPrefetchLocs], in size_t* prefetchLocIdxs[numPrefetchLocs],
    size_t numPrefetchLocs, unsigned long long flags, CUstream hStream);
13: cuMemDiscardBatchAsync(in CUdeviceptr* dptrs[count], in size_t* sizes[count], size_t count,
    unsigned long long flags, CUstream hStream);
13: cuMemDiscardAndPrefetchBatchAsync(in CUdeviceptr* dptrs[count], in size_t* sizes[count], size_t count,
    in CUmemLocation* prefetchLocs[numPrefetchLocs], in size_t* prefetchLocIdxs[numPrefetchLocs],
    size_t numPrefetchLocs, unsigned long long flags, CUstream hStream);
cuStreamAttachMemAsync(CUstream hStream, CUdeviceptr dptr, size_t length, unsigned int flags);

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
cuMemcpy2DUnaligned(const CUDA_MEMCPY2D* pCopy);
cuMemcpy3D(const CUDA_MEMCPY3D* pCopy);
cuMemcpy3DAsync(const CUDA_MEMCPY3D* pCopy, CUstream hStream);
cuMemcpy3DPeer(const CUDA_MEMCPY3D_PEER* pCopy);
cuMemcpy3DPeerAsync(const CUDA_MEMCPY3D_PEER* pCopy, CUstream hStream);
12: cuMemcpyBatchAsync(in CUdeviceptr* dsts[count] @batch, in CUdeviceptr* srcs[count] @batch, in size_t* sizes[count],
    size_t count, in CUmemcpyAttributes* attrs[numAttrs], in size_t* attrsIdxs[numAttrs], size_t numAttrs,
    size_t* failIdx, CUstream hStream);
13: cuMemcpyBatchAsync(in CUdeviceptr* dsts[count] @batch, in CUdeviceptr* srcs[count] @batch, in size_t* sizes[count],
    size_t count, in CUmemcpyAttributes* attrs[numAttrs], in size_t* attrsIdxs[numAttrs], size_t numAttrs,
    CUstream hStream);
12: cuMemcpy3DBatchAsync(size_t numOps, in CUDA_MEMCPY3D_BATCH_OP* opList[numOps], size_t* failIdx,
    unsigned long long flags, CUstream hStream);
13: cuMemcpy3DBatchAsync(size_t numOps, in CUDA_MEMCPY3D_BATCH_OP* opList[numOps], unsigned long long flags,
    CUstream hStream);
cuMemBatchDecompressAsync(in CUmemDecompressParams* paramsArray, size_t count, unsigned int flags, size_t* errorIndex,
    CUstream stream);
cuMemsetD2D8(CUdeviceptr dstDevice, size_t dstPitch, unsigned char uc, size_t Width, size_t Height);
cuMemsetD2D16(CUdeviceptr dstDevice, size_t dstPitch, unsigned short us, size_t Width, size_t Height);
cuMemsetD2D32(CUdeviceptr dstDevice, size_t dstPitch, unsigned int ui, size_t Width, size_t Height);
cuMemsetD2D8Async(CUdeviceptr dstDevice, size_t dstPitch, unsigned char uc, size_t Width, size_t Height,
    CUstream hStream);
cuMemsetD2D16Async(CUdeviceptr dstDevice, size_t dstPitch, unsigned short us, size_t Width, size_t Height,
    CUstream hStream);
cuMemsetD2D32Async(CUdeviceptr dstDevice, size_t dstPitch, unsigned int ui, size_t Width, size_t Height,
    CUstream hStream);
cuMemsetD8(CUdeviceptr dstDevice, unsigned char uc, size_t N);
cuMemsetD16(CUdeviceptr dstDevice, unsigned short us, size_t N);
cuMemsetD32(CUdeviceptr dstDevice, unsigned int ui, size_t N);
cuMemsetD8Async(CUdeviceptr dstDevice, unsigned char uc, size_t N, CUstream hStream);
cuMemsetD16Async(CUdeviceptr dstDevice, unsigned short us, size_t N, CUstream hStream);
cuMemsetD32Async(CUdeviceptr dstDevice, unsigned int ui, size_t N, CUstream hStream);

// Pointers
cuPointerGetAttribute(void* data @attribute, CUpointer_attribute attribute, CUdeviceptr ptr @host);
cuPointerGetAttributes(unsigned int numAttributes, in CUpointer_attribute* attributes[numAttributes],
    void** data[numAttributes] @attribute, CUdeviceptr ptr @host);

cuPointerSetAttribute(const void* value @attribute, CUpointer_attribute attribute, CUdeviceptr ptr @host);

// Memory of other processes
cuIpcGetMemHandle(CUipcMemHandle* pHandle, CUdeviceptr dptr);
cuIpcOpenMemHandle(CUdeviceptr* pdptr, CUipcMemHandle handle, unsigned int Flags);
cuIpcCloseMemHandle(CUdeviceptr dptr);
cuMemGetHandleForAddressRange(void* handle, CUdeviceptr dptr, size_t size, CUmemRangeHandleType handleType,
    unsigned long long flags);

// Pools
cuMemPoolCreate(CUmemoryPool* pool, const CUmemPoolProps* poolProps);
cuMemPoolDestroy(CUmemoryPool pool);
cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc* map[count], size_t count);
cuMemPoolGetAccess(CUmemAccess_flags* flags, CUmemoryPool memPool, in CUmemLocation* location);
cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, in void* value @attribute);
cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, void* value @attribute);
cuMemPoolTrimTo(CUmemoryPool pool, size_t minBytesToKeep);
cuMemPoolExportToShareableHandle(void* handle_out @descriptor, CUmemoryPool pool,
    CUmemAllocationHandleType handleType @kind, unsigned long long flags);
cuMemPoolImportFromShareableHandle(CUmemoryPool* pool_out, in void* handle @descriptor,
    CUmemAllocationHandleType handleType, unsigned long long flags);
cuMemPoolExportPointer(CUmemPoolPtrExportData* shareData_out, CUdeviceptr ptr);
cuMemPoolImportPointer(CUdeviceptr* ptr_out, CUmemoryPool pool, in CUmemPoolPtrExportData* shareData);
13: cuMemGetDefaultMemPool(CUmemoryPool* pool_out, in CUmemLocation* location, CUmemAllocationType typename);
13: cuMemGetMemPool(CUmemoryPool* pool, in CUmemLocation* location, CUmemAllocationType typename);
13: cuMemSetMemPool(in CUmemLocation* location, CUmemAllocationType typename, CUmemoryPool pool);
cuMemAllocAsync(CUdeviceptr* dptr, size_t bytesize, CUstream hStream);
cuMemAllocFromPoolAsync(CUdeviceptr* dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream);
cuMemFreeAsync(CUdeviceptr dptr, CUstream hStream);

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
    CUmemAllocationHandleType handleType @kind, unsigned long long flags);
cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, in void* osHandle @descriptor,
    CUmemAllocationHandleType shHandleType);

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
"""
