// Processes whose programs differ: XLA gives them different run ids, so their calls never meet.
#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "world.h"

namespace jaxcomm {
namespace {

const Status kEnd = InvalidArgumentError("the end");
constexpr double kWarnS = 1;  // processes may be in other runs for as long

// Calls of the same group, each in a run of its own or in that of another call.
struct Calls {
  World& world;
  int num_processes;
  std::mt19937 random{11};
  std::vector<std::unique_ptr<Collective1>> collectives;
  std::vector<std::unique_ptr<Results>> results;

  Calls(World& all, int num) : world(all), num_processes(num) {}
  // `work`: the progress thread advances the call.
  std::shared_ptr<InterProcessCall> Enter(Collective1& one, int32_t process, uint64_t key, int64_t run, Results& result,
                                          bool work = true) {
    auto call = one.CallOf(world, process, key, result, 60, run, kWarnS);
    call->Enter();
    if (work) world.progress_thread(process).Add(call);
    return call;
  }
  Collective1& Make(uint64_t group = 5, const char* algorithm = "direct", bool numbered = false) {
    Request request = Sum(num_processes, 100);
    request.collective = Collective::kAllGather;
    if (world.active_messages(0) != nullptr) request.geometry = {num_processes, 1, false, true};
    collectives.push_back(std::make_unique<Collective1>(Named(Collective::kAllGather, algorithm), request,
                                                        Split(num_processes, num_processes, false), false, random,
                                                        &world, num_processes));
    collectives.back()->group = group;
    collectives.back()->numbered = numbered;
    return *collectives.back();
  }
  Results& Result() {
    results.push_back(std::make_unique<Results>(num_processes));
    return *results.back();
  }
};

// Calls Check() as if the times since `began` had come.
void CheckFrom(InterProcessCall& call, Clock::time_point began, int first_ms, int last_ms) {
  for (int ms = first_ms; ms < last_ms; ms += 50) call.Check(began + std::chrono::milliseconds(ms));
}

// One of three processes executes another program. All get an error long before the time limit. At least one of the
// processes that disagree shows both calls, and the others say who aborted. The next call works.
TEST_CASE("processes that execute different programs get an error that shows both calls, on one node and on several") {
  for (const int num_nodes : {1, 3}) {
    World world(3, num_nodes);
    Calls calls{world, 3};
    Collective1 &here = calls.Make(), &there = calls.Make(), &next = calls.Make();
    Results &result = calls.Result(), &after = calls.Result();
    for (const int32_t p : {0, 1}) calls.Enter(here, p, 1001, 1, result);
    calls.Enter(there, 2, 2001, 2, result);
    CHECK(result.WaitFor(3));
    for (int32_t p = 0; p < 3; ++p) {
      const std::string error = result.error(p);
      CHECK(Has(error, "calls do not match: ranks ") && Has(error, "call 1001 of") && Has(error, "call 2001 of"));
      CHECK(Has(error, "[2] (process 2)"));
    }
    for (int32_t p = 0; p < 3; ++p) calls.Enter(next, p, 3001, 3, after);
    after.ExpectSuccess();
    CHECK(next.outputs == next.expected);
  }
}

// Two processes in calls of different runs, without progress threads: the test sets the time.
struct Two {
  const bool numbered = false;
  World world{2};
  Calls calls{world, 2};
  Results& result = calls.Result();
  const std::shared_ptr<InterProcessCall> one = Enter(0, 1), other = Enter(1, 2);
  const Clock::time_point began = Clock::now();

