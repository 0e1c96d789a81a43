// Kernels that begin late, in any order and on few SMs, with kernels of XLA's between them (fakes/late_gpus.h). Sound
// programs end with the right results. Programs in which GPUs block each other are found.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "../../ffi/cuda/program/call_program.h"
#include "../../ffi/cuda/program/launch_limits.h"
#include "../../ffi/plan/algorithms.h"
#include "../check.h"
#include "fakes/late_gpus.h"
#include "fakes/virtual_ll.h"
#include "fakes/virtual_ranks.h"

namespace jaxcomm {
namespace cuda {
namespace {

constexpr unsigned kThreads = 2;  // of a block
constexpr int64_t kCount = 24;
// Waits end through LateGpus only.
constexpr uint64_t kForeverNs = uint64_t{1} << 60;

// A communicator of all GPUs, and calls of it.
struct Group {
  Group(int32_t n, int32_t num_channels)
      : n(n),
        num_channels(num_channels),
        ranks(memory, {1, n, true, true}, num_channels + 1, kForeverNs),
        slots(memory, n, num_channels, 16) {}

  // An all_reduce; each rank's operand is filled in.
  struct Call {
    VirtualRanks::Call walked;
    LlBuffers ll;
    bool is_ll = false;
    char* Input(int32_t rank) const { return is_ll ? ll.inputs[rank] : walked.inputs[rank]; }
    char* Output(int32_t rank) const { return is_ll ? ll.outputs[rank] : walked.outputs[rank]; }
  };

  Call MakeCall(bool is_ll, const char* algorithm, int32_t number) {
    Call call;
    call.is_ll = is_ll;
    Request request;
    request.collective = Collective::kAllReduce;
    request.geometry = {1, n, true, true};
    request.block_count = kCount;
    const Operation sum = {DType::kS32, ReduceOp::kSum};
    if (is_ll) {
      call.ll = PrepareLl(memory, ranks, slots, request, {}, sum, num_channels, 0);
    } else {
      const Choice choice(*FindAlgorithm(Collective::kAllReduce, algorithm), request);
      call.walked = ranks.Prepare(memory, choice, kCount, {}, sum, num_channels);
    }
    for (int32_t r = 0; r < n; ++r) {
      for (int64_t i = 0; i < kCount; ++i) {
        reinterpret_cast<int32_t*>(call.Input(r))[i] = static_cast<int32_t>(100 * number + 10 * r + i);
      }
    }
    return call;
  }

  void Launch(fake::LateGpus& gpus, const Call& call, int32_t rank, int stream, const std::string& name) const {
    gpus.Launch(rank, stream, name, num_channels, [&call, rank] {
      const auto channel = static_cast<int32_t>(blockIdx.x);
      if (call.is_ll) return LlCall(call.ll.args[rank], channel).Run();
      NoNetwork network;
      ChannelExecutor<NoNetwork>(call.walked.args[rank], network, channel).Run();
    });
  }

  bool IsRight(const Call& call, int32_t number) const {
    for (int32_t r = 0; r < n; ++r) {
      for (int64_t i = 0; i < kCount; ++i) {
        const auto sum = static_cast<int32_t>(n * (100 * number + i) + 10 * n * (n - 1) / 2);
        if (reinterpret_cast<const int32_t*>(call.Output(r))[i] != sum) return false;
      }
    }
    return true;
  }

  void EndWaits() const {
    for (int32_t r = 0; r < n; ++r) device::StoreRelease(&ranks.reports()[r].abort, 1);
  }

