// What NCCL says that a communicator over the GPUs of this process can do.
#pragma once

#include <nccl.h>
#include <nccl_device/core.h>

#include <string>
#include <vector>

#include "cuda/nccl/nccl_library.h"

namespace jaxcomm {

// Makes a communicator over `devices`, asks for its properties, and destroys it. Takes seconds.
// Returns an empty string, or what failed; then `*properties` means nothing.
std::string QueryCommunicator(const NcclLibrary& nccl, const std::vector<int>& devices,
                              ncclCommProperties_t* properties);

}  // namespace jaxcomm
