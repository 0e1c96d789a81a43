#include "cuda/runtime/fused_matmul.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "cuda/nccl/check_cuda.h"
#include "cuda/nccl/scoped_device.h"
#include "cuda/nccl/wait_for_stream.h"
#include "cuda/runtime/make_stream.h"

namespace jaxcomm {
namespace cuda {
namespace {

// Kernels of cuBLASLt load and store 16 bytes at once. XLA aligns arrays to more.
constexpr int64_t kAlignmentBytes = 16;
// Elements of these bytes are NaN in every type that cuBLASLt multiplies.
constexpr int kNaNByte = 0xff;

// The largest power of two that divides all of these distances, at most kAlignmentBytes.
int64_t AlignmentOf(std::initializer_list<int64_t> distances) {
  int64_t alignment = kAlignmentBytes;
  for (const int64_t distance : distances) {
    while (distance % alignment != 0) alignment /= 2;
  }
  return alignment;
}

// One stream per GPU, for all fused calls. It exists as long as the process. Its kernels start before those of XLA's
// stream where both are ready: peers wait for them.
StatusOr<cudaStream_t> SideStream(int device) {
  static auto& mutex = *new std::mutex;
  static auto& streams = *new std::map<int, cudaStream_t>;
  std::lock_guard<std::mutex> lock(mutex);
  cudaStream_t& stream = streams[device];
  if (stream == nullptr) JAXCOMM_RETURN_IF_ERROR(MakeStream(StreamUse::kFusedTransfers, &stream));
  return stream;
}

Status MakeEvent(cudaEvent_t* event) {
  return CheckCuda("cudaEventCreate", cudaEventCreateWithFlags(event, cudaEventDisableTiming));
}

}  // namespace

StatusOr<std::unique_ptr<FusedMatmul>> FusedMatmul::Make(const CallSpec& spec, Communicator& communicator,
                                                         const FusedShape& shape) {
  std::unique_ptr<FusedMatmul> made(new FusedMatmul(communicator, shape));
  ScopedDevice keep;
  Status ready = CheckCuda("cudaSetDevice", cudaSetDevice(communicator.device()));
  if (ready.ok()) ready = made->MakeProducts();
  if (ready.ok()) ready = made->MakeEvents();
  if (ready.ok()) ready = made->RunProducts();
  // After a failure here, the transfers of the other ranks would wait for this rank.
  JAXCOMM_RETURN_IF_ERROR(communicator.AllDone("when it prepared its products", ready));
  const FusedShape::Weight& first = shape.weights.front();
  const DType dtype = shape.scatters ? first.result : shape.operands;
  const int64_t count = made->chunk_rows() * (shape.scatters ? first.columns : shape.contracted);
  CallSpec transfer = spec;
  transfer.collective = Collective::kPermute;
  const int32_t n = communicator.size();
  for (int32_t shift = 1; shift < n; ++shift) {
    transfer.source_of.clear();
    for (int32_t r = 0; r < n; ++r) transfer.source_of.push_back((r - shift + n) % n);
    StatusOr<std::unique_ptr<DeviceCall>> call = DeviceCall::Make(transfer, communicator, dtype, count, count);
    JAXCOMM_RETURN_IF_ERROR(call.status());
    made->transfers_.push_back(*std::move(call));
  }
  return made;
}

Status FusedMatmul::MakeProducts() {
  const StatusOr<const CublasLtLibrary*> library = CublasLtLibrary::Open();
  JAXCOMM_RETURN_IF_ERROR(library.status());
  for (const FusedShape::Weight& weight : shape_.weights) {
    ProductShape shape;
    shape.rows = weight.has_rows ? shape_.contracted : chunk_rows();
    shape.contracted = weight.has_rows ? chunk_rows() : shape_.contracted;
    shape.columns = weight.columns;
    shape.transposes_x = weight.has_rows;
    shape.operands = shape_.operands;
    shape.result = weight.result;
    shape.tf32 = shape_.tf32;
    const DType of_rows = weight.has_rows ? shape_.operands : weight.result;
    shape.alignment_bytes = AlignmentOf({chunk_rows() * shape_.contracted * ItemBytes(shape_.operands),
                                         chunk_rows() * weight.columns * ItemBytes(of_rows)});
    shape.workspace_bytes = shape_.workspace_bytes;
    StatusOr<std::unique_ptr<Product>> product = Product::Make(**library, communicator_.device(), shape);
    JAXCOMM_RETURN_IF_ERROR(product.status());
    products_.push_back(*std::move(product));
  }
  return OkStatus();
}

Status FusedMatmul::MakeEvents() {
  const StatusOr<cudaStream_t> side = SideStream(communicator_.device());
  JAXCOMM_RETURN_IF_ERROR(side.status());
  side_ = *side;
  JAXCOMM_RETURN_IF_ERROR(MakeEvent(&fork_));
  JAXCOMM_RETURN_IF_ERROR(MakeEvent(&join_));
  for (int64_t i = 0; i < (n() - 1) * shape_.chunks; ++i) {
    cudaEvent_t event = nullptr;
    JAXCOMM_RETURN_IF_ERROR(MakeEvent(&event));
    events_.push_back(event);
  }
  return OkStatus();
}

// CUDA loads the kernels of cuBLASLt at their first launch, which may wait for all kernels that run in the process. A
// transfer that waits for another GPU of the process must not be among them.
Status FusedMatmul::RunProducts() {
  for (const std::unique_ptr<Product>& product : products_) {
    void* scratch = nullptr;
    JAXCOMM_RETURN_IF_ERROR(
        CheckCuda("cudaMalloc", cudaMalloc(&scratch, static_cast<size_t>(product->scratch_bytes()))));
    Status run = product->EnqueueOn(scratch, side_);
    const Status waited = WaitForStream(side_, Communicator::Configured().timeout_s, "the end of a first product");
    if (!waited.ok()) return run.ok() ? waited : run;  // the GPU may still use the memory
    if (run.ok()) run = CheckCuda("cudaFree", cudaFree(scratch));
    JAXCOMM_RETURN_IF_ERROR(run);
  }
  return OkStatus();
}

FusedMatmul::~FusedMatmul() {
  ScopedDevice keep;
  cudaSetDevice(communicator_.device());
  for (const cudaEvent_t event : events_) cudaEventDestroy(event);
  for (const cudaEvent_t event : {fork_, join_}) {
    if (event != nullptr) cudaEventDestroy(event);
  }
  cudaGetLastError();  // the driver may be gone at the end of the process
}

Status FusedMatmul::Order(cudaEvent_t event, cudaStream_t from, cudaStream_t to) {
  JAXCOMM_RETURN_IF_ERROR(CheckCuda("cudaEventRecord", cudaEventRecord(event, from)));
  return CheckCuda("cudaStreamWaitEvent", cudaStreamWaitEvent(to, event, 0));
}

Status FusedMatmul::Launch(const Buffers& buffers, cudaStream_t stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  ScopedDevice keep;
  JAXCOMM_RETURN_IF_ERROR(CheckCuda("cudaSetDevice", cudaSetDevice(communicator_.device())));
  const Status enqueued = shape_.scatters ? Scatter(buffers, stream) : Gather(buffers, stream);
  // XLA reuses the buffers in the order of its own stream.
  const Status joined = Order(join_, side_, stream);
  return enqueued.ok() ? joined : enqueued;
}

// The rows of a chunk, which begin at `x`, times all weights. `row`: among the rows of all ranks. `adds`: sums over
// rows have begun.
Status FusedMatmul::Multiply(const Buffers& buffers, const char* x, int64_t row, const std::vector<void*>& products,
                             cudaStream_t stream, bool adds) const {
  for (size_t i = 0; i < products_.size(); ++i) {
    const FusedShape::Weight& weight = shape_.weights[i];
    const char* w = static_cast<const char*>(buffers.weights[i]);
    char* y = static_cast<char*>(products[i]);
    if (weight.has_rows) {
      w += row * weight.columns * ItemBytes(shape_.operands);
    } else {
      y += row * weight.columns * ItemBytes(weight.result);
    }
    JAXCOMM_RETURN_IF_ERROR(products_[i]->Enqueue(x, w, y, buffers.workspace, stream, weight.has_rows && adds));
  }
  return OkStatus();
}

// All transfers start at once, in the order in which their chunks are multiplied. The own block hides the first one.
Status FusedMatmul::Gather(const Buffers& buffers, cudaStream_t stream) {
  const int64_t row_bytes = shape_.contracted * ItemBytes(shape_.operands), chunk_bytes = chunk_rows() * row_bytes;
  const char* const own = static_cast<const char*>(buffers.x);
  const auto gathered = [&](int64_t row) { return static_cast<char*>(buffers.exchanged) + row * row_bytes; };
  JAXCOMM_RETURN_IF_ERROR(Order(fork_, stream, side_));
  for (int32_t shift = 1; shift < n(); ++shift) {
    for (int64_t c = 0; c < shape_.chunks; ++c) {
      const int64_t row = Source(shift) * shape_.rows + c * chunk_rows();
      JAXCOMM_RETURN_IF_ERROR(transfers_[shift - 1]->Launch(own + c * chunk_bytes, gathered(row), side_));
      JAXCOMM_RETURN_IF_ERROR(CheckCuda("cudaEventRecord", cudaEventRecord(EventOf(shift, c), side_)));
    }
  }
  for (int64_t c = 0; c < shape_.chunks; ++c) {
    const int64_t row = rank() * shape_.rows + c * chunk_rows();
    JAXCOMM_RETURN_IF_ERROR(Multiply(buffers, own + c * chunk_bytes, row, buffers.products, stream, c > 0));
  }
  if (shape_.keeps && shape_.rows * row_bytes > 0) {
    JAXCOMM_RETURN_IF_ERROR(CheckCuda("cudaMemcpyAsync", cudaMemcpyAsync(gathered(rank() * shape_.rows), own,
                                                                         static_cast<size_t>(shape_.rows * row_bytes),
                                                                         cudaMemcpyDeviceToDevice, stream)));
  }
  for (int32_t shift = 1; shift < n(); ++shift) {
    for (int64_t c = 0; c < shape_.chunks; ++c) {
      const int64_t row = Source(shift) * shape_.rows + c * chunk_rows();
      JAXCOMM_RETURN_IF_ERROR(CheckCuda("cudaStreamWaitEvent", cudaStreamWaitEvent(stream, EventOf(shift, c), 0)));
      JAXCOMM_RETURN_IF_ERROR(Multiply(buffers, gathered(row), row, buffers.products, stream));
    }
  }
  return OkStatus();
}

// A part leaves as soon as it is complete. The part of the own block comes last, beside the last transfer.
Status FusedMatmul::Scatter(const Buffers& buffers, cudaStream_t stream) {
  const FusedShape::Weight& weight = shape_.weights.front();
  const int64_t x_bytes = shape_.contracted * ItemBytes(shape_.operands);
  const int64_t y_bytes = weight.columns * ItemBytes(weight.result);
  const auto rows = [&](int64_t row) { return static_cast<const char*>(buffers.x) + row * x_bytes; };
  Status first;
  const auto note = [&](const Status& status) {
    if (first.ok()) first = status;
  };
  // After an error, the remaining transfers still start: peers wait for them, and counters must stay equal.
  for (int32_t shift = 1; shift < n(); ++shift) {
    for (int64_t c = 0; c < shape_.chunks; ++c) {
      const int64_t row = Destination(shift) * shape_.rows + c * chunk_rows();
      const int64_t to = Source(shift) * shape_.rows + c * chunk_rows();
      char* const part = static_cast<char*>(buffers.products.front()) + row * y_bytes;
      if (first.ok()) note(Multiply(buffers, rows(row), row, buffers.products, stream));
      if (!first.ok()) cudaMemsetAsync(part, kNaNByte, static_cast<size_t>(chunk_rows() * y_bytes), stream);
      note(Order(EventOf(shift, c), stream, side_));
      note(transfers_[shift - 1]->Launch(part, static_cast<char*>(buffers.exchanged) + to * y_bytes, side_));
    }
  }
  JAXCOMM_RETURN_IF_ERROR(first);
  for (int64_t c = 0; c < shape_.chunks; ++c) {
    const int64_t row = rank() * shape_.rows + c * chunk_rows();
    JAXCOMM_RETURN_IF_ERROR(Multiply(buffers, rows(row), row, {buffers.exchanged}, stream));
  }
  return OkStatus();
}

}  // namespace cuda
}  // namespace jaxcomm
