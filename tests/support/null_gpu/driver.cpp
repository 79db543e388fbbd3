// libcuda.so.1 over the null GPU: what Triton's launcher, torch and vLLM's allocator ask of the driver itself.
#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include <fstream>
#include <iterator>
#include <string>

#include "gpu.h"

extern "C" int null_gpu_allow_shared_memory(void* function, int bytes);

namespace {

// The errors of the runtime have the numbers of the driver's, but for a few that callers tell apart.
CUresult driver_error(int error) { return (CUresult)error; }
CUcontext const CONTEXT = (CUcontext)1;

// The chip that an ELF file of machine code is for: 90 for sm_90. Its place depends on the file's version.
int chip_of(const void* image) {
  auto* bytes = (const unsigned char*)image;
  if (memcmp(bytes, "\177ELF", 4)) return 0;
  unsigned flags;
  memcpy(&flags, bytes + 48, sizeof flags);
  return bytes[8] >= 8 ? (flags >> 8) & 0xff : flags & 0xff;
}

CUresult load(void** module, const void* image) {
  if (int error = null_gpu_initialise()) return driver_error(error);
  int major, minor, chip = chip_of(image);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0);
  if (chip && (chip / 10 != major || chip % 10 > minor)) {
    fprintf(stderr, "[null GPU] a module for sm_%d on a device of %d.%d\n", chip, major, minor);
    return CUDA_ERROR_NO_BINARY_FOR_GPU;
  }
  null_gpu_count("load of a module");
  *module = (void*)1;
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

CUresult cuInit(unsigned) { return driver_error(null_gpu_initialise()); }
CUresult cuDriverGetVersion(int* version) { return driver_error(cudaDriverGetVersion(version)); }
CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = cudaGetErrorName((cudaError_t)error);
  return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char** text) { return cuGetErrorString(error, text); }
CUresult cuGetProcAddress(const char* name, void** function, int version, cuuint64_t, CUdriverProcAddressQueryResult* result) {
  cudaDriverEntryPointQueryResult found;
  cudaGetDriverEntryPointByVersion(name, function, version, 0, &found);
  if (result) *result = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

// ---- the device and its one context
CUresult cuDeviceGet(CUdevice* device, int) { return *device = 0, CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int* devices) { return *devices = 1, CUDA_SUCCESS; }
CUresult cuDeviceGetName(char* name, int size, CUdevice) { return snprintf(name, size, "%s", null_gpu_name()), CUDA_SUCCESS; }
CUresult cuDeviceTotalMem(size_t* size, CUdevice) { return *size = null_gpu_memory(), CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  return driver_error(cudaDeviceGetAttribute(value, (cudaDeviceAttr)attribute, 0));
}
CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice) {
  memset(uuid, 0, sizeof *uuid);
  uuid->bytes[0] = 42;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  *context = CONTEXT;
  return driver_error(null_gpu_initialise());
}
CUresult cuDevicePrimaryCtxRelease(CUdevice) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  if (flags) *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) { return *context = CONTEXT, CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuCtxPushCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuCtxPopCurrent(CUcontext* context) {
  if (context) *context = CONTEXT;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetDevice(CUdevice* device) { return *device = 0, CUDA_SUCCESS; }
CUresult cuCtxSynchronize() { return driver_error(cudaDeviceSynchronize()); }

// ---- modules and launches
CUresult cuModuleLoad(CUmodule* module, const char* path) {
  std::ifstream file(path, std::ios::binary);
  std::string image((std::istreambuf_iterator<char>(file)), {});
  return file ? load((void**)module, image.data()) : CUDA_ERROR_FILE_NOT_FOUND;
}
CUresult cuModuleLoadData(CUmodule* module, const void* image) { return load((void**)module, image); }
CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned, CUjit_option*, void**) {
  return load((void**)module, image);
}
CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  *function = (CUfunction)null_gpu_function(name);
  return CUDA_SUCCESS;
}
CUresult cuLibraryLoadData(CUlibrary* library, const void* image, CUjit_option*, void**, unsigned, CUlibraryOption*,
                           void**, unsigned) {
  return load((void**)library, image);
}
CUresult cuLibraryUnload(CUlibrary) { return CUDA_SUCCESS; }
CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary, const char* name) {
  *kernel = (CUkernel)null_gpu_function(name);
  return CUDA_SUCCESS;
}
CUresult cuKernelGetFunction(CUfunction* function, CUkernel kernel) { return *function = (CUfunction)kernel, CUDA_SUCCESS; }
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : 0;
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  // Triton tries an attribute that later drivers have.
  if (attribute >= CU_FUNC_ATTRIBUTE_MAX) return CUDA_ERROR_INVALID_VALUE;
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_SUCCESS;
  return driver_error(null_gpu_allow_shared_memory(function, value));
}
CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice) {
  return cuFuncSetAttribute((CUfunction)kernel, attribute, value);
}
CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int, size_t) { return *blocks = 2, CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig*) { return *clusters = 66, CUDA_SUCCESS; }
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  memset(map, 0, sizeof *map);
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared_memory, CUstream stream, void**, void**) {
  return driver_error(
      null_gpu_launch(function, stream, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_memory));
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction function, void** arguments, void** extra) {
  return cuLaunchKernel(function, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ,
                        c->sharedMemBytes, c->hStream, arguments, extra);
}
CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_memory,
                                   CUstream stream, void** arguments) {
  return cuLaunchKernel(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_memory, stream, arguments,
                        nullptr);
}

