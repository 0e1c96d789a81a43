// A product of two matrices by cuBLASLt.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "common/dtype.h"
#include "common/status.h"
#include "cuda/cublas/cublaslt_library.h"

namespace jaxcomm {
namespace cuda {

// x (rows, contracted) @ w (contracted, columns), all dense and row-major. With `transposes_x`, the array is
// (contracted, rows), and products of several such arrays can be added up.
struct ProductShape {
  int64_t rows = 0, contracted = 0, columns = 0;
  DType operands = DType::kF32, result = DType::kF32;
  bool transposes_x = false;
  bool tf32 = false;            // f32 operands may be rounded to TF32
  int64_t alignment_bytes = 1;  // of all addresses; a power of two
  int64_t workspace_bytes = 0;  // of the buffer; cuBLASLt gets its part from the first address of this alignment
};

// cuBLASLt requires such workspaces. The buffers of XLA may be aligned to less.
constexpr int64_t kWorkspaceAlignmentBytes = 256;

// Whether cuBLASLt multiplies these types. Sums are in f32, or f64 for f64.
bool CanMultiply(DType operands, DType result);

class Product {
 public:
  // For the current GPU. Nothing waits, and all calls of one shape use the same algorithm of cuBLASLt.
  static StatusOr<std::unique_ptr<Product>> Make(const CublasLtLibrary& library, int device, const ProductShape& shape);
  ~Product();
  Product(const Product&) = delete;
  Product& operator=(const Product&) = delete;

  // The GPU of Make() is the current one. Products on different streams need workspaces of their own. `adds`: to y,
  // instead of replacing it.
  Status Enqueue(const void* x, const void* w, void* y, void* workspace, cudaStream_t stream, bool adds = false) const;
  // Enqueues a product without meaning on memory of scratch_bytes(), and one that adds to it if products may be added
  // up. They load the kernels.
  Status EnqueueOn(void* scratch, cudaStream_t stream) const;
  int64_t scratch_bytes() const;

 private:
  Product(const CublasLtLibrary& library, const ProductShape& shape) : library_(library), shape_(shape) {}
  Status Make(int device);
  Status FindAlgorithm(cublaslt::Preference preference);
  int64_t UsableWorkspaceBytes() const;
  Status Check(const char* name, cublaslt::Result result) const;

  const CublasLtLibrary& library_;
  const ProductShape shape_;
  cublaslt::Handle handle_ = nullptr;  // of the GPU
  cublaslt::Operation operation_ = nullptr;
  cublaslt::Layout w_ = nullptr, x_ = nullptr, y_ = nullptr;
  cublaslt::Algorithm algorithm_ = {};
};

}  // namespace cuda
}  // namespace jaxcomm
