// Failures of collectives between processes: every process gets an error with the reason, and all resources are freed.
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "world.h"

namespace jaxcomm {
namespace {

bool ControlSegmentIsFree(const ControlSegment& control_segment) {
  return std::all_of(std::begin(control_segment.keys), std::end(control_segment.keys),
                     [](const auto& key) { return key.load() == 0; });
}

// Another process of the node, which enters a call as process 1 and does nothing more. Forked before threads start.
struct OtherProcess {
  pid_t pid = -1;
  NodeAddress address;

  OtherProcess(const Collective1& one, uint64_t key) {
    int to_parent[2];
    CHECK(pipe(to_parent) == 0);
    pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);  // also if a check ends the test
      Node node;
      if (!node.Open().ok()) _exit(1);
      const StatusOr<Block> block = node.Allocate(one.program->block_bytes(1));
      if (!block.ok()) _exit(1);
      const int number = node.control_segment().Reserve(key);
      Slot& slot = node.control_segment().slots[number];
      slot.memory = block->memory;
      slot.offset = block->offset;
      slot.fingerprint = one.program->fingerprint();
      node.control_segment().Publish(number, key);
      if (write(to_parent[1], &node.address(), sizeof(NodeAddress)) != sizeof(NodeAddress)) _exit(1);
      for (;;) pause();
    }
    NodeAddress received;
    CHECK(read(to_parent[0], &received, sizeof(received)) == sizeof(received));
    address = received;
    close(to_parent[0]);
    close(to_parent[1]);
  }
  void Kill() const {
    CHECK(kill(pid, SIGKILL) == 0);
    CHECK(waitpid(pid, nullptr, 0) == pid);
  }
};

// These cases come first, because they fork, which requires that no threads run. World starts threads.
void KilledInCall(bool has_left) {
  std::mt19937 random(11);
  const uint64_t key = 1000;
  Request request = Sum(2, 100);
  request.collective = Collective::kAllGather;
  request.geometry.pull = false;
  Collective1 one(Named(Collective::kAllGather, "direct"), request, {0, 1}, false, random);
  const OtherProcess other(one, key);
  World world(1);
  CHECK(world.node(0).Connect(1, other.address).ok());
  Results results(1);
  const auto call = one.CallOf(world, 0, key, results);
  call->Enter();
  while (call->Advance() == InterProcessCall::AdvanceResult::kMoved) {
  }
  ControlSegment& control_segment = world.node(0).control_segment();
  if (has_left) control_segment.slots[control_segment.Find(key)].exited.fetch_add(1);
  call->Check(Clock::now());
  CHECK(results.num_ended() == 0);
  other.Kill();
  world.node(0).CheckAlive();
  call->Check(Clock::now());
  if (has_left) {  // the process has done its work, so its end is not a failure
    CHECK(results.num_ended() == 0);
    CHECK(call->Advance() == InterProcessCall::AdvanceResult::kOver && results.error(0).empty());
  } else {
    CHECK(results.error(0) == "psum at test: in the exit barrier, the process of ranks [1] (process 1) has ended");
    CHECK(call->Reclaim());  // no other process can touch the block
  }
  CHECK(ControlSegmentIsFree(control_segment));
}