// ---- memory, copies and streams, which are the runtime's
CUresult cuMemAlloc(CUdeviceptr* pointer, size_t size) { return driver_error(cudaMalloc((void**)pointer, size)); }
CUresult cuMemFree(CUdeviceptr pointer) { return driver_error(cudaFree((void*)pointer)); }
CUresult cuMemGetInfo(size_t* free, size_t* total) { return driver_error(cudaMemGetInfo(free, total)); }
CUresult cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, size_t size, CUstream stream) {
  return driver_error(cudaMemcpyAsync((void*)target, (void*)source, size, cudaMemcpyDefault, stream));
}
CUresult cuMemcpyHtoD(CUdeviceptr target, const void* source, size_t size) {
  return driver_error(cudaMemcpy((void*)target, source, size, cudaMemcpyHostToDevice));
}
CUresult cuMemcpyDtoH(void* target, CUdeviceptr source, size_t size) {
  return driver_error(cudaMemcpy(target, (void*)source, size, cudaMemcpyDeviceToHost));
}
CUresult cuMemsetD8Async(CUdeviceptr pointer, unsigned char value, size_t size, CUstream stream) {
  return driver_error(cudaMemsetAsync((void*)pointer, value, size, stream));
}
CUresult cuStreamSynchronize(CUstream stream) { return driver_error(cudaStreamSynchronize(stream)); }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  return driver_error(cudaStreamIsCapturing(stream, (cudaStreamCaptureStatus*)status));
}
// Triton asks this of each tensor that it gives to a kernel, and takes it for one of the host where it fails.
CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  int place = null_gpu_place((void*)pointer);
  if (place > 1) return CUDA_ERROR_INVALID_VALUE;
  if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr*)value = pointer;
  else if (attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
    *(unsigned*)value = place ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
  else *(int*)value = 0;
  return CUDA_SUCCESS;
}

// ---- addresses, and memory that is put into them: vLLM's allocator for its sleep mode, torch's segments
CUresult cuMemGetAllocationGranularity(size_t* size, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  return *size = 2u << 20, CUDA_SUCCESS;
}
CUresult cuMemAddressReserve(CUdeviceptr* pointer, size_t size, size_t, CUdeviceptr, unsigned long long) {
  *pointer = (CUdeviceptr)null_gpu_reserve(size);
  return *pointer ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemAddressFree(CUdeviceptr, size_t) { return CUDA_SUCCESS; }
// A handle is the size of its memory, which is all that is kept of it.
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp*, unsigned long long) {
  *handle = size;
  return null_gpu_take(size) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) { return null_gpu_give(handle), CUDA_SUCCESS; }
CUresult cuMemMap(CUdeviceptr pointer, size_t size, size_t, CUmemGenericAllocationHandle, unsigned long long) {
  return null_gpu_map((void*)pointer, size), CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr pointer, size_t size) { return null_gpu_unmap((void*)pointer, size), CUDA_SUCCESS; }
CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }

}  // extern "C"
