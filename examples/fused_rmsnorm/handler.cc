// XLA's handlers of the kernel, for calls inside jit(shard_map).
#include <cuda_runtime_api.h>
#include <jaxcomm/host.h>

#include <cstdint>
#include <string>
#include <type_traits>

#include "fused_rmsnorm.cuh"
#include "xla/ffi/api/ffi.h"

namespace fused_rmsnorm {

namespace ffi = xla::ffi;
namespace host = jaxcomm::host;

// Defined in fused_rmsnorm.cu, which needs another compiler.
template <typename Codec>
cudaError_t Load();
template <typename Codec>
cudaError_t Launch(const Args<Codec>& args, int32_t channels, cudaStream_t stream);

namespace {

template <ffi::DataType type>
using CodecOf = std::conditional_t<type == ffi::F32, F32, BF16>;

ffi::Error Check(const char* what, cudaError_t status) {
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("fused_rmsnorm: ") + what + ": " + cudaGetErrorString(status));
}

// Before the first run, on all ranks: allocates memory that peers can read, unless they can read x itself, and loads
// the kernel's code. The code must be loaded while no kernel waits for this one.
template <ffi::DataType type>
ffi::Error Initialize(host::Setup setup, ffi::BufferR2<type> x, ffi::RemainingArgs, ffi::RemainingRets) {
  using Codec = CodecOf<type>;
  const int64_t bytes = ArenaBytes<Codec>(setup.comm(), setup.max_channels(), x.dimensions()[0], x.dimensions()[1]);
  if (!setup.has_windows()) {
    if (ffi::Error error = setup.Reserve(bytes); error.failure()) return error;
  }
  return Check("cudaFuncGetAttributes", Load<Codec>());
}

// In every run: allocates nothing and waits for nothing, so that the kernel may become part of a CUDA graph.
template <ffi::DataType type>
ffi::Error Execute(cudaStream_t stream, host::Call call, ffi::BufferR2<type> x, ffi::BufferR2<type> residual,
                   ffi::BufferR1<type> weight, ffi::ResultBufferR2<type> out, ffi::ResultBufferR2<type> new_residual,
                   ffi::Dictionary attributes) {
  using Codec = CodecOf<type>;
  using Storage = typename Codec::Storage;
  const ffi::ErrorOr<float> epsilon = attributes.get<float>("epsilon");
  if (!epsilon) return epsilon.error();
  Args<Codec> args = WithArena<Codec>(call.comm());
  if (call.has_windows()) {
    const ffi::ErrorOr<jaxcomm::device::BufferWindow> x_of = call.Window(x.untyped_data());
    if (!x_of) return x_of.error();
    args.x_of = *x_of;
  }
  args.x = static_cast<const Storage*>(x.untyped_data());
  args.residual = static_cast<const Storage*>(residual.untyped_data());
  args.weight = static_cast<const Storage*>(weight.untyped_data());
  args.out = static_cast<Storage*>(out->untyped_data());
  args.new_residual = static_cast<Storage*>(new_residual->untyped_data());
  args.tokens = x.dimensions()[0];
  args.hidden = x.dimensions()[1];
  args.epsilon = *epsilon;
  const int32_t channels = Channels(call.max_channels(), args.tokens);
  if (const char* problem = FindProblem(args, channels)) return ffi::Error::InvalidArgument(problem);
  return Check("kernel", Launch(args, channels, stream));
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
      .template Arg<ffi::BufferR2<type>>()  // residual
      .template Arg<ffi::BufferR1<type>>()  // weight
      .template Ret<ffi::BufferR2<type>>()  // out
      .template Ret<ffi::BufferR2<type>>()  // new_residual
      .Attrs();                             // not .Attr(), because the attributes of jaxcomm.ffi_call are present too
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(FusedRmsnormInitializeF32, Initialize<ffi::F32>, BindInitialize<ffi::F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(FusedRmsnormExecuteF32, Execute<ffi::F32>, BindExecute<ffi::F32>(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(FusedRmsnormInitializeBF16, Initialize<ffi::BF16>, BindInitialize<ffi::BF16>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(FusedRmsnormExecuteBF16, Execute<ffi::BF16>, BindExecute<ffi::BF16>(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace fused_rmsnorm
