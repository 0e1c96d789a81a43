// The kernel of route_and_dispatch.
#include "cuda/kernels/call_kernel.cuh"
#include "cuda/kernels/route_and_dispatch.cuh"

namespace jaxcomm::cuda {

cudaError_t Launch(const RouteAndDispatchArgs& args, cudaStream_t stream) {
  return LaunchCall<RouteAndDispatchCall, kRouteAndDispatchThreads>(args, stream, RouteAndDispatchSharedBytes(args));
}

template <>
cudaError_t Load<RouteAndDispatchArgs>(const BulkStages&) {
  return LoadKernel(RunCall<RouteAndDispatchCall, kRouteAndDispatchThreads, RouteAndDispatchArgs>);
}

}  // namespace jaxcomm::cuda
