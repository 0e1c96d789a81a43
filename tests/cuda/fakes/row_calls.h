// Calls of dispatch and combine among the ranks of a node in the emulation, with random routings.
#pragma once

#include <algorithm>
#include <atomic>
#include <random>
#include <vector>

#include "../../../ffi/cuda/program/call_program.h"
#include "../../check.h"
#include "emulated.h"
#include "node_group.h"
#include "virtual_rows.h"

namespace jaxcomm {
namespace cuda {

// A call of all ranks. Threads of the kernel bring x, take y away and spoil both, as XLA's kernels do.
struct Drawn {
  Routed routed;
  bool combines = false, per_choice = false, weighted = false;
  DType dtype = DType::kU8;
  int64_t row_count = 1;
  std::vector<RowArgs> args;  // by rank
  std::vector<Bytes> x, y;    // by rank: brought and taken
  std::vector<std::vector<char>> weights;
  std::vector<uint64_t> late;  // by rank: polls before the call begins
};

// The buffers of a call with this routing.
inline void Prepare(NodeGroup& group, Drawn& drawn, int32_t num_channels, int64_t shift, std::mt19937_64& random) {
  const Routed& routed = drawn.routed;
  CallSpec spec;
  spec.collective = drawn.combines ? Collective::kCombine : Collective::kDispatch;
  spec.group_size = group.n;
  spec.row_count = drawn.row_count;
  spec.choices = routed.choices;
  spec.num_experts = routed.experts;
  spec.per_choice = drawn.per_choice ? 1 : 0;
  const int64_t rows = int64_t{routed.tokens} * (drawn.per_choice ? routed.choices : 1);
  const int64_t payload = rows * drawn.row_count, slots = routed.capacity * drawn.row_count;
  const int64_t item = ItemBytes(drawn.dtype);
  for (int32_t r = 0; r < group.n; ++r) {
    StatusOr<RowArgs> made = MakeRowArgs(spec, drawn.dtype, drawn.combines ? slots : payload,
                                         drawn.combines ? payload : slots, num_channels);
    CHECK(made.ok());
    RowArgs args = *made;
    // As if there were enough bytes for all channels.
    const int64_t lines = (args.row_bytes + 127) / 128, per_channel = (lines + num_channels - 1) / num_channels;
    args.piece_bytes = per_channel * 128;
    args.num_channels = static_cast<int32_t>((lines + per_channel - 1) / per_channel);
    args.comm = group.CommOf(r);
    args.state = group.memory.Upload(std::vector<uint64_t>(1));
    CHECK(ArenaBytes(args) <= kArenaBytes);
    const int64_t x_bytes = (drawn.combines ? slots : payload) * item,
                  y_bytes = (drawn.combines ? payload : slots) * item;
    drawn.x.emplace_back(x_bytes);
    for (char& byte : drawn.x.back()) byte = static_cast<char>(random());
    if (drawn.dtype != DType::kU8) {  // no infinities, no NaN
      for (int64_t i = item - 1; i < x_bytes; i += item) drawn.x.back()[i] &= static_cast<char>(0xbf);
    }
    drawn.y.emplace_back(y_bytes);
    drawn.weights.emplace_back();
    if (drawn.weighted) {
      for (size_t c = 0; c < routed.slot[r].size(); ++c) {
        const double value = static_cast<double>(static_cast<int>(random() % 2001) - 1000) / 300;
        const auto narrow = static_cast<float>(value);
        const auto* const from =
            drawn.dtype == DType::kF64 ? reinterpret_cast<const char*>(&value) : reinterpret_cast<const char*>(&narrow);
        drawn.weights.back().insert(drawn.weights.back().end(), from, from + (drawn.dtype == DType::kF64 ? 8 : 4));
      }
    }
    RowOperands operands;
    operands.table = group.memory.Upload(routed.table);
    operands.table_count = static_cast<int64_t>(routed.table.size());
    operands.index =
        drawn.combines ? group.memory.Upload(routed.slot[r]) : group.memory.Upload(RowsOf(routed, r, drawn.per_choice));
    operands.index_count = static_cast<int64_t>(routed.slot[r].size());
    if (drawn.combines) operands.expert = group.memory.Upload(routed.expert[r]);
    if (drawn.weighted) operands.weights = group.memory.Upload(drawn.weights.back());
    StatusOr<RowArgs> whole = WithBuffers(args, group.memory.Take(x_bytes + shift) + shift,
                                          group.memory.Take(y_bytes + shift) + shift, operands);
    CHECK(whole.ok());
    drawn.args.push_back(*whole);
    drawn.late.push_back(random() % 4 == 0 ? random() % 200 : 0);
  }
}

// The work of a thread block.
inline void RunCall(Drawn& drawn, int32_t rank, int32_t channel) {
  const RowArgs& args = drawn.args[rank];
  auto* const x = const_cast<char*>(args.x);
  const auto x_bytes = static_cast<int64_t>(drawn.x[rank].size());
  const auto y_bytes = static_cast<int64_t>(drawn.y[rank].size());
  ForPieces(args, channel, x_bytes, [&](int64_t i) { x[i] = drawn.x[rank][i]; });
  ForPieces(args, channel, y_bytes, [&](int64_t i) { args.y[i] = kUnwritten; });
  __syncthreads();
  RowCall(args, channel, device::DynamicShared()).Run();
  __syncthreads();
  ForPieces(args, channel, y_bytes, [&](int64_t i) { drawn.y[rank][i] = args.y[i]; });
  ForPieces(args, channel, x_bytes, [&](int64_t i) { x[i] = kSpoiled; });
}

// A kernel begins once all thread blocks of the previous one on its GPU have ended.
inline void Launch(const std::vector<Drawn*>& calls, int32_t n, int32_t num_channels, unsigned threads, uint64_t seed) {
  size_t shared = 0;
  std::vector<std::atomic<int32_t>> ended(n);  // thread blocks, by rank
  for (const Drawn* drawn : calls) {
    shared = std::max(shared, static_cast<size_t>(RowSharedBytes(drawn->args[0], static_cast<int32_t>(threads))));
  }
  emulation::Launch(
      num_channels, n, threads, seed,
      [&] {
        const auto rank = static_cast<int32_t>(blockIdx.y), channel = static_cast<int32_t>(blockIdx.x);
        for (size_t call = 0; call < calls.size(); ++call) {
          Drawn* const drawn = calls[call];
          const RowArgs& args = drawn->args[rank];
          if (threadIdx.x == 0) {
            while (ended[rank] < static_cast<int32_t>(call) * num_channels) emulation::Pause();
          }
          __syncthreads();
          if (channel < args.num_channels) {
            for (uint64_t i = 0; i < drawn->late[rank]; ++i) emulation::Pause();
            RunCall(*drawn, rank, channel);
          }
          __syncthreads();
          if (threadIdx.x == 0) ++ended[rank];
        }
      },
      shared);
}

}  // namespace cuda
}  // namespace jaxcomm
