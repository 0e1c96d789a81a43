// Failures of collectives between processes: every process gets an error with the reason, and all resources are freed.
#include <algorithm>
#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../transport/forked_node.h"
#include "world.h"

namespace jaxcomm {
namespace {

bool ControlSegmentIsFree(const ControlSegment& control_segment) {
  return std::all_of(std::begin(control_segment.keys), std::end(control_segment.keys),
                     [](const auto& key) { return key.load() == 0; });
}

// This process has done its part of a call; another one, process 1, has entered it and does nothing more.
struct WithOther {
  static constexpr uint64_t kKey = 1000;
  std::mt19937 random{11};
  Collective1 one;
  const ForkedNode other;
  World world{1};
  Results results{1};
  std::shared_ptr<InterProcessCall> call;

  // `too_high`: the other process publishes another memory than its own.
  WithOther(const Algorithm& algorithm, const Request& request, uint32_t too_high = 0)
      : one(algorithm, request, {0, 1}, false, random), other([this, too_high](Node& node) {
          const Block block = ValueOf(node.Allocate(one.program->block_bytes(1)));
          const int number = node.control_segment().Reserve(kKey);
          Slot& slot = node.control_segment().slots[number];
          slot.memory = block.memory + too_high;
          slot.offset = block.offset;
          slot.fingerprint = one.program->fingerprint();
          node.control_segment().Publish(number, kKey);
        }) {
    CHECK(world.node(0).Connect(1, other.address).ok());
    call = one.CallOf(world, 0, kKey, results);
    call->Enter();
    CHECK(Move(*call) == (too_high > 0));
  }
};

// The first cases fork, which requires that no threads run. World starts threads.
TEST_CASE("a process is killed in a call: the others get an error, unless it has left, and reuse their memory") {
  enum class Killed { kWhileRunning, kBeforeExit, kAfterExit };
  for (const Killed killed : {Killed::kWhileRunning, Killed::kBeforeExit, Killed::kAfterExit}) {
    const bool running = killed == Killed::kWhileRunning;
    WithOther with(Named(running ? Collective::kAllReduce : Collective::kAllGather, running ? "ring" : "direct"),
                   running ? Sum(2, 100) : Exchange(2, 100));
    InterProcessCall& call = *with.call;
    ControlSegment& control_segment = with.world.node(0).control_segment();
    if (killed == Killed::kAfterExit) {
      control_segment.slots[control_segment.Find(WithOther::kKey)].exited.fetch_add(1);
    }
    call.Check(Clock::now());
    CHECK(with.results.num_ended() == 0);
    if (running) with.world.progress_thread(0).Add(with.call);
    with.other.Kill();
    if (!running) {
      with.world.node(0).CheckAlive();
      call.Check(Clock::now());
    }
    if (killed == Killed::kAfterExit) {  // the process has done its work, so its end is not a failure
      CHECK(with.results.num_ended() == 0 && Move(call) && with.results.error(0).empty());
    } else {
      CHECK(with.results.WaitFor(1));
      CHECK(with.results.error(0) == std::string("psum at test: ") +
                                         (running ? "while running" : "in the exit barrier") +
                                         ", the process of ranks [1] (process 1) has ended");
      CHECK(running || call.Reclaim());  // no other process can touch the block
    }
    WaitUntil([&] { return ControlSegmentIsFree(control_segment); });
  }
}

TEST_CASE("memory of a process that cannot be mapped") {
  WithOther with(Named(Collective::kAllReduce, "ring"), Sum(2, 100), 1);
  CHECK(with.results.error(0) ==
        "psum at test: in the entry barrier, the memory of ranks [1] (process 1) cannot be mapped: process 1 has "
        "published a call in memory 1, but has only 1 memories");
  with.other.Kill();
}

// A network of two nodes with so little bandwidth that a large payload takes seconds of virtual time. The test does not
// advance time that far, so payloads stay in flight.
struct SlowLink {
  static constexpr int64_t kBlock = 1'000'000, kSoon_ns = 1'000'000'000;
  World world{2, 2, Options()};

