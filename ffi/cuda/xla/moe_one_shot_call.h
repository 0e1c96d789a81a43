// The XLA handlers of jaxcomm_moe_one_shot (kernels/moe_one_shot.cuh). Stages as in call.h, without windows on XLA's
// buffers.
//
// Operands: the rank, which is not read; expert ids (T, K); x (T, ...). Results: slot (T, K), expert (T, K),
// group_sizes, group_counts (M), demand, dropped (), table (n, E); rows (C, ...). All integers have 32 bits.
#pragma once

#include "cuda/runtime/moe_one_shot.h"
#include "cuda/xla/call_site.h"

namespace jaxcomm {
namespace cuda {

// One per call site and executable, shared by the local devices.
struct MoeOneShotState : CallSite<MoeOneShot> {
  static ffi::TypeId id;
  static ffi::TypeInfo info;

  MoeOneShotShape shape;  // without row_bytes
};

}  // namespace cuda
}  // namespace jaxcomm

extern "C" {
XLA_FFI_Error* CudaMoeOneShotInstantiate(XLA_FFI_CallFrame*);
XLA_FFI_Error* CudaMoeOneShotPrepare(XLA_FFI_CallFrame*);
XLA_FFI_Error* CudaMoeOneShotInitialize(XLA_FFI_CallFrame*);
XLA_FFI_Error* CudaMoeOneShotExecute(XLA_FFI_CallFrame*);
}
