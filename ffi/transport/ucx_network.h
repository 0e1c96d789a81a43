// The network between hosts: UCX active messages, over InfiniBand, RoCE or TCP, whichever UCX finds.
//
// Over TCP, UCX listens at a port of every interface in `devices`. Connections that do not begin with UCX's magic
// number are closed there, messages without the token are dropped here. In between lies UCX's own protocol, which
// trusts its peers: whoever speaks its first bytes and then sends garbage can end the process. Networks have to be
// closed to strangers, or `devices` restricted to those that are.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "open_network.h"

namespace jaxcomm {

// The library is libucp; `devices` are UCX's names, such as "eth0" or "mlx5_0:1,mlx5_1:1".
struct UcxOptions : NetworkOptions {
  // UCX_TLS; empty: what UCX itself would use. Default: all but memory shared within a host, which jaxcomm does itself.
  std::string transports = "^sm,self";
  // Larger payloads stay with the sender until they have a place. 0: 64 KiB where there is RDMA, else 1 MiB, because
  // the question and the answer before such a payload queue behind other data (psum of 16 MiB in chunks of 128 KiB over
  // 1 Gbit/s: 1.5 times the time of its bytes with them, 1.17 times without; 2026-11).
  size_t eager_bytes = 0;
  // How long the progress thread looks for work before it sleeps.
  int64_t spin_us = 20;
};

StatusOr<std::unique_ptr<Network>> OpenUcxNetwork(const UcxOptions& options, int process, int num_processes,
                                                  uint64_t token, Receiver* receiver);

}  // namespace jaxcomm
