// A product and the exchange of its rows in one call: algorithm "fused" of all_gather_matmul and matmul_psum_scatter.
// cuBLASLt multiplies chunk by chunk on XLA's stream, while plans of permute move other chunks on a second stream.
// Events order the two, one per chunk. The second stream is joined to XLA's before a call returns.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "common/call_spec.h"
#include "common/status.h"
#include "cuda/cublas/product.h"
#include "cuda/runtime/communicator.h"
#include "cuda/runtime/device_call.h"

namespace jaxcomm {
namespace cuda {

// Arrays are dense, row-major matrices. n is the number of ranks.
//
// Gather: x (rows, contracted) of each rank. Product i of weight i has the rows of all ranks, in rank order. In place
// of weights there may be arrays with the rows of all ranks, (n * rows, columns): their products are sums over all
// rows, gathered x^T @ array. Rank r adds its own rows first, then those of ranks r - 1, r - 2, ...; the same in every
// run. Scatter: x (n * rows, contracted), one weight. Every rank gets the parts of its own block from all ranks, in
// rank order, and adds them later.
struct FusedShape {
  struct Weight {
    int64_t columns = 0;
    DType result = DType::kF32;
    bool has_rows = false;  // gather: an array with the rows of all ranks; its product is a sum over them
  };
  bool scatters = false;
  bool keeps = false;  // gather: `exchanged` also gets the rank's own block
  bool tf32 = false;   // f32 operands may be rounded to TF32
  int64_t chunks = 1;  // of a block; divides `rows`
  int64_t rows = 0, contracted = 0;
  DType operands = DType::kF32;
  std::vector<Weight> weights;
  int64_t workspace_bytes = 0;
};

class FusedMatmul {
 public:
  struct Buffers {
    const void* x = nullptr;
    std::vector<const void*> weights;
    std::vector<void*> products;  // scatter: the parts that this rank computes, by receiver; its own is not written
    void* exchanged = nullptr;    // gather: rows of all ranks; scatter: parts from all ranks; in rank order
    void* workspace = nullptr;
  };

  // Collective. `spec`: of a permute, without sources.
  static StatusOr<std::unique_ptr<FusedMatmul>> Make(const CallSpec& spec, Communicator& communicator,
                                                     const FusedShape& shape);
  ~FusedMatmul();
  FusedMatmul(const FusedMatmul&) = delete;
  FusedMatmul& operator=(const FusedMatmul&) = delete;

  // Enqueues the call. All its work has ended where `stream` continues, also after an error. Not captured.
  // After an error in a scatter, the other ranks get NaN from this rank for the parts without a product.
  Status Launch(const Buffers& buffers, cudaStream_t stream);

  Communicator& communicator() const { return communicator_; }

 private:
  FusedMatmul(Communicator& communicator, const FusedShape& shape) : communicator_(communicator), shape_(shape) {}
  Status MakeProducts();
  Status MakeEvents();
  Status RunProducts();  // each once, on scratch memory
  Status Gather(const Buffers& buffers, cudaStream_t stream);
  Status Scatter(const Buffers& buffers, cudaStream_t stream);
  // `to` waits for all work of `from`.
  static Status Order(cudaEvent_t event, cudaStream_t from, cudaStream_t to);
  Status Multiply(const Buffers& buffers, const char* x, int64_t row, const std::vector<void*>& products,
                  cudaStream_t stream, bool adds = true) const;

  int32_t n() const { return communicator_.size(); }
  int32_t rank() const { return communicator_.rank(); }
  // The rank from which the transfer `shift` brings a block, and the one to which it sends.
  int32_t Source(int32_t shift) const { return (rank() - shift + n()) % n(); }
  int32_t Destination(int32_t shift) const { return (rank() + shift) % n(); }
  // The chunks that arrive or leave by the transfers, in their order.
  cudaEvent_t EventOf(int32_t shift, int64_t chunk) const { return events_[(shift - 1) * shape_.chunks + chunk]; }
  int64_t chunk_rows() const { return shape_.rows / shape_.chunks; }

  Communicator& communicator_;
  const FusedShape shape_;
  std::vector<std::unique_ptr<Product>> products_;      // of a chunk, by weight
  std::vector<std::unique_ptr<DeviceCall>> transfers_;  // of a chunk, by shift - 1
  cudaStream_t side_ = nullptr;                         // of the GPU, shared by all such calls
  std::mutex mutex_;                                    // events are of one call at a time
  std::vector<cudaEvent_t> events_;
  cudaEvent_t fork_ = nullptr, join_ = nullptr;
};

}  // namespace cuda
}  // namespace jaxcomm
