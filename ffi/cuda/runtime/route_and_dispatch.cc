#include "cuda/runtime/route_and_dispatch.h"

#include <string>

#include "common/hash.h"
#include "cuda/kernels/launch.h"
#include "cuda/nccl/check_cuda.h"

namespace jaxcomm {
namespace cuda {
namespace {

// Owner of the arenas of such calls. No target of a user has this name.
constexpr const char* kArena = "jaxcomm: route_and_dispatch";

}  // namespace

StatusOr<std::unique_ptr<RouteAndDispatch>> RouteAndDispatch::Make(const CallSpec& spec, Communicator& communicator,
                                                                   const RouteAndDispatchShape& shape) {
  const RankPlacement placement = communicator.placement();
  if (placement.ranks_per_node != spec.group_size) {
    return InvalidArgumentError(
        "moe.route_and_dispatch runs inside a node on GPUs; the GPUs of this group form " +
        std::to_string(spec.group_size / placement.ranks_per_node) +
        " nodes: pass algorithm=\"xla\" and on_overflow=\"drop\" (the ranks that NVLink connects form a node: see "
        "docs/guide/gpus.md)");
  }
  std::unique_ptr<RouteAndDispatch> made(new RouteAndDispatch(communicator, spec));
  const StatusOr<RouteAndDispatchArgs> args = MakeRouteAndDispatchArgs(spec, shape, communicator.max_channels());
  // Ranks must agree before any of them reserves memory. A rank with an error of its own must not leave the others
  // waiting.
  JAXCOMM_RETURN_IF_ERROR(communicator.AllDone("when it compared its sizes with the limits", args.status()));
  uint64_t shapes = 0;
  for (const int64_t size : {shape.tokens, shape.choices, shape.num_experts, shape.capacity, shape.align, shape.slots,
                             shape.row_bytes, int64_t{args->num_channels}}) {
    shapes = Mix(shapes, static_cast<uint64_t>(size));
  }
  JAXCOMM_RETURN_IF_ERROR(communicator.CheckSameOnAllRanks("the hash of the shapes and of max_sms", shapes));
  device::Comm comm = communicator.comm();
  JAXCOMM_RETURN_IF_ERROR(communicator.ReserveFor(kArena, ArenaBytes(*args), &comm));
  comm.call_id = made->name_.number();
  communicator.AddToRecorder(comm.call_id, spec, DType::kU8, int64_t{shape.tokens} * shape.row_bytes,
                             int64_t{shape.capacity} * shape.row_bytes);
  made->args_ = WithComm(*args, comm);
  return made;
}

Status RouteAndDispatch::Launch(const RouteAndDispatchBuffers& buffers, cudaStream_t stream) const {
  RouteAndDispatchArgs args = args_;
  static_cast<RouteAndDispatchBuffers&>(args) = buffers;
  ScopedDevice keep;
  JAXCOMM_RETURN_IF_ERROR(CheckCuda("cudaSetDevice", cudaSetDevice(communicator_.device())));
  JAXCOMM_RETURN_IF_ERROR(communicator_.Begin(stream));
  JAXCOMM_RETURN_IF_ERROR(CheckCuda("kernel", cuda::Launch(args, stream)));
  return communicator_.End(stream);
}

}  // namespace cuda
}  // namespace jaxcomm
