// all_gather_matmul on several nodes, with one ring over all ranks: a tile goes to the next rank over NVLink if it is
// of the same node, and else by GIN. The protocol is that of all_gather_matmul.cuh. But a block has no groups of warps:
// its threads send a tile on, and multiply it while the network transfers it.
#pragma once

#include <jaxcomm/gin.h>

#include "all_gather_matmul.cuh"

namespace all_gather_matmul {

// Between nodes, a channel counts one kind of signals from a rank. The rank before and the one behind are the same in a
// ring of two, so a block has two channels of GIN. Inside a node, these are tags.
enum Kind : int32_t {
  kTile,  // a tile is in its slot
  kSlot,  // the receiver of a tile needs its slot no more
  kNumKinds
};

// Slots have two halves: for a tile from the rank before, and for a tile of this rank. The network reads only the
// arena.
template <typename Codec>
struct NodeArgs : Args<Codec> {
  device::GinHandle gin;

  JAXCOMM_BOTH int64_t half_bytes() const { return this->slot_bytes / 2 / 16 * 16; }
};

template <typename Codec>
int64_t NodeArenaBytes(const device::Comm& comm, int64_t hidden) {
  const int32_t channels = comm.signals.num_channels;
  return device::SignalsBytes(comm.local.size, channels, kNumTags) + channels * kSlots * 2 * SlotBytes<Codec>(hidden);
}

template <typename Codec>
NodeArgs<Codec> WithArena(const device::Comm& comm, const device::GinHandle& gin) {
  NodeArgs<Codec> args;
  static_cast<Args<Codec>&>(args) = WithArena<Codec>(comm);
  args.gin = gin;
  return args;
}

// As for one node, with twice as many channels and slots of half the size.
template <typename Codec>
const char* FindProblem(const NodeArgs<Codec>& args, int32_t channels) {
  if (channels > args.comm.signals.num_channels / kNumKinds) {
    return "all_gather_matmul: channels must be at most half of those of the communicator";
  }
  Args<Codec> half = args;
  half.comm.world.size = half.comm.local.size;
  half.slot_bytes = args.half_bytes();
  return FindProblem(half, channels);
}

#if JAXCOMM_HAS_DEVICE

// The ranks before and behind this one, for one block. Called by all of its threads.
class Neighbours {
 public:
  // The arguments must outlive this object.
  JAXCOMM_DEVICE Neighbours(const device::Comm& comm, const device::Gin& gin)
      : prev((comm.world.rank + comm.world.size - 1) % comm.world.size),
        next((comm.world.rank + 1) % comm.world.size),
        comm_(comm),
        gin_(gin),
        channel_(static_cast<int32_t>(blockIdx.x)) {}

  JAXCOMM_DEVICE void Signal(int32_t rank, Kind kind) const {
    const int32_t member = comm_.local.Member(rank);
    if (member >= 0) return device::Signal(comm_, device::Channel(channel_, kind), member, device::OfBlock());
    __syncthreads();
    if (threadIdx.x == 0) gin_.Signal(GinChannel(kind), rank);
  }

  JAXCOMM_DEVICE bool Wait(int32_t rank, Kind kind, int32_t step) const {
    const int32_t member = comm_.local.Member(rank);
    if (member >= 0) return device::Wait(comm_, device::Channel(channel_, kind), member, device::OfBlock(), step);
    return gin_.Wait(GinChannel(kind), rank, device::OfBlock(), step);
  }

  // From this rank's arena to that of the next rank.
  JAXCOMM_DEVICE bool Put(int64_t to_offset, int64_t from_offset, int64_t bytes) const {
    __syncthreads();  // other threads may have written the source
    const int32_t member = comm_.local.Member(next);
    if (member < 0) {
      const bool put = threadIdx.x != 0 || gin_.Put(GinChannel(kTile), next, to_offset, from_offset, bytes);
      return !device::AnyOf(device::OfBlock(), !put);
    }
    device::Put(comm_.arena, member, to_offset, comm_.arena.At(comm_.local.rank, from_offset), bytes);
    return true;
  }

