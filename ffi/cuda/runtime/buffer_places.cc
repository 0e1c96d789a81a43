#include "cuda/runtime/buffer_places.h"

#include <cstring>

#include "cuda/kernels/launch.h"
#include "cuda/nccl/check_cuda.h"
#include "cuda/nccl/device_memory.h"

namespace jaxcomm::cuda {

BufferPlaces::BufferPlaces(const Communicator& communicator, const device::Comm& comm, int32_t num_buffers)
    : device_(communicator.device()) {
  args_.comm = comm;
  args_.offset_table = communicator.offset_table();
  args_.num_buffers = num_buffers;
}

Status BufferPlaces::Allocate() {
  ScopedDevice keep;
  JAXCOMM_RETURN_IF_ERROR(CheckCuda("cudaSetDevice", cudaSetDevice(device_)));
  const auto num_buffers = static_cast<size_t>(args_.num_buffers);
  const size_t row_bytes = sizeof(int64_t) * static_cast<size_t>(args_.comm.local.size);
  JAXCOMM_RETURN_IF_ERROR(
      CheckCuda("cudaMalloc", cudaMalloc(&memory_, num_buffers * (sizeof(BufferPlace) + row_bytes))));
  args_.own = memory_;
  args_.at = reinterpret_cast<int64_t*>(memory_ + args_.num_buffers);
  return CheckCuda("kernels", Load<ExchangeOffsetsArgs>());
}

BufferPlaces::~BufferPlaces() {
  if (memory_ != nullptr) Retire(device_, memory_);
}

Status BufferPlaces::Write(const std::vector<BufferPlace>& own, cudaStream_t stream) {
  const size_t bytes = sizeof(BufferPlace) * own.size();
  if (own_.size() == own.size() && std::memcmp(own_.data(), own.data(), bytes) == 0) return OkStatus();
  // Copied in the order of the stream, because earlier runs may still read the old offsets. Not an argument of the
  // kernel, because a captured CUDA graph keeps its arguments.
  ScopedDevice keep;
  JAXCOMM_RETURN_IF_ERROR(CheckCuda("cudaSetDevice", cudaSetDevice(device_)));
  JAXCOMM_RETURN_IF_ERROR(
      CheckCuda("cudaMemcpyAsync", cudaMemcpyAsync(memory_, own.data(), bytes, cudaMemcpyHostToDevice, stream)));
  own_ = own;
  return OkStatus();
}

Status BufferPlaces::Exchange(cudaStream_t stream) const {
  ScopedDevice keep;
  JAXCOMM_RETURN_IF_ERROR(CheckCuda("cudaSetDevice", cudaSetDevice(device_)));
  return CheckCuda("kernel", Launch(args_, stream));
}

}  // namespace jaxcomm::cuda
