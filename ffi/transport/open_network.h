// The factory of networks between hosts. The only implementation is UCX.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "common/status.h"
#include "transport/network.h"

namespace jaxcomm {

// Whether this host has InfiniBand or RoCE devices: entries in `folder`.
bool HasRdma(const char* folder = "/sys/class/infiniband");

struct NetworkOptions {
  std::string library;           // path of the network's library; empty: the system's, or `fallback_library`
  std::string fallback_library;  // path of another library, such as the one in a wheel; may be empty
  std::string devices;           // names of interfaces to use and listen on, such as "eth0"; empty: all
};

// `token` is equal in all processes of a job and unique to the job.
StatusOr<std::unique_ptr<Network>> OpenNetwork(const NetworkOptions& options, int process, int num_processes,
                                               uint64_t token, Receiver* receiver);

}  // namespace jaxcomm
