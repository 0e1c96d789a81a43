// A product with rows that come along a ring, tile by tile:
//
//   y = all_gather(x) @ w
//
// Each rank has `tokens` rows of x, and a w of its own. The kernel uses only the device API of jaxcomm: copy this file
// and change it. MultiplyTile is the place for a faster product, such as one on tensor cores.
#pragma once

#include <jaxcomm/device.h>

#include <cstdint>

namespace all_gather_matmul {

namespace device = jaxcomm::device;
namespace arithmetic = jaxcomm::arithmetic;

// The types of the data, which are stored as `Storage` and computed in f32.
using F32 = arithmetic::Plain<float>;
using BF16 = arithmetic::Widened<jaxcomm::BFloat16>;

constexpr int32_t kTileRows = 16;  // fewer in the last tile of x
constexpr int32_t kSlots = 4;      // tiles that a channel of a rank can hold

// The signals of a channel. A rank sends tiles to the next rank, and gets slots back from it.
enum Tag : int32_t {
  kToSend,      // a tile is in its slot; the receiver sends it on
  kToMultiply,  // a tile is in its slot; the receiver multiplies it
  kSent,        // the receiver has sent the tile on
  kMultiplied,  // the receiver has multiplied the tile
  kNumTags
};

// The arguments of one rank's kernel. All but `comm`, addresses and data are the same on all ranks.
template <typename Codec>
struct Args {
  using Storage = typename Codec::Storage;

