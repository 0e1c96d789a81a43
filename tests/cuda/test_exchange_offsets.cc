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
  Ranks(int32_t n, int32_t num_channels, uint64_t timeout_ns)
      : counters(MakeCounters(memory, n, n, num_channels)),
        reports(n),
        abort_flags(n),
        own(n),
        input_at(n),
        output_at(n) {
    char* const offset_table = memory.Take(n * OffsetTableBytes(n));
    for (int32_t r = 0; r < n; ++r) {
      ExchangeOffsetsArgs rank;
      rank.comm.world = rank.comm.local = {r, n, 0, 1};
      rank.comm.signals = {{counters.pads, counters.pad_bytes}, counters.sent[r], counters.received[r], num_channels};
      rank.comm.timeout_ns = timeout_ns;
      rank.comm.report = &reports[r];
      rank.comm.abort_flag = &abort_flags[r];
      rank.offset_table = {offset_table, OffsetTableBytes(n)};
      rank.own = &own[r];
      input_at[r].resize(n, -1);
      output_at[r].resize(n, -1);
      rank.input_at = input_at[r].data();
      rank.output_at = output_at[r].data();
      args.push_back(rank);
    }
  }

  HostMemory memory;
  const Counters counters;
  std::vector<device::Report> reports;
  std::vector<uint64_t> abort_flags;
  std::vector<OwnBuffers> own;
  std::vector<std::vector<int64_t>> input_at, output_at;
  std::vector<ExchangeOffsetsArgs> args;
};

BufferOffsets OffsetsOf(int32_t rank, int32_t call) { return {1000000 * call + rank, -1000000 * call - rank}; }
// Every rank has XLA's windows at other addresses, as processes have.
BufferOffsets WindowsOf(int32_t rank, int32_t call) { return {100 * rank + call, 1000 * rank - call}; }

TEST_CASE("series of calls") {
  constexpr int32_t kCalls = 5;
  int num_runs = 0;
  for (const int32_t n : {1, 2, 3, 8}) {
    for (uint64_t seed = 0; seed < 20; ++seed) {
      Ranks ranks(n, 3, 1'000'000'000);
      emulation::Launch(1, static_cast<unsigned>(n), 4, seed, [&] {
        const auto rank = static_cast<int32_t>(blockIdx.y);
        for (int32_t call = 0; call < kCalls; ++call) {
          if (threadIdx.x == 0) ranks.own[rank] = {OffsetsOf(rank, call), WindowsOf(rank, call)};
          __syncthreads();
          ExchangeOffsets(ranks.args[rank]);
          __syncthreads();
          for (int32_t r = 0; r < n && threadIdx.x == 0; ++r) {
            CHECK(ranks.input_at[rank][r] == WindowsOf(rank, call).input + OffsetsOf(r, call).input);
            CHECK(ranks.output_at[rank][r] == WindowsOf(rank, call).output + OffsetsOf(r, call).output);
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
  Ranks ranks(3, 4, 100'000);
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
    ranks.own[r].in_window.input = 77;
    emulation::Launch(1, 1, 4, 1, [&] { ExchangeOffsets(ranks.args[r]); });
    CHECK(ranks.counters.sent[r][3 * 3 + (r + 1) % 3] == sent && ranks.input_at[r][r] != 77);
  }
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
