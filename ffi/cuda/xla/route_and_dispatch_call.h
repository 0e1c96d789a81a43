// The XLA handlers of jaxcomm_moe_one_shot (kernels/route_and_dispatch.cuh). Stages as in call.h, without windows on
// XLA's buffers.
//
// Operands: the rank, which is not read; expert ids (T, K); x (T, ...). Results: slot (T, K), expert (T, K),
// group_sizes, group_counts (M), demand, dropped (), table (n, E); rows (C, ...). All integers have 32 bits.
#pragma once

#include "cuda/runtime/device_call.h"
#include "cuda/xla/call_site.h"

namespace jaxcomm::cuda {

// One per call site and executable, shared by the local devices.
struct RouteAndDispatchState : CallSite<DeviceCall> {
  static ffi::TypeId id;
  static ffi::TypeInfo info;

  RouteAndDispatchShape shape;  // without row_bytes
};

}  // namespace jaxcomm::cuda

extern "C" {
XLA_FFI_Error* CudaRouteAndDispatchInstantiate(XLA_FFI_CallFrame*);
XLA_FFI_Error* CudaRouteAndDispatchPrepare(XLA_FFI_CallFrame*);
XLA_FFI_Error* CudaRouteAndDispatchInitialize(XLA_FFI_CallFrame*);
XLA_FFI_Error* CudaRouteAndDispatchExecute(XLA_FFI_CallFrame*);
}
