// Finds and opens NCCL at run time. Nothing links NCCL: jaxcomm must use the copy that JAX has loaded, because an
// ncclComm_t is valid only in the copy that made it.
#pragma once

#include <nccl.h>
#include <nccl_device/core.h>

#include <string>
#include <vector>

#include "common/status.h"

namespace jaxcomm {

// NCCL is refused if one of these is missing.
#define JAXCOMM_NCCL_NEEDED(F) \
  F(GetVersion)                \
  F(GetErrorString)            \
  F(GetUniqueId)               \
  F(CommInitRank)              \
  F(CommDestroy)               \
  F(CommAbort)                 \
  F(CommRevoke)                \
  F(CommCount)                 \
  F(CommUserRank)              \
  F(CommGetAsyncError)         \
  F(GroupStart)                \
  F(GroupEnd)                  \
  F(Send)                      \
  F(Recv)                      \
  F(AllGather)

// Null in builds of NCCL that lack them; NcclLibrary::Require then returns the error.
#define JAXCOMM_NCCL_OPTIONAL(F) \
  F(GetLastError)                \
  F(CommInitRankConfig)          \
  F(MemAlloc)                    \
  F(MemFree)                     \
  F(CommWindowRegister)          \
  F(CommWindowDeregister)        \
  F(DevCommCreate)               \
  F(DevCommDestroy)              \
  F(CommQueryProperties)         \
  F(GetLsaDevicePointer)         \
  F(GetLsaMultimemDevicePointer)

struct NcclLibrary {
#define JAXCOMM_DECLARE(name) decltype(&nccl##name) name = nullptr;
  JAXCOMM_NCCL_NEEDED(JAXCOMM_DECLARE)
  JAXCOMM_NCCL_OPTIONAL(JAXCOMM_DECLARE)
#undef JAXCOMM_DECLARE
  std::string path;                  // file of the library
  int version = 0;                   // as ncclGetVersion returns it; at least NCCL_VERSION_CODE
  std::vector<std::string> missing;  // names of optional functions that are null

  // An error if the optional function `name`, such as "ncclDevCommCreate", is null.
  Status Require(const std::string& name) const;

  // The copy that this process has loaded; else `wheel_path`, the file of the nvidia-nccl wheel, if it is not empty and
  // can be loaded; else the copy that the loader finds. The error, if there is no copy or if it is older than the
  // headers that this module was built with, names the package to install. A copy that is found stays loaded.
  // Thread-safe.
  static StatusOr<const NcclLibrary*> Open(const std::string& wheel_path);
};

// 23007 -> "2.30.7"
std::string NcclVersionText(int version);

}  // namespace jaxcomm
