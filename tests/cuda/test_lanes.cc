// The two lanes of a group: synchronous calls, and calls that have been started. Calls of both run at the same time.
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "../../ffi/cuda/program/launch_limits.h"
#include "fakes/machine.h"
#include "fakes/seed.h"
#include "fakes/xla_fake.h"

namespace jaxcomm {
namespace cuda {
namespace {

using namespace fake;

Communicator& LaneOf(Communicator& communicator) { return *Ok(communicator.AsynchronousLane()); }

ALONE_TEST_CASE("a group has one asynchronous lane, which shares no memory with the other one") {
  for (const int n : {1, 3}) {
    Communicator::Configure(20, 32);
    auto* world = new World(n);
    OnRanks(*world, [&](Rank& rank) {
      Communicator& communicator = *Ok(Get(rank));
      const int before = rank.num_allocations;
      Communicator& lane = LaneOf(communicator);
      CHECK(&lane != &communicator && &LaneOf(communicator) == &lane);
      CHECK(rank.num_allocations == before + 1);  // its signals, once
      CHECK(world->num_made == n);                // one ncclComm_t of jaxcomm's for both lanes
      CHECK(lane.rank() == rank.rank && lane.size() == n && lane.device() == communicator.device());
      CHECK(communicator.max_channels() == 32 && lane.max_channels() == kAsynchronousChannels);
      const device::Comm &own = communicator.comm(), &of_lane = lane.comm();
      CHECK(own.signals.pad.base != of_lane.signals.pad.base && own.signals.sent != of_lane.signals.sent);
      CHECK(own.signals.received != of_lane.signals.received && own.report != of_lane.report);
      CHECK(own.ll_slots.pad.base != of_lane.ll_slots.pad.base && own.ll_slots.epochs != of_lane.ll_slots.epochs);
      CHECK(own.abort_flag == of_lane.abort_flag);  // of the GPU: after an abort, no kernel of either lane runs
      device::Window arena, arena_of_lane;
      int64_t bytes = 0;
      CHECK(communicator.Reserve(1, &arena, &bytes).ok() && lane.Reserve(1, &arena_of_lane, &bytes).ok());
      CHECK(arena.base != arena_of_lane.base);
      Sum(communicator, 100);
      Sum(lane, 100);
    });
  }
}

TEST_CASE("the SMs of a GPU are divided among the lanes and others") {
  for (int num_sms = 1; num_sms < 200; ++num_sms) {
    for (const int limit : {1, 4, 32, 1000}) {
      const LaneChannels channels = MaxChannels(num_sms, limit);
      CHECK(channels.synchronous >= 1 && channels.synchronous <= limit);
      CHECK(channels.asynchronous >= 1 && channels.asynchronous <= std::min(limit, kAsynchronousChannels));
      const int all = channels.synchronous + channels.asynchronous + kSmsOfOthers;
      CHECK(all <= num_sms || num_sms < kSmsOfOthers + 2);
    }
  }
}

// A call of one lane with random algorithm and size.
struct Call {
  Call(Communicator& communicator, std::mt19937_64& random) : n(communicator.size()) {
    static constexpr Collective kCollectives[] = {Collective::kAllReduce, Collective::kAllGather,
                                                  Collective::kReduceScatter};
    collective = kCollectives[random() % 3];
    CallSpec spec = SpecOf(collective, n);
    spec.algorithm = random() % 2 == 0 ? "ring" : "direct";
    count = static_cast<int64_t>(1 + random() % 200) * (random() % 4 == 0 ? 10 : 1);
    if (random() % 3 == 0) spec.algorithm = "";  // LL messages
    x.resize(collective == Collective::kReduceScatter ? n * count : count);
    y.resize(collective == Collective::kAllGather ? n * count : count);
    call = Ok(DeviceCall::Make(spec, communicator, DType::kS32, static_cast<int64_t>(x.size()),
                               static_cast<int64_t>(y.size())));
  }
  void Launch(int32_t rank, int32_t run, cudaStream_t stream) {
    for (size_t i = 0; i < x.size(); ++i) x[i] = Value(rank, run, static_cast<int64_t>(i));
    std::fill(y.begin(), y.end(), -1);
    CHECK(call->Launch(x.data(), y.data(), stream).ok());
  }
  bool IsRight(int32_t rank, int32_t run) const {
    for (int64_t i = 0; i < static_cast<int64_t>(y.size()); ++i) {
      int32_t expected = 0;
      const int64_t at = collective == Collective::kReduceScatter ? rank * count + i : i;
      for (int32_t r = 0; r < n; ++r) expected += Value(r, run, at);
      if (collective == Collective::kAllGather) expected = Value(static_cast<int32_t>(i / count), run, i % count);
      if (y[i] != expected) return false;
    }
    return true;
  }
  int32_t Value(int32_t rank, int32_t run, int64_t i) const {
    return static_cast<int32_t>(1000 * rank + 17 * run + i % 501);
  }

