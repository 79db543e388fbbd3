// Kernels: their registration, whether the device has code for them, and the limits of a launch.
#include <stdint.h>
#include <string.h>

#include <algorithm>

#include "gpu.h"

namespace null_gpu {
namespace {

// By the address of the function on the host that stands for them.
std::map<const void*, Function*>& host_functions() {
  static auto* all = new std::map<const void*, Function*>;
  return *all;
}
std::set<const void*>& functions() {
  static auto* all = new std::set<const void*>;
  return *all;
}

Function* make_function(const char* name, int code) {
  auto* function = new Function{name, 49152, code};
  functions().insert(function);
  return function;
}

// A kernel by either kind of handle; nullptr for neither.
Function* function_of(const void* handle) {
  if (functions().count(handle)) return (Function*)handle;
  auto found = host_functions().find(handle);
  return found == host_functions().end() ? nullptr : found->second;
}

// What nvcc puts into a library: images for several chips, each behind a header.
struct ImageHeader {
  uint16_t kind;  // 1 for PTX, 2 for machine code
  uint16_t version;
  uint32_t header_size;
  uint64_t size;
  uint32_t compressed_size, options;
  uint16_t minor, major;
  uint32_t chip;  // 90 for sm_90 and sm_90a
};
struct ContainerHeader {
  uint32_t magic;
  uint16_t version, header_size;
  uint64_t size;
};

int device_chip() { return device().major * 10 + device().minor; }

// The chip of the image that this device runs, 0 for none. Machine code runs on later chips of the same generation;
// PTX on all later ones, since the driver compiles it.
int chosen_image(const void* container) {
  auto* header = (const ContainerHeader*)container;
  if (!header || header->magic != 0xBA55ED50) return device_chip();  // of a kind that is not looked into
  int code = 0, ptx = 0;
  const char* image = (const char*)container + header->header_size;
  const char* end = image + header->size;
  while (image < end) {
    auto* found = (const ImageHeader*)image;
    int chip = found->chip;
    if (chip <= device_chip() && found->kind == 1) ptx = std::max(ptx, chip);
    if (chip <= device_chip() && found->kind == 2 && chip / 10 == device().major) code = std::max(code, chip);
    image += found->header_size + found->size;
  }
  return code ? code : ptx;
}

struct LibraryHandle {
  const void* container;
};

struct Configuration {
  dim3 grid, block;
  size_t shared_memory;
  cudaStream_t stream;
};
thread_local std::vector<Configuration>* configurations = nullptr;

cudaError_t launch(const void* handle, dim3 grid, dim3 block, size_t shared_memory, cudaStream_t stream) {
  NULL_GPU_LOCK;
  if (cudaError_t error = initialise()) return error;
  Function* function = function_of(handle);
  if (!function) return fail(cudaErrorInvalidResourceHandle, "launch of an unknown kernel");
  std::string what = "kernel " + function->name;
  if (!function->code) return fail(cudaErrorNoKernelImageForDevice, what);
  bool fits = grid.x && grid.y && grid.z && grid.x <= 2147483647 && grid.y <= 65535 && grid.z <= 65535;
  fits = fits && block.x && block.y && block.z && block.x <= 1024 && block.y <= 1024 && block.z <= 64;
  if (!fits || (size_t)block.x * block.y * block.z > 1024) {
    auto size = [](dim3 d) { return std::to_string(d.x) + " x " + std::to_string(d.y) + " x " + std::to_string(d.z); };
    return fail(cudaErrorInvalidConfiguration, what + ": grid " + size(grid) + ", block " + size(block));
  }
  if (shared_memory > (size_t)function->dynamic_shared)
    return fail(cudaErrorInvalidValue, what + ": " + std::to_string(shared_memory) + " bytes of shared memory, of " +
                                           std::to_string(function->dynamic_shared));
  return submit(stream, Node{Node::KERNEL, what});
}

cudaError_t allow_shared_memory(const void* handle, int bytes) {
  NULL_GPU_LOCK;
  Function* function = function_of(handle);
  if (!function) return fail(cudaErrorInvalidResourceHandle, "an attribute of an unknown kernel");
  if (bytes < 0 || (size_t)bytes > device().shared_memory)
    return fail(cudaErrorInvalidValue, function->name + ": " + std::to_string(bytes) + " bytes of shared memory");
  function->dynamic_shared = bytes;
  return cudaSuccess;
}

}  // namespace
}  // namespace null_gpu

