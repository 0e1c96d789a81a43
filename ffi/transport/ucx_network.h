// The network between hosts: UCX active messages, over InfiniBand, RoCE or TCP, whichever UCX finds.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "network.h"

namespace jaxcomm {

struct UcxOptions {
  std::string library;           // path of libucp; empty: the system's, else `fallback_library`
  std::string fallback_library;  // path, such as that in the libucx wheel; may be empty
  // UCX's names of interfaces to use and listen on, such as "eth0" or "mlx5_0:1,mlx5_1:1"; empty: all.
  std::string devices;
  // UCX_TLS; empty: what UCX itself would use. Default: all but memory shared within a host, which jaxcomm does itself.
  std::string transports = "^sm,self";
  // Larger payloads stay with the sender until they have a place.
  size_t eager_bytes = 16 << 10;
  // How long the progress thread looks for work before it sleeps.
  int64_t spin_us = 20;
};

// Null and a sentence if UCX cannot be used. `token` is the same in all processes of a run and in no other run.
std::unique_ptr<Network> OpenUcxNetwork(const UcxOptions& options, int process, int num_processes, uint64_t token,
                                        Receiver* receiver, std::string* error);

}  // namespace jaxcomm
