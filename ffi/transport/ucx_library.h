// Finds and opens UCX.
#pragma once

#include <string>

#include "common/status.h"
#include "transport/ucp_abi.h"

namespace jaxcomm {

// UCX 1.13.1 ends the process on an assertion of its own in one of six runs of the test that kills a peer amid large
// messages; 1.15.0, 1.17.0 and 1.22.0 never did.
constexpr unsigned kOldestUcxMinor = 15;

struct UcxLibrary : ucp::Functions {
  std::string path;
  unsigned major = 0;
  unsigned minor = 0;
  unsigned release = 0;
  std::string version() const;

  // Opens `path` if it is not empty; otherwise the system's library; otherwise, if the system has none, `fallback`. The
  // error for an unusable library lists the attempts and a remedy. An opened library stays until the process ends,
  // because UCX leaves threads and hooks. So a system library that is too old blocks `fallback`: find out its version
  // in another process, and pass the other library as `path`.
  static StatusOr<const UcxLibrary*> Open(const std::string& path, const std::string& fallback);
};

}  // namespace jaxcomm
