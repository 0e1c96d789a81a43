// The network between hosts: UCX active messages, over InfiniBand, RoCE or TCP, whichever UCX finds.
//
// Over TCP, UCX listens on a port of every interface in `devices`. UCX closes connections that do not begin with its
// magic number, and jaxcomm drops messages without the token. UCX's own protocol trusts its peers: a connection that
// begins correctly and then sends garbage can end the process. Use networks that are closed to strangers, or restrict
// `devices` to such networks.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "common/status.h"
#include "transport/network.h"

namespace jaxcomm {

// Whether this host has InfiniBand or RoCE devices: entries in `folder`.
bool HasRdma(const char* folder = "/sys/class/infiniband");

struct UcxOptions {
  std::string library;           // path of libucp; empty: the system's, or `fallback_library`
  std::string fallback_library;  // path of another libucp, such as the one in a wheel; may be empty
  // UCX's names of interfaces to use and listen on, such as "eth0" or "mlx5_0:1,mlx5_1:1"; empty: all.
  std::string devices;
  // UCX_TLS; empty: UCX's own default. This default excludes transports within a host, which jaxcomm provides itself.
  std::string transports = "^sm,self";
  // Larger payloads stay at the sender until they have a destination (UCX's rendezvous protocol). 0: 64 KiB with RDMA,
  // otherwise kEagerBytes, because over TCP the control messages of that protocol queue behind other data. A psum of 16
  // MiB in chunks of 128 KiB over 1 Gbit/s takes 1.5 times the time of its bytes with them, 1.17 times without
  // (2026-11).
  size_t eager_bytes = 0;
  // How long the progress thread polls for work before it sleeps: longer than a peer takes to send 256 KiB. With 20 us
  // here and 50 us in cpu/progress_thread.cc, a ppermute of 256 KiB takes 1.0 to 1.15 times as long (2026-11).
  int64_t spin_us = 100;
  // How long a process that leaves waits until its peers acknowledge that they have received everything. A peer that is
  // alive answers as soon as its progress thread runs: on a busy machine, that may take seconds. A dead process does
  // not count, because its kernel closes its connections. So only peers that are stopped or out of reach take all this
  // time.
  double disconnect_s = 10;
};

// `token` is equal in all processes of a job and unique to the job.
StatusOr<std::unique_ptr<Network>> OpenUcxNetwork(const UcxOptions& options, int process, int num_processes,
                                                  uint64_t token, Receiver* receiver);

}  // namespace jaxcomm
