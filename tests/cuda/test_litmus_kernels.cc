// The kernels themselves, on the smallest groups, in all executions that a relaxed memory model allows: test_litmus.cc
// has the protocols that they use.
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

// clang-format off: NCCL's names go before its users
#include "fakes/litmus_gin.h"
#include "../../ffi/cuda/kernels/gin_network.cuh"
// clang-format on
#include "../../ffi/cuda/kernels/executor.cuh"
#include "../../ffi/cuda/kernels/ll.cuh"
#include "../../ffi/cuda/kernels/multimem.cuh"
#include "../../ffi/cuda/program/call_program.h"
#include "../../ffi/plan/algorithms.h"
#include "../check.h"
#include "fakes/litmus_ranks.h"
#include "fakes/virtual_ranks.h"

namespace jaxcomm {
namespace cuda {
namespace {

using memory_model::EndKernel;
using memory_model::Program;
using memory_model::Require;

class ProgramMemory : public Memory {
 public:
  explicit ProgramMemory(Program& program) : program_(program) {}
  char* Take(int64_t bytes) override { return program_.Take(bytes, "memory " + std::to_string(number_++)); }
  void Write(void* to, const void* from, int64_t bytes) override { std::memcpy(to, from, static_cast<size_t>(bytes)); }

 private:
  Program& program_;
  int number_ = 0;
};

Request RequestOf(Collective collective, Geometry geometry, int64_t block_count) {
  Request request;
  request.collective = collective;
  request.geometry = geometry;
  request.block_count = block_count;
  return request;
}

// The network of a rank of a group of one channel.
struct LitmusGin {
  GinNetworkArgs args;
  ncclDevComm comm;
  ncclWindow_vidmem windows[3];
};

std::vector<LitmusGin> MakeLitmusGin(Program& program, const VirtualRanks::Call& call) {
  const auto n = static_cast<int32_t>(call.inputs.size());
  std::vector<LitmusGin> made(n);
  auto* const signals = program.Words<uint64_t>(n * NumGinSignals(1, n), "GIN signals");
  for (int32_t r = 0; r < n; ++r) {
    const PeerNetworkArgs& peers = call.network[r];
    const std::string of = " of rank " + std::to_string(r);
    LitmusGin& rank = made[r];
    rank.windows[0] = {peers.input.base, peers.input.stride};
    rank.windows[1] = {peers.output.base, peers.output.stride};
    rank.windows[2] = {peers.scratch.base, peers.scratch.stride};
    rank.args.comm = peers.comm;
    rank.args.puts = program.Words<uint64_t>(1, "puts" + of);
    rank.args.input = {&rank.windows[0], 0};
    rank.args.output = {&rank.windows[1], 0};
    rank.args.scratch = {&rank.windows[2], 0};
    rank.comm.rank = r;
    rank.comm.signals = signals;
    rank.comm.num_signals = static_cast<uint32_t>(NumGinSignals(1, n));
    rank.comm.counters = program.Words<uint64_t>(NumGinCounters(1), "GIN counters" + of);
    rank.comm.arrivals = program.Words<uint64_t>(n, "arrivals" + of);
  }
  return made;
}

int32_t Value(int32_t rank, int64_t i, int32_t run) { return static_cast<int32_t>(40 * run + 16 * rank + i); }

// Runs a plan on bytes twice. Reductions and copies divide bytes among threads in different ways. A rank writes its
// input just before the kernel begins, and reads and overwrites its output as soon as the kernel has ended, as XLA's
// kernels do.
void CheckPlan(Collective collective, const char* algorithm, Geometry geometry, int64_t block_count, unsigned threads,
               bool copies, int64_t chunk_count = 0) {
  Program program;
  ProgramMemory memory(program);
  const int32_t n = geometry.num_ranks();
  const VirtualRanks ranks(memory, geometry, 1, 1'000'000);
  const Algorithm* found = FindAlgorithm(collective, algorithm);
  CHECK(found != nullptr);
  Request request = RequestOf(collective, geometry, block_count);
  request.chunk_count = chunk_count;
  const Choice choice(*found, request);
  const VirtualRanks::Call call = ranks.Prepare(memory, choice, block_count, {}, {DType::kS8, ReduceOp::kSum}, 1);
  std::vector<LitmusGin> gin;
  if (geometry.num_nodes > 1) gin = MakeLitmusGin(program, call);
  // Not aligned, so that the copies divide bytes in yet another way.
  auto* const operands = program.Words<int8_t>(n * InputCount(choice.request) + 1, "operands") + 1;
  auto* const results = program.Words<int8_t>(n * OutputCount(choice.request) + 1, "results") + 1;
  const auto input_count = static_cast<int32_t>(InputCount(choice.request));
  const auto output_count = static_cast<int32_t>(OutputCount(choice.request));
  for (int32_t r = 0; r < n; ++r) {
    program.AddBlock(r, 0, threads, [=, &call, &gin] {
      RankArgs args = call.args_on_host[r];
      auto* input = reinterpret_cast<int8_t*>(call.inputs[r]);
      auto* output = reinterpret_cast<int8_t*>(call.outputs[r]);
      if (copies) {
        args.copy_in = {call.inputs[r], reinterpret_cast<char*>(operands + r * input_count)};
        args.copy_out = {reinterpret_cast<char*>(results + r * output_count), call.outputs[r]};
        input = operands + r * input_count;
        output = results + r * output_count;
      }
      for (int32_t run = 1; run <= 2; ++run) {
        if (threadIdx.x == 0) {
          for (int32_t i = 0; i < input_count; ++i) input[i] = static_cast<int8_t>(Value(r, i, run));
        }
        EndKernel();
        if (gin.empty()) {
          NoNetwork network;
          ChannelExecutor<NoNetwork>(args, network, 0).Run();
        } else {
          GinNetwork network(gin[r].args, gin[r].comm);
          ChannelExecutor<GinNetwork>(args, network, 0).Run();
        }
        EndKernel();
        for (int32_t i = 0; i < output_count && threadIdx.x == 0; ++i) {
          int32_t expected = 0;
          if (collective == Collective::kAllGather) expected = Value(i / input_count, i % input_count, run);
          for (int32_t peer = 0; peer < n && collective == Collective::kAllReduce; ++peer)
            expected += Value(peer, i, run);
          Require(output[i] == static_cast<int8_t>(expected), "a wrong result");
          output[i] = -1;
        }
      }
    });
  }
  ExpectSound(program);
}

TEST_CASE("a walked plan") {
  const Geometry node = {1, 2, true, true};
  CheckPlan(Collective::kAllGather, "direct", node, 32, 2, false);
  CheckPlan(Collective::kAllReduce, "direct", node, 32, 2, false);
  CheckPlan(Collective::kAllReduce, "ring", node, 64, 2, false);
}

// Own and peer's chunks: every thread is a warp, which takes one after the other from both.
TEST_CASE("moves of several chunks at once") {
  CheckPlan(Collective::kAllGather, "direct", {1, 2, true, true}, 4, 2, false, 1);
}

TEST_CASE("a walked plan with copies of operand and result") {
  CheckPlan(Collective::kAllGather, "direct", {1, 2, true, true}, 32, 2, true);
  CheckPlan(Collective::kAllGather, "direct", {1, 1, true, true}, 32, 2, true);  // begins with data
}

TEST_CASE("a walked plan over GIN") { CheckPlan(Collective::kAllGather, "ring", {2, 1, false, false}, 32, 2, false); }

// Sums through the switch, twice on the same arena.
TEST_CASE("multimem") {
  constexpr int32_t kRanks = 2, kCount = 4;
  for (const Collective collective : {Collective::kAllReduce, Collective::kAllGather}) {
    Program program;
    LitmusRanks ranks(program, kRanks, 1);
    const Request request = RequestOf(collective, {1, kRanks, true, true, true}, kCount);
    const int32_t output_count = static_cast<int32_t>(OutputCount(request));
    const device::Window arena = ranks.Window(program, 64, "arena");
    const device::Window x = ranks.Window(program, kCount * 4, "x"), y = ranks.Window(program, output_count * 4, "y");
    emulation::Multicast& multicast = emulation::TheMulticast();
    multicast = {&program, reinterpret_cast<char*>(uintptr_t{0x10000}), 64, {arena.At(0), arena.At(1)}, kRanks};
    ranks.AddBlocks(program, 1, 1, [=](const device::Comm& comm) {
      const int32_t rank = comm.local.rank;
      MultimemArgs args = MakeMultimemArgs(request, {}, DType::kF32, 1);
      args.comm = comm;
      args.comm.arena = arena;
      args.comm.arena_bytes = 64;
      args.comm.arena_multicast = {emulation::TheMulticast().base};
      args.x = x.At(rank);
      args.y = y.At(rank);
      for (int32_t run = 1; run <= 2; ++run) {
        for (int32_t i = 0; i < kCount; ++i) x.At<float>(rank)[i] = static_cast<float>(Value(rank, i, run));
        EndKernel();
        MultimemCall(args, 0).Run();
        EndKernel();
        for (int32_t i = 0; i < output_count; ++i) {
          const int32_t expected = collective == Collective::kAllReduce ? Value(0, i, run) + Value(1, i, run)
                                                                        : Value(i / kCount, i % kCount, run);
          Require(y.At<float>(rank)[i] == static_cast<float>(expected), "a wrong result");
        }
      }
    });
    ExpectSound(program);
  }
}

// Two shots: a rank sends the sums of its share to all ranks in a second exchange.
TEST_CASE("an LL call of two shots") {
  constexpr int32_t kRanks = 2, kCount = 4;
  Program program;
  LitmusRanks ranks(program, kRanks, 1, 1);
  const Request request = RequestOf(Collective::kAllReduce, {1, kRanks, true, true}, kCount);
  const device::Window x = ranks.Window(program, kCount * 4, "x"), y = ranks.Window(program, kCount * 4, "y");
  ranks.AddBlocks(program, 1, 2, [=](const device::Comm& comm) {
    const int32_t rank = comm.local.rank;
    LlArgs args = MakeLlArgs(request, {}, {DType::kS32, ReduceOp::kSum}, 1, true);
    args.comm = comm;
    args.x = x.At(rank);
    args.y = y.At(rank);
    for (int32_t run = 1; run <= 2; ++run) {
      if (threadIdx.x == 0) {
        for (int32_t i = 0; i < kCount; ++i) x.At<int32_t>(rank)[i] = Value(rank, i, run);
      }
      EndKernel();
      LlCall(args, 0).Run();
      EndKernel();
      for (int32_t i = 0; i < kCount && threadIdx.x == 0; ++i) {
        Require(y.At<int32_t>(rank)[i] == Value(0, i, run) + Value(1, i, run), "a wrong result");
        y.At<int32_t>(rank)[i] = -1;
      }
      EndKernel();
    }
  });
  ExpectSound(program);
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