  device::Comm comm;           // the ring is comm.local. Its signals have kNumTags tags
  device::Window slots;        // of comm.local: [comm.signals.num_channels][num_slots] of slot_bytes each
  int64_t slot_bytes = 0;      // of a tile or more
  int32_t num_slots = kSlots;  // at least 2
  const Storage* x = nullptr;  // [tokens, hidden]
  const Storage* w = nullptr;  // [hidden, columns]
  Storage* y = nullptr;        // [ranks, tokens, columns]
  int64_t tokens = 0;
  int64_t hidden = 0;
  int64_t columns = 0;
};

template <typename Codec>
JAXCOMM_BOTH int64_t SlotBytes(int64_t hidden) {
  return (kTileRows * hidden * static_cast<int64_t>(sizeof(typename Codec::Storage)) + 15) / 16 * 16;
}

JAXCOMM_BOTH int64_t NumTiles(int64_t tokens) { return (tokens + kTileRows - 1) / kTileRows; }

// At most one channel per tile: further channels would have nothing to do.
inline int32_t Channels(int32_t max_channels, int64_t tokens) {
  const int64_t tiles = NumTiles(tokens);
  return static_cast<int32_t>(tiles < 1 ? 1 : tiles < max_channels ? tiles : max_channels);
}

// An arena holds the counters of the signals, followed by the slots. Their number is that of the communicator's
// channels, which is the same in all calls: the calls of a target share the counters.
template <typename Codec>
int64_t ArenaBytes(const device::Comm& comm, int64_t hidden) {
  const int32_t channels = comm.signals.num_channels;
  return device::SignalsBytes(comm.local.size, channels, kNumTags) + channels * kSlots * SlotBytes<Codec>(hidden);
}

// For an arena that was zero before the first call and that no other kernel writes to.
template <typename Codec>
Args<Codec> WithArena(const device::Comm& comm) {
  const int32_t channels = comm.signals.num_channels;
  Args<Codec> args;
  args.comm = device::WithSignals(comm, 0, channels, kNumTags);
  args.slots = comm.arena;
  const int64_t signals_bytes = device::SignalsBytes(comm.local.size, channels, kNumTags);
  args.slots.base += signals_bytes;
  // The place of a slot is the same in all calls: channels of one call do not wait for those of the call before.
  args.slot_bytes = (comm.arena_bytes - signals_bytes) / (channels * kSlots) / 16 * 16;
  return args;
}

// Returns the reason why a call with `channels` thread blocks per rank is invalid, or null if it is valid.
template <typename Codec>
const char* FindProblem(const Args<Codec>& args, int32_t channels) {
  if (args.comm.local.size != args.comm.world.size) return "all_gather_matmul: the ranks must be of one node";
  if (channels < 1 || channels > args.comm.signals.num_channels) {
    return "all_gather_matmul: channels must be at least 1 and at most those of the communicator";
  }
  if (args.tokens < 0 || args.hidden < 1 || args.columns < 0) {
    return "all_gather_matmul: tokens and columns must be at least 0, hidden at least 1";
  }
  if (args.slot_bytes < SlotBytes<Codec>(args.hidden)) {
    return "all_gather_matmul: the arena is too small for rows of this length";
  }
  return nullptr;
}

#if JAXCOMM_HAS_DEVICE

// A channel sends its tiles of x to the next rank, and sends on those of other ranks: tile after tile, each around the
// whole ring. `number` counts the tiles that a rank sends on the channel; number i of a rank is number i that the next
// one receives. A rank sends at step s what it has received at step s - 1.
template <typename Codec>
JAXCOMM_DEVICE int64_t SlotOffset(const Args<Codec>& args, int32_t channel, int64_t number) {
  return (channel * int64_t{args.num_slots} + number % args.num_slots) * args.slot_bytes;
}

template <typename Codec>
JAXCOMM_DEVICE const typename Codec::Storage* Received(const Args<Codec>& args, int32_t channel, int64_t number) {
  return args.slots.template At<const typename Codec::Storage>(args.comm.local.rank, SlotOffset(args, channel, number));
}

JAXCOMM_DEVICE int64_t RowsOfTile(int64_t tokens, int64_t tile) {
  const int64_t left = tokens - tile * kTileRows;
  return left < kTileRows ? left : kTileRows;
}

// Whether the receiver of a tile at this step sends it on. The last rank of the ring does not.
JAXCOMM_DEVICE bool IsSentOn(int32_t num_ranks, int64_t step) { return step + 2 < num_ranks; }

// Waits until the next rank needs tile `number` no more. Called by all threads of the group.
template <typename Codec>
JAXCOMM_DEVICE bool WaitForSlot(const Args<Codec>& args, int32_t channel, int32_t next, int64_t number,
                                const device::ThreadGroup& threads) {
  bool free = true;
  if (threads.rank == 0) {
    const int32_t n = args.comm.local.size;
    const auto step = static_cast<int32_t>(number % (n - 1));
    free = device::Wait(args.comm, device::Channel(channel, kMultiplied), next, step);
    if (free && IsSentOn(n, step)) free = device::Wait(args.comm, device::Channel(channel, kSent), next, step);
  }
  return !device::AnyOf(threads, !free);
}

// The part of the warps that move tiles.
template <typename Codec>
JAXCOMM_DEVICE void SendTiles(const Args<Codec>& args, const device::ThreadGroup& threads) {
  const device::Comm& comm = args.comm;
  const auto channel = static_cast<int32_t>(blockIdx.x);
  const int32_t n = comm.local.size;
  const int32_t next = (comm.local.rank + 1) % n, prev = (comm.local.rank + n - 1) % n;
  int64_t number = 0;
  for (int64_t tile = channel; tile < NumTiles(args.tokens); tile += gridDim.x) {
    const int64_t bytes =
        RowsOfTile(args.tokens, tile) * args.hidden * static_cast<int64_t>(sizeof(typename Codec::Storage));
    for (int32_t step = 0; step + 1 < n; ++step, ++number) {
      if (number >= args.num_slots && !WaitForSlot(args, channel, next, number - args.num_slots, threads)) return;
      if (step > 0 && !device::Wait(comm, device::Channel(channel, kToSend), prev, threads, step)) return;
      const auto* from = step == 0 ? args.x + tile * kTileRows * args.hidden : Received(args, channel, number - 1);
      device::Put(args.slots, next, SlotOffset(args, channel, number), from, bytes, threads);
      device::Sync(threads);
      if (threads.rank != 0) continue;
      device::Signal(comm, device::Channel(channel, kToMultiply), next);
      if (IsSentOn(n, step)) device::Signal(comm, device::Channel(channel, kToSend), next);
      if (step > 0) device::Signal(comm, device::Channel(channel, kSent), prev);
    }
  }
  // When the kernel ends, the next rank has no tile of this one left. So the next call may write to all slots.
  for (int64_t i = number < args.num_slots ? 0 : number - args.num_slots; i < number; ++i) {
    if (!WaitForSlot(args, channel, next, i, threads)) return;
  }
}

// The rows of y that belong to `rows` rows of x. Each thread has columns of its own, and sums in the order of `hidden`:
// the bits do not depend on the number of ranks, channels or threads.
template <typename Codec>
JAXCOMM_DEVICE void MultiplyTile(const Args<Codec>& args, const typename Codec::Storage* tile, int64_t rows,
                                 typename Codec::Storage* y, device::Threads threads) {
  for (int64_t column = threads.rank; column < args.columns; column += threads.size) {
    float sums[kTileRows] = {};
    for (int64_t k = 0; k < args.hidden; ++k) {
      const float weight = Codec::Decode(args.w[k * args.columns + column]);
      JAXCOMM_UNROLL
      for (int32_t row = 0; row < kTileRows; ++row) {
        if (row < rows) sums[row] += Codec::Decode(tile[row * args.hidden + k]) * weight;
      }
    }
    JAXCOMM_UNROLL
    for (int32_t row = 0; row < kTileRows; ++row) {
      if (row < rows) y[row * args.columns + column] = Codec::Encode(sums[row]);
    }
  }
}

// The part of the other warps.
template <typename Codec>
JAXCOMM_DEVICE void MultiplyTiles(const Args<Codec>& args, const device::ThreadGroup& threads) {
  const device::Comm& comm = args.comm;
  const auto channel = static_cast<int32_t>(blockIdx.x);
  const int32_t n = comm.local.size, prev = (comm.local.rank + n - 1) % n;
  int64_t number = 0;
  for (int64_t tile = channel; tile < NumTiles(args.tokens); tile += gridDim.x) {
    for (int32_t step = 0; step < n; ++step) {
      const auto* rows_of_x = args.x + tile * kTileRows * args.hidden;
      if (step > 0) {
        if (!device::Wait(comm, device::Channel(channel, kToMultiply), prev, threads, step)) return;
        rows_of_x = Received(args, channel, number++);
      }
      const int64_t owner = (comm.local.rank + n - step) % n;
      auto* const y = args.y + (owner * args.tokens + tile * kTileRows) * args.columns;
      MultiplyTile(args, rows_of_x, RowsOfTile(args.tokens, tile), y, threads);
      if (step > 0) device::Signal(comm, device::Channel(channel, kMultiplied), prev, threads);
    }
  }
}

// Called by all threads of all blocks of the kernel, with one block per channel. The number of blocks and of threads is
// the same on all ranks. A block has two warps or more.
//
// Why the ring does not block: a rank sends number i once it has received number i - 1, and once the next rank has
// multiplied number i - num_slots and has sent it on, as its number i - num_slots + 1. As num_slots is at least 2, each
// send waits for sends of smaller numbers only.
//
// If a peer does not signal in time, the waits write comm.report, and the kernel ends. y is then undefined, and the
// communicator cannot be used any more. Later kernels do nothing.
template <typename Codec>
JAXCOMM_DEVICE void Run(const Args<Codec>& args) {
  if (device::IsAborted(args.comm)) return;
  const int32_t warps = static_cast<int32_t>(blockDim.x) / device::kWarpThreads;
  const int32_t senders = warps / 2;
  if (static_cast<int32_t>(threadIdx.x) < senders * device::kWarpThreads) {
    SendTiles(args, device::OfWarps(0, senders, 1));
  } else {
    MultiplyTiles(args, device::OfWarps(senders, warps - senders, 2));
  }
}

#endif
#if defined(__CUDACC__)

// 6 warps send, which keeps 24 KiB in flight, and 6 multiply. With more threads, ptxas would spill registers.
constexpr int kThreads = 384;

template <typename Codec>
__global__ void __launch_bounds__(kThreads, 1) Kernel(const __grid_constant__ Args<Codec> args) {
  Run(args);
}

// Loads the kernel's code.
template <typename Codec>
cudaError_t Load() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, Kernel<Codec>);
}

// Launches the kernel of this rank. All ranks must launch it with the same number of channels. All blocks must be
// resident at once on every GPU, because they wait for each other. Does not wait for the kernel. May be captured into a
// CUDA graph.
template <typename Codec>
cudaError_t Launch(const Args<Codec>& args, int32_t channels, cudaStream_t stream) {
  if (FindProblem(args, channels) != nullptr) return cudaErrorInvalidValue;
  Kernel<Codec><<<channels, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

#endif

}  // namespace all_gather_matmul