using namespace null_gpu;

extern "C" {

void* null_gpu_function(const char* name) {
  NULL_GPU_LOCK;
  return make_function(name, device_chip());
}
int null_gpu_launch(void* function, void* stream, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                    unsigned block_y, unsigned block_z, size_t shared_memory) {
  return launch(function, dim3(grid_x, grid_y, grid_z), dim3(block_x, block_y, block_z), shared_memory,
                (cudaStream_t)stream);
}
int null_gpu_allow_shared_memory(void* function, int bytes) { return allow_shared_memory(function, bytes); }

// ---- what nvcc's code calls when a library is loaded
void** __cudaRegisterFatBinary(void* wrapper) {
  struct Wrapper {
    int magic, version;
    const void* container;
  };
  return (void**)new LibraryHandle{((Wrapper*)wrapper)->container};
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(void** library, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  NULL_GPU_LOCK;
  host_functions()[host] = make_function(name, chosen_image(((LibraryHandle*)library)->container));
}

// ---- and when a kernel is launched
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_memory, CUstream_st* stream) {
  if (!configurations) configurations = new std::vector<Configuration>;
  configurations->push_back(Configuration{grid, block, shared_memory, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_memory, void* stream) {
  if (!configurations || configurations->empty()) return fail(cudaErrorMissingConfiguration, "a launch");
  Configuration last = configurations->back();
  configurations->pop_back();
  *grid = last.grid, *block = last.block, *shared_memory = last.shared_memory;
  *(cudaStream_t*)stream = last.stream;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void**, size_t shared_memory,
                             cudaStream_t stream) {
  return launch(function, grid, block, shared_memory, stream);
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void**, size_t shared_memory,
                               cudaStream_t stream) {
  return launch(kernel, grid, block, shared_memory, stream);
}
cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block, void**, size_t shared_memory,
                                        cudaStream_t stream) {
  return launch(function, grid, block, shared_memory, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void**) {
  return launch(function, config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream);
}

// ---- kernels and their attributes
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  NULL_GPU_LOCK;
  *kernel = (cudaKernel_t)function_of(host);
  return *kernel ? cudaSuccess : fail(cudaErrorInvalidResourceHandle, "an unknown kernel");
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* handle) {
  NULL_GPU_LOCK;
  if (cudaError_t error = initialise()) return error;
  Function* function = function_of(handle);
  if (!function) return fail(cudaErrorInvalidResourceHandle, "attributes of an unknown kernel");
  if (!function->code) return fail(cudaErrorNoKernelImageForDevice, function->name);
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 64;
  // CUB chooses its kernels by it.
  attributes->ptxVersion = attributes->binaryVersion = function->code;
  attributes->maxDynamicSharedSizeBytes = function->dynamic_shared;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) return allow_shared_memory(function, value);
  return cudaSuccess;
}
cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t kernel, cudaFuncAttribute attribute, int value, int) {
  return cudaFuncSetAttribute(kernel, attribute, value);
}
// What nothing here could know: as many as most kernels have.
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  *blocks = 2;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function, int threads, size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, shared, 0);
}

cudaError_t cudaLibraryLoadData(cudaLibrary_t* library, const void* image, cudaJitOption*, void**, unsigned,
                                cudaLibraryOption*, void**, unsigned) {
  *library = (cudaLibrary_t) new LibraryHandle{image};
  count("load of a module");
  return cudaSuccess;
}
cudaError_t cudaLibraryGetKernel(cudaKernel_t* kernel, cudaLibrary_t library, const char* name) {
  NULL_GPU_LOCK;
  *kernel = (cudaKernel_t)make_function(name, chosen_image(((LibraryHandle*)library)->container));
  return cudaSuccess;
}
cudaError_t cudaLibraryUnload(cudaLibrary_t) { return cudaSuccess; }

}  // extern "C"
