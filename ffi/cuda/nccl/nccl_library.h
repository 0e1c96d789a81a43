// Finds and opens NCCL at run time. Nothing links NCCL: jaxcomm must use the copy that JAX has loaded, because an
// ncclComm_t is valid only in the copy that made it.
#pragma once

#include <algorithm>
#include <string>

#include "cuda/nccl/nccl_headers.h"
#include "cuda/program/assign_or_return.h"

namespace jaxcomm {

// NCCL 2.29.7, the oldest version that says which ranks address each other's memory, and where (nLsaTeams,
// ncclGetLsaDevicePointer). It may be older than the headers: kernels inside a node use none of NCCL's device code, and
// the structures that the host exchanges with NCCL carry their size and version (ncclConfig_t, NoProperties). GIN needs
// the version of the headers: Gin::Problem.
constexpr int kOldestNccl = 22907;

// Functions of NCCL. A library that lacks one is refused.
#define JAXCOMM_NCCL_FUNCTIONS(F) \
  F(GetVersion)                   \
  F(GetErrorString)               \
  F(GetLastError)                 \
  F(GetUniqueId)                  \
  F(CommInitRank)                 \
  F(CommInitRankConfig)           \
  F(CommDestroy)                  \
  F(CommAbort)                    \
  F(CommRevoke)                   \
  F(CommCount)                    \
  F(CommUserRank)                 \
  F(CommGetAsyncError)            \
  F(CommQueryProperties)          \
  F(CommWindowRegister)           \
  F(DevCommCreate)                \
  F(GetLsaDevicePointer)          \
  F(GetLsaMultimemDevicePointer)  \
  F(GroupStart)                   \
  F(GroupEnd)                     \
  F(MemAlloc)                     \
  F(MemFree)                      \
  F(AllGather)

struct NcclLibrary {
#define JAXCOMM_DECLARE(name) decltype(&nccl##name) name = nullptr;
  JAXCOMM_NCCL_FUNCTIONS(JAXCOMM_DECLARE)
#undef JAXCOMM_DECLARE
  std::string path;  // file of the library
  int version = 0;   // as ncclGetVersion returns it; at least kOldestNccl

  // The copy that this process has loaded; else `wheel_path`, the file of the nvidia-nccl wheel, if it is not empty and
  // can be loaded; else the copy that the loader finds. The error, if there is no copy or if it is older than
  // kOldestNccl, names the package to install. A copy that is found stays loaded.
  // Thread-safe.
  static StatusOr<const NcclLibrary*> Open(const std::string& wheel_path);
};

// The argument of ncclCommQueryProperties. NCCL fills the members of the version that it reads there, and refuses
// versions later than its own.
inline ncclCommProperties_t NoProperties(const NcclLibrary& nccl) {
  ncclCommProperties_t properties = NCCL_COMM_PROPERTIES_INITIALIZER;
  properties.version = static_cast<unsigned>(std::min(nccl.version, NCCL_VERSION_CODE));
  return properties;
}

// 23007 -> "2.30.7"
inline std::string NcclVersionText(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

}  // namespace jaxcomm
