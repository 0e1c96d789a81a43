// The kernel of route_and_dispatch.
#include "cuda/kernels/launch.h"
#include "cuda/kernels/load_kernel.h"
#include "cuda/kernels/route_and_dispatch.cuh"

namespace jaxcomm {
namespace cuda {
namespace {

__global__ void __launch_bounds__(kRouteAndDispatchThreads, 1)
    RunRouteAndDispatch(const __grid_constant__ RouteAndDispatchArgs args) {
  RouteAndDispatchCall call(args, static_cast<int32_t>(blockIdx.x), device::DynamicShared());
  call.Run();
}

}  // namespace

cudaError_t LaunchRouteAndDispatch(const RouteAndDispatchArgs& args, cudaStream_t stream) {
  const auto shared_bytes = static_cast<size_t>(RouteAndDispatchSharedBytes(args));
  RunRouteAndDispatch<<<args.num_channels, kRouteAndDispatchThreads, shared_bytes, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t LoadRouteAndDispatchKernel() { return Load(RunRouteAndDispatch); }

}  // namespace cuda
}  // namespace jaxcomm
