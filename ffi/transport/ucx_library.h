// Finds and opens UCX.
#pragma once

#include <string>

#include "ucp_abi.h"

namespace jaxcomm {

struct UcxLibrary : ucp::Functions {
  std::string path;
  unsigned major = 0;
  unsigned minor = 0;
  unsigned release = 0;
  std::string version() const;

  // `path` if it is not empty; else the system's library if it is new enough; else `fallback`. Null and a sentence that
  // says what was tried if none can be used. A library stays open until the process ends: UCX leaves threads and hooks.
  static const UcxLibrary* Open(const std::string& path, const std::string& fallback, std::string* error);
};

}  // namespace jaxcomm
