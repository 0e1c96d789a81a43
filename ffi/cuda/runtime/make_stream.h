// Streams of jaxcomm's own, each with a priority by its use.
#pragma once

#include <cuda_runtime_api.h>

#include "common/status.h"

namespace jaxcomm {
namespace cuda {

// Messages between nodes, of each lane; transfers of fused products, whose messages are of the synchronous lane.
enum class StreamUse { kMessages, kAsynchronousMessages, kFusedTransfers };

Status MakeStream(StreamUse use, cudaStream_t* stream);

}  // namespace cuda
}  // namespace jaxcomm
