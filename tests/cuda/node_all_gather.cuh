// The kernel of docs/guide/device-kernels.md for several nodes: an all-gather. Blocks travel between the nodes on
// rails, and from there over NVLink.
#pragma once

#include <jaxcomm/device.h>
#include <jaxcomm/gin.h>

#include <cstdint>

namespace node_all_gather {

namespace device = jaxcomm::device;

struct Args {
  device::Comm comm;
  device::GinHandle gin;
  const char* x = nullptr;  // [bytes]
  char* y = nullptr;        // [comm.world.size, bytes]
  int64_t bytes = 0;        // the same on all ranks
  int64_t chunk_bytes = 0;  // the same in all calls; a multiple of 16
};

// The arena holds the number of rounds of each channel, then two halves per channel. A half has a slot for a chunk of
// each rank. All call sites share the arena. So its layout has all channels of the communicator, however many a call
// site uses.
JAXCOMM_BOTH int64_t HeadBytes(const device::Comm& comm) {
  return (int64_t{8} * comm.signals.num_channels + 15) / 16 * 16;
}

inline int64_t ArenaBytes(const device::Comm& comm, int64_t chunk_bytes) {
  return HeadBytes(comm) + int64_t{2} * comm.signals.num_channels * comm.world.size * chunk_bytes;
}

#if JAXCOMM_HAS_DEVICE

// Called by all threads of all blocks. Block c of a rank communicates with block c of the others.
JAXCOMM_DEVICE void Run(const Args& args, const ncclDevComm& nccl_comm) {
  const device::Comm& comm = args.comm;
  if (device::IsAborted(comm)) return;
  const device::Gin gin(args.gin, nccl_comm);
  const device::Team rail = device::RailOf(comm);
  const auto channel = static_cast<int32_t>(blockIdx.x);
  const int32_t n = comm.world.size, own = comm.world.rank;
  uint64_t* const rounds = comm.arena.At<uint64_t>(comm.local.rank) + channel;
  uint64_t round = *rounds;
  const int64_t stride = gridDim.x * args.chunk_bytes;
  for (int64_t begin = channel * args.chunk_bytes; begin < args.bytes; begin += stride, ++round) {
    const int64_t left = args.bytes - begin;
    const int64_t count = left < args.chunk_bytes ? left : args.chunk_bytes;
    const int64_t half = HeadBytes(comm) + (2 * channel + round % 2) * n * args.chunk_bytes;
    const auto slot = [&](int32_t rank) { return half + rank * args.chunk_bytes; };
    const auto step = static_cast<int32_t>(begin / stride);

    // The own chunk, to this node and to the rail.
    for (int32_t i = 0; i < comm.local.size; ++i) {
      device::Put(comm.arena, (comm.local.rank + i) % comm.local.size, slot(own), args.x + begin, count);
    }
    __syncthreads();
    for (int32_t node = 0; threadIdx.x == 0 && node < rail.size; ++node) {
      if (node == rail.rank) continue;
      const int32_t peer = rail.World(node);
      if (gin.Put(channel, peer, slot(own), slot(own), count)) gin.Signal(channel, peer);
    }
    // Chunks that come on the rail go to the other ranks of the node.
    for (int32_t node = 0; node < rail.size; ++node) {
      if (node == rail.rank) continue;
      const int32_t peer = rail.World(node);
      if (!gin.Wait(channel, peer, device::OfBlock(), step)) return;
      for (int32_t i = 1; i < comm.local.size; ++i) {
        const int32_t to = (comm.local.rank + i) % comm.local.size;
        device::Put(comm.arena, to, slot(peer), comm.arena.At(comm.local.rank, slot(peer)), count);
      }
    }
    if (!device::Barrier(comm, channel, step)) return;
    for (int32_t rank = 0; rank < n; ++rank) {
      device::Copy(args.y + rank * args.bytes + begin, comm.arena.At(comm.local.rank, slot(rank)), count);
    }
  }
  __syncthreads();  // all threads have read the number
  if (threadIdx.x == 0) *rounds = round;
}

#endif
#if defined(__CUDACC__)

static __global__ void __launch_bounds__(256, 1)
    Kernel(const __grid_constant__ Args args, const __grid_constant__ ncclDevComm nccl_comm) {
  Run(args, nccl_comm);
}

#endif
}  // namespace node_all_gather
