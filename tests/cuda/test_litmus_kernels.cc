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

using memory_model::Program;

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
  const std::vector<ncclDevComm> comms = NcclCommsOf(program, n, 1);
  for (int32_t r = 0; r < n; ++r) {
    const PeerNetworkArgs& peers = call.network[r];
    LitmusGin& rank = made[r];
    rank.windows[0] = {peers.input.base, peers.input.stride};
    rank.windows[1] = {peers.output.base, peers.output.stride};
    rank.windows[2] = {peers.scratch.base, peers.scratch.stride};
    rank.args.comm = peers.comm;
    rank.args.puts = program.Words<uint64_t>(1, "puts");
    rank.args.input = {&rank.windows[0], 0};
    rank.args.output = {&rank.windows[1], 0};
    rank.args.scratch = {&rank.windows[2], 0};
    rank.comm = comms[r];
  }
  return made;
}

int32_t Value(int32_t rank, int64_t i, int32_t run) { return static_cast<int32_t>(40 * run + 16 * rank + i); }

// Runs a plan on bytes twice. Reductions and copies divide bytes among threads in different ways.
void CheckPlan(Collective collective, const char* algorithm, Geometry geometry, int64_t block_count, unsigned threads,
               bool copies, int64_t chunk_count = 0, int64_t contiguous_count = 0) {
  Program program;
  ProgramMemory memory(program);
  const int32_t n = geometry.num_ranks();
  const VirtualRanks ranks(memory, geometry, 1, 1'000'000);
  const Algorithm* found = FindAlgorithm(collective, algorithm);
  CHECK(found != nullptr);
  Request request = RequestOf(collective, geometry, block_count);
  request.chunk_count = chunk_count;
  const Choice choice(*found, request);
  const VirtualRanks::Call call =
      ranks.Prepare(memory, choice, block_count, {0, contiguous_count}, {DType::kS8, ReduceOp::kSum}, 1, 0, {0, 0});
  std::vector<LitmusGin> gin;
  if (geometry.num_nodes > 1) gin = MakeLitmusGin(program, call);
  // Not aligned, so that the copies divide bytes in yet another way.
  auto* const operands = program.Words<int8_t>(n * InputCount(choice.request) + 1, "operands") + 1;
  auto* const results = program.Words<int8_t>(n * OutputCount(choice.request) + 1, "results") + 1;
  const auto input_count = static_cast<int32_t>(InputCount(choice.request));
  const auto output_count = static_cast<int32_t>(OutputCount(choice.request));
  const int64_t c = contiguous_count > 0 ? contiguous_count : input_count;
  const auto value = [collective, n, c](int64_t i, int32_t run) {
    int32_t expected = 0;
    if (collective == Collective::kAllGather) {
      expected = Value(static_cast<int32_t>(i / c % n), i / (c * n) * c + i % c, run);
    }
    for (int32_t r = 0; r < n && collective == Collective::kAllReduce; ++r) expected += Value(r, i, run);
    return static_cast<int8_t>(expected);
  };
  for (int32_t r = 0; r < n; ++r) {
    RankArgs args = call.args_on_host[r];
    auto* input = reinterpret_cast<int8_t*>(call.inputs[r]);
    auto* output = reinterpret_cast<int8_t*>(call.outputs[r]);
    if (copies) {
      args.copy_in = {call.inputs[r], reinterpret_cast<char*>(operands + r * input_count)};
      args.copy_out = {reinterpret_cast<char*>(results + r * output_count), call.outputs[r]};
      input = operands + r * input_count;
      output = results + r * output_count;
    }
    const auto run = [=, &gin] {
      if (gin.empty()) {
        NoNetwork network;
        ChannelExecutor<NoNetwork>(args, network, 0).Run();
      } else {
        GinNetwork network(gin[r].args, gin[r].comm);
        ChannelExecutor<GinNetwork>(args, network, 0).Run();
      }
    };
    const auto operand = [r](int64_t i, int32_t number) { return static_cast<int8_t>(Value(r, i, number)); };
    AddRuns(program, r, threads, 2, input, input_count, operand, output, output_count, value, run);
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

// The second time, a step has two puts, by the threads of two warps.
TEST_CASE("a walked plan over GIN") {
  CheckPlan(Collective::kAllGather, "ring", {2, 1, false, false}, 32, 2, false);
  CheckPlan(Collective::kAllGather, "ring", {2, 1, false, false}, 4, 3, false, 0, 2);
}

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
    for (int32_t r = 0; r < kRanks; ++r) {
      MultimemArgs args = MakeMultimemArgs(request, {}, DType::kF32, 1);
      args.comm = ranks.comm(r);
      args.comm.arena = arena;
      args.comm.arena_bytes = 64;
      args.comm.arena_multicast = {multicast.base};
      args.x = x.At(r);
      args.y = y.At(r);
      const auto sum_or_copy = [collective](int64_t i, int32_t run) {
        return static_cast<float>(collective == Collective::kAllReduce
                                      ? Value(0, i, run) + Value(1, i, run)
                                      : Value(static_cast<int32_t>(i / kCount), i % kCount, run));
      };
      AddRuns(
          program, r, 1, 2, x.At<float>(r), kCount,
          [r](int64_t i, int32_t run) { return static_cast<float>(Value(r, i, run)); }, y.At<float>(r), output_count,
          sum_or_copy, [args] { MultimemCall(args, 0).Run(); });
    }
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
  for (int32_t r = 0; r < kRanks; ++r) {
    LlArgs args = MakeLlArgs(request, {}, {DType::kS32, ReduceOp::kSum}, 1, true);
    args.comm = ranks.comm(r);
    args.x = x.At(r);
    args.y = y.At(r);
    AddRuns(
        program, r, 2, 2, x.At<int32_t>(r), kCount, [r](int64_t i, int32_t run) { return Value(r, i, run); },
        y.At<int32_t>(r), kCount, [](int64_t i, int32_t run) { return Value(0, i, run) + Value(1, i, run); },
        [args] { LlCall(args, 0).Run(); });
  }
  ExpectSound(program);
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
