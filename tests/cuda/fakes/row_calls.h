// Calls of dispatch and combine among the ranks of a node in the emulation, with random routings.
#pragma once

#include "drawn_rows.h"
#include "node_group.h"

namespace jaxcomm {
namespace cuda {

struct Drawn : DrawnRows {
  std::vector<RowArgs> args;  // by rank
};

// The buffers of a call with this routing.
inline void Prepare(NodeGroup& group, Drawn& drawn, int32_t num_channels, int64_t shift, std::mt19937_64& random) {
  const int64_t item = ItemBytes(drawn.dtype);
  for (int32_t r = 0; r < group.n; ++r) {
    StatusOr<RowArgs> made = MakeRowArgs(SpecOf(drawn), drawn.dtype, drawn.x_count(), drawn.y_count(), num_channels);
    CHECK(made.ok());
    RowArgs args = *made;
    SpreadOver(num_channels, args);
    args.comm = group.CommOf(r);
    args.state = group.memory.Upload(std::vector<uint64_t>(1));
    CHECK(ArenaBytes(args) <= kArenaBytes);
    const RowOperands operands = DrawOperands(group.memory, drawn, random);
    StatusOr<RowArgs> whole = WithBuffers(args, group.memory.Take(drawn.x_count() * item + shift) + shift,
                                          group.memory.Take(drawn.y_count() * item + shift) + shift, operands);
    CHECK(whole.ok());
    drawn.args.push_back(*whole);
  }
}

inline void Launch(const std::vector<Drawn*>& calls, int32_t n, int32_t num_channels, unsigned threads, uint64_t seed) {
  size_t shared = 0;
  std::vector<std::atomic<int32_t>> ended(n);
  for (const Drawn* drawn : calls) {
    shared = std::max(shared, static_cast<size_t>(RowSharedBytes(drawn->args[0], static_cast<int32_t>(threads))));
  }
  const auto run = [&] {
    const auto rank = static_cast<int32_t>(blockIdx.y), channel = static_cast<int32_t>(blockIdx.x);
    RunInOrder(calls, ended[rank], [&](Drawn& drawn) {
      const RowArgs& args = drawn.args[rank];
      if (channel >= args.num_channels) return;
      BeLate(drawn.late[rank]);
      RunAndSpoil(args, channel, drawn.x[rank], drawn.y[rank],
                  [&] { RowCall(args, channel, device::DynamicShared()).Run(); });
    });
  };
  emulation::Launch(num_channels, n, threads, seed, run, shared);
}

}  // namespace cuda
}  // namespace jaxcomm
