// Where the ranks of a node address buffers of XLA's, for one call site on one GPU: memory that each run writes, and
// the kernel that exchanges it (exchange_offsets.cuh).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "common/status.h"
#include "cuda/kernels/exchange_offsets.cuh"
#include "cuda/runtime/communicator.h"

namespace jaxcomm::cuda {

class BufferPlaces {
 public:
  // `comm`: of the call, which reports name. At most kMostBuffers buffers, as many as on the other ranks.
  BufferPlaces(const Communicator& communicator, const device::Comm& comm, int32_t num_buffers);
  ~BufferPlaces();
  BufferPlaces(const BufferPlaces&) = delete;
  BufferPlaces& operator=(const BufferPlaces&) = delete;

  // Once, before all else.
  Status Allocate();

  // Sets the places of this rank's buffers, for the work that `stream` gets from now on. Not captured.
  Status Write(const std::vector<BufferPlace>& own, cudaStream_t stream);
  // Enqueues the kernel. May be captured: the places are those that Write() has set when it runs.
  Status Exchange(cudaStream_t stream) const;

  // Written by the kernel, on the GPU: [rank of the node], bytes from the rank's signals to its buffer.
  const int64_t* At(int32_t buffer) const { return args_.at + buffer * int64_t{args_.comm.local.size}; }

 private:
  const int device_;
  ExchangeOffsetsArgs args_;
  BufferPlace* memory_ = nullptr;  // on the GPU: this rank's places, then those of all ranks
  std::vector<BufferPlace> own_;   // the copy on the GPU; empty at first
};

}  // namespace jaxcomm::cuda
