// The null GPU: CUDA's libraries for a machine without a GPU. Device memory is host memory, copies are memmove,
// and kernels do nothing. What is kept is CUDA's book: memory, streams, events, captures, graphs and launches,
// with CUDA's errors for what it forbids.
//
// This header is what the sources of libcudart.so.13 share. The other libraries (driver, products, NVML) reach
// the book through the C functions at the end, and through CUDA's own.
#pragma once
#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace null_gpu {

// One lock for everything: what a caller sees of the book is one moment of it.
std::recursive_mutex& book_mutex();
#define NULL_GPU_LOCK std::lock_guard<std::recursive_mutex> book_lock(null_gpu::book_mutex())

// The device, by what CUDA's tables say of the chips that stand for each compute capability.
struct Device {
  int major = 9, minor = 0;
  int multiprocessors = 132;
  int threads_per_multiprocessor = 2048;
  int blocks_per_multiprocessor = 32;
  size_t shared_memory = 232448;  // bytes that a block may opt in to
  size_t l2_cache = 50u << 20;
  size_t memory = 0;  // bytes
  std::string name;
};
Device& device();

// Counts what was asked of the driver, by kind and name; a test reads it.
void count(const std::string& what);
// Reports an error as CUDA does, for cudaGetLastError too, and says why on stderr.
cudaError_t fail(cudaError_t error, const std::string& why);
// Marks this process as one that uses the device. Fails in a process that was forked from such a one.
cudaError_t initialise();

// ---- memory.cpp
enum class Place { DEVICE, PINNED, PAGEABLE, INVALID };
// Where [pointer, pointer + size) lies; INVALID for memory of the device that is not allocated (any more).
Place place_of(const void* pointer, size_t size);
size_t memory_in_use();
// Adds to what is in use, and is false where the device has no room for it.
bool take_memory(size_t size);
void give_memory(size_t size);
// Does what a memset says, without touching pages that are zero already.
void set_memory(void* pointer, int value, size_t size);
// Copies, and leaves pages of the device untouched where the source is zero.
void copy_memory(void* target, const void* source, size_t size);

// ---- streams.cpp
struct Node {
  enum Kind { KERNEL, COPY, SET, HOST } kind;
  std::string name;
  void* target = nullptr;
  const void* source = nullptr;
  size_t size = 0;
  int value = 0;
  cudaHostFn_t function = nullptr;
};
struct Graph {
  std::vector<Node> nodes;
};
struct Stream;
struct Capture {
  unsigned long long id;
  Stream* origin;
  cudaStreamCaptureMode mode;
  unsigned long thread;
  std::set<Stream*> streams;
  Graph graph;
  bool invalid = false;
};
struct Stream {
  int priority;
  unsigned flags;
  Capture* capture = nullptr;
  // Within a capture: operations of each stream that this one's next operation comes after.
  std::map<Stream*, long> after;
};

// An operation for a stream: into the graph where the stream is captured, otherwise done at once.
cudaError_t submit(cudaStream_t stream, const Node& node);
// Whether the call may not be made now because some stream is captured, which invalidates that capture.
bool forbidden_by_capture(const char* call);

// ---- launches.cpp
// A kernel: what cudaFunction_t, cudaKernel_t, CUfunction and CUkernel point to.
struct Function {
  std::string name;
  int dynamic_shared = 49152;
  // The chip that its code is for, of what its library holds; 0 where none of it runs here.
  int code = 0;
};

}  // namespace null_gpu

extern "C" {
// For the other libraries.
void null_gpu_count(const char* what);
void null_gpu_missing(const char* name);
int null_gpu_initialise();
size_t null_gpu_memory();
size_t null_gpu_memory_in_use();
const char* null_gpu_name();
// Ranges of addresses without memory, and memory that is put into them.
void* null_gpu_reserve(size_t size);
int null_gpu_take(size_t size);
void null_gpu_give(size_t size);
void null_gpu_map(void* pointer, size_t size);
void null_gpu_unmap(void* pointer, size_t size);
// 0 device, 1 pinned, 2 pageable, 3 none.
int null_gpu_place(const void* pointer);
void* null_gpu_function(const char* name);
int null_gpu_launch(void* function, void* stream, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                    unsigned block_y, unsigned block_z, size_t shared_memory);
// For tests, through ctypes.
void null_gpu_choose(const char* capability, double gib);
void null_gpu_reset_counts();
int null_gpu_write_counts(const char* path);
}
