// The device, errors, counts, and what decides whether a process may use the device at all.
#include <cxxabi.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu.h"

namespace null_gpu {
namespace {

thread_local cudaError_t last_error = cudaSuccess;
bool initialised = false;
bool forked_too_late = false;

std::map<std::string, long>& counts() {
  static auto* all = new std::map<std::string, long>;
  return *all;
}

// A chip for each compute capability: what NVIDIA's tables say of it. The name says that it is none.
struct Chip {
  const char* capability;
  const char* name;
  double gib;
  int multiprocessors, threads_per_multiprocessor, blocks_per_multiprocessor;
  size_t shared_memory;
  unsigned l2_cache_mib;
};
constexpr Chip CHIPS[] = {
    {"7.5", "Tesla T4 (null)", 14.56, 40, 1024, 16, 65536, 4},
    {"8.0", "NVIDIA A100 (null)", 79.25, 108, 2048, 32, 166912, 40},
    {"8.6", "NVIDIA GeForce RTX 3090 (null)", 23.68, 82, 1536, 16, 101376, 6},
    {"8.9", "NVIDIA GeForce RTX 4090 (null)", 23.52, 128, 1536, 24, 101376, 72},
    {"9.0", "NVIDIA H200 (null)", 139.8, 132, 2048, 32, 232448, 60},
    {"10.0", "NVIDIA B200 (null)", 178.35, 148, 2048, 32, 232448, 126},
    {"12.0", "NVIDIA GeForce RTX 5090 (null)", 31.36, 170, 1536, 24, 101376, 96},
};

void choose(const char* capability, double gib) {
  for (const Chip& chip : CHIPS) {
    if (strcmp(chip.capability, capability)) continue;
    Device& d = device();
    sscanf(capability, "%d.%d", &d.major, &d.minor);
    d.name = chip.name;
    d.multiprocessors = chip.multiprocessors;
    d.threads_per_multiprocessor = chip.threads_per_multiprocessor;
    d.blocks_per_multiprocessor = chip.blocks_per_multiprocessor;
    d.shared_memory = chip.shared_memory;
    d.l2_cache = (size_t)chip.l2_cache_mib << 20;
    d.memory = (size_t)((gib > 0 ? gib : chip.gib) * (1ull << 30));
    return;
  }
  fprintf(stderr, "[null GPU] no chip of capability %s; see device.cpp\n", capability);
  abort();
}

__attribute__((constructor)) void start() {
  const char* capability = getenv("NULL_GPU_CAPABILITY");
  const char* gib = getenv("NULL_GPU_GIB");
  choose(capability ? capability : "9.0", gib ? atof(gib) : 0);
  pthread_atfork(nullptr, nullptr, [] { forked_too_late = forked_too_late || initialised; });
}

}  // namespace

std::recursive_mutex& book_mutex() {
  static auto* mutex = new std::recursive_mutex;
  return *mutex;
}

Device& device() {
  static auto* chosen = new Device;
  return *chosen;
}

void count(const std::string& what) {
  NULL_GPU_LOCK;
  counts()[what]++;
}

cudaError_t fail(cudaError_t error, const std::string& why) {
  last_error = error;
  fprintf(stderr, "[null GPU] error %d (%s): %s\n", (int)error, cudaGetErrorName(error), why.c_str());
  return error;
}

cudaError_t initialise() {
  if (forked_too_late) return fail(cudaErrorInitializationError, "a process that used the GPU has forked this one");
  initialised = true;
  return cudaSuccess;
}

}  // namespace null_gpu

using namespace null_gpu;

