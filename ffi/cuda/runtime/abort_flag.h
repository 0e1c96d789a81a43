// The flag that all kernels of this process on one GPU check before they begin: device::Comm::abort_flag.
#pragma once

#include <cstdint>
#include <string>

namespace jaxcomm {
namespace cuda {

// The flag of the current GPU, `device`. It lives as long as the process. Null, and `error` filled in, if there is
// no memory for it.
uint64_t* AbortFlag(int device, std::string* error);

}  // namespace cuda
}  // namespace jaxcomm