  const int32_t n;
  Collective collective = Collective::kAllReduce;
  int64_t count = 0;
  std::vector<int32_t> x, y;
  std::unique_ptr<DeviceCall> call;
};

// Calls of both lanes in pairs, whose thread blocks run in random order.
void RunBeside(uint64_t seed) {
  std::mt19937_64 of_world(seed);
  const auto n = static_cast<int>(2 + of_world() % 2);
  Communicator::Configure(20, 2);
  auto* world = new World(n);
  world->seed = seed;
  OnRanks(*world, [&](Rank& rank) {
    std::mt19937_64 random(seed);  // the same on all ranks
    Communicator& communicator = *Ok(Get(rank));
    Communicator& lane = LaneOf(communicator);
    std::vector<Call> calls;
    for (int i = 0; i < 3; ++i) {
      calls.emplace_back(communicator, random);
      calls.emplace_back(lane, random);
    }
    world->beside = 2;
    Stream main, side;
    for (int32_t run = 0; run < 4; ++run) {
      Call& synchronous = calls[2 * (random() % 3)];
      Call& asynchronous = calls[2 * (random() % 3) + 1];
      const bool first = random() % 2 == 0;
      if (first) asynchronous.Launch(rank.rank, run, side.handle());
      synchronous.Launch(rank.rank, run, main.handle());
      if (!first) asynchronous.Launch(rank.rank, run, side.handle());
      for (bool over = false; !over; std::this_thread::yield()) {
        const bool main_is_over = main.Drain();
        over = side.Drain() && main_is_over;
      }
      if (!synchronous.IsRight(rank.rank, run) || !asynchronous.IsRight(rank.rank, run)) {
        std::fprintf(stderr, "seed %llu, rank %d, run %d\n", static_cast<unsigned long long>(seed), rank.rank, run);
        CHECK(false);
      }
      CHECK(main.num_waits == 0 && side.num_waits == 0);  // no lane waits for the other
    }
    CHECK(communicator.Failure().ok() && lane.Failure().ok());
  });
}

ALONE_TEST_CASE("calls of both lanes at the same time") {
  for (uint64_t seed = FirstSeed(); seed < FirstSeed() + 4; ++seed) RunBeside(seed);
}
// Worlds are never freed, because watcher threads may use them: each has tens of MB, so few share a process.
TEST_CASE("calls of both lanes at the same time, many [full]") {
  for (uint64_t seed = FirstSeed() + 4; seed < FirstSeed() + 102; seed += 14) {
    Alone([&] {
      for (uint64_t i = 0; i < 14; ++i) RunBeside(seed + i);
    });
  }
}

// All calls of XLA's stages on one GPU.
struct Site {
  Site(GpuCallState& state, Rank& rank) : xla(state, stream.handle(), rank.device(), &rank) { xla.Use(x, 4, y, 4); }
  std::string Initialize() { return xla.Initialize(); }
  std::string Execute() { return xla.Run(&CudaExecuteEagerly, XLA_FFI_ExecutionStage_EXECUTE); }

