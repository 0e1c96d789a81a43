// One kernel for three consecutive operations of a tensor-parallel layer:
//
//   new_residual = residual + the sum of x over the ranks
//   out          = new_residual / sqrt(mean(new_residual^2) + epsilon) * weight
//
// The rows of x, residual, out and new_residual are tokens. Sums are in f32 and in the order of the ranks, so all ranks
// get the same bits. The kernel uses only the device API of jaxcomm: copy this file and change it.
#pragma once

#include <jaxcomm/device.h>

#include <cmath>
#include <cstdint>

namespace fused_rmsnorm {

namespace device = jaxcomm::device;
namespace arithmetic = jaxcomm::arithmetic;

// The types of the data, which are stored as `Storage` and computed in f32.
using F32 = arithmetic::Plain<float>;
using BF16 = arithmetic::Widened<jaxcomm::BFloat16>;

// The arguments of one rank's kernel. All but `comm`, addresses and data are the same on all ranks.
template <typename Codec>
struct Args {
  using Storage = typename Codec::Storage;

  device::Comm comm;           // the sum is over the ranks of comm.local
  device::BufferWindow x_of;   // x at every rank of comm.local. Without places, x goes through `window`
  device::Window window;       // of comm.local; peers read x here
  int64_t window_bytes = 0;    // per rank
  uint64_t* rounds = nullptr;  // [comm.signals.num_channels], of this rank only. Zero at first; belongs to the window
  const Storage* x = nullptr;  // [tokens, hidden], this rank's part of the sum
  const Storage* residual = nullptr;  // [tokens, hidden], the same on all ranks
  const Storage* weight = nullptr;    // [hidden]
  Storage* out = nullptr;             // [tokens, hidden]; may be x if x goes through `window`
  Storage* new_residual = nullptr;    // [tokens, hidden]; may be residual
  int64_t tokens = 0;
  int64_t hidden = 0;
  float epsilon = 1e-6F;
};

// Each channel has two halves of its share of the window. Only rounds of the same channel reuse memory.
template <typename Codec>
JAXCOMM_BOTH int64_t HalfBytes(const Args<Codec>& args) {
  return args.window_bytes / args.comm.signals.num_channels / 2 / 16 * 16;
}

// Whether peers read x where XLA has it.
template <typename Codec>
JAXCOMM_BOTH bool ReadsInPlace(const Args<Codec>& args) {
  return args.x_of.places != nullptr;
}

template <typename Codec>
JAXCOMM_BOTH int64_t RowBytes(const Args<Codec>& args) {
  return args.hidden * static_cast<int64_t>(sizeof(typename Codec::Storage));
}

// At most one channel per token: further channels would have nothing to do.
inline int32_t Channels(int32_t max_channels, int64_t tokens) {
  return static_cast<int32_t>(tokens < 1 ? 1 : tokens < max_channels ? tokens : max_channels);
}

// An arena holds the counts of rounds, followed by the window.
inline int64_t CountsBytes(const device::Comm& comm) {
  return (comm.signals.num_channels * static_cast<int64_t>(sizeof(uint64_t)) + 15) / 16 * 16;
}

// Enough for one round per channel, limited to 1 MiB per half, but at least one row per half.
template <typename Codec>
int64_t ArenaBytes(const device::Comm& comm, int32_t max_channels, int64_t tokens, int64_t hidden) {
  constexpr int64_t kMostBytes = 1 << 20;
  const int64_t row_bytes = hidden * static_cast<int64_t>(sizeof(typename Codec::Storage));
  const int64_t channels = Channels(max_channels, tokens);
  int64_t half_bytes = (tokens + channels - 1) / channels * row_bytes;
  if (half_bytes > kMostBytes) half_bytes = kMostBytes;
  if (half_bytes < row_bytes) half_bytes = row_bytes;
  return CountsBytes(comm) + 2 * comm.signals.num_channels * ((half_bytes + 15) / 16 * 16);
}

// For an arena that was zero before the first call and that no other kernel writes to.
template <typename Codec>
Args<Codec> WithArena(const device::Comm& comm) {
  Args<Codec> args;
  args.comm = comm;
  args.window = {comm.arena.base + CountsBytes(comm), comm.arena.stride};
  args.window_bytes = comm.arena_bytes - CountsBytes(comm);
  args.rounds = comm.arena.At<uint64_t>(comm.local.rank);
  return args;
}

// Returns the reason why a call with `channels` thread blocks per rank is invalid, or null if it is valid.
template <typename Codec>
const char* FindProblem(const Args<Codec>& args, int32_t channels) {
  if (args.comm.local.size != args.comm.world.size) return "fused_rmsnorm: the ranks must be of one node";
  if (channels < 1 || channels > args.comm.signals.num_channels) {
    return "fused_rmsnorm: channels must be at least 1 and at most those of the communicator";
  }
  if (args.tokens < 0 || args.hidden < 1) return "fused_rmsnorm: tokens must be at least 0, hidden at least 1";
  if (ReadsInPlace(args)) {
    return args.out == args.x && args.tokens > 0 ? "fused_rmsnorm: out is x, which peers read" : nullptr;
  }
  if (HalfBytes(args) < RowBytes(args)) return "fused_rmsnorm: the window must hold two rows per channel";
  return nullptr;
}

#if JAXCOMM_HAS_DEVICE

// Normalises one token. All threads of the block call it and see the token's new residual.
template <typename Codec>
JAXCOMM_DEVICE void Normalise(const Args<Codec>& args, int64_t token, float* shared) {
  const auto* row = args.new_residual + token * args.hidden;
  auto* out = args.out + token * args.hidden;
  float squares = 0;
  for (int64_t i = threadIdx.x; i < args.hidden; i += blockDim.x) {
    const float value = Codec::Decode(row[i]);
    squares += value * value;
  }
  const float mean = device::BlockSum(squares, shared) / static_cast<float>(args.hidden);
  const float scale = 1.0F / sqrtf(mean + args.epsilon);
  for (int64_t i = threadIdx.x; i < args.hidden; i += blockDim.x) {
    out[i] = Codec::Encode(Codec::Decode(row[i]) * scale * Codec::Decode(args.weight[i]));
  }
}

// Called by all threads of all blocks of the kernel, with one block per channel. The number of blocks and of threads is
// the same on all ranks. Needs device::BlockSumBytes(threads) bytes of dynamic shared memory.
//
// A block processes its tokens in rounds. Each round has as many tokens as fit into half of the block's share of the
// window. The halves alternate, also from call to call, which is why `rounds` counts the rounds. A rank therefore
// overwrites in round r + 2 the data that its peers read in round r. By then it has passed the barrier of round r + 1,
// which a peer reaches only after it has read all data of round r. So one barrier per round is enough.
//
// If peers read x in place, there is no round: the ranks have met before the kernel, and meet again at its end, because
// XLA may reuse the memory of x from then on.
//
// If a peer does not arrive in time, the barrier writes comm.report, and the kernel ends. out and new_residual are then
// undefined, and the communicator cannot be used any more. Later kernels do nothing.
template <typename Codec>
JAXCOMM_DEVICE void Run(const Args<Codec>& args) {
  using Storage = typename Codec::Storage;
  auto* const shared = static_cast<float*>(device::DynamicShared());
  const auto channel = static_cast<int32_t>(blockIdx.x);
  const int64_t channels = gridDim.x;
  const int64_t end = args.tokens * (channel + 1) / channels;
  const bool in_place = ReadsInPlace(args);
  const int64_t most = in_place ? args.tokens : HalfBytes(args) / RowBytes(args);
  if (device::IsAborted(args.comm)) return;
  const uint64_t rounds_before = in_place ? 0 : args.rounds[channel];
  uint64_t round = rounds_before;
  for (int64_t first = args.tokens * channel / channels; first < end; first += most, ++round) {
    const int64_t tokens = end - first < most ? end - first : most;
    const int64_t half = 2 * channel + static_cast<int64_t>(round % 2);
    const int64_t place = half * HalfBytes(args);
    const int64_t begin = first * args.hidden;
    if (!in_place) {
      device::Put(args.window, args.comm.local.rank, place, args.x + begin, tokens * RowBytes(args));
      if (!device::Barrier(args.comm, channel, static_cast<int32_t>(first))) return;
    }
    device::Reduce<Codec, arithmetic::Sum>(
        args.new_residual + begin, 1 + args.comm.local.size,
        [&](int source) {
          if (source == 0) return args.residual + begin;
          return in_place ? args.x_of.template At<const Storage>(source - 1) + begin
                          : args.window.template At<const Storage>(source - 1, place);
        },
        tokens * args.hidden);
    __syncthreads();
    for (int64_t token = first; token < first + tokens; ++token) Normalise(args, token, shared);
  }
  if (in_place) {
    device::Barrier(args.comm, channel, static_cast<int32_t>(end));
    return;
  }
  // If there was a round, all threads have read the count before its barrier.
  if (threadIdx.x == 0 && round != rounds_before) args.rounds[channel] = round;
}

#endif
#if defined(__CUDACC__)

constexpr int kThreads = 512;  // one block per multiprocessor, which may use all registers

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
  Kernel<Codec><<<channels, kThreads, device::BlockSumBytes(kThreads), stream>>>(args);
  return cudaGetLastError();
}

#endif

}  // namespace fused_rmsnorm
