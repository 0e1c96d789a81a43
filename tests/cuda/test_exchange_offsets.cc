// Ranks exchange the offsets of their buffers: in consecutive calls with nothing between them, and with a missing peer.
#include <cstdio>
#include <vector>

#include "../../ffi/cuda/kernels/exchange_offsets.cuh"
#include "../check.h"
#include "fakes/virtual_ranks.h"

namespace jaxcomm {
namespace cuda {
namespace {

struct Ranks {
  Ranks(int32_t n, int32_t num_channels, uint64_t timeout_ns, int32_t num_buffers)
      : counters(MakeCounters(memory, n, n, num_channels)), reports(n), abort_flags(n), own(n), at(n) {
    char* const offset_table = memory.Take(n * OffsetTableBytes(n));
    for (int32_t r = 0; r < n; ++r) {
      ExchangeOffsetsArgs rank;
      rank.comm.world = rank.comm.local = {r, n, 0, 1};
      rank.comm.signals = {{counters.pads, counters.pad_bytes}, counters.sent[r], counters.received[r], num_channels};
      rank.comm.timeout_ns = timeout_ns;
      rank.comm.report = &reports[r];
      rank.comm.abort_flag = &abort_flags[r];
      rank.offset_table = {offset_table, OffsetTableBytes(n)};
      own[r].resize(num_buffers);
      rank.own = own[r].data();
      at[r].resize(num_buffers * n, -1);
      rank.at = at[r].data();
      rank.num_buffers = num_buffers;
      args.push_back(rank);
    }
  }

  HostMemory memory;
  const Counters counters;
  std::vector<device::Report> reports;
  std::vector<uint64_t> abort_flags;
  std::vector<std::vector<BufferPlace>> own;
  std::vector<std::vector<int64_t>> at;
  std::vector<ExchangeOffsetsArgs> args;
};

int64_t OffsetOf(int32_t rank, int32_t call, int32_t buffer) { return 1000000 * call + 1000 * buffer + rank; }
// Every rank has XLA's windows at other addresses, as processes have.
int64_t WindowOf(int32_t rank, int32_t call, int32_t buffer) { return 100 * rank + call - 5000 * buffer; }

TEST_CASE("series of calls") {
  constexpr int32_t kCalls = 5;
  int num_runs = 0;
  for (const int32_t n : {1, 2, 3, 8}) {
    for (uint64_t seed = 0; seed < 20; ++seed) {
      // Calls of one communicator share the table, whatever number of buffers they have.
      const auto num_buffers = static_cast<int32_t>(1 + seed % kMostBuffers);
      Ranks ranks(n, 3, 1'000'000'000, num_buffers);
      emulation::Launch(1, static_cast<unsigned>(n), 4, seed, [&] {
        const auto rank = static_cast<int32_t>(blockIdx.y);
        for (int32_t call = 0; call < kCalls; ++call) {
          for (int32_t i = 0; i < num_buffers && threadIdx.x == 0; ++i) {
            ranks.own[rank][i] = {OffsetOf(rank, call, i), WindowOf(rank, call, i)};
          }
          __syncthreads();
          ExchangeOffsets(ranks.args[rank]);
          __syncthreads();
          for (int32_t i = 0; i < num_buffers * n && threadIdx.x == 0; ++i) {
            CHECK(ranks.at[rank][i] == WindowOf(rank, call, i / n) + OffsetOf(i % n, call, i / n));
          }
          __syncthreads();
        }
      });
      for (const device::Report& report : ranks.reports) CHECK(report.state == device::Report::kNone);
      ++num_runs;
    }
  }
}

TEST_CASE("a rank with a missing peer runs no plan") {
  Ranks ranks(3, 4, 100'000, 2);
  emulation::Launch(1, 3, 4, 1, [&] {
    if (blockIdx.y != 1) ExchangeOffsets(ranks.args[blockIdx.y]);
  });
  for (const int32_t r : {0, 2}) {
    const device::Report& report = ranks.reports[r];
    CHECK(report.state == device::Report::kComplete && report.step == kOffsetExchange && report.peer == 1);
    CHECK(report.channel == 3 && report.rank == r);
    // Otherwise the plan would use the buffers of another run.
    CHECK(ranks.abort_flags[r] != 0);
    // A CUDA graph may be replayed: it writes nothing and signals nobody.
    const uint64_t sent = ranks.counters.sent[r][3 * 3 + (r + 1) % 3];
    ranks.own[r][0].in_window = 77;
    emulation::Launch(1, 1, 4, 1, [&] { ExchangeOffsets(ranks.args[r]); });
    CHECK(ranks.counters.sent[r][3 * 3 + (r + 1) % 3] == sent && ranks.at[r][r] != 77);
  }
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
