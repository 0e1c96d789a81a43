// XLA's handlers of the kernel, for calls inside jit(shard_map).
#include <cuda_runtime_api.h>
#include <jaxcomm/host.h>

#include <cstdint>
#include <string>

#include "token_dispatch.cuh"
#include "xla/ffi/api/ffi.h"

namespace token_dispatch {

namespace ffi = xla::ffi;
namespace host = jaxcomm::host;

// Defined in token_dispatch.cu, which needs another compiler.
cudaError_t Load();
cudaError_t Launch(const Args& args, int32_t blocks, cudaStream_t stream);

namespace {

ffi::Error Check(const char* what, cudaError_t status) {
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("token_dispatch: ") + what + ": " + cudaGetErrorString(status));
}

int64_t RowBytes(const ffi::AnyBuffer& x) {
  return x.dimensions()[1] * static_cast<int64_t>(ffi::ByteWidth(x.element_type()));
}

// Before the first run, on all ranks: allocates memory that peers can write, and loads the kernel's code. The code must
// be loaded while no kernel waits for this one.
ffi::Error Initialize(host::Setup setup, ffi::AnyBuffer x, ffi::RemainingArgs, ffi::RemainingRets) {
  if (x.dimensions().size() != 2) return ffi::Error::InvalidArgument("token_dispatch: x must have two dimensions");
  const int64_t bytes = ArenaBytes(setup.comm(), x.dimensions()[0], RowBytes(x));
  if (ffi::Error error = setup.Reserve(bytes); error.failure()) return error;
  return Check("cudaFuncGetAttributes", Load());
}

// In every run: allocates nothing and waits for nothing, so that the kernel may become part of a CUDA graph.
ffi::Error Execute(cudaStream_t stream, host::Call call, ffi::AnyBuffer x, ffi::BufferR1<ffi::S32> order,
                   ffi::BufferR1<ffi::S32> begin, ffi::Result<ffi::AnyBuffer> out, ffi::ResultBufferR1<ffi::S32> counts,
                   ffi::Dictionary) {
  Args args = WithArena(call.comm());
  args.x = static_cast<const char*>(x.untyped_data());
  args.order = order.typed_data();
  args.begin = begin.typed_data();
  args.out = static_cast<char*>(out->untyped_data());
  args.counts = counts->typed_data();
  args.tokens = x.dimensions()[0];
  args.row_bytes = RowBytes(x);
  const int64_t n = args.comm.local.size;
  if (order.dimensions()[0] != args.tokens || begin.dimensions()[0] != n || counts->dimensions()[0] != n ||
      static_cast<int64_t>(out->size_bytes()) != n * args.tokens * args.row_bytes) {
    return ffi::Error::InvalidArgument("token_dispatch: x, order, begin, out and counts have shapes that do not fit");
  }
  if (const char* problem = FindProblem(call.comm(), args, call.max_channels())) {
    return ffi::Error::InvalidArgument(problem);
  }
  return Check("kernel", Launch(args, call.max_channels(), stream));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(TokenDispatchInitialize, Initialize,
                              ffi::Ffi::BindInitialize()
                                  .Ctx<host::Setup>()
                                  .Arg<ffi::AnyBuffer>()  // x
                                  .RemainingArgs()
                                  .RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(TokenDispatchExecute, Execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<host::Call>()
                                  .Arg<ffi::AnyBuffer>()           // x
                                  .Arg<ffi::BufferR1<ffi::S32>>()  // order
                                  .Arg<ffi::BufferR1<ffi::S32>>()  // begin
                                  .Ret<ffi::AnyBuffer>()           // out
                                  .Ret<ffi::BufferR1<ffi::S32>>()  // counts
                                  .Attrs(),                        // those of jaxcomm.ffi_call
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace token_dispatch
