// The two lanes of a group: synchronous calls, and calls that have been started. Calls of both run at the same time.
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "../../ffi/cuda/program/launch_limits.h"
#include "fakes/machine.h"
#include "fakes/seed.h"
#include "fakes/xla_fake.h"

namespace jaxcomm {
namespace cuda {
namespace {

using namespace fake;

Communicator& LaneOf(Communicator& communicator) { return *ValueOf(communicator.AsynchronousLane()); }

ALONE_TEST_CASE("a group has one asynchronous lane, which shares no memory with the other one") {
  for (const int n : {1, 3}) {
    Communicator::Configure(20, 32);
    auto* world = new World(n);
    OnRanks(*world, [&](Rank& rank) {
      Communicator& communicator = *ValueOf(Get(rank));
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
      CHECK(own.timeout_ns == of_lane.timeout_ns);
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
DataCall<> DrawCall(Communicator& communicator, std::mt19937_64& random) {
  constexpr Collective kCollectives[] = {Collective::kAllReduce, Collective::kAllGather, Collective::kReduceScatter};
  const Collective collective = kCollectives[random() % 3];
  CallSpec spec = SpecOf(collective, communicator.size(), random() % 2 == 0 ? "ring" : "direct");
  const auto count = static_cast<int64_t>(1 + random() % 200) * (random() % 4 == 0 ? 10 : 1);
  if (random() % 3 == 0) spec.algorithm = "";  // LL messages
  return {communicator, spec, count};
}

// Calls of both lanes in pairs, whose thread blocks run in random order.
void RunBeside(uint64_t seed) {
  std::mt19937_64 of_world(seed);
  const auto n = static_cast<int>(2 + of_world() % 2);
  Communicator::Configure(20, 2);
  auto* world = new World(n);
  world->seed = seed;
  OnRanks(*world, [&](Rank& rank) {
    std::mt19937_64 random(seed);  // the same on all ranks
    Communicator& communicator = *ValueOf(Get(rank));
    Communicator& lane = LaneOf(communicator);
    std::vector<DataCall<>> calls;
    for (int i = 0; i < 3; ++i) {
      calls.push_back(DrawCall(communicator, random));
      calls.push_back(DrawCall(lane, random));
    }
    world->beside = 2;
    Stream main, side;
    for (int32_t run = 0; run < 4; ++run) {
      DataCall<>& synchronous = calls[2 * (random() % 3)];
      DataCall<>& asynchronous = calls[2 * (random() % 3) + 1];
      const bool first = random() % 2 == 0;
      if (first) asynchronous.Launch(run, side.handle());
      synchronous.Launch(run, main.handle());
      if (!first) asynchronous.Launch(run, side.handle());
      for (bool over = false; !over; std::this_thread::yield()) {
        const bool main_is_over = main.Drain();
        over = side.Drain() && main_is_over;
      }
      if (!synchronous.IsRight(run) || !asynchronous.IsRight(run)) {
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

GpuCallState* CallAt(const std::string& site, bool asynchronous, const std::string& algorithm = "") {
  GpuCallState* const state = StateOf(SpecOf(Collective::kAllReduce, 3, algorithm));
  state->spec.site = site;
  state->spec.asynchronous = asynchronous ? 1 : 0;
  return state;
}

// The values that a call waits for are operands. They are not read.
ALONE_TEST_CASE("a started call runs in the lane, with further operands") {
  Communicator::Configure(20, 4);
  auto* world = new World(3);
  GpuCallState *const started = CallAt("here.py:1", true), *const synchronous = CallAt("here.py:2", false);
  OnRanks(*world, [&](Rank& rank) {
    Site first(*started, rank), second(*synchronous, rank);
    first.xla.more = {{nullptr, 0, XLA_FFI_DataType_F32}, {nullptr, 3, XLA_FFI_DataType_S8}};
    for (Site* const site : {&first, &second}) CHECK(site->Initialize().empty());
    Communicator* const communicator = ValueOf(Get(rank));
    CHECK(&synchronous->calls.at(rank.device())->communicator() == communicator);
    CHECK(&started->calls.at(rank.device())->communicator() == &LaneOf(*communicator));
    for (Site* const site : {&first, &second}) {
      CHECK(site->Execute().empty());
      fake::Wait(site->stream.handle());
      CHECK(site->y[0] == 3 && site->y[3] == 12);
    }
    second.xla.more = first.xla.more;
    CHECK(Has(second.Execute(), "unexpected number of operands"));
  });
}

// XLA reuses the memory of a started call after an error, since it does not run `done`.
ALONE_TEST_CASE("after an error, work waits for the calls that have been started") {
  Communicator::Configure(20, 4);
  auto* world = new World(3);
  GpuCallState *const started = CallAt("here.py:1", true), *const synchronous = CallAt("here.py:2", false);
  OnRanks(*world, [&](Rank& rank) {
    Site first(*started, rank), second(*synchronous, rank);
    for (Site* const site : {&first, &second}) CHECK(site->Initialize().empty());
    CHECK(first.Execute().empty());
    CHECK(second.stream.num_waits == 0);
    second.xla.more = {{nullptr, 0, XLA_FFI_DataType_F32}};
    CHECK(Has(second.Execute(), "unexpected number of operands"));
    CHECK(second.stream.num_waits == 1);
    fake::Wait(first.stream.handle());
    CHECK(first.y[0] == 3 && first.y[3] == 12);
  });
}

TEST_CASE("a failure of one lane ends the calls of both") {
  Communicator::Configure(20, 4);
  for (const bool asynchronous : {false, true}) {
    Alone([asynchronous] {
      auto& rank = *new Rank{new World(1), 0};
      own = &rank;
      GpuCallState* const states[] = {CallAt("here.py:1", false), CallAt("here.py:2", true)};
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

// The errors of three ranks, by rank and call. Ranks 0 and 2 make two calls, rank 1 makes them in the other order.
// change(site): of rank 1.
template <typename Change>
std::vector<std::vector<std::string>> ErrorsOf(GpuCallState* of_0, GpuCallState* of_1, const Change& change) {
  Communicator::Configure(20, 4);
  GpuCallState* const states[] = {of_0, of_1};
  std::vector<std::vector<std::string>> errors(3);
  OnRanks(*new World(3), [&](Rank& rank) {
    Site first(*states[rank.rank % 2], rank), second(*states[1 - rank.rank % 2], rank);
    if (rank.rank == 1) change(first);
    CHECK(first.Initialize().empty() && second.Initialize().empty());  // reported by Execute
    errors[rank.rank] = {first.Execute(), second.Execute()};
  });
  return errors;
}
void Unchanged(Site&) {}

// Processes may have compiled a program in different ways. All ranks get an error that names two calls, in time.
ALONE_TEST_CASE("calls in different orders on two ranks are an error") {
  const std::string names[] = {"all_reduce at first.py:1", "all_reduce at second.py:2"};
  for (const bool both_lanes : {false, true}) {
    const auto errors = ErrorsOf(CallAt("first.py:1", true), CallAt("second.py:2", !both_lanes), Unchanged);
    for (const int rank : {0, 1, 2}) {
      for (const int call : {0, 1}) {
        const int own = (rank + call) % 2, other = rank == 1 ? 0 : 1;
        CHECK(Has(errors[rank][call], "different calls, or calls in different orders: rank " + std::to_string(other) +
                                          " makes " + names[1 - own] + ", rank " + std::to_string(rank) + " makes " +
                                          names[own]));
      }
    }
  }
}

// Of a long name, the end is exchanged: it has the line. Names that differ before it are different calls too. Equal
// starts of one line: the leaves of a tree, or the layers of an unrolled loop.
ALONE_TEST_CASE("calls with long or equal names are told apart") {
  const std::string path(200, 'a');
  GpuCallState* const second = CallAt("here.py:1", true);
  second->spec.number = 1;
  const std::tuple<GpuCallState*, GpuCallState*, const char*> cases[] = {
      {CallAt(path + ".py:1", true), CallAt(path + ".py:2", true), ".py:1"},
      {CallAt(path + ".py:1", true), CallAt(path + ".py:2", true), ".py:2"},
      {CallAt("1" + path + ".py:7", true), CallAt("2" + path + ".py:7", true), ".py:7"},
      {CallAt("here.py:1", true), second, "makes all_reduce at here.py:1 (call 2 of this line)"}};
  for (const auto& [of_0, of_1, part] : cases) {
    for (const auto& of_rank : ErrorsOf(of_0, of_1, Unchanged)) {
      CHECK(Has(of_rank[0], "different calls, or calls in different orders") && Has(of_rank[0], part));
    }
  }
}

TEST_CASE("the same call with other arguments, elements or sizes on another rank is an error") {
  void (*const changes[])(Site&) = {[](Site& site) { site.xla.state = CallAt("here.py:1", true, "direct"); },
                                    [](Site& site) { site.xla.dtype = XLA_FFI_DataType_F32; },
                                    [](Site& site) { site.xla.Use(site.x, 3, site.y, 4); },
                                    [](Site& site) { site.xla.Use(site.x, 4, site.y, 3); }};
  for (const auto change : changes) {
    Alone([change] {
      const auto errors = ErrorsOf(CallAt("here.py:1", true, "ring"), CallAt("here.py:1", true, "ring"), change);
      for (const int rank : {0, 1, 2}) {
        CHECK(Has(errors[rank][0], "rank " + std::to_string(rank) + " and rank " + (rank == 1 ? "0" : "1") +
                                       " make this call with different shapes, types or arguments"));
      }
    });
  }
}

ALONE_TEST_CASE("a lane that can't be made is an error on all ranks") {
  Communicator::Configure(20, 4);
  OnRanks(*new World(3), [&](Rank& rank) {
    Communicator& communicator = *ValueOf(Get(rank));
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