extern "C" {

void null_gpu_count(const char* what) { count(what); }
void null_gpu_missing(const char* name) {
  count(std::string("call of what the null GPU lacks: ") + name);
  fprintf(stderr, "[null GPU] it has no %s\n", name);
}
int null_gpu_initialise() { return initialise(); }
size_t null_gpu_memory() { return device().memory; }
size_t null_gpu_memory_in_use() { return memory_in_use(); }
const char* null_gpu_name() { return device().name.c_str(); }
void null_gpu_choose(const char* capability, double gib) { choose(capability, gib); }
void null_gpu_reset_counts() {
  NULL_GPU_LOCK;
  counts().clear();
}
int null_gpu_write_counts(const char* path) {
  NULL_GPU_LOCK;
  FILE* file = fopen(path, "w");
  if (!file) return 1;
  for (auto& [what, times] : counts()) {
    // nvcc's kernels are known by the names that linkers read.
    size_t mangled = what.find("kernel _Z");
    char* name = mangled == what.npos ? nullptr : abi::__cxa_demangle(&what[mangled + 7], nullptr, nullptr, nullptr);
    fprintf(file, "%ld\t%s\n", times, name ? (what.substr(0, mangled + 7) + name).c_str() : what.c_str());
    free(name);
  }
  return fclose(file);
}

// ---- one device, always chosen
cudaError_t cudaGetDeviceCount(int* devices) {
  *devices = 1;
  return initialise();
}
cudaError_t cudaGetDevice(int* index) {
  *index = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int index) {
  if (index) return fail(cudaErrorInvalidDevice, "cudaSetDevice: there is one device");
  return initialise();
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* id, int size, int) {
  snprintf(id, size, "0000:01:00.0");
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  if (cudaError_t error = initialise()) return error;
  const Device& d = device();
  cudaDeviceProp& p = *properties;
  memset(&p, 0, sizeof p);
  snprintf(p.name, sizeof p.name, "%s", d.name.c_str());
  p.uuid.bytes[0] = 42;
  p.major = d.major, p.minor = d.minor;
  p.totalGlobalMem = d.memory;
  p.multiProcessorCount = d.multiprocessors;
  p.warpSize = 32;
  p.maxThreadsPerBlock = p.maxThreadsDim[0] = p.maxThreadsDim[1] = 1024, p.maxThreadsDim[2] = 64;
  p.maxGridSize[0] = 2147483647, p.maxGridSize[1] = p.maxGridSize[2] = 65535;
  p.maxThreadsPerMultiProcessor = d.threads_per_multiprocessor;
  p.maxBlocksPerMultiProcessor = d.blocks_per_multiprocessor;
  p.regsPerBlock = p.regsPerMultiprocessor = 65536;
  p.sharedMemPerBlock = 49152, p.reservedSharedMemPerBlock = 1024;
  p.sharedMemPerBlockOptin = d.shared_memory, p.sharedMemPerMultiprocessor = d.shared_memory + 1024;
  p.l2CacheSize = p.persistingL2CacheMaxSize = p.accessPolicyMaxWindowSize = d.l2_cache;
  p.totalConstMem = 65536, p.memPitch = 2147483647, p.textureAlignment = 512, p.memoryBusWidth = 6144;
  p.canMapHostMemory = p.concurrentKernels = p.unifiedAddressing = p.managedMemory = p.concurrentManagedAccess = 1;
  p.streamPrioritiesSupported = p.globalL1CacheSupported = p.localL1CacheSupported = p.cooperativeLaunch = 1;
  p.computePreemptionSupported = p.hostRegisterSupported = p.memoryPoolsSupported = p.unifiedFunctionPointers = 1;
  p.asyncEngineCount = 3, p.ECCEnabled = 1, p.pciBusID = 1, p.clusterLaunch = d.major >= 9;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  const Device& d = device();
  const std::map<int, int> values = {
      {cudaDevAttrMaxThreadsPerBlock, 1024},
      {cudaDevAttrMaxBlockDimX, 1024},
      {cudaDevAttrMaxBlockDimY, 1024},
      {cudaDevAttrMaxBlockDimZ, 64},
      {cudaDevAttrMaxGridDimX, 2147483647},
      {cudaDevAttrMaxGridDimY, 65535},
      {cudaDevAttrMaxGridDimZ, 65535},
      {cudaDevAttrMaxSharedMemoryPerBlock, 49152},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, (int)d.shared_memory},
      {cudaDevAttrMaxSharedMemoryPerMultiprocessor, (int)d.shared_memory + 1024},
      {cudaDevAttrReservedSharedMemoryPerBlock, 1024},
      {cudaDevAttrTotalConstantMemory, 65536},
      {cudaDevAttrWarpSize, 32},
      {cudaDevAttrMaxPitch, 2147483647},
      {cudaDevAttrMaxRegistersPerBlock, 65536},
      {cudaDevAttrMaxRegistersPerMultiprocessor, 65536},
      {cudaDevAttrClockRate, 1980000},
      {cudaDevAttrMemoryClockRate, 3201000},
      {cudaDevAttrGlobalMemoryBusWidth, 6144},
      {cudaDevAttrTextureAlignment, 512},
      {cudaDevAttrGpuOverlap, 1},
      {cudaDevAttrMultiProcessorCount, d.multiprocessors},
      {cudaDevAttrMaxThreadsPerMultiProcessor, d.threads_per_multiprocessor},
      {cudaDevAttrMaxBlocksPerMultiprocessor, d.blocks_per_multiprocessor},
      {cudaDevAttrL2CacheSize, (int)d.l2_cache},
      {cudaDevAttrComputeCapabilityMajor, d.major},
      {cudaDevAttrComputeCapabilityMinor, d.minor},
      {cudaDevAttrClusterLaunch, d.major >= 9},
      {cudaDevAttrAsyncEngineCount, 3},
      {cudaDevAttrSingleToDoublePrecisionPerfRatio, 2},
      {cudaDevAttrCanMapHostMemory, 1},
      {cudaDevAttrConcurrentKernels, 1},
      {cudaDevAttrUnifiedAddressing, 1},
      {cudaDevAttrPciBusId, 1},
      {cudaDevAttrEccEnabled, 1},
      {cudaDevAttrStreamPrioritiesSupported, 1},
      {cudaDevAttrGlobalL1CacheSupported, 1},
      {cudaDevAttrLocalL1CacheSupported, 1},
      {cudaDevAttrManagedMemory, 1},
      {cudaDevAttrConcurrentManagedAccess, 1},
      {cudaDevAttrPageableMemoryAccess, 0},
      {cudaDevAttrComputePreemptionSupported, 1},
      {cudaDevAttrCooperativeLaunch, 1},
      {cudaDevAttrHostRegisterSupported, 1},
      {cudaDevAttrMemoryPoolsSupported, 1},
      // Of cuda.h, whose numbers these are: virtual memory, and handles of it as file descriptors.
      {102, 1},
      {103, 1},
  };
  auto found = values.find(attribute);
  *value = found == values.end() ? 0 : found->second;
  return cudaSuccess;
}

