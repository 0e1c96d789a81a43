#include "cuda/runtime/device_call.h"

#include <cuda_runtime_api.h>

#include <cstdio>
#include <mutex>
#include <utility>

#include "cuda/kernels/launch.h"
#include "cuda/kernels/launch_exchange_offsets.h"
#include "cuda/nccl/check_cuda.h"
#include "cuda/nccl/scoped_device.h"

namespace jaxcomm {
namespace cuda {
namespace {

// Owner of the arena of calls by multimem. No handler of a user's has this name.
constexpr const char* kMultimemArena = "jaxcomm: multimem";

}  // namespace

void WarnOfCopies(const std::string& where, const std::string& why) {
  static std::once_flag warned;
  std::call_once(warned, [&] {
    std::fprintf(stderr, "%s: JAXCOMM_SYMMETRIC_BUFFERS=1, but buffers are copied: %s\n", where.c_str(), why.c_str());
  });
}

std::unique_ptr<DeviceCall> DeviceCall::Make(const CallSpec& spec, Communicator& communicator, DType dtype,
                                             int64_t input_count, int64_t output_count, std::string* error,
                                             bool exchanges_offsets) {
  std::unique_ptr<DeviceCall> made(new DeviceCall(communicator, spec.op + " at " + spec.site));
  if (!MakeCallProgram(spec, dtype, input_count, output_count, communicator.placement(), communicator.max_channels(),
                       &made->call_, error)) {
    return nullptr;
  }
  // Thread block c of a rank waits for thread block c of its peers.
  const auto num_channels = static_cast<uint64_t>(made->call_.num_channels);
  if (!communicator.IsSameOnAllRanks("the number of thread blocks (max_sms)", num_channels, error)) return nullptr;
  made->args_.comm = communicator.comm();
  device::Comm& comm = made->args_.comm;
  if (made->call_.arena.bytes > 0 &&
      !communicator.Reserve(made->call_.arena.bytes, &comm.arena, &comm.arena_bytes, error)) {
    return nullptr;
  }
  if (made->call_.multimem) {
    // Not the arena of plans, which has no such address.
    if (!communicator.ReserveFor(kMultimemArena, MultimemBytes(*made->call_.multimem), &comm, error)) return nullptr;
    if (comm.arena_multicast.base == nullptr) {
      *error =
          "algorithm \"multimem\" needs NVLink SHARP, which the group's GPUs, their switch or NCCL don't offer (see "
          "python -m jaxcomm.info --communicator)";
      return nullptr;
    }
  }
  comm.call_id = made->name_.number();
  if (made->call_.ll || made->call_.multimem) {
    (made->call_.ll ? made->call_.ll->comm : made->call_.multimem->comm) = comm;
    return made;
  }
  made->where_ = spec.Where();
  made->exchanges_offsets_ = exchanges_offsets && communicator.placement().ranks_per_node == communicator.size() &&
                             (made->shares_input() || made->shares_output()) && !made->call_.program.steps.empty();
  SendRecvProxy* const send_recv_proxy = communicator.send_recv_proxy();
  const bool ready = made->Upload(error) &&
                     (!send_recv_proxy || send_recv_proxy->MakeEvents(made->call_.schedule, &made->events_, error));
  // Or others would wait for this rank: kernels for the timeout, NCCL without end.
  if (!communicator.AllDone("when it copied its program to the GPU", ready, error)) return nullptr;
  if (const Gin* const gin = communicator.gin()) {
    const ncclWindow_t arena = made->call_.arena.bytes > 0 ? communicator.Registered(comm.arena) : nullptr;
    made->gin_args_ = gin->Args(comm, arena, made->call_.arena);
  }
  if (send_recv_proxy && !send_recv_proxy->Connect(made->call_.schedule, made->call_.item_bytes, comm.call_id, error))
    return nullptr;
  return made;
}

bool DeviceCall::Upload(std::string* error) {
  ScopedDevice keep;
  const ProgramImage image(call_.program);
  *error = Problem("cudaSetDevice", cudaSetDevice(communicator_.device()));
  if (!error->empty()) return false;
  const size_t image_bytes =
      (image.bytes.size() + sizeof(BufferOffsets) - 1) / sizeof(BufferOffsets) * sizeof(BufferOffsets);
  const size_t table_bytes = sizeof(int64_t) * static_cast<size_t>(communicator_.size());
  *error =
      Problem("cudaMalloc",
              cudaMalloc(&image_, image_bytes + (exchanges_offsets_ ? sizeof(BufferOffsets) + 2 * table_bytes : 0)));
  if (!error->empty()) return false;
  // Not the legacy default stream, which might wait for a kernel that waits for a peer.
  *error = Problem("cudaMemcpyAsync", cudaMemcpyAsync(image_, image.bytes.data(), image.bytes.size(),
                                                      cudaMemcpyHostToDevice, cudaStreamPerThread));
  if (!error->empty()) return false;
  *error = Problem("cudaStreamSynchronize", cudaStreamSynchronize(cudaStreamPerThread));
  if (!error->empty()) return false;
  args_ = MakeArgs(call_, args_.comm, image_, image);
  if (!exchanges_offsets_) return true;
  offset_args_.comm = args_.comm;
  offset_args_.offset_table = communicator_.offset_table();
  offset_args_.own = reinterpret_cast<const BufferOffsets*>(image_ + image_bytes);
  offset_args_.input_at = reinterpret_cast<int64_t*>(image_ + image_bytes + sizeof(BufferOffsets));
  offset_args_.output_at = offset_args_.input_at + communicator_.size();
  // From the begin of the signals, as BufferOffsets are.
  if (shares_input()) {
    args_.input = args_.comm.signals.pad;
    args_.input_at = offset_args_.input_at;
  }
  if (shares_output()) {
    args_.output = args_.comm.signals.pad;
    args_.output_at = offset_args_.output_at;
  }
  *error = Problem("kernels", LoadExchangeOffsets());
  return error->empty();
}

std::string DeviceCall::FindOffset(const char* name, const void* address, const XlaWindow& window, int64_t in_arena,
                                   Shared* shared, int64_t* buffer_offset) const {
  std::string problem = "XLA gives no window";
  const bool found =
      window.window != nullptr && communicator_.OffsetOf(window.window, window.offset, buffer_offset, &problem);
  if (!shared->known) *shared = {true, found, address};
  if (!found) WarnOfCopies(where_, std::string("of the ") + name + ": " + problem);
  if (!shared->in_place) {
    *buffer_offset = communicator_.OffsetOf(args_.comm.arena, in_arena);
    return "";
  }
  shared->address = address;
  if (found) return "";
  return std::string("the ") + name + " was in a window of XLA's before, but is not now: " + problem;
}

std::string DeviceCall::ExchangeOffsets(const void* x, const void* y, const XlaWindow& input, const XlaWindow& output,
                                        cudaStream_t stream) {
  if (!exchanges_offsets_) return "";
  BufferOffsets offsets;
  const bool first = !input_.known && !output_.known;
  if (shares_input()) {
    std::string problem = FindOffset("operand", x, input, call_.arena.input, &input_, &offsets.input);
    if (!problem.empty()) return problem;
  }
  if (shares_output()) {
    std::string problem = FindOffset("result", y, output, call_.arena.output, &output_, &offsets.output);
    if (!problem.empty()) return problem;
  }
  if (!first && offsets.input == offsets_.input && offsets.output == offsets_.output) return "";
  // In the order of the stream, and not as an argument of the kernel: runs before this one may still read it there, and
  // a CUDA graph is not captured anew.
  ScopedDevice keep;
  std::string problem = Problem("cudaSetDevice", cudaSetDevice(communicator_.device()));
  if (problem.empty()) {
    problem = Problem("cudaMemcpyAsync", cudaMemcpyAsync(const_cast<BufferOffsets*>(offset_args_.own), &offsets,
                                                         sizeof offsets, cudaMemcpyHostToDevice, stream));
  }
  if (problem.empty()) offsets_ = offsets;
  return problem;
}

DeviceCall::~DeviceCall() {
  if (SendRecvProxy* const send_recv_proxy = communicator_.send_recv_proxy()) send_recv_proxy->Forget(name_.number());
  if (image_ == nullptr) return;
  ScopedDevice keep;
  cudaSetDevice(communicator_.device());
  SendRecvProxy::Free(events_);
  cudaFree(image_);
  cudaGetLastError();  // the process may be at its end, and the driver gone
}

std::string DeviceCall::CheckAlignment(const void* x, const void* y) const {
  for (const auto& [name, address] : {std::pair{"operand", x}, std::pair{"result", y}}) {
    if (reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(call_.item_bytes) == 0) continue;
    return std::string("the ") + name + " is not aligned to its elements of " + std::to_string(call_.item_bytes) +
           " bytes";
  }
  return "";
}

std::string DeviceCall::Launch(const void* x, void* y, cudaStream_t stream) const {
  std::string problem = CheckAlignment(x, y);
  if (!problem.empty() || call_.empty()) return problem;
  ScopedDevice keep;
  problem = Problem("cudaSetDevice", cudaSetDevice(communicator_.device()));
  if (exchanges_offsets_ && ((input_.in_place && x != input_.address) || (output_.in_place && y != output_.address))) {
    return "XLA runs the call with other buffers than it has initialized it with";
  }
  if (problem.empty()) problem = communicator_.Begin(stream);
  if (problem.empty() && call_.ll) {
    problem = Problem("kernel", cuda::Launch(WithBuffers(*call_.ll, x, y), stream));
  } else if (problem.empty() && call_.multimem) {
    problem = Problem("kernel", cuda::Launch(WithBuffers(*call_.multimem, x, y), stream));
  }
  if (call_.ll || call_.multimem) return problem.empty() ? communicator_.End(stream) : problem;
  if (problem.empty() && exchanges_offsets_) problem = Problem("kernel", LaunchExchangeOffsets(offset_args_, stream));
  if (problem.empty()) {
    RankArgs args = WithBuffers(call_, args_, x, y);
    const auto in_arena = [&](int64_t offset) { return args.comm.arena.At(args.comm.local.rank, offset); };
    if (shares_input() && !input_.in_place) args.copy_in = {in_arena(call_.arena.input), static_cast<const char*>(x)};
    if (shares_output() && !output_.in_place) args.copy_out = {static_cast<char*>(y), in_arena(call_.arena.output)};
    if (SendRecvProxy* const send_recv_proxy = communicator_.send_recv_proxy()) {
      problem = send_recv_proxy->Run(call_, args, events_, stream);
    } else if (const Gin* const gin = communicator_.gin()) {
      problem = Problem("kernel", LaunchGin(args, gin_args_, gin->nccl_comm(), call_.num_channels, stream));
    } else {
      problem = Problem("kernel", cuda::Launch(args, call_.num_channels, stream));
    }
  }
  if (problem.empty()) problem = communicator_.End(stream);
  return problem;
}

}  // namespace cuda
}  // namespace jaxcomm