  std::shared_ptr<InterProcessCall> Enter(int32_t process, int64_t run) {
    return calls.Enter(calls.Make(5, "direct", numbered), process, 1000 * run + 1, run, result, false);
  }
};

TEST_CASE("of two numbered calls, the earlier one fails at once, and the later one waits") {
  Two two{true};
  CheckFrom(*two.other, two.began, 0, 5000);
  CHECK(two.result.num_ended() == 0);
  CheckFrom(*two.one, two.began, 0, 500);
  CHECK(two.result.error(0) ==
        "psum at test: in the entry barrier, calls do not match: ranks [0] (process 0) are in call "
        "1001 of 100 elements, ranks [1] (process 1) are in call 2001 of 100 elements, a later call");
  CheckFrom(*two.other, two.began, 5000, 5500);
  CHECK(!two.other->failed());
  two.other->Fail(kEnd);
}

TEST_CASE("a process may be in another run for almost as long as the wait for the warning") {
  Two two;
  CheckFrom(*two.one, two.began, 0, 400);
  CheckFrom(*two.one, two.began, 20000, 20600);  // time in which the process is stopped does not count
  CHECK(two.result.num_ended() == 0);
  CheckFrom(*two.one, two.began, 20600, 20900);
  CHECK(Has(two.result.error(0), "calls do not match: ranks [0] (process 0) are in call 1001"));
  two.other->Check(two.began);
  CHECK(Has(two.result.error(1),
            "ranks [0] (process 0) aborted: psum at test: in the entry barrier, calls do not match"));
  CHECK(two.one->Reclaim() && two.other->Reclaim());
}

TEST_CASE("a process in one call after the other, and processes in turn, get no error") {
  for (const int32_t second : {1, 2}) {
    World world(3);
    Calls calls{world, 3};
    Collective1 &here = calls.Make(), &there = calls.Make();
    Results& result = calls.Result();
    std::vector<Results*> others;
    for (int i = 0; i < 2; ++i) others.push_back(&calls.Result());
    const auto one = calls.Enter(here, 0, 1001, 1, result, false);
    const auto first = calls.Enter(there, 1, 2001, 2, *others[0], false);
    const Clock::time_point began = Clock::now();
    CheckFrom(*one, began, 0, 800);
    first->Fail(kEnd);
    // Another call of this process, or the same call of another one.
    const auto next = calls.Enter(there, second, second == 1 ? 3001 : 2001, second == 1 ? 3 : 2, *others[1], false);
    CheckFrom(*one, began, 800, 1700);
    CHECK(result.num_ended() == 0);
    CheckFrom(*one, began, 1700, 2200);
    CHECK(Has(result.error(0), "calls do not match"));
    next->Fail(kEnd);
    for (const auto& call : {one, first, next}) CHECK(call->Reclaim());
  }
}

// Process 1 enters a call of run 2, of which process 0 has the message. The call of process 0 does not fail by that,
// because process 1 has been in it, or because process 0 has seen a failure of run 2.
TEST_CASE("a process of another node that has been in the call, or whose run has failed, gets no error") {
  enum class Seen { kFailure, kEntry, kPayload, kExit };  // a third process is late
  for (const Seen seen : {Seen::kFailure, Seen::kEntry, Seen::kPayload, Seen::kExit}) {
    World world(3, 3);
    Calls calls{world, 3};
    Collective1& one = calls.Make();
    const Fingerprint fingerprint(one.program->fingerprint(), 0);
    Results &result = calls.Result(), &other = calls.Result(), &failed = calls.Result();
    if (seen == Seen::kFailure) calls.Enter(calls.Make(), 0, 2003, 2, failed, false)->Fail(kEnd);
    const auto call = calls.Enter(one, 0, 1001, 1, result, false);
    Move(*call);
    if (seen == Seen::kEntry) call->OnEntered(1, fingerprint, "the call");
    if (seen == Seen::kPayload) CHECK(call->DestinationOf(1, fingerprint, 0, Space::kOutput, 0, 4) != nullptr);
    if (seen == Seen::kExit) call->OnExited(1, fingerprint, "the call");
    calls.Enter(calls.Make(), 1, 2001, 2, other);
    WaitUntil([&] { return !world.active_messages(0)->OtherCallsOf(1).empty(); });
    CheckFrom(*call, Clock::now(), 0, 2000);
    CHECK(!call->failed());
    world.progress_thread(1).FailRun(2, kEnd);
    CHECK(other.WaitFor(1));
    call->Fail(kEnd);
    if (seen == Seen::kPayload) call->OnPutDone();
    CHECK(result.WaitFor(1));
  }
}

TEST_CASE("two nodes in one run and two in another one get an error, although each has a payload of its partner") {
  World world(4, 4);
  Calls calls{world, 4};
  Collective1 &here = calls.Make(), &there = calls.Make();
  Results& result = calls.Result();
  for (const int32_t p : {0, 1}) calls.Enter(here, p, 1001, 1, result);
  for (const int32_t p : {2, 3}) calls.Enter(there, p, 2001, 2, result);
  CHECK(result.WaitFor(4));
  for (int32_t p = 0; p < 4; ++p) CHECK(Has(result.error(p), "calls do not match"));
}

// Process 1 comes late to the call of process 0. Meanwhile it is in other calls, or seems to be.
struct Late {
  World world;
  Calls calls{world, 2};
  Collective1& late = calls.Make();
  Results& result = calls.Result();

