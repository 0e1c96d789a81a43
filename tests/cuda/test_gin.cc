// The fake of GIN guarantees no more than GIN; and kernels end when the network stops. Collectives over GIN are in
// test_executor.cc and test_failures.cc.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>

#include "../../ffi/plan/algorithms.h"
#include "../check.h"
#include "fakes/virtual_gin.h"

namespace jaxcomm {
namespace cuda {
namespace {

constexpr uint64_t kTimeoutNs = 1'000'000;
constexpr int64_t kBytes = 100;

// Two nodes of one rank each. The test puts their inputs and outputs itself; rank 1 owns the second row of each.
struct Pair {
  explicit Pair(uint64_t seed, int32_t num_channels) : gin(2, num_channels, seed) {
    call.network = memory.Upload(std::vector<PeerNetworkArgs>(2));
    char* const inputs = memory.Take(2 * kBytes);
    char* const outputs = memory.Take(2 * kBytes);
    std::iota(inputs, inputs + kBytes, static_cast<char>(1));
    for (int32_t r = 0; r < 2; ++r) {
      PeerNetworkArgs& args = call.network[r];
      args.comm.world = args.comm.local = {r, 2, 0, 1};
      args.comm.signals.received = reinterpret_cast<uint64_t*>(memory.Take(num_channels * 2 * sizeof(uint64_t)));
      args.comm.timeout_ns = kTimeoutNs;
      args.comm.report = memory.Upload(std::vector<device::Report>(1));
      args.comm.abort_flag = memory.Upload(std::vector<uint64_t>(1));
      args.input = {inputs, kBytes};
      args.output = {outputs, kBytes};
    }
    args = gin.Args(call);
  }

  // Two ranks with one block per channel, and the network.
  void Launch(int32_t num_channels, uint64_t seed, const std::function<void(int32_t rank, GinNetwork&)>& body) {
    gin.network().Reopen();
    emulation::Launch(num_channels, 3, 2, seed, [&] {
      if (blockIdx.y == 2) return gin.Serve();
      const auto rank = static_cast<int32_t>(blockIdx.y);
      const ncclDevComm comm = gin.CommOf(rank);
      GinNetwork network(args[rank], comm);
      body(rank, network);
      gin.network().Leave();
    });
  }

  device::Report& report(int32_t rank) const { return *args[rank].comm.report; }
  const char* arrived() const { return call.network[1].output.At(1); }

