// XLA's handlers of the kernel, for calls inside jit(shard_map).
#include <cuda_runtime_api.h>
#include <jaxcomm/host.h>
#include <nccl.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>

#include "node_ring.cuh"
#include "xla/ffi/api/ffi.h"

namespace all_gather_matmul {

namespace ffi = xla::ffi;
namespace host = jaxcomm::host;

// Defined in all_gather_matmul.cu, which needs another compiler.
template <typename Codec>
cudaError_t Load();
template <typename Codec>
cudaError_t Launch(const Args<Codec>& args, int32_t channels, cudaStream_t stream);
template <typename Codec>
cudaError_t LoadOnNodes();
template <typename Codec>
cudaError_t LaunchOnNodes(const NodeArgs<Codec>& args, int32_t channels, const ncclDevComm& nccl_comm,
                          cudaStream_t stream);

namespace {

template <ffi::DataType type>
using CodecOf = std::conditional_t<type == ffi::F32, F32, BF16>;

ffi::Error Check(const char* what, cudaError_t status) {
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("all_gather_matmul: ") + what + ": " + cudaGetErrorString(status));
}

bool HasNodes(const device::Comm& comm) { return comm.local.size < comm.world.size; }

// Before the first run, on all ranks: allocates memory that peers can write, and loads the kernel's code. The code must
// be loaded while no kernel waits for this one.
template <ffi::DataType type>
ffi::Error Initialize(host::Setup setup, ffi::BufferR2<type> x, ffi::RemainingArgs, ffi::RemainingRets) {
  using Codec = CodecOf<type>;
  const bool nodes = HasNodes(setup.comm());
  if (nodes) {
    if (ffi::Error error = setup.UseGin(NCCL_VERSION_CODE); error.failure()) return error;
  }
  const int64_t hidden = x.dimensions()[1];
  const int64_t bytes = nodes ? NodeArenaBytes<Codec>(setup.comm(), hidden) : ArenaBytes<Codec>(setup.comm(), hidden);
  if (ffi::Error error = setup.Reserve(bytes); error.failure()) return error;
  return Check("cudaFuncGetAttributes", nodes ? LoadOnNodes<Codec>() : Load<Codec>());
}

// In every run: allocates nothing and waits for nothing, so that the kernel may become part of a CUDA graph.
template <ffi::DataType type>
ffi::Error Execute(cudaStream_t stream, host::Call call, ffi::BufferR2<type> x, ffi::BufferR2<type> w,
                   ffi::ResultBufferR2<type> y, ffi::Dictionary) {
  using Codec = CodecOf<type>;
  using Storage = typename Codec::Storage;
  NodeArgs<Codec> args = WithArena<Codec>(call.comm(), call.gin());
  args.x = static_cast<const Storage*>(x.untyped_data());
  args.w = static_cast<const Storage*>(w.untyped_data());
  args.y = static_cast<Storage*>(y->untyped_data());
  args.tokens = x.dimensions()[0];
  args.hidden = x.dimensions()[1];
  args.columns = w.dimensions()[1];
  if (w.dimensions()[0] != args.hidden || y->dimensions()[0] != args.tokens * args.comm.world.size ||
      y->dimensions()[1] != args.columns) {
    return ffi::Error::InvalidArgument("all_gather_matmul: x, w and y have shapes that do not fit");
  }
  if (HasNodes(args.comm)) {
    // A block takes an SM and kNumKinds channels of GIN, which has one more than max_channels().
    const int32_t most = std::min(call.max_channels(), args.comm.signals.num_channels / kNumKinds);
    const int32_t channels = Channels(most, args.tokens);
    if (const char* problem = FindProblem(args, channels)) return ffi::Error::InvalidArgument(problem);
    return Check("kernel", LaunchOnNodes(args, channels, call.nccl_comm(), stream));
  }
  const Args<Codec>& of_node = args;
  const int32_t channels = Channels(call.max_channels(), args.tokens);
  if (const char* problem = FindProblem(of_node, channels)) return ffi::Error::InvalidArgument(problem);
  return Check("kernel", Launch(of_node, channels, stream));
}

template <ffi::DataType type>
auto BindInitialize() {
  return ffi::Ffi::BindInitialize()
      .Ctx<host::Setup>()
      .template Arg<ffi::BufferR2<type>>()  // x
      .RemainingArgs()
      .RemainingRets();
}

template <ffi::DataType type>
auto BindExecute() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Ctx<host::Call>()
      .template Arg<ffi::BufferR2<type>>()  // x
      .template Arg<ffi::BufferR2<type>>()  // w
      .template Ret<ffi::BufferR2<type>>()  // y
      .Attrs();                             // those of jaxcomm.ffi_call
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(AllGatherMatmulInitializeF32, Initialize<ffi::F32>, BindInitialize<ffi::F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(AllGatherMatmulExecuteF32, Execute<ffi::F32>, BindExecute<ffi::F32>(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(AllGatherMatmulInitializeBF16, Initialize<ffi::BF16>, BindInitialize<ffi::BF16>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(AllGatherMatmulExecuteBF16, Execute<ffi::BF16>, BindExecute<ffi::BF16>(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace all_gather_matmul