  static MemoryNetworkOptions Options() {
    MemoryNetworkOptions options;
    options.bytes_per_ns = 1e-3;
    return options;
  }
  // Delivers small messages until the condition holds.
  template <typename Condition>
  void StepUntil(Condition condition) {
    WaitUntil([&] {
      while (world.fabric().Step(kSoon_ns)) {
      }
      return condition();
    });
  }
};

// Two nodes disagree and send large payloads to each other. Both get the error before the payloads could have arrived,
// fetch none of them, and can run further calls.
TEST_CASE("nodes that disagree over a slow link") {
  std::mt19937 random(11);
  uint64_t key = 1000;
  const Algorithm& direct = Named(Collective::kAllGather, "direct");
  for (const bool late : {false, true}) {
    SlowLink slow;
    Collective1 one(direct, Gather(2, 1, SlowLink::kBlock), {0, 1}, false, random, &slow.world, 2);
    Collective1 other(direct, Gather(2, 1, SlowLink::kBlock + 1), {0, 1}, false, random, &slow.world, 2);
    Results results(2);
    key += 1000;
    for (const int32_t p : {0, 1}) {
      auto call = (p == 0 ? one : other).CallOf(slow.world, p, key, results);
      call->Enter();
      slow.world.progress_thread(p).Add(call);
      const auto sent = [&] { return slow.world.fabric().bytes_sent(0, 1) > 0; };
      if (late) slow.StepUntil(sent);
    }
    slow.StepUntil([&] { return results.num_ended() == 2; });
    for (const int32_t p : {0, 1}) {
      CHECK(Has(results.error(p), " of 1000000 elements") && Has(results.error(p), " of 1000001 elements"));
      CHECK(slow.world.active_messages(p)->Reachable(1 - p).ok());
    }
  }
}

// A call fails while a large payload is arriving in its result. The call does not end before the payload has arrived or
// its sender has been dropped. The result is not written afterwards.
void FailureWhilePayloadLands(bool comes) {
  std::mt19937 random(11);
  SlowLink slow;
  World& world = slow.world;
  // In this ring, each process forwards the data that it receives, so none finishes before the data has arrived.
  Collective1 one(Named(Collective::kAllGather, "ring"), Gather(2, 2, SlowLink::kBlock), {0, 0, 1, 1}, false, random,
                  &world, 2);
  Results results(2);
  std::vector<std::shared_ptr<InterProcessCall>> calls;
  for (const int32_t p : {0, 1}) {
    calls.push_back(one.CallOf(world, p, 1000, results));
    calls[p]->Enter();
    world.progress_thread(p).Add(calls[p]);
  }
  for (const int32_t p : {0, 1}) {
    slow.StepUntil([&] { return world.fabric().bytes_sent(p, 1 - p) > SlowLink::kBlock; });
  }
  while (world.fabric().Step(SlowLink::kSoon_ns)) {
  }
  const Clock::time_point failed_at = Clock::now();
  calls[0]->Fail(InvalidArgumentError("had enough"));
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  CHECK(results.num_ended() == 0);
  const auto lost = [&](int32_t p) { return world.active_messages(p)->Reachable(1 - p).message(); };
  if (comes) {
    while (world.fabric().Step()) {
    }
    CHECK(results.WaitFor(2));
    for (const int32_t p : {0, 1}) CHECK(lost(p).empty());
    CHECK(Has(results.error(1), "had enough"));
  } else {
    slow.StepUntil([&] { return results.num_ended() == 2; });
    const auto took = Clock::now() - failed_at;
    CHECK(took >= std::chrono::milliseconds(500) && took < std::chrono::seconds(30));
    CHECK(lost(0) == "its data did not arrive in time");
    CHECK(Has(results.error(1), "the process of ranks [0, 1] (process 0) cannot be reached: the connection was lost"));
    // The memory of the results is reused while the remaining virtual time passes.
    for (auto& output : one.outputs) std::fill(output.begin(), output.end(), 7);
    while (world.fabric().Step()) {
    }
    for (const auto& output : one.outputs) {
      CHECK(std::all_of(output.begin(), output.end(), [](int32_t value) { return value == 7; }));
    }
  }
  CHECK(results.error(0) == "had enough");
}

// Calls that fail free all resources, whether the others take part, are late, or never enter.
void FailuresAreReclaimed(int num_processes, int num_nodes, int num_rounds, int num_calls) {
  std::mt19937 random(11);
  uint64_t key = 1000;
  World world(num_processes, num_nodes, 17);
  Request request = Sum(num_processes, 20000);
  if (num_nodes > 1) request.geometry = {num_nodes, num_processes / num_nodes, false, true};
  uint32_t memories = 0;
  for (int round = 0; round < num_rounds; ++round) {
    const uint64_t run_id = key = (key / 1000 + 1) * 1000;
    Collective1 one(Named(Collective::kAllReduce, num_nodes > 1 ? "hierarchical" : "ring"), request,
                    Split(num_processes, num_processes, false), false, random, &world, num_processes);
    std::vector<std::unique_ptr<Results>> results;
    std::vector<std::shared_ptr<InterProcessCall>> calls;
    std::vector<int> num_entered(num_calls);
    for (int c = 0; c < num_calls; ++c) {
      results.push_back(std::make_unique<Results>(num_processes));
      for (int32_t p = 0; p < num_processes; ++p) {
        if (p > 0 && random() % 3 == 0) continue;
        auto call = one.CallOf(world, p, run_id + c, *results[c], 0.01);
        ++num_entered[c];
        call->Enter();
        if (random() % 2) call->Advance();
        if (random() % 4 == 0) call->Fail(InvalidArgumentError("had enough"));
        world.progress_thread(p).Add(call);
        if (random() % 16 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(random() % 20));
      }
    }
    for (int c = 0; c < num_calls; ++c) CHECK(results[c]->WaitFor(num_entered[c]));
    for (int32_t p = 0; p < num_processes; ++p) {
      WaitUntil([&] { return ControlSegmentIsFree(world.node(p).control_segment()); });
    }
    if (round == num_rounds / 2) memories = world.node(0).control_segment().num_memories.load();
  }
  CHECK(world.node(0).control_segment().num_memories.load() <= memories + 1);
}

TEST_CASE("a failure while a payload arrives") {
  for (const bool comes : {true, false}) FailureWhilePayloadLands(comes);
}

TEST_CASE("failures free all resources") {
  FailuresAreReclaimed(3, 1, 4, 25);
  FailuresAreReclaimed(4, 2, 4, 25);
}

TEST_CASE("an error after the time limit of another process also says for whom this one waited, others do not") {
  struct Case {
    int32_t process;
    const char* why;
    const char* expected;
  };
  const char *const late = "no signal within 5 s (JAXCOMM_TIMEOUT_S)", *const limited =
                                                                           "no signal within 5 s (timeout_s)";
  for (const Case& one :
       {Case{1, late, " aborted; at that time, rank 6 waited for rank 8 (process 2): no signal within"},
        Case{1, limited, " aborted; at that time, rank 6 waited for rank 8 (process 2): no signal within"},
        Case{2, late, " aborted: no signal"}, Case{1, "had enough", " aborted: had enough"}}) {
    World world(3, 3);
    std::mt19937 random(5);
    Collective1 ring(Named(Collective::kAllGather, "ring"), Gather(3, 1, 100), Split(3, 3, false), false, random,
                     &world, 3);
    ring.first_rank = 6;
    Results results(3);
    const auto call = ring.CallOf(world, 0, 1001, results);
    call->Enter();
    Move(*call);
    call->OnAborted(one.process, one.why);
    CHECK(Has(results.error(0), one.expected));
  }
}

}  // namespace
}  // namespace jaxcomm