  HostMemory memory;
  VirtualRanks::Call call;
  VirtualGin gin;
  std::vector<GinNetworkArgs> args;
};

char memory_of_users[32];  // of both ranks

constexpr Place kFrom{0, Space::kInput, 0};
constexpr Place kTo{1, Space::kOutput, 0};

// Returns how many of 200 puts had not arrived when their signal had.
template <typename Signal>
int Overtaken() {
  int overtaken = 0;
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    Pair pair(seed, 1);
    bool complete = true;
    pair.Launch(1, seed, [&](int32_t rank, GinNetwork& network) {
      const ncclDevComm comm = pair.gin.CommOf(rank);
      const ncclGin gin(comm, 0);
      if (rank == 0) {
        network.Put(0, 0, kTo, 0, kFrom, 0, kBytes);
        if (threadIdx.x == 0) {
          gin.signal(ncclTeamWorld(comm), 1, Signal{0}, ncclCoopThread{}, ncclGin_None{}, ::cuda::thread_scope_thread,
                     ::cuda::thread_scope_system);
        }
        CHECK(network.Flush(0));
      } else if (threadIdx.x == 0) {
        while (gin.readSignal(0) == 0) emulation::Pause();
        for (int64_t i = 0; i < kBytes; ++i) complete = complete && pair.arrived()[i] == static_cast<char>(i + 1);
      }
    });
    overtaken += complete ? 0 : 1;
  }
  return overtaken;
}

TEST_CASE("strong signals wait for puts, weak ones don't") {
  CHECK(Overtaken<ncclGin_StrongSignalInc>() == 0);
#if !defined(__SANITIZE_THREAD__)  // is a race, as it should be
  CHECK(Overtaken<ncclGin_WeakSignalInc>() > 20);
#endif
}

// The network stops before it has read anything, or never signals. Each waiting rank reports the reason once and in
// time.
TEST_CASE("every wait for a stopped network ends") {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    Pair pair(seed, 2);
    pair.Launch(2, seed, [&](int32_t rank, GinNetwork& network) {
      const auto channel = static_cast<int32_t>(blockIdx.x);
      if (rank == 0) {
        network.Put(channel, 0, kTo, channel, kFrom, 0, 1);
        __syncthreads();
        CHECK(network.Flush(channel));
      }
    });
    pair.gin.network().Stall();
    uint64_t begin = emulation::NowNs();
    pair.Launch(2, seed, [&](int32_t rank, GinNetwork& network) {
      const auto channel = static_cast<int32_t>(blockIdx.x);
      if (channel == 0) return;
      if (rank == 0) {
        for (int32_t i = 0; i < 3; ++i) network.Put(channel, i, kTo, i, kFrom, i, 1);
        CHECK(__syncthreads_or(!network.Flush(channel)) != 0);
      } else if (threadIdx.x == 0) {
        CHECK(!network.Wait(channel, 0, 7));
      }
    });
    CHECK(emulation::NowNs() - begin < 2 * kTimeoutNs);
    const device::Report& sender = pair.report(0);
    CHECK(sender.state == device::Report::kComplete && sender.step == kFlush && sender.channel == 1);
    CHECK(sender.rank == 0 && sender.peer == 0 && sender.expected == 4 && sender.seen == 1);
    const device::Report& receiver = pair.report(1);
    CHECK(receiver.state == device::Report::kComplete && receiver.step == 7 && receiver.channel == 1);
    CHECK(receiver.rank == 1 && receiver.peer == 0 && receiver.expected == 1 && receiver.seen == 0);
  }
}

// A user's kernel ends with as many outstanding puts as it may have. The fake refuses more than fit into a queue.
TEST_CASE("a plan after a kernel that has not flushed") {
  constexpr int64_t kCount = 3;
  Request request;
  request.collective = Collective::kAllGather;
  request.geometry = {2, 1, false};
  request.block_count = 1;
  const Algorithm* algorithm = nullptr;
  for (const Algorithm& candidate : Algorithms(request.collective)) {
    if (algorithm == nullptr && candidate.supports(request)) algorithm = &candidate;
  }
  CHECK(algorithm != nullptr);
  const Choice choice(*algorithm, request);
  for (uint64_t seed = 1; seed <= 400; ++seed) {
    HostMemory memory;
    const VirtualRanks ranks(memory, request.geometry, 1, 1'000'000'000);
    const VirtualRanks::Call call = ranks.Prepare(memory, choice, kCount, {}, {DType::kU8, ReduceOp::kSum}, 1);
    VirtualGin gin(2, 1, seed);
    const std::vector<GinNetworkArgs> args = gin.Args(call);
    for (int32_t r = 0; r < 2; ++r) std::memset(call.inputs[r], 10 + r, kCount);
    emulation::Launch(1, 3, 2, seed, [&] {
      if (blockIdx.y == 2) return gin.Serve();
      const auto rank = static_cast<int32_t>(blockIdx.y);
      const ncclDevComm comm = gin.CommOf(rank);
      device::GinHandle handle = args[rank];
      ncclWindow_vidmem unused{memory_of_users, sizeof(memory_of_users) / 2};
      handle.arena = &unused;
      const device::Gin of_user(handle, comm);
      const bool puts = rank == 0 && threadIdx.x == 0;
      for (int64_t i = 0; puts && i < device::Gin::kMostPuts; ++i) CHECK(of_user.Put(0, 1, i, 8, 1));
      __syncthreads();
      GinNetwork network(args[rank], comm);
      ChannelExecutor<GinNetwork>(call.args[rank], network, 0).Run();
      __syncthreads();
      gin.network().Leave();
    });
    for (int32_t r = 0; r < 2; ++r) {
      CHECK(ranks.reports()[r].state == device::Report::kNone);
      for (int64_t i = 0; i < 2 * kCount; ++i) CHECK(call.outputs[r][i] == 10 + i / kCount);
    }
  }
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
