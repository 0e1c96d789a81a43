// Calls of dispatch and combine in the emulation, with random routings and payloads, and what they must return.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>
#include <vector>

#include "../../../ffi/cpu/combine_rows.h"
#include "../../check.h"
#include "spoiling.h"
#include "virtual_rows.h"

namespace jaxcomm {
namespace cuda {

// The operands and results of all ranks.
struct DrawnRows {
  Routed routed;
  bool combines = false, per_choice = false, weighted = false, sums_at_source = false;
  int32_t ranks_per_node = 0;  // 0: one node
  DType dtype = DType::kU8;
  int64_t row_count = 1;
  std::vector<Bytes> x, y;  // by rank: brought and taken
  std::vector<Bytes> weights;
  std::vector<uint64_t> late;  // by rank: polls before the call begins

  int64_t row_bytes() const { return row_count * ItemBytes(dtype); }
  int64_t num_rows() const { return int64_t{routed.tokens} * (per_choice ? routed.choices : 1); }
  // Elements.
  int64_t x_count() const { return (combines ? routed.capacity : num_rows()) * row_count; }
  int64_t y_count() const { return (combines ? num_rows() : routed.capacity) * row_count; }
  int32_t num_nodes() const { return ranks_per_node > 0 ? routed.n / ranks_per_node : 1; }
};

inline CallSpec SpecOf(const DrawnRows& drawn) {
  CallSpec spec;
  spec.collective = drawn.combines ? Collective::kCombine : Collective::kDispatch;
  spec.group_size = drawn.routed.n;
  spec.row_count = drawn.row_count;
  spec.choices = drawn.routed.choices;
  spec.num_experts = drawn.routed.experts;
  spec.per_choice = drawn.per_choice ? 1 : 0;
  spec.home = drawn.sums_at_source ? 1 : 0;
  spec.weighted = drawn.weighted ? 1 : 0;
  return spec;
}

// As if there were enough bytes for all channels.
template <typename Args>
void SpreadOver(int32_t num_channels, Args& args) {
  const int64_t lines = (args.row_bytes + 127) / 128, per_channel = (lines + num_channels - 1) / num_channels;
  args.piece_bytes = per_channel * 128;
  args.num_channels = static_cast<int32_t>((lines + per_channel - 1) / per_channel);
}

// Draws the operands of the next rank.
inline RowOperands DrawOperands(HostMemory& memory, DrawnRows& drawn, std::mt19937_64& random) {
  const Routed& routed = drawn.routed;
  const auto r = static_cast<int32_t>(drawn.x.size());
  const int64_t item = ItemBytes(drawn.dtype);
  drawn.x.emplace_back(drawn.x_count() * item);
  Bytes& x = drawn.x.back();
  for (char& byte : x) byte = static_cast<char>(random());
  if (drawn.dtype != DType::kU8) {  // no infinities, no NaN
    for (size_t i = item - 1; i < x.size(); i += item) x[i] &= static_cast<char>(0xbf);
  }
  drawn.y.emplace_back(drawn.y_count() * item);
  drawn.weights.emplace_back();
  for (size_t c = 0; drawn.weighted && c < routed.slot[r].size(); ++c) {
    const double value = static_cast<double>(static_cast<int>(random() % 2001) - 1000) / 300;
    const auto narrow = static_cast<float>(value);
    const bool wide = drawn.dtype == DType::kF64;
    const auto* const from = wide ? reinterpret_cast<const char*>(&value) : reinterpret_cast<const char*>(&narrow);
    drawn.weights.back().insert(drawn.weights.back().end(), from, from + (wide ? sizeof value : sizeof narrow));
  }
  drawn.late.push_back(random() % 4 == 0 ? random() % 300 : 0);
  RowOperands operands;
  operands.table = memory.Upload(routed.table);
  operands.table_count = static_cast<int64_t>(routed.table.size());
  operands.index = memory.Upload(drawn.combines ? routed.slot[r] : RowsOf(routed, r, drawn.per_choice));
  operands.index_count = static_cast<int64_t>(routed.slot[r].size());
  if (drawn.combines) operands.expert = memory.Upload(routed.expert[r]);
  if (drawn.weighted) operands.weights = memory.Upload(drawn.weights.back());
  return operands;
}

// combine, by the CPU's sums: in the order of the choices, node by node if nodes are added.
inline std::vector<Bytes> Combined(const DrawnRows& drawn) {
  const Routed& routed = drawn.routed;
  const int64_t row = drawn.row_bytes(), weight = drawn.dtype == DType::kF64 ? 8 : 4;
  const int32_t per_row = drawn.per_choice ? 1 : routed.choices,
                num_nodes = drawn.sums_at_source ? 1 : drawn.num_nodes();
  std::vector<Bytes> y;
  for (int32_t r = 0; r < routed.n; ++r) {
    y.emplace_back(drawn.num_rows() * row);
    for (int64_t t = 0; t < drawn.num_rows(); ++t) {
      std::vector<const void*> rows;
      std::vector<char> weights;
      std::vector<int32_t> ends;
      for (int32_t node = 0; node < num_nodes; ++node) {
        for (int64_t c = t * per_row; c < (t + 1) * per_row; ++c) {
          if (routed.slot[r][c] < 0) continue;
          const int32_t rank = routed.RankOf(routed.expert[r][c]);
          if (rank / (routed.n / num_nodes) != node) continue;
          rows.push_back(drawn.x[rank].data() + routed.slot[r][c] * row);
          if (!drawn.weighted) continue;
          weights.insert(weights.end(), drawn.weights[r].begin() + c * weight,
                         drawn.weights[r].begin() + (c + 1) * weight);
        }
        ends.push_back(static_cast<int32_t>(rows.size()));
      }
      char* const to = y.back().data() + t * row;
      if (rows.empty()) continue;
      if (drawn.per_choice) {
        std::memcpy(to, rows[0], static_cast<size_t>(row));
        continue;
      }
      const TokenRows token = {rows.data(), drawn.weighted ? weights.data() : nullptr, ends.data(), num_nodes};
      FindCombine(drawn.dtype)(to, token, drawn.row_count);
    }
  }
  return y;
}

inline std::vector<Bytes> ExpectedOf(const DrawnRows& drawn) {
  return drawn.combines ? Combined(drawn) : Dispatched(drawn.routed, drawn.x, drawn.row_bytes(), drawn.per_choice);
}

// The work of a thread block of a call: its threads bring x, take y away and spoil both, as XLA's kernels do.
template <typename Args, typename Run>
void RunAndSpoil(const Args& args, int32_t channel, const Bytes& brought, Bytes& taken, const Run& run) {
  auto* const x = const_cast<char*>(args.x);
  const auto for_pieces = [&](size_t bytes, const auto& f) {  // of this channel
    for (size_t i = threadIdx.x; i < bytes; i += blockDim.x) {
      if (static_cast<int64_t>(i) % args.row_bytes / args.piece_bytes == channel) f(i);
    }
  };
  for_pieces(brought.size(), [&](size_t i) { x[i] = brought[i]; });
  for_pieces(taken.size(), [&](size_t i) { args.y[i] = kUnwritten; });
  __syncthreads();
  run();
  __syncthreads();
  for_pieces(taken.size(), [&](size_t i) { taken[i] = args.y[i]; });
  for_pieces(brought.size(), [&](size_t i) { x[i] = kSpoiled; });
}

// The kernels of all ranks but `missing`, one after the other: each begins once all thread blocks of the previous one
// have ended. `ended`: thread blocks, by rank. run(call, rank, channel): the work of this block.
template <typename Call, typename Run>
void RunInOrder(const std::vector<Call*>& calls, std::vector<std::atomic<int32_t>>& ended, int32_t missing,
                const Run& run) {
  const auto rank = static_cast<int32_t>(blockIdx.y), channel = static_cast<int32_t>(blockIdx.x);
  for (size_t i = 0; i < calls.size() && rank != missing; ++i) {
    while (threadIdx.x == 0 && ended[rank] < static_cast<int32_t>(i * gridDim.x)) emulation::Pause();
    __syncthreads();
    if (channel < calls[i]->NumChannels()) {
      for (uint64_t polls = calls[i]->late[rank]; polls > 0; --polls) emulation::Pause();
      run(*calls[i], rank, channel);
    }
    __syncthreads();
    if (threadIdx.x == 0) ++ended[rank];
  }
}

}  // namespace cuda
}  // namespace jaxcomm