  explicit Late(int num_nodes) : world(2, num_nodes) {}
  void First() { calls.Enter(late, 0, 1001, 1, result); }
  void Second() {
    CHECK(result.num_ended() == 0);
    calls.Enter(late, 1, 1001, 1, result);
    result.ExpectSuccess();
    CHECK(late.outputs == late.expected);
  }
};

// Longer than a process may be in another run.
void WaitForComparisons() { std::this_thread::sleep_for(std::chrono::milliseconds(1800)); }

TEST_CASE("a process that is late because it is in another call gets no error") {
  struct Case {
    int num_nodes;
    uint64_t group;             // of its other call
    int64_t run;                // of its other call
    bool first_in_other_run;    // process 0 is in a third run
    bool second_in_other_runs;  // process 1 is in a third run
  };
  const Case cases[] = {
      {1, 6, 2, false, false},  // another group
      {2, 6, 2, false, false},  // another group, nodes
      {1, 0, 2, false, false},  // not compared
      {1, 5, 1, false, false},  // the same run
      {2, 5, 1, false, false},  // the same run, nodes
      {1, 5, 2, true, false},   // the first process in two runs
      {1, 5, 2, false, true},   // the second one in two runs
      {2, 5, 2, false, true},   // the second one in two runs, nodes
  };
  std::vector<std::unique_ptr<Late>> all;
  std::vector<Results*> others, alone;
  for (const Case& one : cases) {
    all.push_back(std::make_unique<Late>(one.num_nodes));
    Late& late = *all.back();
    Collective1 &other = late.calls.Make(one.group), &third = late.calls.Make(7);
    others.push_back(&late.calls.Result());
    alone.push_back(&late.calls.Result());
    if (one.second_in_other_runs) late.calls.Enter(third, 1, 3001, 3, *alone.back());
    late.calls.Enter(other, 1, 2001, one.run, *others.back());
    if (one.first_in_other_run) late.calls.Enter(third, 0, 3001, 3, *alone.back());
    late.First();
  }
  WaitForComparisons();
  for (size_t i = 0; i < all.size(); ++i) {
    CHECK(others[i]->num_ended() == 0);
    all[i]->Second();
    all[i]->calls.Enter(*all[i]->calls.collectives[1], 0, 2001, cases[i].run, *others[i]);
    others[i]->ExpectSuccess();
    for (const int32_t p : {0, 1}) all[i]->world.progress_thread(p).FailRun(3, kEnd);
    CHECK(alone[i]->WaitFor(cases[i].first_in_other_run || cases[i].second_in_other_runs));
  }
}

TEST_CASE("a process that is in the call, and in another one, gets no error while both wait for a third") {
  World worlds[] = {World(3, 1), World(3, 3)};
  std::vector<Calls> all;
  for (World& world : worlds) {
    all.push_back(Calls{world, 3});
    for (int i = 0; i < 2; ++i) all.back().Make(5, "ring"), all.back().Result();  // no process ends its part early
  }
  for (Calls& calls : all) {
    for (const int32_t p : {0, 1}) calls.Enter(*calls.collectives[0], p, 1001, 1, *calls.results[0]);
    calls.Enter(*calls.collectives[1], 1, 2001, 2, *calls.results[1]);
  }
  WaitForComparisons();
  for (Calls& calls : all) {
    calls.Enter(*calls.collectives[0], 2, 1001, 1, *calls.results[0]);
    for (const int32_t p : {0, 2}) calls.Enter(*calls.collectives[1], p, 2001, 2, *calls.results[1]);
    for (const auto& result : calls.results) result->ExpectSuccess();
  }
}

TEST_CASE("a process that has not yet noticed the end of its call gets no error") {
  for (const bool failed : {false, true}) {
    Late late(1);
    Collective1& earlier = late.calls.Make();
    Results& result = late.calls.Result();
    const auto first = late.calls.Enter(earlier, 0, 2001, 2, result, false);
    const auto second = late.calls.Enter(earlier, 1, 2001, 2, result, false);
    ControlSegment& segment = late.world.node(0).control_segment();
    if (failed) {
      first->Fail(InvalidArgumentError("had enough"));
    } else {
      while (segment.slots[segment.Find(2001)].exited.load() == 0) second->Advance();
      while (!first->over()) first->Advance();
    }
    CHECK(result.num_ended() == 1 && result.error(0).empty() == !failed);
    late.First();
    WaitForComparisons();
    late.world.progress_thread(1).Add(second);
    CHECK(result.WaitFor(2));
    CHECK(failed ? Has(result.error(1), "aborted: had enough") : result.error(1).empty());
    if (failed) late.world.progress_thread(0).Add(first);  // reclaims its slot
    late.Second();
  }
}

}  // namespace
}  // namespace jaxcomm
