// After a kernel has aborted: the error texts, and the calls that no longer begin.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fakes/machine.h"
#include "fakes/xla_fake.h"

namespace jaxcomm {
namespace cuda {
namespace {

using namespace fake;

ALONE_TEST_CASE("names of ended calls are dropped") {
  auto first = std::make_unique<CallName>("first");
  const uint64_t number = first->number();
  std::vector<std::unique_ptr<CallName>> others;
  for (int i = 0; i < 1000; ++i) others.push_back(std::make_unique<CallName>("other"));
  first.reset();
  CHECK(CallName::Of(number) == "first");  // for a late caller
  const uint64_t lasting = others[0]->number();
  for (size_t i = 1; i < others.size(); ++i) others[i].reset();
  CHECK(CallName::Of(number) == "a call");
  CHECK(CallName::Of(lasting) == "other" && lasting != number);
  CHECK(CallName("next").number() > lasting);
}

// Kernels have aborted, with further runs enqueued. A late peer may still read its data from the arena, and later work
// on these GPUs may use the result of such a kernel as an operand.
ALONE_TEST_CASE("no kernel runs after an aborted one") {
  constexpr int64_t kCount = 40000;  // several channels
  Communicator::Configure(20, 4);
  auto* other_world = new World(2);
  OnRanks(*new World(2), [&](Rank& rank) {
    // On the same GPUs, in another order.
    Rank& other_rank = *new Rank{other_world, 1 - rank.rank};
    other_rank.number = rank.device();
    Stream stream;
    const auto on_stream = stream.handle();
    const auto make = [&](Rank& of, const char* algorithm, int64_t count) {
      own = &of;
      const CallSpec spec = SpecOf(Collective::kAllReduce, 2, algorithm);
      return ValueOf(DeviceCall::Make(spec, *ValueOf(Get(of)), DType::kS32, count, count));
    };
    const auto call = make(rank, "direct", kCount);
    const auto ll = make(rank, "ll", 2);
    const auto other = make(other_rank, "direct", kCount);
    CHECK(call->shares_input() && call->shares_output());
    const auto run = [&](Rank& of, const DeviceCall& launched, const std::vector<int32_t>& x) {
      own = &of;
      std::vector<int32_t> y(kCount, -1);
      for (int i = 0; i < 3; ++i) CHECK(launched.Launch(x.data(), y.data(), on_stream).ok());
      while (!stream.Drain()) std::this_thread::yield();
      return y;
    };
    const std::vector<int32_t> untouched(kCount, -1);
    CHECK(run(rank, *call, std::vector<int32_t>(kCount, 1 + rank.rank)) == std::vector<int32_t>(kCount, 3));
    CHECK(run(other_rank, *other, std::vector<int32_t>(kCount, 5)) == std::vector<int32_t>(kCount, 10));

    device::AbortChannel(call->communicator().comm(), 1);
    device::Window arena;
    int64_t bytes = 0;
    CHECK(call->communicator().Reserve(1, &arena, &bytes).ok());
    const std::vector<char> before(arena.At(rank.rank), arena.At(rank.rank) + bytes);
    const std::vector<int32_t> next(kCount, 77);
    CHECK(run(rank, *call, next) == untouched && run(rank, *ll, next) == untouched);
    CHECK(std::equal(before.begin(), before.end(), arena.At(rank.rank)));
    CHECK(run(other_rank, *other, next) == untouched);
  });
}

// The process fails after the first kernel has timed out, and while the second one waits.
ALONE_TEST_CASE("a kernel is not aborted for a reason that comes later") {
  Communicator::Configure(600, 4);
  std::vector<Communicator*> communicators(2);
  for (Communicator*& made : communicators) {
    OnRanks(*new World(1), [&](Rank& rank) { made = ValueOf(Get(rank)); });
  }
  const auto wait = [&](size_t i, uint64_t for_ns) {
    const uint64_t begin = device::NowNs();
    emulation::TheMachine().now_ns += for_ns;
    CHECK(device::EndWait(communicators[i]->comm(), 0, begin, 0, kEntryBarrier, 1, 0));
  };
  wait(0, 600'000'000'000);
  Communicator::NoteOwnFailure("no memory");
  wait(1, 1'000'000);
  CHECK(Has(communicators[0]->Failure(), "rank 0 did not signal within 600 s"));
  CHECK(Has(communicators[1]->Failure(), "where it waited for rank 0: process 0 failed: no memory"));
}

// Calls on two communicators that share only the process. The first failure is reported for good.
ALONE_TEST_CASE("one failure ends all calls of the process") {
  Communicator::Configure(20, 4);
  Rank ranks[3];
  Stream stream;
  FakeXla xla(*StateOf(SpecOf(Collective::kAllReduce, 1)), stream.handle(), 0, &ranks[0]);
  int32_t x[4] = {}, y[4];
  xla.Use(x, 4, y, 4);
  const auto fail = [&](Rank& rank, const char* call, uint64_t time_ns) {
    device::Report& report = *ValueOf(Get(rank))->comm().report;
    report.call_id = CallName(call).number();  // known a while longer
    report.time_ns = time_ns;
    report.claim = 1;
    CHECK(ValueOf(Get(rank))->Failure().ok());  // still being written
    report.state = device::Report::kComplete;
  };
  for (Rank& rank : ranks) {
    own = &rank;
    rank.world = new World(1);
    CHECK(Get(rank).ok());
  }
  own = &ranks[0];
  xla.run = 1;
  CHECK(xla.Initialize().empty());
  CHECK(Communicator::FirstFailure().ok());
  fail(ranks[1], "psum at second.py:1", 2000);
  fail(ranks[2], "psum at first.py:1", 1000);
  xla.run = 2;
  for (const std::string& failed : {xla.Execute(), xla.Initialize()}) {
    CHECK(Has(failed, "here.py:1 can't run, since a call before it failed: psum at first.py:1: rank 0"));
  }
  fail(ranks[0], "psum at last.py:1", 1);  // reported too late
  xla.run = 3;
  CHECK(Has(xla.Execute(), "failed: psum at first.py:1"));
  CHECK(Communicator::Failures().size() == 3 && Has(Communicator::OwnFailure(), "psum at first.py:1"));
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