  HostMemory memory;
  const int32_t n, num_channels;
  const VirtualRanks ranks;
  const VirtualSlots slots;
};

// The same calls in the same order on every GPU, in stream 0, with XLA's kernels between them. XLA's collectives run in
// stream 1, beside the calls, with `sms_of_xla` blocks each. The calls of the asynchronous lane run in stream 2.
// Returns the text of a deadlock.
std::string RunProgram(uint64_t seed, int num_sms, LaneChannels channels, int sms_of_xla) {
  std::mt19937_64 random(seed);
  const auto n = static_cast<int32_t>(2 + random() % 2);
  Group group(n, channels.synchronous), lane(n, channels.asynchronous);
  fake::LateGpus gpus(n, num_sms, kThreads, seed);
  constexpr int32_t kCalls = 4;
  std::vector<Group::Call> calls, started;
  for (int32_t i = 0; i < kCalls; ++i) {
    calls.push_back(group.MakeCall(random() % 2 == 0, random() % 2 == 0 ? "direct" : "ring", i));
    started.push_back(lane.MakeCall(random() % 2 == 0, random() % 2 == 0 ? "direct" : "ring", i));
  }
  for (int32_t r = 0; r < n; ++r) {
    for (int32_t i = 0; i < kCalls; ++i) {
      while (random() % 2 == 0) gpus.Compute(r, 0, 1 + static_cast<int>(random() % (2 * num_sms)));
      group.Launch(gpus, calls[i], r, 0, "call " + std::to_string(i));
      if (i % 2 == 0) gpus.Collective(r, 1, i, sms_of_xla);
      lane.Launch(gpus, started[i], r, 2, "started call " + std::to_string(i));
      if (random() % 2 == 0) gpus.Compute(r, 1, 1 + static_cast<int>(random() % num_sms));
    }
  }
  const std::string deadlock = gpus.Run([&] {
    group.EndWaits();
    lane.EndWaits();
  });
  for (int32_t i = 0; i < kCalls && deadlock.empty(); ++i) {
    const bool right = group.IsRight(calls[i], i) && lane.IsRight(started[i], i);
    if (!right) std::fprintf(stderr, "seed %llu\n", static_cast<unsigned long long>(seed));
    CHECK(right);
  }
  return deadlock;
}

// The most thread blocks of NCCL's kernels on most machines.
constexpr int NcclBlocks() { return 32; }

void RunSound(uint64_t first, uint64_t last) {
  for (uint64_t seed = first; seed <= last; ++seed) {
    // On these SMs the synchronous lane has three channels, the other one has one.
    constexpr int kSms = kSmsOfOthers + 4;
    const std::string deadlock = RunProgram(seed, kSms, MaxChannels(kSms, 32), NcclBlocks());
    if (!deadlock.empty()) std::fprintf(stderr, "%s\n", deadlock.c_str());
    CHECK(deadlock.empty());
  }
}

TEST_CASE("GPUs with SMs for all kernels that wait end") { RunSound(1, 40); }
TEST_CASE("GPUs with SMs for all kernels that wait end, many programs [full]") { RunSound(41, 2000); }

TEST_CASE("without a reserve of SMs, GPUs block each other") {
  int num_found = 0;
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    const std::string deadlock = RunProgram(seed, 4, {3, 1}, 2);
    if (deadlock.empty()) continue;
    ++num_found;
    CHECK(deadlock.find("XLA's collective") != std::string::npos && deadlock.find("call ") != std::string::npos);
  }
  CHECK(num_found > 0);
}

// Two GPUs with one SM each begin different blocks of the same call.
TEST_CASE("fewer SMs than blocks") {
  int num_found = 0;
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    Group group(2, 3);
    fake::LateGpus gpus(2, 1, kThreads, seed);
    const Group::Call call = group.MakeCall(seed % 2 == 0, "direct", 0);
    for (int32_t r = 0; r < 2; ++r) group.Launch(gpus, call, r, 0, "call");
    const std::string deadlock = gpus.Run([&] { group.EndWaits(); });
    if (deadlock.empty()) CHECK(group.IsRight(call, 0));
    num_found += deadlock.find("GPU 0, stream 0: call has begun 1 and ended 0 of 3 blocks") != std::string::npos;
  }
  CHECK(num_found > 0);
}

TEST_CASE("a kernel that waits for a later kernel of its stream") {
  Group group(2, 1);
  fake::LateGpus gpus(2, 4, kThreads, 1);
  const auto launch = [&](int32_t rank, const std::string& name, bool waits) {
    gpus.Launch(rank, 0, name, 1, [&group, rank, waits] {
      if (threadIdx.x != 0) return;
      const device::Comm comm = group.ranks.CommOfNode(rank);
      if (waits) {
        device::Wait(comm, 0, 1 - rank);
      } else {
        device::Signal(comm, 0, 1 - rank);
      }
    });
  };
  launch(0, "wait", true);
  launch(0, "signal", false);
  launch(1, "wait", true);
  launch(1, "signal", false);
  const std::string deadlock = gpus.Run([&] { group.EndWaits(); });
  CHECK(deadlock.find("GPU 0, stream 0: wait has begun 1 and ended 0 of 1 blocks") != std::string::npos);
  CHECK(deadlock.find("GPU 1, stream 0: signal has begun 0") != std::string::npos);
}

TEST_CASE("two calls in different orders on two ranks") {
  for (const bool same : {true, false}) {
    Group first(2, 1), second(2, 1);
    fake::LateGpus gpus(2, 4, kThreads, 7);
    const Group::Call a = first.MakeCall(false, "direct", 0), b = second.MakeCall(false, "direct", 1);
    first.Launch(gpus, a, 0, 0, "call a");
    second.Launch(gpus, b, 0, 0, "call b");
    if (!same) second.Launch(gpus, b, 1, 0, "call b");
    first.Launch(gpus, a, 1, 0, "call a");
    if (same) second.Launch(gpus, b, 1, 0, "call b");
    const std::string deadlock = gpus.Run([&] {
      first.EndWaits();
      second.EndWaits();
    });
    CHECK(deadlock.empty() == same);
    if (same) CHECK(first.IsRight(a, 0) && second.IsRight(b, 1));
    if (!same) CHECK(deadlock.find("GPU 1, stream 0: call b has begun 1 and ended 0 of 1") != std::string::npos);
  }
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
