#include "cuda/runtime/make_stream.h"

#include "cuda/nccl/check_cuda.h"

namespace jaxcomm {
namespace cuda {
namespace {

// Streams of different priority share no queue of the hardware. In a shared queue one stream would wait for the other,
// although peers may need this rank's next segment before they can send. So messages have another priority than the
// kernels that wait for them. Those of the synchronous lane run on XLA's main stream, of the lowest priority; those of the asynchronous lane on XLA's stream for collectives, of the highest one.
// GPUs have six priorities (0 to -5). With two, the messages of both lanes get the highest.
int PriorityOf(StreamUse use, int lowest, int highest) {
  switch (use) {
    case StreamUse::kMessages:
      return highest;
    case StreamUse::kAsynchronousMessages:
      return highest + 1 < lowest ? highest + 1 : highest;
  }
  return highest;
}

}  // namespace

Status MakeStream(StreamUse use, cudaStream_t* stream) {
  int lowest = 0, highest = 0;
  JAXCOMM_RETURN_IF_ERROR(
      CheckCuda("cudaDeviceGetStreamPriorityRange", cudaDeviceGetStreamPriorityRange(&lowest, &highest)));
  const int priority = PriorityOf(use, lowest, highest);
  return CheckCuda("cudaStreamCreate", cudaStreamCreateWithPriority(stream, cudaStreamNonBlocking, priority));
}

}  // namespace cuda
}  // namespace jaxcomm
