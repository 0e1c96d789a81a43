// The kernel of dispatch between nodes on the smallest groups, in all executions that a relaxed memory model and GIN
// allow: two nodes of one rank, and one node of two ranks, whose messages do not cross the network.
#include <cstdio>
#include <vector>

// clang-format off: in this order, as NCCL's headers go before it
#include "fakes/litmus_gin.h"
#include "../../ffi/include/jaxcomm/gin.h"
// clang-format on
#include "../../ffi/cuda/kernels/rail_rows.cuh"
#include "../../ffi/cuda/program/gin_args.h"
#include "../check.h"
#include "fakes/litmus_ranks.h"

namespace jaxcomm {
namespace cuda {
namespace {

using memory_model::EndKernel;
using memory_model::Program;
using memory_model::Require;

constexpr int32_t kRanks = 2;

// One token per rank, which goes to the experts of both ranks: by rank the first packed choice of each expert, sizes,
// slots, sizes. No vectors of int32_t: see test_litmus_rows.cc.
constexpr int32_t kTable[] = {0, 1, 1, 1, 0, 0, 1, 1, /**/ 0, 1, 1, 1, 1, 1, 1, 1};

float Value(int32_t rank, int32_t run) { return static_cast<float>(10 * run + rank + 1); }

// Two runs on one arena: a rank writes its operand just before the kernel begins, and reads and overwrites the result
// as soon as the kernel has ended, as XLA's kernels do.
void CheckRails(int32_t num_nodes, unsigned threads) {
  const int32_t locals = kRanks / num_nodes;
  Program program;
  LitmusRanks world(program, kRanks, 1);
  std::vector<LitmusRanks> nodes;
  for (int32_t g = 0; g < num_nodes; ++g) nodes.emplace_back(program, locals, 1);
  std::vector<RailRowArgs> args(kRanks);
  std::vector<ncclDevComm> comms(kRanks);
  std::vector<char*> shared;
  device::Window arena;
  ncclWindow_vidmem registered;
  auto* const signals = program.Words<uint64_t>(kRanks * NumGinSignals(1, kRanks), "GIN signals");
  auto* const table = program.Words<int32_t>(16, "table");
  for (size_t i = 0; i < 16; ++i) table[i] = kTable[i];
  for (int32_t r = 0; r < kRanks; ++r) {
    const int32_t node = r / locals;
    RowArgs& rows = args[r].rows;
    rows.num_rows = 1, rows.num_slots = 2, rows.num_choices = 2;
    rows.row_bytes = sizeof(float), rows.piece_bytes = 128;
    rows.num_experts = kRanks, rows.choices_per_row = 2;
    if (r == 0) {
      arena = world.Window(program, RailArenaBytes(rows, num_nodes), "arena");
      registered = {arena.base, arena.stride};
    }
    device::GinHandle& gin = args[r].gin;
    gin.comm = world.comm(r);
    gin.puts = program.Words<uint64_t>(1, "puts");
    gin.arena = &registered;
    args[r].node = nodes[node].comm(r % locals);
    args[r].node.world = gin.comm.world;
    args[r].node.local = {r % locals, locals, node * locals, 1};
    args[r].node.report = gin.comm.report;
    args[r].node.abort_flag = gin.comm.abort_flag;
    args[r].node.arena = {arena.At(node * locals), arena.stride};
    rows.comm = gin.comm;
    rows.state = program.Words<uint64_t>(1, "state");
    rows.x = reinterpret_cast<char*>(program.Words<float>(1, "x"));
    rows.y = reinterpret_cast<char*>(program.Words<float>(2, "y"));
    rows.table = table;
    rows.index = program.Words<int32_t>(2, "index");  // both choices have row 0
    shared.push_back(program.Take(RailSharedBytes(rows, static_cast<int32_t>(threads)), "shared memory"));
    comms[r].rank = r;
    comms[r].signals = signals;
    comms[r].num_signals = static_cast<uint32_t>(NumGinSignals(1, kRanks));
    comms[r].counters = program.Words<uint64_t>(NumGinCounters(1), "GIN counters");
    comms[r].arrivals = program.Words<uint64_t>(kRanks, "arrivals");
  }
  for (int32_t r = 0; r < kRanks; ++r) {
    program.AddBlock(r, 0, threads, [=, &args, &comms, &shared] {
      auto* const x = reinterpret_cast<float*>(const_cast<char*>(args[r].rows.x));
      auto* const y = reinterpret_cast<float*>(args[r].rows.y);
      for (int32_t run = 1; run <= 2; ++run) {
        if (threadIdx.x == 0) x[0] = Value(r, run);
        EndKernel();
        const device::Gin gin(args[r].gin, comms[r]);
        RailDispatch<device::Gin>(args[r], gin, 0, shared[r]).Run();
        EndKernel();
        for (int32_t s = 0; s < kRanks && threadIdx.x == 0; ++s) {  // slot s belongs to rank s
          Require(y[s] == Value(s, run), "a wrong result");
          y[s] = -1;
        }
        EndKernel();
      }
    });
  }
  ExpectSound(program);
}

TEST_CASE("two nodes of one rank, by one thread and by two") {
  CheckRails(2, 1);
  CheckRails(2, 2);
}

TEST_CASE("one node of two ranks, by one thread and by two") {
  CheckRails(1, 1);
  CheckRails(1, 2);
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
