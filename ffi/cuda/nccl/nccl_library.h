// Finds and opens NCCL at run time. Nothing links it: the copy to use is the one that JAX has loaded, because an
// ncclComm_t is valid only in the copy that made it.
#pragma once

#include <nccl.h>
#include <nccl_device/core.h>

#include <string>
#include <vector>

namespace jaxcomm {

// Without these NCCL is refused.
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

// Null where a build of NCCL lacks them; NcclLibrary::WhyNot then says so.
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
  std::string path;                  // the file it is in
  int version = 0;                   // as ncclGetVersion gives it; at least NCCL_VERSION_CODE
  std::vector<std::string> missing;  // names of optional functions that are null

  // Empty, or why `name`, such as "ncclDevCommCreate", is null.
  std::string WhyNot(const std::string& name) const;

  // The copy that this process has loaded; else `wheel_path`, the file of the nvidia-nccl wheel, if it is not empty and
  // can be loaded; else what the loader finds. Null and a sentence that says what to install if there is none, or if
  // the one found is older than the headers that this module was built with. A copy that is found stays loaded.
  // Thread-safe.
  static const NcclLibrary* Open(const std::string& wheel_path, std::string* error);
};

// 23007 -> "2.30.7"
std::string NcclVersionText(int version);

}  // namespace jaxcomm
