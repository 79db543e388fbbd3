// libnvidia-ml.so.1: the one device, as vLLM asks for it before it decides on a platform. Nothing here uses the
// device, so that a process that has only looked may still fork.
#include <stdio.h>

#include "gpu.h"

using nvmlDevice = void*;

extern "C" {

int nvmlInit() { return 0; }
int nvmlInit_v2() { return 0; }
int nvmlInitWithFlags(unsigned) { return 0; }
int nvmlShutdown() { return 0; }
const char* nvmlErrorString(int) { return "an error of the null GPU"; }
int nvmlDeviceGetCount(unsigned* devices) { return *devices = 1, 0; }
int nvmlDeviceGetCount_v2(unsigned* devices) { return nvmlDeviceGetCount(devices); }
int nvmlSystemGetDriverVersion(char* version, unsigned size) { return snprintf(version, size, "580.65.06"), 0; }
int nvmlSystemGetCudaDriverVersion(int* version) { return *version = 13000, 0; }
int nvmlSystemGetCudaDriverVersion_v2(int* version) { return nvmlSystemGetCudaDriverVersion(version); }
int nvmlDeviceGetHandleByIndex(unsigned, nvmlDevice* device) { return *device = (nvmlDevice)1, 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned, nvmlDevice* device) { return *device = (nvmlDevice)1, 0; }
int nvmlDeviceGetHandleByUUID(const char*, nvmlDevice* device) { return *device = (nvmlDevice)1, 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char*, nvmlDevice* device) { return *device = (nvmlDevice)1, 0; }
int nvmlDeviceGetIndex(nvmlDevice, unsigned* index) { return *index = 0, 0; }
int nvmlDeviceGetName(nvmlDevice, char* name, unsigned size) { return snprintf(name, size, "%s", null_gpu_name()), 0; }
int nvmlDeviceGetUUID(nvmlDevice, char* uuid, unsigned size) {
  return snprintf(uuid, size, "GPU-2a000000-0000-0000-0000-000000000000"), 0;
}
int nvmlDeviceGetCudaComputeCapability(nvmlDevice, int* major, int* minor) {
  cudaDeviceGetAttribute(major, cudaDevAttrComputeCapabilityMajor, 0);
  cudaDeviceGetAttribute(minor, cudaDevAttrComputeCapabilityMinor, 0);
  return 0;
}
struct Memory {
  unsigned long long total, free, used;
};
int nvmlDeviceGetMemoryInfo(nvmlDevice, Memory* memory) {
  memory->total = null_gpu_memory();
  memory->used = null_gpu_memory_in_use();
  memory->free = memory->total - memory->used;
  return 0;
}
struct Memory2 {
  unsigned version;
  unsigned long long total, reserved, free, used;
};
int nvmlDeviceGetMemoryInfo_v2(nvmlDevice device, Memory2* memory) {
  Memory now;
  nvmlDeviceGetMemoryInfo(device, &now);
  memory->total = now.total, memory->reserved = 0, memory->free = now.free, memory->used = now.used;
  return 0;
}
int nvmlDeviceGetP2PStatus(nvmlDevice, nvmlDevice, int, int* status) { return *status = 1, 0; }

// What torch looks up besides, and does without.
constexpr int NOT_SUPPORTED = 3;
int nvmlDeviceGetComputeRunningProcesses(nvmlDevice, unsigned*, void*) { return NOT_SUPPORTED; }
int nvmlDeviceGetGpuFabricInfoV(nvmlDevice, void*) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice, unsigned, int*) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice, unsigned, void*) { return NOT_SUPPORTED; }

}  // extern "C"
