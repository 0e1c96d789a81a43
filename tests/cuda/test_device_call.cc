// Calls on a communicator: the places of their buffers, and multimem calls.
#include <memory>
#include <string>
#include <vector>

#include "fakes/machine.h"

namespace jaxcomm {
namespace cuda {
namespace {

using namespace fake;

// Sums, their blocks, and gathers, in an arena of their own that grows; and the error without multicast.
ALONE_TEST_CASE("calls by multimem") {
  constexpr int kRanks = 3;
  Communicator::Configure(20, 4, "");
  const auto spec_of = [](Collective collective) { return SpecOf(collective, kRanks, "multimem"); };
  auto* world = new World(kRanks);
  world->multimem = true;
  emulation::Multicast& multicast = emulation::TheMulticast();
  multicast.base = reinterpret_cast<char*>(kMulticast);
  multicast.bytes = World::kStride;
  multicast.replicas.clear();
  OnRanks(*world, [&](Rank& rank) {
    Communicator& communicator = *ValueOf(Get(rank));
    for (int r = 0; r < kRanks && rank.rank == 0; ++r) {
      multicast.replicas.push_back(rank.made->world->memory[0] + r * World::kStride);
    }
    const int before = rank.num_allocations;
    std::vector<std::unique_ptr<DataCall<float>>> calls;  // calls with a smaller arena keep it
    for (const int64_t count : {5, 200'001, 5}) {
      for (const Collective collective : {Collective::kAllReduce, Collective::kReduceScatter, Collective::kAllGather}) {
        calls.push_back(std::make_unique<DataCall<float>>(communicator, spec_of(collective), count));
        CHECK(!calls.back()->call->shares_input() && !calls.back()->call->shares_output());
        for (DataCall<float>* const call : {calls.front().get(), calls.back().get()}) {
          if (call == calls.front().get() && (collective != Collective::kAllReduce || count != 5)) continue;
          Stream stream;
          call->Launch(0, stream.handle());
          CHECK(stream.queue.size() == 1);  // no copies
          fake::Wait(stream.handle());
          CHECK(call->IsRight(0));
        }
      }
    }
    CHECK(rank.num_multimem == 11 && rank.num_allocations == before + 2);
    CallSpec maximum = spec_of(Collective::kAllReduce);
    maximum.reduce_op = ReduceOp::kMax;
    CHECK(Has(DeviceCall::Make(maximum, communicator, DType::kF32, 5, 5).status(),
              "supports only sums of f32, bf16 and f16"));
  });
  auto* without = new World(kRanks);
  without->multimem = true;
  without->rank_without_multicast = 1;
  OnRanks(*without, [&](Rank& rank) {
    Communicator& communicator = *ValueOf(Get(rank));
    CHECK(Has(DeviceCall::Make(spec_of(Collective::kAllReduce), communicator, DType::kF32, 5, 5).status(),
              "algorithm \"multimem\" needs NVLink SHARP, which the group's GPUs, their switch or NCCL"));
    Sum(communicator, 1000);  // all else goes on
  });
}

// Runs of an all_reduce in which peers read the operands and write the results. The ranks in `without_input` and
// `without_output` have these buffers outside XLA's windows.
void SumWhereXlaPutsIt(int n, int without_input, int without_output) {
  Communicator::Configure(20, 4);
  OnRanks(*new World(n), [&](Rank& rank) {
    constexpr int64_t kCount = 700;
    Communicator& communicator = *ValueOf(Get(rank));
    const XlaMemory memory(rank);
    const CallSpec spec = SpecOf(Collective::kAllReduce, n, "direct");
    const auto call = ValueOf(DeviceCall::Make(spec, communicator, DType::kS32, kCount, kCount, true));
    CHECK(call && (n == 1 || (call->shares_input() && call->shares_output())));
    Stream stream;
    const auto on_stream = stream.handle();
    std::vector<int32_t> x_elsewhere(kCount), y_elsewhere(kCount);
    for (int32_t run = 0; run < 6; ++run) {
      DeviceCall::XlaWindow input = {memory.window, memory.InputOf(run / 2)};
      DeviceCall::XlaWindow output = {memory.window, memory.OutputOf(run / 2)};
      int32_t* x = memory.At(input.offset);
      int32_t* y = memory.At(output.offset);
      if (rank.rank == without_input) input = {}, x = x_elsewhere.data();
      if (rank.rank == without_output) output = {}, y = y_elsewhere.data();
      CHECK(call->ExchangeOffsets(x, y, input, output, on_stream).ok());
      if (n > 1 && without_output < 0) CHECK(Has(call->Launch(x, x, on_stream), "other buffers than"));
      for (int32_t replay = 0; replay < 2; ++replay) {  // as a CUDA graph does it
        for (int64_t i = 0; i < kCount; ++i) x[i] = static_cast<int32_t>(rank.rank + i + 10 * run + replay), y[i] = -1;
        CHECK(call->Launch(x, y, on_stream).ok());
        while (!stream.Drain()) std::this_thread::yield();
        for (int64_t i = 0; i < kCount; ++i) CHECK(y[i] == n * (n - 1) / 2 + n * (i + 10 * run + replay));
        for (int64_t i = 0; i < kCount; ++i) x[i] = y[i] = 0x77;  // another program uses this memory now
      }
    }
    CHECK(communicator.Failure().ok());
  });
}

TEST_CASE("buffers at XLA's addresses, and in the arena on some ranks") {
  const std::string without =
      ": JAXCOMM_SYMMETRIC_BUFFERS=1, but buffers are copied: of the result: XLA gives no window\n";
  CHECK(Count(Alone([] { SumWhereXlaPutsIt(3, -1, 2); }), without) == 1);
  const std::string said = Alone([] {
    SumWhereXlaPutsIt(1, -1, -1);
    SumWhereXlaPutsIt(3, -1, -1);
    SumWhereXlaPutsIt(3, 1, -1);
    SumWhereXlaPutsIt(3, 0, 0);
  });
  // Once per process, for any number of ranks and calls.
  CHECK(Count(said, "buffers are copied") == 1);
  CHECK(Count(said, "JAXCOMM_SYMMETRIC_BUFFERS=1, but buffers are copied: of the operand: XLA gives no window\n") == 1);
}

// Plans use bulk copies only if they are wanted and the GPU has them.
void SumWithBulkCopies(bool wanted, int capability, int shared_bytes, bool expected, int num_nodes = 1, int code = 90) {
  Communicator::Configure(20, 4, "", false, 0, 0, wanted);
  auto* world = new World(2 * num_nodes);
  world->num_lsa_teams = num_nodes;
  if (num_nodes > 1) world->gin = NCCL_GIN_TYPE_GDAKI;
  most_shared_bytes = 0;
  OnRanks(*world, [&](Rank& rank) {
    compute_capability = capability;
    shared_memory_bytes = shared_bytes;
    ptx_version = code;
    Communicator& communicator = *ValueOf(Get(rank));
    CHECK(communicator.bulk_copies() == expected &&
          ValueOf(communicator.AsynchronousLane())->bulk_copies() == expected);
    Sum(communicator, 100'000);
  });
  CHECK(most_shared_bytes == static_cast<size_t>(expected ? BulkSharedBytes(kPlanStages) : 0));
}

TEST_CASE("bulk copies in plans") {
  const std::string said = Alone([] {
    SumWithBulkCopies(false, 9, 227 << 10, false);
    SumWithBulkCopies(true, 9, 227 << 10, true);
    SumWithBulkCopies(true, 10, 227 << 10, true);
    SumWithBulkCopies(true, 9, 227 << 10, true, 2);
    SumWithBulkCopies(true, 12, 99 << 10, false);
    SumWithBulkCopies(true, 8, 227 << 10, false);
    SumWithBulkCopies(true, 9, 227 << 10, false, 1, 80);  // PTX of compute capability 8.0
  });
  CHECK(Count(said, "JAXCOMM_BULK_COPY=1 has no effect") == 1);  // once per process
  CHECK(Count(said, "compute capability 12.0 with 101376 bytes of shared memory") == 1);
}

ALONE_TEST_CASE("windows of changing calls") {
  Communicator::Configure(20, 4);
  auto* world = new World(2);
  OnRanks(*world, [&](Rank& rank) {
    Communicator& communicator = *ValueOf(Get(rank));
    const XlaMemory memory(rank);
    const CallSpec spec = SpecOf(Collective::kAllGather, 2, "direct");
    const auto call = ValueOf(DeviceCall::Make(spec, communicator, DType::kS32, 4, 8, true));
    CHECK(call && call->shares_input() && !call->shares_output());
    Stream stream;
    const auto on_stream = stream.handle();
    int32_t* const x = memory.At(64);
    int32_t* const other = memory.At(128);
    int32_t y[8] = {};
    CHECK(call->ExchangeOffsets(x, y, {memory.window, 64}, {}, on_stream).ok());
    CHECK(stream.queue.size() == 1);
    CHECK(call->ExchangeOffsets(x, y, {memory.window, 64}, {}, on_stream).ok());
    CHECK(stream.queue.size() == 1);  // nothing new to tell
    // A plan that has been captured copies nothing.
    CHECK(Has(call->ExchangeOffsets(x, y, {}, {}, on_stream),
              "the operand was in a window of XLA's before, but is not now"));
    CHECK(Has(call->Launch(other, y, on_stream), "other buffers than it has initialized it with"));
    // Peers cannot address a window whose spacing differs from that of the communicator.
    Sum(communicator, 1);  // both ranks have arrived
    world->spacing_error = 64;
    const auto copies = ValueOf(DeviceCall::Make(spec, communicator, DType::kS32, 4, 8, true));
    CHECK(copies->ExchangeOffsets(x, y, {memory.window, 64}, {}, on_stream).ok());
    Sum(communicator, 1);
    world->spacing_error = 0;
    CHECK(copies->Launch(other, y, on_stream).ok());
  });
}

ALONE_TEST_CASE("empty and unaligned buffers") {
  Communicator::Configure(20, 4);
  OnRanks(*new World(2), [&](Rank& rank) {
    Communicator& communicator = *ValueOf(Get(rank));
    const auto call = ValueOf(DeviceCall::Make(SpecOf(Collective::kAllReduce, 2), communicator, DType::kF32, 0, 0));
    CHECK(call && call->Launch(nullptr, nullptr, nullptr).ok());
    const auto aligned = ValueOf(DeviceCall::Make(SpecOf(Collective::kAllReduce, 2), communicator, DType::kF32, 1, 1));
    alignas(4) char buffer[16];
    CHECK(aligned->Launch(buffer + 1, buffer, nullptr).message() ==
          "the operand is not aligned to its elements of 4 bytes");
    CHECK(aligned->Launch(buffer, buffer + 2, nullptr).message() ==
          "the result is not aligned to its elements of 4 bytes");
    CHECK(Has(aligned->Launch(buffer + 1, buffer + 2, nullptr), "the operand is not aligned"));
  });
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