  // Waits until all sources of Put() have been read.
  JAXCOMM_DEVICE bool Flush() const {
    return comm_.local.Member(next) >= 0 || gin_.Flush(GinChannel(kTile), device::OfBlock());
  }

  const int32_t prev, next;  // in the world

 private:
  JAXCOMM_DEVICE int32_t GinChannel(Kind kind) const { return kNumKinds * channel_ + kind; }

  const device::Comm& comm_;
  const device::Gin& gin_;
  const int32_t channel_;
};

// Called by all threads of all blocks, as Run() is. There are at most half as many blocks as channels.
template <typename Codec>
JAXCOMM_DEVICE void RunOnNodes(const NodeArgs<Codec>& args, const ncclDevComm& nccl_comm) {
  const device::Comm& comm = args.comm;
  if (device::IsAborted(comm)) return;
  const device::Gin gin(args.gin, nccl_comm);
  const Neighbours ring(comm, gin);
  const auto channel = static_cast<int32_t>(blockIdx.x);
  const int32_t n = comm.world.size;
  const int64_t slots = args.slots.base - comm.arena.base;  // their place in the arena
  const auto received = [&](int64_t number) { return slots + SlotOffset(args, channel, number); };
  int64_t number = 0;  // of tiles sent; number i is number i that the next rank receives
  for (int64_t tile = channel; tile < NumTiles(args.tokens); tile += gridDim.x) {
    const int64_t rows = RowsOfTile(args.tokens, tile);
    const int64_t bytes = rows * args.hidden * static_cast<int64_t>(sizeof(typename Codec::Storage));
    for (int32_t step = 0; step < n; ++step) {
      const bool sends = step + 1 < n;
      const auto* rows_of_x = args.x + tile * kTileRows * args.hidden;
      int64_t from = received(number) + args.half_bytes();
      if (sends && number >= args.num_slots && !ring.Wait(ring.next, kSlot, step)) return;
      if (step > 0) {
        if (!ring.Wait(ring.prev, kTile, step)) return;
        from = received(number - 1);
        rows_of_x = Received(args, channel, number - 1);
      } else if (sends) {
        device::Copy(comm.arena.At(comm.local.rank, from), rows_of_x, bytes);
      }
      if (sends) {
        if (!ring.Put(received(number), from, bytes)) return;
        ring.Signal(ring.next, kTile);
        ++number;
      }
      const int64_t owner = (comm.world.rank + n - step) % n;
      MultiplyTile(args, rows_of_x, rows, args.y + (owner * args.tokens + tile * kTileRows) * args.columns,
                   device::OfBlock());
      if (step == 0) continue;
      if (sends && !ring.Flush()) return;
      ring.Signal(ring.prev, kSlot);
    }
  }
  // When the kernel ends, the next rank has no tile of this one left. So the next call may write to all slots.
  for (int64_t i = number < args.num_slots ? 0 : number - args.num_slots; i < number; ++i) {
    if (!ring.Wait(ring.next, kSlot, n)) return;
  }
}

#endif
#if defined(__CUDACC__)

// NCCL's code needs registers, too.
constexpr int kNodeThreads = 256;

template <typename Codec>
__global__ void __launch_bounds__(kNodeThreads, 1)
    NodeKernel(const __grid_constant__ NodeArgs<Codec> args, const __grid_constant__ ncclDevComm nccl_comm) {
  RunOnNodes(args, nccl_comm);
}

// As Load() and Launch().
template <typename Codec>
cudaError_t LoadOnNodes() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, NodeKernel<Codec>);
}

template <typename Codec>
cudaError_t LaunchOnNodes(const NodeArgs<Codec>& args, int32_t channels, const ncclDevComm& nccl_comm,
                          cudaStream_t stream) {
  if (FindProblem(args, channels) != nullptr) return cudaErrorInvalidValue;
  NodeKernel<Codec><<<channels, kNodeThreads, 0, stream>>>(args, nccl_comm);
  return cudaGetLastError();
}

#endif
}  // namespace all_gather_matmul
