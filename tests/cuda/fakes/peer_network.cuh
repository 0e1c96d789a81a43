// Replaces the network between nodes if all ranks can address each other, as when the ranks of one GPU form several
// nodes.
#pragma once

#include "../../../ffi/cuda/kernels/executor.cuh"

namespace jaxcomm {
namespace cuda {

// Windows and signals of all ranks of the group, as if they were one node. The counters are separate from those of the
// nodes.
struct PeerNetworkArgs {
  device::Comm comm;
  device::Window input;
  device::Window output;
  device::Window scratch;

  // Address of byte `offset` of the buffer of `place`.
  JAXCOMM_BOTH char* At(const Place& place, int64_t offset) const {
    const device::Window& window = place.space == Space::kInput    ? input
                                   : place.space == Space::kOutput ? output
                                                                   : scratch;
    return window.At(place.rank, offset);
  }
};

}  // namespace cuda
}  // namespace jaxcomm

#if JAXCOMM_HAS_DEVICE
namespace jaxcomm {
namespace cuda {

class PeerNetwork {
 public:
  static constexpr bool kSharesQueues = false;

  JAXCOMM_DEVICE explicit PeerNetwork(const PeerNetworkArgs& args) : args_(args) {}

  JAXCOMM_DEVICE void Put(int32_t, int32_t, const Place& to, int64_t to_offset, const Place& from, int64_t from_offset,
                          int64_t bytes) const {
    device::Copy(args_.At(to, to_offset), args_.At(from, from_offset), bytes);
  }
  JAXCOMM_DEVICE void Signal(int32_t channel, int32_t peer) const { device::Signal(args_.comm, channel, peer); }
  JAXCOMM_DEVICE bool Wait(int32_t channel, int32_t peer, int32_t origin) const {
    return device::Wait(args_.comm, channel, peer, origin);
  }
  JAXCOMM_DEVICE static bool Flush(int32_t) { return true; }

 private:
  const PeerNetworkArgs& args_;
};

// The functions of device::Gin, by accesses to the memory of peers.
class PeerGin {
 public:
  // The windows of all ranks of the group, as if they were one node.
  JAXCOMM_DEVICE PeerGin(const device::Comm& comm, const device::Window& arena) : comm_(comm), arena_(arena) {}

  JAXCOMM_DEVICE bool Put(int32_t, int32_t peer, int64_t to_offset, int64_t from_offset, int64_t bytes) const {
    device::Copy(arena_.At(peer, to_offset), arena_.At(comm_.world.rank, from_offset), bytes, device::OfThread());
    return true;
  }
  JAXCOMM_DEVICE void Signal(int32_t channel, int32_t peer) const { device::Signal(comm_, channel, peer); }
  JAXCOMM_DEVICE bool Wait(int32_t channel, int32_t peer, const device::ThreadGroup& threads, int32_t step) const {
    return device::Wait(comm_, channel, peer, threads, step);
  }
  JAXCOMM_DEVICE static bool Flush(int32_t, const device::ThreadGroup&) { return true; }

 private:
  const device::Comm& comm_;
  const device::Window& arena_;
};

}  // namespace cuda
}  // namespace jaxcomm
#endif
