// Plans over GIN whose queues are full: a user's kernel has filled them, or the network has stopped. Collectives over
// GIN are in test_executor.cc and test_failures.cc.
#include <cstring>
#include <vector>

#include "../../ffi/plan/algorithms.h"
#include "../check.h"
#include "fakes/virtual_gin.h"

namespace jaxcomm {
namespace cuda {
namespace {

// An all-gather of two nodes of one rank each.
struct Gather {
  Gather(uint64_t seed, int64_t count, uint64_t timeout_ns)
      : ranks(memory, {2, 1, false}, 1, timeout_ns), gin(2, 1, seed) {
    Request request;
    request.collective = Collective::kAllGather;
    request.geometry = {2, 1, false};
    request.block_count = count;
    const Choice choice(*FindAlgorithm(Collective::kAllGather, "ring"), request);
    call = ranks.Prepare(memory, choice, count, {}, {DType::kU8, ReduceOp::kSum}, 1);
    args = gin.Args(call);
    for (int32_t r = 0; r < 2; ++r) std::memset(call.inputs[r], 10 + r, count);
  }

  // before(rank, comm): what the threads of the kernels do first.
  template <typename Before>
  void Launch(uint64_t seed, const Before& before) {
    emulation::Launch(1, 3, 2, seed, [&] {
      if (blockIdx.y == 2) return gin.Serve();
      const auto rank = static_cast<int32_t>(blockIdx.y);
      const ncclDevComm comm = gin.CommOf(rank);
      before(rank, comm);
      __syncthreads();
      GinNetwork network(args[rank], comm);
      ChannelExecutor<GinNetwork>(call.args[rank], network, 0).Run();
      __syncthreads();
      gin.network().Leave();
    });
  }

  HostMemory memory;
  const VirtualRanks ranks;
  VirtualGin gin;
  VirtualRanks::Call call;
  std::vector<GinNetworkArgs> args;
};

char memory_of_users[32];  // of both ranks

// A user's kernel ends with as many outstanding puts as it may have. The fake refuses more than fit into a queue.
TEST_CASE("a plan after a kernel that has not flushed") {
  constexpr int64_t kCount = 3;
  for (uint64_t seed = 1; seed <= 400; ++seed) {
    Gather gather(seed, kCount, 1'000'000'000);
    gather.Launch(seed, [&](int32_t rank, const ncclDevComm& comm) {
      device::GinHandle handle = gather.args[rank];
      ncclWindow_vidmem unused{memory_of_users, sizeof(memory_of_users) / 2};
      handle.arena = &unused;
      const device::Gin of_user(handle, comm);
      const bool puts = rank == 0 && threadIdx.x == 0;
      for (int64_t i = 0; puts && i < device::Gin::kMostPuts; ++i) CHECK(of_user.Put(0, 1, i, 8, 1));
    });
    for (int32_t r = 0; r < 2; ++r) {
      CHECK(gather.ranks.reports()[r].state == device::Report::kNone);
      for (int64_t i = 0; i < 2 * kCount; ++i) CHECK(gather.call.outputs[r][i] == 10 + i / kCount);
    }
  }
}

TEST_CASE("a flush of a network that has stopped ends") {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    Gather gather(seed, 3, 1'000'000);
    gather.gin.network().Stall();
    const uint64_t begin = emulation::NowNs();
    gather.Launch(seed, [&](int32_t rank, const ncclDevComm& comm) {
      if (rank == 1) return;
      const GinNetwork network(gather.args[rank], comm);
      network.Put(0, 0, {1, Space::kOutput, 0}, 0, {0, Space::kInput, 0}, 0, 1);
      __syncthreads();
      CHECK(__syncthreads_or(!network.Flush(0)) != 0);
    });
    CHECK(emulation::NowNs() - begin < 4'000'000);
    const device::Report& report = gather.ranks.reports()[0];
    CHECK(report.state == device::Report::kComplete && report.step == kFlush && report.channel == 0);
    CHECK(report.rank == 0 && report.peer == 0 && report.expected == 1 && report.seen == 0);
  }
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
