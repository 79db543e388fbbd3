// cuBLAS and cuBLASLt: products that compute nothing, launched as one kernel each, named by their shape.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "gpu.h"

namespace {

constexpr int FAILED = 13;  // CUBLAS_STATUS_EXECUTION_FAILED

int launch(const std::string& name, void* stream) {
  static auto* kernels = new std::map<std::string, void*>;
  NULL_GPU_LOCK;
  void*& kernel = (*kernels)[name];
  if (!kernel) kernel = null_gpu_function(name.c_str());
  return null_gpu_launch(kernel, stream, 1, 1, 1, 1, 1, 1, 0) ? FAILED : 0;
}

std::string shape(long m, long n, long k) {
  return std::to_string(m) + " x " + std::to_string(n) + " x " + std::to_string(k);
}

}  // namespace

extern "C" {

#ifdef CUBLAS
struct Handle {
  void* stream;
  int math_mode, pointer_mode;
};
int cublasCreate_v2(Handle** handle) { return *handle = (Handle*)calloc(1, sizeof(Handle)), 0; }
int cublasDestroy_v2(Handle* handle) { return free(handle), 0; }
int cublasSetStream_v2(Handle* handle, void* stream) { return handle->stream = stream, 0; }
int cublasGetStream_v2(Handle* handle, void** stream) { return *stream = handle->stream, 0; }
int cublasSetWorkspace_v2(Handle*, void*, size_t) { return 0; }
int cublasSetMathMode(Handle* handle, int mode) { return handle->math_mode = mode, 0; }
int cublasGetMathMode(Handle* handle, int* mode) { return *mode = handle->math_mode, 0; }
int cublasSetPointerMode_v2(Handle* handle, int mode) { return handle->pointer_mode = mode, 0; }
int cublasGetPointerMode_v2(Handle* handle, int* mode) { return *mode = handle->pointer_mode, 0; }
int cublasSetSmCountTarget(Handle*, int) { return 0; }
int cublasGetVersion_v2(Handle*, int* version) { return *version = 130000, 0; }
const char* cublasGetStatusString(int) { return "a product of the null GPU failed"; }
// The arguments that all of them begin with.
#define PRODUCT(name) \
  int name(Handle* handle, int, int, int m, int n, int k) { return launch("cublas product " + shape(m, n, k), handle->stream); }
PRODUCT(cublasGemmEx)
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasDgemm_v2)
PRODUCT(cublasSgemmEx)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasSgemmStridedBatched)
#endif

#ifdef CUBLASLT
struct Layout {
  int type;
  uint64_t rows, columns;
};
constexpr size_t DESCRIPTION = 256;  // bytes, more than any of them has

int cublasLtCreate(void** handle) { return *handle = calloc(1, DESCRIPTION), 0; }
int cublasLtDestroy(void* handle) { return free(handle), 0; }
size_t cublasLtGetVersion() { return 130000; }
size_t cublasLtGetCudartVersion() { return 13000; }
int cublasLtMatmulDescCreate(void** description, int, int) { return *description = calloc(1, DESCRIPTION), 0; }
int cublasLtMatmulDescDestroy(void* description) { return free(description), 0; }
int cublasLtMatmulDescSetAttribute(void*, int, const void*, size_t) { return 0; }
int cublasLtMatmulPreferenceCreate(void** preference) { return *preference = calloc(1, DESCRIPTION), 0; }
int cublasLtMatmulPreferenceDestroy(void* preference) { return free(preference), 0; }
int cublasLtMatmulPreferenceSetAttribute(void*, int, const void*, size_t) { return 0; }
int cublasLtMatrixLayoutCreate(Layout** layout, int type, uint64_t rows, uint64_t columns, int64_t) {
  *layout = (Layout*)calloc(1, DESCRIPTION);
  **layout = Layout{type, rows, columns};
  return 0;
}
int cublasLtMatrixLayoutDestroy(void* layout) { return free(layout), 0; }
int cublasLtMatrixLayoutSetAttribute(void*, int, const void*, size_t) { return 0; }
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int wanted, void* algorithms, int* found) {
  memset(algorithms, 0, wanted > 0 ? 96 : 0);  // sizeof(cublasLtMatmulHeuristicResult_t)
  return *found = wanted > 0, 0;
}
int cublasLtMatmul(void*, void*, const void*, const void*, Layout* a, const void*, Layout*, const void*, const void*,
                   Layout*, void*, Layout* d, const void*, void*, size_t, void* stream) {
  uint64_t inner = a->rows == d->rows ? a->columns : a->rows;
  return launch("cublasLt product " + shape(d->rows, d->columns, inner), stream);
}
#endif

}  // extern "C"
