// Device memory, pinned memory and copies.
#include <string.h>
#include <sys/mman.h>

#include <algorithm>

#include "gpu.h"

namespace null_gpu {
namespace {

struct Allocation {
  size_t size;      // as asked for: what may be read and written
  size_t reserved;  // as counted
  Place place;
};

std::map<char*, Allocation>& allocations() {
  static auto* all = new std::map<char*, Allocation>;
  return *all;
}

// Device memory lies in one range of addresses of which none is given out twice, so that a pointer into freed
// memory is always known as one. The range takes no memory until it is written to.
constexpr size_t ARENA = 1ull << 44;
constexpr size_t GRANULE = 2u << 20;  // bytes by which cudaMalloc takes memory
char* arena = nullptr;
char* arena_next = nullptr;
size_t in_use = 0;

size_t rounded(size_t size) { return (size + GRANULE - 1) & ~(GRANULE - 1); }

char* reserve(size_t size) {
  if (!arena) {
    void* range = mmap(nullptr, ARENA, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) return nullptr;
    arena = arena_next = (char*)(((size_t)range + GRANULE - 1) & ~(GRANULE - 1));
  }
  if (arena_next + size > arena + ARENA - GRANULE) return nullptr;
  char* start = arena_next;
  arena_next += size;
  return start;
}

void open_range(char* start, size_t size) {
  mprotect(start, size, PROT_READ | PROT_WRITE);
  allocations()[start] = Allocation{size, size, Place::DEVICE};
}

void close_range(char* start, size_t size) {
  madvise(start, size, MADV_DONTNEED);
  mprotect(start, size, PROT_NONE);
  allocations().erase(start);
}

const char* name_of(Place place) {
  static const char* const names[] = {"device", "pinned", "pageable", "invalid"};
  return names[(int)place];
}

// A copy between places that exist, in the direction that the caller says.
cudaError_t checked_copy(void* target, const void* source, size_t size, cudaMemcpyKind kind, cudaStream_t stream,
                         const char* call) {
  Place to = place_of(target, size), from = place_of(source, size);
  bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  std::string what = std::string(call) + " " + name_of(from) + " to " + name_of(to);
  if (to == Place::INVALID || from == Place::INVALID)
    return fail(cudaErrorInvalidValue, what + ": freed, or past the end of an allocation");
  if ((to_device && to == Place::PAGEABLE) || (from_device && from == Place::PAGEABLE))
    return fail(cudaErrorInvalidValue, what + ": not memory of the device");
  Node node{Node::COPY, what};
  node.target = target, node.source = source, node.size = size;
  return submit(stream, node);
}

}  // namespace

Place place_of(const void* pointer, size_t size) {
  auto next = allocations().upper_bound((char*)pointer);
  if (next != allocations().begin()) {
    auto& [start, allocation] = *std::prev(next);
    if ((char*)pointer < start + allocation.size)
      return (char*)pointer + size <= start + allocation.size ? allocation.place : Place::INVALID;
  }
  bool ours = arena && (char*)pointer >= arena && (char*)pointer < arena + ARENA;
  return ours ? Place::INVALID : Place::PAGEABLE;
}

size_t memory_in_use() { return in_use; }

bool take_memory(size_t size) {
  if (in_use + size > device().memory) return false;
  in_use += size;
  return true;
}

void give_memory(size_t size) { in_use -= size; }

void set_memory(void* pointer, int value, size_t size) {
  constexpr size_t PAGE = 4096;
  char *begin = (char*)pointer, *end = begin + size;
  char* first = (char*)(((size_t)begin + PAGE - 1) & ~(PAGE - 1));
  char* last = (char*)((size_t)end & ~(PAGE - 1));
  // The KV cache of a large GPU is zeroed at a start; this machine has no room to write that much.
  if (value == 0 && size > (1u << 20) && place_of(pointer, size) == Place::DEVICE) {
    memset(begin, 0, first - begin);
    madvise(first, last - first, MADV_DONTNEED);
    memset(last, 0, end - last);
  } else {
    memset(pointer, value, size);
  }
}

void copy_memory(void* target, const void* source, size_t size) {
  constexpr size_t PAGE = 4096, LARGE = 1u << 20;
  static const char zeros[PAGE] = {};
  if (size <= LARGE || place_of(target, size) != Place::DEVICE) {
    memmove(target, source, size);
    return;
  }
  char *begin = (char*)target, *end = begin + size;
  auto from = [&](char* to) { return (const char*)source + (to - begin); };
  char* first = (char*)(((size_t)begin + PAGE - 1) & ~(PAGE - 1));
  char* last = (char*)((size_t)end & ~(PAGE - 1));
  memcpy(begin, source, first - begin);
  // Weights that nothing has filled are copied too, by gigabytes.
  char* zero = first;
  for (char* page = first; page < last; page += PAGE) {
    if (!memcmp(from(page), zeros, PAGE)) continue;
    if (zero < page) madvise(zero, page - zero, MADV_DONTNEED);
    memcpy(page, from(page), PAGE);
    zero = page + PAGE;
  }
  if (zero < last) madvise(zero, last - zero, MADV_DONTNEED);
  memcpy(last, from(last), end - last);
}

}  // namespace null_gpu

