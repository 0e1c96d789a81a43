// Rows that each go to one of the ranks, such as tokens to their experts. Every warp is a channel: it sends rows, and
// tells each receiver how many there are by the value of its signal.
//
//   out[source, place] = row number `place` of those that `source` sends here, or zero
//   counts[source]     = their number
//
// The kernel uses only the device API of jaxcomm: copy this file and change it.
#pragma once

#include <jaxcomm/device.h>

#include <cstdint>

namespace token_dispatch {

namespace device = jaxcomm::device;

constexpr int kThreads = 256;
constexpr int32_t kWarps = 8;  // per block on a GPU
constexpr int64_t kMostTokens = int64_t{1} << 31;

enum Tag : int32_t {
  kRows,  // values: the number of the call in the upper half, the number of rows for the receiver in the lower half
  kRead,  // counts, of a barrier: the receivers have read all rows
  kNumTags
};

// The arguments of one rank's kernel. All but `comm`, addresses and data are the same on all ranks.
struct Args {
  device::Comm comm;               // the ranks are comm.local. Its signals have a channel per warp, and kNumTags tags
  device::Window rows;             // of comm.local: [source][place][row_bytes]
  uint64_t* calls = nullptr;       // [comm.signals.num_channels], of this rank only: calls so far
  const char* x = nullptr;         // [tokens, row_bytes]
  const int32_t* order = nullptr;  // [tokens]: numbers of tokens, sorted by their ranks
  const int32_t* begin = nullptr;  // [ranks]: where the tokens of a rank begin in `order`
  char* out = nullptr;             // [ranks, tokens, row_bytes]
  int32_t* counts = nullptr;       // [ranks]
  int64_t tokens = 0;
  int64_t row_bytes = 0;
};

// The channels of the target, in all calls: those of a communicator are blocks.
JAXCOMM_BOTH int32_t NumChannels(const device::Comm& comm) { return comm.signals.num_channels * kWarps; }

// An arena holds the numbers of calls and the counters of the signals, followed by the rows.
JAXCOMM_BOTH int64_t HeadBytes(const device::Comm& comm) {
  const int32_t channels = NumChannels(comm);
  return channels * int64_t{sizeof(uint64_t)} * 2 + device::SignalsBytes(comm.local.size, channels, kNumTags);
}

inline int64_t ArenaBytes(const device::Comm& comm, int64_t tokens, int64_t row_bytes) {
  return HeadBytes(comm) + comm.local.size * tokens * row_bytes;
}

// For an arena that was zero before the first call and that no other kernel writes to.
inline Args WithArena(const device::Comm& comm) {
  const int32_t channels = NumChannels(comm);
  Args args;
  args.calls = comm.arena.At<uint64_t>(comm.local.rank);
  args.comm = device::WithSignals(comm, channels * int64_t{sizeof(uint64_t)} * 2, channels, kNumTags);
  args.rows = {comm.arena.base + HeadBytes(comm), comm.arena.stride};
  return args;
}

// Returns the reason why a call is invalid, or null if it is valid. `comm`: without signals of its own.
inline const char* FindProblem(const device::Comm& comm, const Args& args, int32_t blocks) {
  if (comm.local.size != comm.world.size) return "token_dispatch: the ranks must be of one node";
  if (blocks < 1 || blocks > comm.signals.num_channels) {
    return "token_dispatch: blocks must be at least 1 and at most the channels of the communicator";
  }
  if (args.tokens < 0 || args.tokens >= kMostTokens || args.row_bytes < 1) {
    return "token_dispatch: tokens must be from 0 to 2^31 - 1, rows of at least one byte";
  }
  if (comm.arena_bytes < ArenaBytes(comm, args.tokens, args.row_bytes)) {
    return "token_dispatch: the arena is too small for these rows";
  }
  return nullptr;
}

#if JAXCOMM_HAS_DEVICE

JAXCOMM_DEVICE void ZeroRow(char* row, int64_t bytes, device::Threads threads) {
  for (int64_t i = threads.rank; i < bytes; i += threads.size) row[i] = 0;
}

// Called by all threads of all blocks of the kernel. The number of blocks and of threads is the same on all ranks. Warp
// q of all blocks has places q, q + warps, ... of every sender and receiver.
//
// A rank writes to its peers' rows when its kernel of the call before has ended: all of its warps have then passed
// their barriers, so all warps of its peers have read their rows. If a peer does not signal in time, the waits write
// comm.report, and the kernel ends. The results are then undefined, and the communicator cannot be used any more. Later
// kernels do nothing.
JAXCOMM_DEVICE void Run(const Args& args) {
  if (device::IsAborted(args.comm)) return;
  const device::Comm& comm = args.comm;
  const device::ThreadGroup warp = device::OfWarp();
  const int32_t warps = static_cast<int32_t>(blockDim.x) / device::kWarpThreads;
  const int32_t channel =
      static_cast<int32_t>(blockIdx.x) * warps + static_cast<int32_t>(threadIdx.x) / device::kWarpThreads;
  const int32_t stride = static_cast<int32_t>(gridDim.x) * warps;
  const int32_t n = comm.local.size, rank = comm.local.rank;
  const auto end = [&](int32_t peer) { return peer + 1 < n ? int64_t{args.begin[peer + 1]} : args.tokens; };
  const auto place_of = [&](int32_t source, int64_t place) { return (source * args.tokens + place) * args.row_bytes; };
  const uint64_t call = args.calls[channel] + 1;

  for (int32_t step = 0; step < n; ++step) {
    const int32_t peer = (rank + step) % n;  // not all ranks to the same one at once
    const int64_t count = end(peer) - args.begin[peer];
    for (int64_t place = channel; place < count; place += stride) {
      const char* row = args.x + args.order[args.begin[peer] + place] * args.row_bytes;
      if (peer == rank) {
        device::Copy(args.out + place_of(rank, place), row, args.row_bytes, warp);
      } else {
        device::Put(args.rows, peer, place_of(rank, place), row, args.row_bytes, warp);
      }
    }
    if (peer == rank) continue;
    device::Sync(warp);
    if (warp.rank == 0) {
      device::SignalSet(comm, device::Channel(channel, kRows), peer, call << 32 | static_cast<uint64_t>(count));
    }
  }

  for (int32_t step = 0; step < n; ++step) {
    const int32_t source = (rank + n - step) % n;
    uint64_t value = call << 32 | static_cast<uint64_t>(end(rank) - args.begin[rank]);
    if (source != rank) {
      // All threads poll: each needs the value.
      const bool here = device::WaitValue(comm, device::Channel(channel, kRows), source, call << 32, &value, step);
      if (device::AnyOf(warp, !here)) return;
    }
    const auto count = static_cast<int64_t>(value & 0xffffffff);
    if (channel == 0 && warp.rank == 0) args.counts[source] = static_cast<int32_t>(count);
    for (int64_t place = channel; place < args.tokens; place += stride) {
      char* const to = args.out + place_of(source, place);
      if (place >= count) {
        ZeroRow(to, args.row_bytes, warp);
      } else if (source != rank) {
        device::Copy(to, args.rows.At(rank, place_of(source, place)), args.row_bytes, warp);
      }
    }
  }
  if (!device::Barrier(comm, device::Channel(channel, kRead), n, warp)) return;
  if (warp.rank == 0) args.calls[channel] = call;  // all threads have read it before the barrier
}

#endif
#if defined(__CUDACC__)

inline __global__ void __launch_bounds__(kThreads, 1) Kernel(const __grid_constant__ Args args) { Run(args); }

#endif

}  // namespace token_dispatch
