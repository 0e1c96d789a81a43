// Calls on a communicator: where their buffers are, and through a switch.
#include <memory>
#include <string>
#include <vector>

#include "fakes/machine.h"

namespace jaxcomm {
namespace cuda {
namespace {

using namespace fake;

// Sums, blocks of them and gathers, in an arena of their own that grows; and what users see where there is none.
ALONE_TEST_CASE("calls by multimem") {
  constexpr int kRanks = 3;
  Communicator::Configure(20, 4, "");
  const auto spec_of = [](Collective collective) {
    CallSpec spec = SpecOf(collective, kRanks);
    spec.algorithm = "multimem";
    return spec;
  };
  auto* world = new World(kRanks);
  world->multimem = true;
  emulation::Multicast& multicast = emulation::TheMulticast();
  multicast.base = reinterpret_cast<char*>(kMulticast);
  multicast.bytes = World::kStride;
  multicast.replicas.clear();
  for (int r = 0; r < kRanks; ++r) multicast.replicas.push_back(world->memory + r * World::kStride);
  OnRanks(*world, [&](Rank& rank) {
    std::string error;
    Communicator& communicator = *Get(rank, &error);
    const int before = rank.num_allocations;
    std::vector<std::unique_ptr<DeviceCall>> calls;  // those with a smaller arena go on using it
    const auto value = [](int r, int64_t i) { return static_cast<float>(r + i % 50); };
    for (const int64_t count : {5, 200'001, 5}) {
      for (const Collective collective : {Collective::kAllReduce, Collective::kReduceScatter, Collective::kAllGather}) {
        const int64_t input_count = collective == Collective::kReduceScatter ? kRanks * count : count;
        const int64_t output_count = collective == Collective::kAllGather ? kRanks * count : count;
        calls.push_back(
            DeviceCall::Make(spec_of(collective), communicator, DType::kF32, input_count, output_count, &error));
        CHECK(calls.back() != nullptr && !calls.back()->shares_input() && !calls.back()->shares_output());
        std::vector<float> x(input_count), y(output_count, -1);
        for (int64_t i = 0; i < input_count; ++i) x[i] = value(rank.rank, i);
        for (const auto& call : {calls.front().get(), calls.back().get()}) {
          if (call == calls.front().get() && (collective != Collective::kAllReduce || count != 5)) continue;
          Stream stream;
          CHECK(call->Launch(x.data(), y.data(), reinterpret_cast<cudaStream_t>(&stream)).empty());
          CHECK(stream.queue.size() == 1);  // no copies
          while (!stream.Drain()) std::this_thread::yield();
          for (int64_t i = 0; i < output_count; ++i) {
            float expected = 0;
            if (collective == Collective::kAllGather) expected = value(static_cast<int>(i / count), i % count);
            const int64_t at = collective == Collective::kReduceScatter ? rank.rank * count + i : i;
            for (int r = 0; r < kRanks && collective != Collective::kAllGather; ++r) expected += value(r, at);
            CHECK(y[i] == expected);
          }
        }
      }
    }
    CHECK(rank.num_multimem == 11 && rank.num_allocations == before + 2);
    CallSpec maximum = spec_of(Collective::kAllReduce);
    maximum.reduce_op = ReduceOp::kMax;
    CHECK(DeviceCall::Make(maximum, communicator, DType::kF32, 5, 5, &error) == nullptr);
    CHECK(Has(error, "needs f32, bf16 or f16 to add up, nothing else"));
  });
  auto* without = new World(kRanks);
  without->multimem = true;
  without->rank_without_multicast = 1;
  OnRanks(*without, [&](Rank& rank) {
    std::string error;
    Communicator& communicator = *Get(rank, &error);
    CHECK(DeviceCall::Make(spec_of(Collective::kAllReduce), communicator, DType::kF32, 5, 5, &error) == nullptr);
    CHECK(Has(error, "algorithm \"multimem\" needs NVLink SHARP, which the group's GPUs, their switch or NCCL"));
    Sum(communicator, 1000);  // all else goes on
  });
}

// Runs of an all_reduce in which peers read the operands and write the results. Ranks `without_input` and
// `without_output` have none in a window of XLA's.
void SumWhereXlaPutsIt(int n, int without_input, int without_output) {
  Communicator::Configure(20, 4);
  auto* world = new World(n);
  OnRanks(*world, [&](Rank& rank) {
    constexpr int64_t kCount = 700;
    std::string error;
    Communicator& communicator = *Get(rank, &error);
    const XlaMemory memory(rank);
    CallSpec spec = SpecOf(Collective::kAllReduce, n);
    spec.algorithm = "direct";
    const auto call = DeviceCall::Make(spec, communicator, DType::kS32, kCount, kCount, &error, true);
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
      CHECK(call->ExchangeOffsets(x, y, input, output, on_stream).empty());
      for (int32_t replay = 0; replay < 2; ++replay) {  // as a CUDA graph does it
        for (int64_t i = 0; i < kCount; ++i) x[i] = static_cast<int32_t>(rank.rank + i + 10 * run + replay), y[i] = -1;
        CHECK(call->Launch(x, y, on_stream).empty());
        while (!stream.Drain()) std::this_thread::yield();
        for (int64_t i = 0; i < kCount; ++i) CHECK(y[i] == n * (n - 1) / 2 + n * (i + 10 * run + replay));
        for (int64_t i = 0; i < kCount; ++i) x[i] = y[i] = 0x77;  // of somebody else now
      }
    }
    CHECK(communicator.Failure().empty());
  });
}

TEST_CASE("buffers where XLA puts them, of some ranks in the arena") {
  const std::string said = Alone([] {
    SumWhereXlaPutsIt(1, -1, -1);
    SumWhereXlaPutsIt(3, -1, -1);
    SumWhereXlaPutsIt(3, 1, -1);
    SumWhereXlaPutsIt(3, -1, 2);
    SumWhereXlaPutsIt(3, 0, 0);
  });
  // Once in a process, whatever the ranks and calls.
  CHECK(Count(said, "buffers are copied") == 1);
  CHECK(Count(said, "JAXCOMM_SYMMETRIC_BUFFERS=1, but buffers are copied: of the operand: XLA gives no window\n") == 1);
}

ALONE_TEST_CASE("windows that change") {
  Communicator::Configure(20, 4);
  auto* world = new World(2);
  OnRanks(*world, [&](Rank& rank) {
    std::string error;
    Communicator& communicator = *Get(rank, &error);
    const XlaMemory memory(rank);
    CallSpec spec = SpecOf(Collective::kAllGather, 2);
    spec.algorithm = "direct";
    const auto call = DeviceCall::Make(spec, communicator, DType::kS32, 4, 8, &error, true);
    CHECK(call && call->shares_input() && !call->shares_output());
    Stream stream;
    const auto on_stream = stream.handle();
    int32_t* const x = memory.At(64);
    int32_t* const other = memory.At(128);
    int32_t y[8] = {};
    CHECK(call->ExchangeOffsets(x, y, {memory.window, 64}, {}, on_stream).empty());
    CHECK(stream.queue.size() == 1);
    CHECK(call->ExchangeOffsets(x, y, {memory.window, 64}, {}, on_stream).empty());
    CHECK(stream.queue.size() == 1);  // nothing new to tell
    // A plan that has been captured copies nothing.
    CHECK(Has(call->ExchangeOffsets(x, y, {}, {}, on_stream),
              "the operand was in a window of XLA's before, but is not now"));
    CHECK(Has(call->Launch(other, y, on_stream), "other buffers than it has initialized it with"));
    // Peers can't find a window that is not spaced as the communicator's own.
    Sum(communicator, 1);  // both ranks are here
    world->spacing_error = 64;
    const auto copies = DeviceCall::Make(spec, communicator, DType::kS32, 4, 8, &error, true);
    CHECK(copies->ExchangeOffsets(x, y, {memory.window, 64}, {}, on_stream).empty());
    Sum(communicator, 1);
    world->spacing_error = 0;
    CHECK(copies->Launch(other, y, on_stream).empty());
  });
}

ALONE_TEST_CASE("buffers of nothing, buffers that are not aligned") {
  Communicator::Configure(20, 4);
  auto* world = new World(2);
  OnRanks(*world, [&](Rank& rank) {
    std::string error;
    Communicator& communicator = *Get(rank, &error);
    const auto call = DeviceCall::Make(SpecOf(Collective::kAllReduce, 2), communicator, DType::kF32, 0, 0, &error);
    CHECK(call && call->Launch(nullptr, nullptr, nullptr).empty());
    const auto aligned = DeviceCall::Make(SpecOf(Collective::kAllReduce, 2), communicator, DType::kF32, 1, 1, &error);
    alignas(4) char buffer[16];
    CHECK(aligned->Launch(buffer + 1, buffer, nullptr) == "the operand is not aligned to its elements of 4 bytes");
    CHECK(aligned->Launch(buffer, buffer + 2, nullptr) == "the result is not aligned to its elements of 4 bytes");
    CHECK(Has(aligned->Launch(buffer + 1, buffer + 2, nullptr), "the operand is not aligned"));
  });
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