using namespace null_gpu;

extern "C" {

void* null_gpu_reserve(size_t size) {
  NULL_GPU_LOCK;
  return reserve(rounded(size));
}
int null_gpu_take(size_t size) {
  NULL_GPU_LOCK;
  return take_memory(size);
}
void null_gpu_give(size_t size) {
  NULL_GPU_LOCK;
  give_memory(size);
}
void null_gpu_map(void* pointer, size_t size) {
  NULL_GPU_LOCK;
  open_range((char*)pointer, size);
}
void null_gpu_unmap(void* pointer, size_t size) {
  NULL_GPU_LOCK;
  close_range((char*)pointer, size);
}
int null_gpu_place(const void* pointer) {
  NULL_GPU_LOCK;
  return (int)place_of(pointer, 1);
}

cudaError_t cudaMalloc(void** pointer, size_t size) {
  NULL_GPU_LOCK;
  if (cudaError_t error = initialise()) return error;
  if (forbidden_by_capture("cudaMalloc")) return fail(cudaErrorStreamCaptureUnsupported, "cudaMalloc");
  *pointer = nullptr;
  if (size == 0) return cudaSuccess;
  if (!take_memory(rounded(size))) return fail(cudaErrorMemoryAllocation, "cudaMalloc of " + std::to_string(size));
  char* start = reserve(rounded(size));
  if (!start) return fail(cudaErrorMemoryAllocation, "cudaMalloc: no more addresses");
  mprotect(start, rounded(size), PROT_READ | PROT_WRITE);
  allocations()[start] = Allocation{size, rounded(size), Place::DEVICE};
  *pointer = start;
  count("allocation of device memory");
  return cudaSuccess;
}

cudaError_t cudaFree(void* pointer) {
  NULL_GPU_LOCK;
  if (cudaError_t error = initialise()) return error;
  if (!pointer) return cudaSuccess;
  if (forbidden_by_capture("cudaFree")) return fail(cudaErrorStreamCaptureUnsupported, "cudaFree");
  auto found = allocations().find((char*)pointer);
  if (found == allocations().end() || found->second.place != Place::DEVICE)
    return fail(cudaErrorInvalidValue, "cudaFree of what is not allocated");
  size_t reserved = found->second.reserved;
  give_memory(reserved);
  close_range((char*)pointer, reserved);
  return cudaSuccess;
}

// No memory pools: what torch's caching allocator does not ask for.
cudaError_t cudaMallocAsync(void** pointer, size_t size, cudaStream_t) { return cudaMalloc(pointer, size); }
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return cudaFree(pointer); }
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  *pool = (cudaMemPool_t)1;
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  NULL_GPU_LOCK;
  if (cudaError_t error = initialise()) return error;
  *total = device().memory;
  // A context, with the code of what is loaded, takes about half a GiB.
  *free = device().memory - memory_in_use();
  *free -= std::min<size_t>(*free, 512u << 20);
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned) {
  NULL_GPU_LOCK;
  if (cudaError_t error = initialise()) return error;
  if (forbidden_by_capture("cudaHostAlloc")) return fail(cudaErrorStreamCaptureUnsupported, "cudaHostAlloc");
  size = std::max<size_t>(size, 1);
  if (posix_memalign(pointer, 4096, size)) return fail(cudaErrorMemoryAllocation, "cudaHostAlloc");
  allocations()[(char*)*pointer] = Allocation{size, size, Place::PINNED};
  count("allocation of pinned memory");
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* pointer) {
  NULL_GPU_LOCK;
  if (!pointer) return cudaSuccess;
  if (forbidden_by_capture("cudaFreeHost")) return fail(cudaErrorStreamCaptureUnsupported, "cudaFreeHost");
  auto found = allocations().find((char*)pointer);
  if (found == allocations().end() || found->second.place != Place::PINNED)
    return fail(cudaErrorInvalidValue, "cudaFreeHost of what is not allocated");
  allocations().erase(found);
  free(pointer);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* pointer, size_t size, unsigned) {
  NULL_GPU_LOCK;
  if (cudaError_t error = initialise()) return error;
  if (place_of(pointer, size) != Place::PAGEABLE)
    return fail(cudaErrorHostMemoryAlreadyRegistered, "cudaHostRegister");
  allocations()[(char*)pointer] = Allocation{size, size, Place::PINNED};
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* pointer) {
  NULL_GPU_LOCK;
  if (!allocations().erase((char*)pointer)) return fail(cudaErrorHostMemoryNotRegistered, "cudaHostUnregister");
  return cudaSuccess;
}