TEST_CASE("a process is killed in a call: the others get an error and reuse their memory") {
  std::mt19937 random(11);
  const uint64_t key = 1000;
  Collective1 one(Named(Collective::kAllReduce, "ring"), Sum(2, 100), {0, 1}, false, random);
  const OtherProcess other(one, key);
  World world(1);
  CHECK(world.node(0).Connect(1, other.address).ok());
  Results results(1);
  const auto call = one.CallOf(world, 0, key, results);
  call->Enter();
  while (call->Advance() == InterProcessCall::AdvanceResult::kMoved) {
  }
  world.progress_thread(0).Add(call);
  other.Kill();
  CHECK(results.WaitFor(1));
  CHECK(Has(results.error(0), "the process of ranks [1] (process 1) has ended"));
  const Clock::time_point limit = Clock::now() + std::chrono::seconds(30);
  while (!ControlSegmentIsFree(world.node(0).control_segment())) {
    CHECK(Clock::now() < limit);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

TEST_CASE("a process is killed before it has left a call") { KilledInCall(false); }

TEST_CASE("a process ends after it has left a call") { KilledInCall(true); }

// A process is late, never enters, aborts, or has a different call: every process gets an error with the reason.
void Failures(World& world, std::mt19937& random, uint64_t* key) {
  const Algorithm& ring = Named(Collective::kAllReduce, "ring");
  const auto next_run = [key] { return *key = (*key / 1000 + 1) * 1000; };
  {  // process 2 never enters
    Collective1 one(ring, Sum(3, 100), {0, 1, 2}, true, random);
    Results results(3);
    const uint64_t now = next_run();
    std::vector<std::shared_ptr<InterProcessCall>> calls;
    for (int32_t p = 0; p < 2; ++p) {
      calls.push_back(one.CallOf(world, p, now, results, 0.2));
      calls[p]->Enter();
      world.progress_thread(p).Add(calls[p]);
    }
    CHECK(results.WaitFor(2));
    int named = 0;
    for (int32_t p = 0; p < 2; ++p) {
      CHECK(Has(results.error(p), "psum at test: "));
      named += Has(results.error(p), "ranks [2] (process 2) in no collective");  // perhaps with others that are late
    }
    CHECK(named >= 1);
    // Then process 2 enters and gets the error at once. Its call releases the others' memory.
    auto late = one.CallOf(world, 2, now, results, 60);
    late->Enter();
    world.progress_thread(2).Add(late);
    CHECK(results.WaitFor(3));
    CHECK(Has(results.error(2), "aborted"));
    // The call is over in all processes, so its slot and block are free.
    CHECK(calls[0]->Reclaim() || world.node(0).control_segment().Find(now) < 0);
  }
  {  // one aborts while all run
    Collective1 one(ring, Sum(3, 100), {0, 1, 2}, false, random);
    Results results(3);
    const uint64_t now = next_run();
    std::vector<std::shared_ptr<InterProcessCall>> calls;
    for (int32_t p = 0; p < 3; ++p) calls.push_back(one.CallOf(world, p, now, results));
    for (auto& call : calls) call->Enter();
    calls[0]->Advance();  // only one of three, so no call can finish
    calls[1]->Fail(InvalidArgumentError("had enough"));
    for (int32_t p = 0; p < 3; ++p) world.progress_thread(p).Add(calls[p]);
    CHECK(results.WaitFor(3));
    CHECK(results.error(1) == "had enough");
    for (const int32_t p : {0, 2}) CHECK(Has(results.error(p), "aborted: had enough"));
  }
  {  // process 2 does nothing, process 0 waits for it, and process 1, which waits for process 0, times out first
    Collective1 one(ring, Sum(3, 100), {0, 1, 2}, false, random);
    Results results(3);
    const uint64_t now = next_run();
    std::vector<std::shared_ptr<InterProcessCall>> calls;
    for (int32_t p = 0; p < 3; ++p) calls.push_back(one.CallOf(world, p, now, results, p == 1 ? 0.2 : 60));
    for (auto& call : calls) call->Enter();
    for (const int32_t p : {0, 1}) world.progress_thread(p).Add(calls[p]);
    CHECK(results.WaitFor(2));
    CHECK(Has(results.error(1), "got no signal from rank 0 (process 0)"));
    CHECK(Has(results.error(0), "ranks [1] (process 1) aborted; at that time, rank 0 waited for rank 2 (process 2): "));
    world.progress_thread(2).Add(calls[2]);
    CHECK(results.WaitFor(3));
  }
  {  // two disagree about the size
    Collective1 one(ring, Sum(2, 100), {0, 1}, true, random), other(ring, Sum(2, 101), {0, 1}, true, random);
    Results results(2);
    const uint64_t now = next_run();
    auto a = one.CallOf(world, 0, now, results), b = other.CallOf(world, 1, now, results);
    a->Enter();
    b->Enter();
    world.progress_thread(0).Add(a);
    world.progress_thread(1).Add(b);
    CHECK(results.WaitFor(2));
    for (int32_t p = 0; p < 2; ++p)
      CHECK(Has(results.error(p), "calls do not match") || Has(results.error(p), "aborted"));
  }
  {  // the same key twice
    Collective1 one(ring, Sum(2, 100), {0, 1}, true, random);
    Results results(2), more(2);
    const uint64_t now = next_run();
    auto a = one.CallOf(world, 0, now, results), again = one.CallOf(world, 0, now, more);
    a->Enter();
    again->Enter();
    CHECK(more.WaitFor(1));
    CHECK(Has(more.error(0), "another call with the same key"));
    auto b = one.CallOf(world, 1, now, results);
    b->Enter();
    world.progress_thread(0).Add(a);
    world.progress_thread(1).Add(b);
    CHECK(results.WaitFor(2));
    CHECK(Has(results.error(0), "aborted") || results.error(0).empty() || Has(results.error(1), "aborted"));
  }
  {  // an error of the whole run reaches its calls
    Collective1 one(ring, Sum(2, 100), {0, 1}, true, random);
    Results results(2);
    const uint64_t now = next_run();
    auto a = one.CallOf(world, 0, now, results);
    a->Enter();
    world.progress_thread(0).Add(a);
    world.progress_thread(0).FailRun(static_cast<int64_t>(now / 1000), InvalidArgumentError("elsewhere"));
    CHECK(results.WaitFor(1));
    CHECK(results.error(0) == "elsewhere");
  }
}

// A process of another node is lost, aborts, or has a different call.
void FailuresBetweenNodes(std::mt19937& random, uint64_t* key) {
  const Algorithm& ring = Named(Collective::kAllReduce, "ring");
  const auto has_all = [](Results& results, const std::string& part) {
    for (const int32_t p : {0, 1}) CHECK(Has(results.error(p), part));
  };
  const auto request = [](int64_t block_count) {
    Request flat = Sum(3, block_count);
    flat.geometry = {3, 1, false, true};
    return flat;
  };
  for (const char* kind : {"lost", "aborts", "never comes", "disagrees"}) {
    World world(3, 3, *key);
    const bool disagrees = kind == std::string("disagrees");
    // A direct all_gather has no waits, so every process sends its exit message. In a ring, all wait.
    const bool direct = disagrees && random() % 2;
    const Algorithm& algorithm = direct ? Named(Collective::kAllGather, "direct") : ring;
    Request here = request(100), there = request(101);
    here.collective = there.collective = direct ? Collective::kAllGather : Collective::kAllReduce;
    Collective1 one(algorithm, here, {0, 1, 2}, false, random, &world, 3);
    Collective1 other(algorithm, there, {0, 1, 2}, false, random, &world, 3);
    Results results(3);
    const uint64_t now = *key = (*key / 1000 + 1) * 1000;
    std::vector<std::shared_ptr<InterProcessCall>> calls;
    for (int32_t p = 0; p < 3; ++p) {
      calls.push_back((disagrees && p == 2 ? other : one)
                          .CallOf(world, p, now, results, kind == std::string("never comes") ? 0.3 : 60));
      if (p == 2 && kind != std::string("aborts") && !disagrees) break;
      calls[p]->Enter();
      if (p == 2 && !disagrees) calls[p]->Fail(InvalidArgumentError("had enough"));
      world.progress_thread(p).Add(calls[p]);
    }
    if (kind == std::string("lost")) world.fabric().Lose(2);
    CHECK(results.WaitFor(kind == std::string("aborts") || disagrees ? 3 : 2));
    if (kind == std::string("lost")) has_all(results, "[2] (process 2)");
    if (kind == std::string("aborts")) has_all(results, "had enough");
    if (disagrees) {
      for (int32_t p = 0; p < 3; ++p) {
        CHECK(Has(results.error(p), " of 100 elements") && Has(results.error(p), " of 101 elements"));
      }
    }
    for (const int32_t p : {0, 1}) CHECK(!results.error(p).empty());
  }
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
  static Request Exchange(int32_t ranks_per_node, int64_t block_count) {
    Request request;
    request.collective = Collective::kAllGather;
    request.geometry = {2, ranks_per_node, false, true};
    request.block_count = block_count;
    return request;
  }
  // Delivers small messages until the condition holds.
  template <typename Condition>
  void StepUntil(Condition condition) {
    const Clock::time_point limit = Clock::now() + std::chrono::seconds(30);
    while (!condition()) {
      while (world.fabric().Step(kSoon_ns)) {
      }
      CHECK(Clock::now() < limit);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
};

// Two nodes disagree and send large payloads to each other. Both get the error before the payloads could have arrived,
// fetch none of them, and can run further calls.
void DisagreementOverSlowLink(std::mt19937& random, uint64_t* key) {
  const Algorithm& direct = Named(Collective::kAllGather, "direct");
  for (const bool late : {false, true}) {
    SlowLink slow;
    Collective1 one(direct, SlowLink::Exchange(1, SlowLink::kBlock), {0, 1}, false, random, &slow.world, 2);
    Collective1 other(direct, SlowLink::Exchange(1, SlowLink::kBlock + 1), {0, 1}, false, random, &slow.world, 2);
    Results results(2);
    const uint64_t now = *key = (*key / 1000 + 1) * 1000;
    for (const int32_t p : {0, 1}) {
      auto call = (p == 0 ? one : other).CallOf(slow.world, p, now, results);
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
void FailureWhilePayloadLands(bool comes, std::mt19937& random, uint64_t* key) {
  SlowLink slow;
  World& world = slow.world;
  // In this ring, each process forwards the data that it receives, so none finishes before the data has arrived.
  Collective1 one(Named(Collective::kAllGather, "ring"), SlowLink::Exchange(2, SlowLink::kBlock), {0, 0, 1, 1}, false,
                  random, &world, 2);
  Results results(2);
  const uint64_t now = *key = (*key / 1000 + 1) * 1000;
  std::vector<std::shared_ptr<InterProcessCall>> calls;
  for (const int32_t p : {0, 1}) {
    calls.push_back(one.CallOf(world, p, now, results));
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
      const Clock::time_point limit = Clock::now() + std::chrono::seconds(30);
      while (!ControlSegmentIsFree(world.node(p).control_segment())) {
        CHECK(Clock::now() < limit);
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
    }
    if (round == num_rounds / 2) memories = world.node(0).control_segment().num_memories.load();
  }
  CHECK(world.node(0).control_segment().num_memories.load() <= memories + 1);
}

TEST_CASE("late, missing and disagreeing processes of a node") {
  std::mt19937 random(11);
  uint64_t key = 1000;
  for (int round = 0; round < 2; ++round) {
    World world(3);
    Failures(world, random, &key);
  }
}

TEST_CASE("late, missing and disagreeing nodes") {
  std::mt19937 random(11);
  uint64_t key = 1000;
  for (int round = 0; round < 2; ++round) FailuresBetweenNodes(random, &key);
}

TEST_CASE("nodes that disagree over a slow link") {
  std::mt19937 random(11);
  uint64_t key = 1000;
  DisagreementOverSlowLink(random, &key);
}

TEST_CASE("a failure while a payload arrives") {
  std::mt19937 random(11);
  uint64_t key = 1000;
  for (const bool comes : {true, false}) FailureWhilePayloadLands(comes, random, &key);
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
  const char* const late = "no signal within 5 s (JAXCOMM_TIMEOUT_S)";
  for (const Case& one :
       {Case{1, late, " aborted; at that time, rank 0 waited for rank 2 (process 2): no signal within"},
        Case{2, late, " aborted: no signal"}, Case{1, "had enough", " aborted: had enough"}}) {
    World world(3, 3);
    std::mt19937 random(5);
    Request request = Sum(3, 100);
    request.collective = Collective::kAllGather;
    request.geometry = {3, 1, false, true};
    Collective1 ring(Named(Collective::kAllGather, "ring"), request, Split(3, 3, false), false, random, &world, 3);
    Results results(3);
    const auto call = ring.CallOf(world, 0, 1001, results);
    call->Enter();
    while (call->Advance() == InterProcessCall::AdvanceResult::kMoved) {
    }
    call->OnAborted(one.process, one.why);
    CHECK(Has(results.error(0), one.expected));
  }
}

}  // namespace
}  // namespace jaxcomm
