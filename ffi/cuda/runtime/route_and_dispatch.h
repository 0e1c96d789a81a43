// A route_and_dispatch call site on one GPU: its arguments, and the kernel that a run enqueues on the stream.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "common/call_spec.h"
#include "common/status.h"
#include "cuda/program/route_and_dispatch_args.h"
#include "cuda/runtime/call_names.h"
#include "cuda/runtime/communicator.h"

namespace jaxcomm {
namespace cuda {

class RouteAndDispatch {
 public:
  // Collective, as Communicator::ReserveFor.
  static StatusOr<std::unique_ptr<RouteAndDispatch>> Make(const CallSpec& spec, Communicator& communicator,
                                                          const RouteAndDispatchShape& shape);
  ~RouteAndDispatch() { communicator_.RemoveFromRecorder(name_.number()); }

  // Enqueues the call on `stream`. May be captured.
  Status Launch(const RouteAndDispatchBuffers& buffers, cudaStream_t stream) const;

  Communicator& communicator() const { return communicator_; }

 private:
  RouteAndDispatch(Communicator& communicator, const CallSpec& spec)
      : communicator_(communicator), name_(spec.op + " at " + spec.site) {}

  Communicator& communicator_;
  const CallName name_;
  RouteAndDispatchArgs args_;  // without operands and results
};

}  // namespace cuda
}  // namespace jaxcomm
