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

constexpr int64_t kCount = 3;
char memory_of_users[32];  // of both ranks

// An all-gather of two nodes of one rank each, after a user's kernel that ends with as many outstanding puts as it may
// have. The fake refuses more than fit into a queue.
void GatherAfterPuts(uint64_t seed, bool stalls, uint64_t timeout_ns) {
  HostMemory memory;
  const VirtualRanks ranks(memory, {2, 1, false}, 1, timeout_ns);
  VirtualGin gin(2, 1, seed);
  Request request;
  request.collective = Collective::kAllGather;
  request.geometry = {2, 1, false};
  request.block_count = kCount;
  const Choice choice(*FindAlgorithm(Collective::kAllGather, "ring"), request);
  const VirtualRanks::Call call = ranks.Prepare(memory, choice, kCount, {}, {DType::kU8, ReduceOp::kSum}, 1);
  const std::vector<GinNetworkArgs> args = gin.Args(call);
  for (int32_t r = 0; r < 2; ++r) std::memset(call.inputs[r], 10 + r, kCount);
  if (stalls) gin.Stall();
  const uint64_t begin = emulation::NowNs();
  gin.Launch(1, 2, 2, seed, [&] {
    const ncclDevComm comm = gin.CommOf(static_cast<int32_t>(blockIdx.y));
    device::GinHandle handle = args[comm.rank];
    ncclWindow_vidmem unused{memory_of_users, sizeof(memory_of_users) / 2};
    handle.arena = &unused;
    const device::Gin of_user(handle, comm);
    const bool puts = comm.rank == 0 && threadIdx.x == 0;
    for (int64_t i = 0; puts && i < device::Gin::kMostPuts; ++i) CHECK(of_user.Put(0, 1, i, 8, 1));
    __syncthreads();
    GinNetwork network(args[comm.rank], comm);
    ChannelExecutor<GinNetwork>(call.args[comm.rank], network, 0).Run();
    __syncthreads();
  });
  const device::Report& report = ranks.reports()[0];
  if (stalls) {
    CHECK(emulation::NowNs() - begin < 4 * timeout_ns);
    CHECK(report.state == device::Report::kComplete && report.step == kFlush && report.channel == 0);
    CHECK(report.rank == 0 && report.peer == 0 && report.expected == device::Gin::kMostPuts && report.seen == 0);
    CHECK(gin.num_posted({0, 0, 1}) == device::Gin::kMostPuts);
    return;
  }
  for (int32_t r = 0; r < 2; ++r) {
    CHECK(ranks.reports()[r].state == device::Report::kNone);
    for (int64_t i = 0; i < 2 * kCount; ++i) CHECK(call.outputs[r][i] == 10 + i / kCount);
  }
}

TEST_CASE("a plan after a kernel that has not flushed") {
  for (uint64_t seed = 1; seed <= 400; ++seed) GatherAfterPuts(seed, false, 1'000'000'000);
}

TEST_CASE("a plan ends when the network has stopped") {
  for (uint64_t seed = 1; seed <= 10; ++seed) GatherAfterPuts(seed, true, 1'000'000);
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
