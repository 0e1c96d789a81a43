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

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
