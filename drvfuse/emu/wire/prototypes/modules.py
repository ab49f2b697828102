# SPDX-License-Identifier: Apache-2.0
"""The prototypes of the functions for modules, libraries, linking, kernels, occupancy and launches."""

PROTOTYPES = """
// Modules and libraries
cuModuleLoadData(CUmodule* module, const void* image @image);
cuModuleLoadDataEx(CUmodule* module, const void* image @image, unsigned int numOptions,
    in CUjit_option* options[numOptions], in void** optionValues[numOptions] @options);
cuModuleLoad(CUmodule* module, const char* fname);
cuModuleLoadFatBinary(CUmodule* module, const void* fatCubin @image);
cuModuleUnload(CUmodule hmod);
cuModuleGetFunction(CUfunction* hfunc, CUmodule hmod, const char* name);
cuModuleGetFunctionCount(unsigned int* count, CUmodule mod);
cuModuleEnumerateFunctions(CUfunction* functions[numFunctions], unsigned int numFunctions, CUmodule mod);
cuModuleGetGlobal(CUdeviceptr* dptr @managed, size_t* bytes, CUmodule hmod, const char* name);
cuModuleGetLoadingMode(CUmoduleLoadingMode* mode);
cuLibraryLoadData(CUlibrary* library, const void* code @image, in CUjit_option* jitOptions[numJitOptions],
    in void** jitOptionsValues[numJitOptions] @options, unsigned int numJitOptions,
    in CUlibraryOption* libraryOptions[numLibraryOptions], in void** libraryOptionValues[numLibraryOptions] @options,
    unsigned int numLibraryOptions);
cuLibraryLoadFromFile(CUlibrary* library, const char* fileName, in CUjit_option* jitOptions[numJitOptions],
    in void** jitOptionsValues[numJitOptions] @options, unsigned int numJitOptions,
    in CUlibraryOption* libraryOptions[numLibraryOptions], in void** libraryOptionValues[numLibraryOptions] @options,
    unsigned int numLibraryOptions);
cuLibraryGetUnifiedFunction(void** fptr, CUlibrary library, const char* symbol);
cuLibraryUnload(CUlibrary library);
cuLibraryGetKernel(CUkernel* pKernel, CUlibrary library, const char* name);
cuLibraryGetKernelCount(unsigned int* count, CUlibrary lib);
cuLibraryEnumerateKernels(CUkernel* kernels[numKernels], unsigned int numKernels, CUlibrary lib);
cuLibraryGetModule(CUmodule* pMod, CUlibrary library);
cuLibraryGetGlobal(CUdeviceptr* dptr @managed, size_t* bytes, CUlibrary library, const char* name);
cuLibraryGetManaged(CUdeviceptr* dptr @managed, size_t* bytes, CUlibrary library, const char* name);
cuKernelGetFunction(CUfunction* pFunc, CUkernel kernel);
cuKernelGetLibrary(CUlibrary* pLib, CUkernel kernel);
cuKernelGetName(const char** name, CUkernel hfunc);

// Linking
cuLinkCreate(unsigned int numOptions, in CUjit_option* options[numOptions], in void** optionValues[numOptions] @options,
    CUlinkState* stateOut);
cuLinkAddData(CUlinkState state, CUjitInputType typename, in void* data[size], size_t size, const char* name,
    unsigned int numOptions, in CUjit_option* options[numOptions], in void** optionValues[numOptions] @options);
cuLinkAddFile(CUlinkState state, CUjitInputType typename, const char* path, unsigned int numOptions,
    in CUjit_option* options[numOptions], in void** optionValues[numOptions] @options);
cuLinkComplete(CUlinkState state, void** cubinOut @code, size_t* sizeOut);
cuLinkDestroy(CUlinkState state);

// Functions
cuFuncGetAttribute(int* pi, CUfunction_attribute attrib, CUfunction hfunc);
cuFuncSetAttribute(CUfunction hfunc, CUfunction_attribute attrib, int value);
cuFuncSetCacheConfig(CUfunction hfunc, CUfunc_cache config);
cuFuncSetSharedMemConfig(CUfunction hfunc, CUsharedconfig config);
cuKernelSetCacheConfig(CUkernel kernel, CUfunc_cache config, CUdevice dev);
cuFuncGetName(const char** name, CUfunction hfunc);
cuFuncGetModule(CUmodule* hmod, CUfunction hfunc);
cuFuncLoad(CUfunction function);
cuFuncIsLoaded(CUfunctionLoadingState* state, CUfunction function);
cuFuncGetParamInfo(CUfunction func, size_t paramIndex, size_t* paramOffset, size_t* paramSize);
cuKernelGetParamInfo(CUkernel kernel, size_t paramIndex, size_t* paramOffset, size_t* paramSize);
cuKernelGetAttribute(int* pi, CUfunction_attribute attrib, CUkernel kernel, CUdevice dev);
cuKernelSetAttribute(CUfunction_attribute attrib, int val, CUkernel kernel, CUdevice dev);
13: cuFuncGetParamCount(CUfunction func, size_t* paramCount);

// Occupancy
cuOccupancyMaxActiveBlocksPerMultiprocessor(int* numBlocks, CUfunction func, int blockSize, size_t dynamicSMemSize);
cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* numBlocks, CUfunction func, int blockSize,
    size_t dynamicSMemSize, unsigned int flags);
cuOccupancyMaxPotentialBlockSize(int* minGridSize, int* blockSize, CUfunction func,
    CUoccupancyB2DSize blockSizeToDynamicSMemSize, size_t dynamicSMemSize, int blockSizeLimit);
cuOccupancyMaxPotentialBlockSizeWithFlags(int* minGridSize, int* blockSize, CUfunction func,
    CUoccupancyB2DSize blockSizeToDynamicSMemSize, size_t dynamicSMemSize, int blockSizeLimit, unsigned int flags);
cuOccupancyAvailableDynamicSMemPerBlock(size_t* dynamicSmemSize, CUfunction func, int numBlocks, int blockSize);
cuOccupancyMaxPotentialClusterSize(int* clusterSize, CUfunction func, const CUlaunchConfig* config);
cuOccupancyMaxActiveClusters(int* numClusters, CUfunction func, const CUlaunchConfig* config);

// Launches
cuLaunchKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ,
    unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ, unsigned int sharedMemBytes,
    CUstream hStream, in void** kernelParams @parameters, in void** extra @parameters);
cuLaunchCooperativeKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ,
    unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ, unsigned int sharedMemBytes,
    CUstream hStream, in void** kernelParams @parameters);
cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction f, in void** kernelParams @parameters,
    in void** extra @parameters);
cuLaunchCooperativeKernelMultiDevice(in CUDA_LAUNCH_PARAMS* launchParamsList[numDevices], unsigned int numDevices,
    unsigned int flags);
cuFuncSetBlockShape(CUfunction hfunc, int x, int y, int z);
cuFuncSetSharedSize(CUfunction hfunc, unsigned int numbytes);
cuParamSetSize(CUfunction hfunc, unsigned int numbytes);
cuParamSeti(CUfunction hfunc, int offset, unsigned int value);
cuParamSetf(CUfunction hfunc, int offset, float value);
cuParamSetv(CUfunction hfunc, int offset, in void* ptr[numbytes], unsigned int numbytes);
cuLaunch(CUfunction f);
cuLaunchGrid(CUfunction f, int grid_width, int grid_height);
cuLaunchGridAsync(CUfunction f, int grid_width, int grid_height, CUstream hStream);
"""
