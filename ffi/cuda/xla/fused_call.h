// The XLA handlers of algorithm "fused" of collective matmul (runtime/fused_matmul.h). Stages as in call.h, without
// windows on XLA's buffers. XLA does not capture the call into a CUDA graph: it uses a second stream.
//
// Operands: the rank, which is not read; x; the weights; arrays with the rows of all ranks. Results: the products; the
// exchanged rows or parts; the workspace of cuBLASLt. All have two dimensions but the rank and the workspace.
#pragma once

#include "cuda/runtime/fused_matmul.h"
#include "cuda/xla/call_site.h"

namespace jaxcomm {
namespace cuda {

// One per call site and executable, shared by the local devices.
struct FusedCallState : CallSite<FusedMatmul> {
  static ffi::TypeId id;
  static ffi::TypeInfo info;

  int64_t scatters = 0, keeps = 0, tf32 = 0, chunks = 1;  // as in FusedShape
  int64_t weights = 0;                                    // the other arrays have the rows of all ranks
};

}  // namespace cuda
}  // namespace jaxcomm

extern "C" {
XLA_FFI_Error* CudaFusedInstantiate(XLA_FFI_CallFrame*);
XLA_FFI_Error* CudaFusedPrepare(XLA_FFI_CallFrame*);
XLA_FFI_Error* CudaFusedInitialize(XLA_FFI_CallFrame*);
XLA_FFI_Error* CudaFusedExecute(XLA_FFI_CallFrame*);
}