  int32_t x[4] = {1, 2, 3, 4}, y[4] = {};
  Stream stream;
  FakeXla xla;
};

GpuCallState* StateOf(const std::string& site, bool asynchronous, const std::string& algorithm = "") {
  auto* state = new GpuCallState;
  state->spec = SpecOf(Collective::kAllReduce, 2);
  state->spec.groups = {0, 1};
  state->spec.site = site;
  state->spec.algorithm = algorithm;
  state->spec.asynchronous = asynchronous ? 1 : 0;
  return state;
}

// The values that a call waits for are operands. They are not read.
ALONE_TEST_CASE("a started call runs in the lane, with further operands") {
  Communicator::Configure(20, 4);
  auto* world = new World(2);
  GpuCallState *const started = StateOf("here.py:1", true), *const synchronous = StateOf("here.py:2", false);
  OnRanks(*world, [&](Rank& rank) {
    Site first(*started, rank), second(*synchronous, rank);
    first.xla.more = {{nullptr, 0, XLA_FFI_DataType_F32}, {nullptr, 3, XLA_FFI_DataType_S8}};
    for (Site* const site : {&first, &second}) CHECK(site->Initialize().empty());
    Communicator* const communicator = Ok(Get(rank));
    CHECK(&synchronous->calls.at(rank.device())->communicator() == communicator);
    CHECK(&started->calls.at(rank.device())->communicator() == &LaneOf(*communicator));
    for (Site* const site : {&first, &second}) {
      CHECK(site->Execute().empty());
      fake::Wait(site->stream.handle());
      CHECK(site->y[0] == 2 && site->y[3] == 8);
    }
    second.xla.more = first.xla.more;
    CHECK(Has(second.Execute(), "unexpected number of operands"));
  });
}

// XLA reuses the memory of a started call after an error, since it does not run `done`.
ALONE_TEST_CASE("after an error, work waits for the calls that have been started") {
  Communicator::Configure(20, 4);
  auto* world = new World(2);
  GpuCallState *const started = StateOf("here.py:1", true), *const synchronous = StateOf("here.py:2", false);
  OnRanks(*world, [&](Rank& rank) {
    Site first(*started, rank), second(*synchronous, rank);
    for (Site* const site : {&first, &second}) CHECK(site->Initialize().empty());
    CHECK(first.Execute().empty());
    CHECK(second.stream.num_waits == 0);
    second.xla.more = {{nullptr, 0, XLA_FFI_DataType_F32}};
    CHECK(Has(second.Execute(), "unexpected number of operands"));
    CHECK(second.stream.num_waits == 1);
    fake::Wait(first.stream.handle());
    CHECK(first.y[0] == 2 && first.y[3] == 8);
  });
}

TEST_CASE("a failure of one lane ends the calls of both") {
  Communicator::Configure(20, 4);
  for (const bool asynchronous : {false, true}) {
    Alone([asynchronous] {
      auto& rank = *new Rank{new World(1), 0};
      own = &rank;
      GpuCallState* const states[] = {StateOf("here.py:1", false), StateOf("here.py:2", true)};
      for (GpuCallState* const state : states) {
        state->spec.group_size = 1;
        state->spec.groups = {0};
      }
      Site synchronous(*states[0], rank), started(*states[1], rank);
      for (Site* const site : {&synchronous, &started}) CHECK(site->Initialize().empty() && site->Execute().empty());
      states[asynchronous]->calls.at(rank.device())->communicator().comm().report->state = device::Report::kComplete;
      for (Site* const site : {&synchronous, &started}) {
        CHECK(Has(site->Execute(), "a call before it failed"));
        site->xla.run = 1;
        CHECK(Has(site->Initialize(), "a call before it failed"));
      }
    });
  }
}

// Processes may have compiled a program in different ways. Both ranks get an error that names both calls, in time.
ALONE_TEST_CASE("calls in different orders on two ranks are an error") {
  Communicator::Configure(20, 4);
  for (const bool both_lanes : {false, true}) {
    GpuCallState* const states[] = {StateOf("first.py:1", true), StateOf("second.py:2", !both_lanes)};
    OnRanks(*new World(2), [&](Rank& rank) {
      Site first(*states[rank.rank], rank), second(*states[1 - rank.rank], rank);
      const char* const names[] = {"all_reduce at first.py:1", "all_reduce at second.py:2"};
      CHECK(first.Initialize().empty() && second.Initialize().empty());  // reported by Execute
      const std::string other = std::to_string(1 - rank.rank), own = std::to_string(rank.rank);
      for (int i = 0; i < 2; ++i) {
        Site& site = i == 0 ? first : second;
        const int which = i == 0 ? rank.rank : 1 - rank.rank;
        CHECK(Has(site.Execute(), "different calls, or calls in different orders: rank " + other + " makes " +
                                      names[1 - which] + ", rank " + own + " makes " + names[which]));
      }
    });
  }
}

// The leaves of a tree, or the layers of an unrolled loop.
ALONE_TEST_CASE("equal starts of one line in different orders on two ranks are an error") {
  Communicator::Configure(20, 4);
  GpuCallState* const states[] = {StateOf("here.py:1", true), StateOf("here.py:1", true)};
  states[1]->spec.number = 1;
  OnRanks(*new World(2), [&](Rank& rank) {
    Site first(*states[rank.rank], rank), second(*states[1 - rank.rank], rank);
    CHECK(first.Initialize().empty() && second.Initialize().empty());
    const std::string error = first.Execute();
    CHECK(Has(error, "different calls, or calls in different orders"));
    CHECK(Has(error, "makes all_reduce at here.py:1 (call 2 of this line)"));
  });
}

ALONE_TEST_CASE("the same call with other arguments on another rank is an error") {
  Communicator::Configure(20, 4);
  GpuCallState* const states[] = {StateOf("here.py:1", true, "ring"), StateOf("here.py:1", true, "direct")};
  OnRanks(*new World(2), [&](Rank& rank) {
    Site site(*states[rank.rank], rank);
    CHECK(site.Initialize().empty());
    CHECK(Has(site.Execute(), "rank " + std::to_string(rank.rank) + " and rank " + std::to_string(1 - rank.rank) +
                                  " make this call with different shapes, types or arguments"));
  });
}

ALONE_TEST_CASE("the same start with another element type or size on another rank is an error") {
  for (const bool of_type : {true, false}) {
    Alone([of_type] {
      Communicator::Configure(20, 4);
      GpuCallState* const states[] = {StateOf("here.py:1", true, "ring"), StateOf("here.py:1", true, "ring")};
      OnRanks(*new World(2), [&](Rank& rank) {
        Site site(*states[rank.rank], rank);
        if (rank.rank == 1 && of_type) site.xla.dtype = XLA_FFI_DataType_F32;
        if (rank.rank == 1 && !of_type) site.xla.Use(site.x, 3, site.y, 3);
        CHECK(site.Initialize().empty());
        CHECK(Has(site.Execute(), "make this call with different shapes, types or arguments"));
      });
    });
  }
}

// Of a long name, the end is exchanged: it has the line. Names that differ before it are different calls too.
ALONE_TEST_CASE("calls with long names are told apart") {
  Communicator::Configure(20, 4);
  const std::string path(200, 'a');
  for (const bool at_the_end : {false, true}) {
    GpuCallState* states[2];
    for (int i = 0; i < 2; ++i) {
      const std::string digit = std::to_string(i + 1);
      states[i] = StateOf(at_the_end ? path + ".py:" + digit : digit + path + ".py:7", true);
    }
    OnRanks(*new World(2), [&](Rank& rank) {
      Site site(*states[rank.rank], rank);
      CHECK(site.Initialize().empty());
      const std::string error = site.Execute();
      CHECK(Has(error, "different calls, or calls in different orders"));
      CHECK(Has(error, at_the_end ? ".py:1" : ".py:7") && Has(error, at_the_end ? ".py:2" : ".py:7"));
    });
  }
}

ALONE_TEST_CASE("a lane that can't be made is an error on all ranks") {
  Communicator::Configure(20, 4);
  auto* world = new World(3);
  OnRanks(*world, [&](Rank& rank) {
    Communicator& communicator = *Ok(Get(rank));
    if (rank.rank == 2) fault = {"ncclMemAlloc"};
    for (int i = 0; i < 2; ++i) {
      CHECK(Has(communicator.AsynchronousLane().status(), "rank 2 of the group has no 2097152 bytes of GPU memory"));
    }
    Sum(communicator, 1000);  // synchronous calls go on
  });
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