// ---- errors
cudaError_t cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() { return last_error; }
// Names of what the null GPU reports; CUDA's library has one for each.
const char* cudaGetErrorName(cudaError_t error) {
#define NAME(error) \
  case error: return #error
  switch (error) {
    NAME(cudaSuccess);
    NAME(cudaErrorInvalidValue);
    NAME(cudaErrorMemoryAllocation);
    NAME(cudaErrorInitializationError);
    NAME(cudaErrorInvalidConfiguration);
    NAME(cudaErrorMissingConfiguration);
    NAME(cudaErrorInvalidDevice);
    NAME(cudaErrorNoKernelImageForDevice);
    NAME(cudaErrorInvalidResourceHandle);
    NAME(cudaErrorIllegalState);
    NAME(cudaErrorIllegalAddress);
    NAME(cudaErrorHostMemoryAlreadyRegistered);
    NAME(cudaErrorHostMemoryNotRegistered);
    NAME(cudaErrorNotSupported);
    NAME(cudaErrorStreamCaptureUnsupported);
    NAME(cudaErrorStreamCaptureInvalidated);
    NAME(cudaErrorStreamCaptureMerge);
    NAME(cudaErrorStreamCaptureUnmatched);
    NAME(cudaErrorStreamCaptureUnjoined);
    NAME(cudaErrorStreamCaptureIsolation);
    NAME(cudaErrorStreamCaptureImplicit);
    NAME(cudaErrorCapturedEvent);
    NAME(cudaErrorStreamCaptureWrongThread);
    default: return "cudaErrorUnknown";
  }
}
const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

// ---- the way to the driver
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  *function = nullptr;
  // The newest version that there is of it.
  for (const char* version : {"_v3", "_v2", ""})
    if (driver && !*function) *function = dlsym(driver, (std::string(name) + version).c_str());
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

}  // extern "C"
