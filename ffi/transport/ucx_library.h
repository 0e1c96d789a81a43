// Finds and opens UCX.
#pragma once

#include <string>

#include "ucp_abi.h"

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

  // `path` if it is not empty; else the system's library; else, if the system has none, `fallback`. Null and a sentence
  // that says what was tried and what to do if that one cannot be used. An opened library stays until the process ends:
  // UCX leaves threads and hooks. So a system library that is too old stands in the way of `fallback`; who wants to use
  // that one then has to find out in another process, and to give it as `path`.
  static const UcxLibrary* Open(const std::string& path, const std::string& fallback, std::string* error);
};

}  // namespace jaxcomm
