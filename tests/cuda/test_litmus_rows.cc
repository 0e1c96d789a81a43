// The kernel of dispatch and combine on the smallest group, in all executions that a relaxed memory model allows.
#include <cstdio>
#include <vector>

#include "../../ffi/cuda/kernels/rows.cuh"
#include "../check.h"
#include "fakes/litmus_ranks.h"

namespace jaxcomm {
namespace cuda {
namespace {

using memory_model::EndKernel;
using memory_model::Program;
using memory_model::Require;

constexpr int32_t kRanks = 2;
constexpr int64_t kArenaBytes = 1024;

// One token per rank, which goes to the experts of both ranks: by rank the first packed choice of each expert, sizes,
// slots, sizes. Not in vectors of int32_t: the model uses functions of these, which would be compiled as parts of the
// program.
constexpr int32_t kTable[] = {0, 1, 1, 1, 0, 0, 1, 1, /**/ 0, 1, 1, 1, 1, 1, 1, 1};
constexpr int32_t kExperts[kRanks][2] = {{0, 1}, {1, 0}};  // by rank and choice
constexpr int32_t kSlots[kRanks][2] = {{0, 0}, {1, 1}};
constexpr int32_t kRows[2] = {0, 0};  // of the payload

template <size_t kNum>
int32_t* Upload(Program& program, const int32_t (&values)[kNum], const char* name) {
  auto* const to = program.Words<int32_t>(kNum, name);
  for (size_t i = 0; i < kNum; ++i) to[i] = values[i];
  return to;
}

float Value(int32_t rank, int32_t run) { return static_cast<float>(10 * run + rank + 1); }

// Two runs on one arena: a rank writes its operand just before the kernel begins, and reads and overwrites the result
// as soon as the kernel has ended, as XLA's kernels do.
void CheckRows(bool combines, unsigned threads) {
  Program program;
  LitmusRanks ranks(program, kRanks, 1);
  const device::Window arena = ranks.Window(program, kArenaBytes, "arena");
  std::vector<RowArgs> args(kRanks);
  std::vector<char*> shared;
  for (int32_t r = 0; r < kRanks; ++r) {
    RowArgs& own = args[r];
    own.comm = ranks.comm(r);
    own.comm.arena = arena;
    own.comm.arena_bytes = kArenaBytes;
    own.combines = combines;
    own.dtype = DType::kF32;
    own.num_rows = 1, own.num_slots = 2, own.num_choices = 2;
    own.row_bytes = sizeof(float), own.piece_bytes = 128;
    own.num_experts = kRanks, own.choices_per_row = 2;
    CHECK(ArenaBytes(own) <= kArenaBytes);
    own.x = reinterpret_cast<char*>(program.Words<float>(2, "x"));
    own.y = reinterpret_cast<char*>(program.Words<float>(2, "y"));
    own.table = Upload(program, kTable, "table");
    own.index = Upload(program, combines ? kSlots[r] : kRows, "index");
    own.expert = Upload(program, kExperts[r], "expert");
    shared.push_back(program.Take(RowSharedBytes(own, static_cast<int32_t>(threads)), "shared memory"));
  }
  for (int32_t r = 0; r < kRanks; ++r) {
    program.AddBlock(r, 0, threads, [=, &args, &shared] {
      auto* const x = reinterpret_cast<float*>(const_cast<char*>(args[r].x));
      auto* const y = reinterpret_cast<float*>(args[r].y);
      for (int32_t run = 1; run <= 2; ++run) {
        // Slot s of a rank belongs to rank s.
        for (int32_t s = 0; s < (combines ? kRanks : 1) && threadIdx.x == 0; ++s) {
          x[s] = combines ? Value(s, run) : Value(r, run);
        }
        EndKernel();
        RowCall(args[r], 0, shared[r]).Run();
        EndKernel();
        for (int32_t s = 0; s < (combines ? 1 : kRanks) && threadIdx.x == 0; ++s) {
          Require(y[s] == (combines ? 2 * Value(r, run) : Value(s, run)), "a wrong result");
          y[s] = -1;
        }
        EndKernel();
      }
    });
  }
  ExpectSound(program);
}

TEST_CASE("dispatch by one thread and by two") {
  CheckRows(false, 1);
  CheckRows(false, 2);
}

TEST_CASE("combine by one thread and by two") {
  CheckRows(true, 1);
  CheckRows(true, 2);
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
