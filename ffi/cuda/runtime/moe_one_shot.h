// A moe_one_shot call site on one GPU: its arguments, and the kernel that a run enqueues on the stream.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "common/call_spec.h"
#include "common/status.h"
#include "cuda/program/moe_one_shot_args.h"
#include "cuda/runtime/call_names.h"
#include "cuda/runtime/communicator.h"

namespace jaxcomm {
namespace cuda {

class MoeOneShot {
 public:
  // Collective, as Communicator::ReserveFor.
  static StatusOr<std::unique_ptr<MoeOneShot>> Make(const CallSpec& spec, Communicator& communicator,
                                                    const MoeOneShotShape& shape);

  // Enqueues the call on `stream`. May be captured.
  Status Launch(const MoeOneShotBuffers& buffers, cudaStream_t stream) const;

  Communicator& communicator() const { return communicator_; }

 private:
  MoeOneShot(Communicator& communicator, const CallSpec& spec)
      : communicator_(communicator), name_(spec.op + " at " + spec.site) {}

  Communicator& communicator_;
  const CallName name_;
  MoeOneShotArgs args_;  // without operands and results
};

}  // namespace cuda
}  // namespace jaxcomm
