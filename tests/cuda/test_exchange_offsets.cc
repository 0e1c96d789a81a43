// A peer is missing when ranks exchange the offsets of their buffers. The exchange itself: test_litmus.cc, and in calls
// test_device_call.cc and test_user_windows.cc.
#include <vector>

#include "../../ffi/cuda/kernels/exchange_offsets.cuh"
#include "../check.h"
#include "fakes/node_group.h"

namespace jaxcomm {
namespace cuda {
namespace {

TEST_CASE("a rank with a missing peer runs no plan") {
  constexpr int32_t kRanks = 3, kChannels = 4, kBuffers = 2;
  NodeGroup group(kRanks, kChannels, 100'000);
  std::vector<std::vector<BufferPlace>> own(kRanks, std::vector<BufferPlace>(kBuffers));
  std::vector<std::vector<int64_t>> at(kRanks, std::vector<int64_t>(kBuffers * kRanks, -1));
  const auto exchange = [&](int32_t rank) {
    ExchangeOffsets({group.CommOf(rank), group.arena, own[rank].data(), at[rank].data(), kBuffers});
  };
  emulation::Launch(1, kRanks, 4, 1, [&] {
    if (blockIdx.y != 1) exchange(static_cast<int32_t>(blockIdx.y));
  });
  for (const int32_t r : {0, 2}) {
    const device::Report& report = group.report(r);
    CHECK(report.state == device::Report::kComplete && report.step == kOffsetExchange && report.peer == 1);
    CHECK(report.channel == kChannels - 1 && report.rank == r);
    // Otherwise the plan would use the buffers of another run.
    CHECK(*group.CommOf(r).abort_flag != 0);
    // A CUDA graph may be replayed: it writes nothing and signals nobody.
    const std::vector<uint64_t*>& sent = group.ranks.intra_node().sent;
    const uint64_t before = sent[r][(kChannels - 1) * kRanks + (r + 1) % kRanks];
    own[r][0].in_window = 77;
    emulation::Launch(1, 1, 4, 1, [&] { exchange(r); });
    CHECK(sent[r][(kChannels - 1) * kRanks + (r + 1) % kRanks] == before && at[r][r] != 77);
  }
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