cudaError_t cudaHostGetDevicePointer(void** of_device, void* of_host, unsigned) {
  NULL_GPU_LOCK;
  if (place_of(of_host, 1) != Place::PINNED) return fail(cudaErrorInvalidValue, "cudaHostGetDevicePointer");
  *of_device = of_host;
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  NULL_GPU_LOCK;
  memset(attributes, 0, sizeof *attributes);
  Place place = place_of(pointer, 1);
  bool known = place == Place::DEVICE || place == Place::PINNED;
  attributes->type = place == Place::DEVICE   ? cudaMemoryTypeDevice
                     : place == Place::PINNED ? cudaMemoryTypeHost
                                              : cudaMemoryTypeUnregistered;
  attributes->device = known ? 0 : -2;
  attributes->devicePointer = known ? (void*)pointer : nullptr;
  attributes->hostPointer = place == Place::DEVICE ? nullptr : (void*)pointer;
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t size, cudaMemcpyKind kind, cudaStream_t stream) {
  NULL_GPU_LOCK;
  if (cudaError_t error = initialise()) return error;
  return size ? checked_copy(target, source, size, kind, stream, "copy") : cudaSuccess;
}

cudaError_t cudaMemcpy(void* target, const void* source, size_t size, cudaMemcpyKind kind) {
  NULL_GPU_LOCK;
  if (cudaError_t error = initialise()) return error;
  if (forbidden_by_capture("cudaMemcpy")) return fail(cudaErrorStreamCaptureImplicit, "cudaMemcpy");
  return size ? checked_copy(target, source, size, kind, nullptr, "blocking copy") : cudaSuccess;
}

cudaError_t cudaMemcpyPeerAsync(void* target, int, const void* source, int, size_t size, cudaStream_t stream) {
  return cudaMemcpyAsync(target, source, size, cudaMemcpyDeviceToDevice, stream);
}

cudaError_t cudaMemcpy2DAsync(void* target, size_t target_pitch, const void* source, size_t source_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
  for (size_t row = 0; row < height; row++) {
    char* to = (char*)target + row * target_pitch;
    cudaError_t error = cudaMemcpyAsync(to, (const char*)source + row * source_pitch, width, kind, stream);
    if (error) return error;
  }
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* pointer, int value, size_t size, cudaStream_t stream) {
  NULL_GPU_LOCK;
  if (cudaError_t error = initialise()) return error;
  if (size == 0) return cudaSuccess;
  Place place = place_of(pointer, size);
  if (place != Place::DEVICE && place != Place::PINNED)
    return fail(cudaErrorInvalidValue, "cudaMemsetAsync: not memory of the device, or freed");
  Node node{Node::SET, "memset"};
  node.target = pointer, node.value = value, node.size = size;
  return submit(stream, node);
}

cudaError_t cudaMemset(void* pointer, int value, size_t size) {
  if (forbidden_by_capture("cudaMemset")) return fail(cudaErrorStreamCaptureImplicit, "cudaMemset");
  return cudaMemsetAsync(pointer, value, size, nullptr);
}

// Variables of kernels that do nothing: one piece of memory for all of them.
cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
cudaError_t cudaGetSymbolAddress(void** pointer, const void*) {
  static void* variables = nullptr;
  if (!variables) cudaMalloc(&variables, 1 << 20);
  *pointer = variables;
  return cudaSuccess;
}

}  // extern "C"
