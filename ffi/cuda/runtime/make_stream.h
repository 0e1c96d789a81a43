// Streams of jaxcomm's own, each with a priority by its use.
#pragma once

#include <cuda_runtime_api.h>

#include "common/status.h"

namespace jaxcomm {
namespace cuda {

// Messages between nodes, of each lane.
enum class StreamUse { kMessages, kAsynchronousMessages };

Status MakeStream(StreamUse use, cudaStream_t* stream);

}  // namespace cuda
}  // namespace jaxcomm
