// What all kernels of this process on one GPU look at before they begin: device::Comm::stopped.
#pragma once

#include <cstdint>
#include <string>

namespace jaxcomm {
namespace cuda {

// The word of the current GPU, `device`, which stays as long as the process. Null, and `error` filled in, if there is
// no memory for it.
uint64_t* StopWord(int device, std::string* error);

}  // namespace cuda
}  // namespace jaxcomm
