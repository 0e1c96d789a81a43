// The ways in which a collective between processes ends. The test advances the calls itself, so nothing depends on
// time.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "standard_error.h"
#include "world.h"

namespace jaxcomm {
namespace {

// Two processes of a node. Process 1 runs rank 6, and process 0 runs rank 7.
struct Pair {
  World world{2};
  std::mt19937 random{11};
  Collective1 one;
  Results results{2};
  std::shared_ptr<InterProcessCall> calls[2];

  explicit Pair(const Algorithm& algorithm, const Request& request, bool single_copy = false)
      : one(algorithm, request, {1, 0}, single_copy, random) {
    one.first_rank = 6;
    for (const int p : {0, 1}) world.progress_thread(p).Stop();  // it does not wake by itself
  }
  static Pair Direct() { return Pair(Named(Collective::kAllGather, "direct"), Exchange(2, 100)); }
  static Pair Ring() { return Pair(Named(Collective::kAllReduce, "ring"), Sum(2, 100)); }

  void Enter(uint64_t key, double timeout_s = 60) {
    for (const int p : {0, 1}) {
      calls[p] = one.CallOf(world, p, key, results, timeout_s);
      calls[p]->Enter();
    }
  }
  bool Move(int process) { return jaxcomm::Move(*calls[process]); }
  // Runs an entered call until it succeeds.
  void Succeed() {
    for (auto& output : one.outputs) std::fill(output.begin(), output.end(), -1);
    const int before = results.num_ended();
    for (int turn = 0; turn < 50 && results.num_ended() < before + 2; ++turn) Move(turn % 2);
    CHECK(results.num_ended() == before + 2 && one.outputs == one.expected);
    for (const int p : {0, 1}) CHECK(results.error(p).empty() && calls[p]->over() && !calls[p]->failed());
  }
};

const Status kEnough = InvalidArgumentError("had enough");

// Whether the action wakes the process, which sleeps.
bool Rings(Node& node, const std::function<void()>& action) {
  const uint32_t seen = node.control_segment().PrepareToSleep();
  action();
  node.control_segment().StayAwake();
  return node.control_segment().doorbell.load() != seen;
}

TEST_CASE("the entry and the signals of another process wake a process") {
  Pair pair = Pair::Ring();
  for (const int p : {0, 1}) pair.calls[p] = pair.one.CallOf(pair.world, p, 1000, pair.results);
  pair.calls[0]->Enter();
  CHECK(Rings(pair.world.node(0), [&] { pair.calls[1]->Enter(); }));
  CHECK(Rings(pair.world.node(1), [&] { CHECK(!pair.Move(0)); }));  // it has not left the call
}

TEST_CASE("a call finishes when all others have left, and not before") {
  Pair pair = Pair::Direct();
  const Values before = pair.one.outputs;
  pair.Enter(1000);
  CHECK(!pair.Move(0) && !pair.Move(0));
  CHECK(pair.results.num_ended() == 0 && pair.one.outputs == before);
  CHECK(Rings(pair.world.node(0), [&] { CHECK(pair.Move(1)); }));  // all have written: this one is through
  CHECK(pair.results.num_ended() == 1 && pair.one.outputs[0] == pair.one.expected[0]);
  CHECK(pair.one.outputs[1] == before[1]);
  CHECK(pair.Move(0));
  CHECK(pair.results.num_ended() == 2 && pair.one.outputs == pair.one.expected);
  for (const int p : {0, 1}) CHECK(pair.results.error(p).empty());
}

// A process that aborts also leaves the slots of the others. That alone does not mean that it has put its data.
TEST_CASE("the abort of a peer is detected before it has found the others, before its put, and after its work") {
  enum class Done { kNothing, kFoundOthers, kWork };
  for (const auto& [done, phase] : {std::pair{Done::kNothing, "in the entry barrier, "},
                                    {Done::kFoundOthers, "in the exit barrier, "},
                                    {Done::kWork, ""}}) {
    Pair pair = Pair::Direct();
    pair.Enter(1000);
    if (done == Done::kFoundOthers) {
      CHECK(pair.calls[1]->Advance() == InterProcessCall::AdvanceResult::kMoved);
      CHECK(!pair.Move(0));  // this one has done its work
    }
    if (done == Done::kWork) CHECK(!pair.Move(1));  // it has counted itself out
    CHECK(Rings(pair.world.node(0), [&] { pair.calls[1]->Fail(kEnough); }));
    CHECK(pair.results.num_ended() == 1);
    CHECK(pair.Move(0));
    CHECK(Has(pair.results.error(0), phase) && Has(pair.results.error(0), "ranks [6] (process 1) aborted: had enough"));
    CHECK(pair.results.error(1) == "had enough");
  }
}

TEST_CASE("only the first failure counts, and none after success") {
  Pair pair = Pair::Ring();
  pair.Enter(1000);
  const InterProcessProgram& program = *pair.one.program;  // both come before the last thread has left
  CHECK(pair.calls[0]->DestinationOf(1, program.fingerprint(), 1, Space::kOutput, 0, program.output_bytes()) !=
        nullptr);
  pair.calls[0]->Fail(kEnough);
  pair.calls[0]->Fail(InvalidArgumentError("more than enough"));
  CHECK(pair.results.num_ended() == 0);
  pair.calls[0]->OnPutDone();
  CHECK(pair.results.error(0) == "had enough");
  CHECK(pair.Move(1) && Has(pair.results.error(1), "had enough"));
  pair.calls[1]->Fail(InvalidArgumentError("more than enough"));
  CHECK(Has(pair.results.error(1), "had enough"));

  Pair good = Pair::Ring();
  good.Enter(1000);
  Results same(1);
  good.one.CallOf(good.world, 0, 1000, same)->Enter();
  CHECK(same.error(0) == "psum at test: another call with the same key is in flight in this process");
  good.Succeed();
  const std::shared_ptr<InterProcessCall> old = good.calls[0];
  good.Enter(1000);  // in the same slot
  old->Fail(kEnough);
  CHECK(!old->failed() && good.results.error(0).empty());
  CHECK(good.world.node(0).control_segment().slots[good.world.node(0).control_segment().Find(1000)].failed.load() == 0);
}

TEST_CASE("a call without a slot fails and gives its block back") {
  Pair pair = Pair::Ring();
  Node& node = pair.world.node(0);
  const Block block = ValueOf(node.Allocate(pair.one.program->block_bytes(0)));
  node.Release(block);
  for (auto& key : node.control_segment().keys) key.store(ControlSegment::kRetired);
  pair.Enter(1000);
  CHECK(pair.results.error(0) ==
        "psum at test: too many collectives are in flight: no free slot in the control segment");
  CHECK(pair.calls[0]->Reclaim() && ValueOf(node.Allocate(block.bytes)).offset == block.offset);
  CHECK(ValueOf(node.Allocate(block.bytes)).offset != block.offset);  // given back once
}

// Slots and blocks that are used again keep no state of the previous call.
TEST_CASE("one slot serves calls that succeed and calls that fail in turn") {
  for (const bool direct : {true, false}) {
    World world(2);
    std::mt19937 random(11);
    const uint64_t key = 1000;
    std::vector<uint64_t> offsets;
    for (int round = 0; round < 6; ++round) {
      const int64_t count = round % 2 == 0 ? 100 : 7;
      Collective1 one(Named(direct ? Collective::kAllGather : Collective::kAllReduce, direct ? "direct" : "ring"),
                      direct ? Exchange(2, count) : Sum(2, count), {1, 0}, false, random);
      Results results(2);
      std::shared_ptr<InterProcessCall> calls[2];
      // Each turn has its own run, so the next does not find its failure. The key, which determines the slot, stays.
      for (const int p : {0, 1}) calls[p] = one.CallOf(world, p, key, results, 60, round);
      for (const auto& call : calls) call->Enter();
      ControlSegment& control_segment = world.node(0).control_segment();
      const int slot = control_segment.Find(key);
      CHECK(slot >= 0 && control_segment.slots[slot].What() == "call 1000 of " + std::to_string(count) + " elements");
      offsets.push_back(control_segment.slots[slot].offset);
      if (round % 3 != 2) {
        Move(*calls[0]);
        CHECK(results.num_ended() == 0);
        for (int turn = 1; turn < 50 && results.num_ended() < 2; ++turn) Move(*calls[turn % 2]);
        CHECK(results.num_ended() == 2 && one.outputs == one.expected);
        for (const int p : {0, 1}) CHECK(results.error(p).empty());
      } else {
        CHECK(calls[1]->Advance() == InterProcessCall::AdvanceResult::kMoved);
        calls[0]->Fail(kEnough);
        CHECK(results.num_ended() == 1);
        CHECK(!calls[0]->Reclaim());  // the other process may still touch it
        CHECK(control_segment.Find(key) < 0 && control_segment.keys[slot].load() != 0);
        Move(*calls[1]);
        calls[1]->Check(Clock::now());  // a call that waits for a signal detects the failure here
        CHECK(results.num_ended() == 2 && Has(results.error(1), "aborted: had enough"));
        for (const int p : {1, 0}) CHECK(calls[p]->Reclaim());
      }
      CHECK(control_segment.keys[slot].load() == 0);
    }
    CHECK(offsets == std::vector<uint64_t>(6, offsets[0]));
  }
}

// Memory that a failed peer may still read or write is not reused, whichever of the two failed first.
TEST_CASE("a block is free again when the last of its users is done") {
  Pair pair = Pair::Ring();
  pair.Enter(1000);
  const auto block_of = [&](int process) {
    ControlSegment& control_segment = pair.world.node(process).control_segment();
    return control_segment.slots[control_segment.Find(1000)].offset;
  };
  const uint64_t offset = block_of(0);
  const auto next = [&] { return ValueOf(pair.world.node(0).Allocate(pair.one.program->block_bytes(0))); };
  for (const int p : {0, 1}) CHECK(pair.calls[p]->Advance() == InterProcessCall::AdvanceResult::kMoved);
  pair.calls[0]->Fail(kEnough);
  CHECK(!pair.calls[0]->Reclaim());
  const Block other = next();
  CHECK(other.offset != offset);
  const InterProcessProgram& program = *pair.one.program;  // of process 1, something is still at work when it fails
  CHECK(pair.calls[1]->DestinationOf(0, program.fingerprint(), 0, Space::kOutput, 0, program.output_bytes()) !=
        nullptr);
  pair.calls[1]->Check(Clock::now());
  CHECK(pair.calls[1]->failed() && pair.results.num_ended() == 1 && !pair.calls[0]->Reclaim());
  pair.calls[1]->OnPutDone();
  CHECK(pair.results.num_ended() == 2 && pair.calls[0]->Reclaim());
  const Block same = next();
  CHECK(same.offset == offset);
}

TEST_CASE("a call fails at its deadline, with a grace period while it runs") {
  enum class Phase { kEntry, kRunning, kExit };
  const std::string call = " in call 1000 of 100 elements ", limit = " within 500 s (JAXCOMM_TIMEOUT_S)";
  for (const auto& [phase, why] :
       {std::pair<Phase, std::string>{Phase::kEntry, "in the entry barrier, ranks [7] (process 0)" + call +
                                                         "waited for ranks [6] (process 1) in no collective, which "
                                                         "did not enter the call" +
                                                         limit},
        {Phase::kRunning, "while running, rank 7" + call + "got no signal from rank 6 (process 1)" + limit},
        {Phase::kExit, "in the exit barrier, ranks [7] (process 0)" + call +
                           "waited for ranks [6] (process 1), which did not leave the call" + limit}}) {
    const bool running = phase == Phase::kRunning;
    Pair pair = phase == Phase::kExit ? Pair::Direct() : Pair::Ring();
    const auto began = Clock::now();
    for (const int p : {0, 1}) {
      pair.calls[p] = pair.one.CallOf(pair.world, p, 1000, pair.results, 500);
      if (p == 0 || phase != Phase::kEntry) pair.calls[p]->Enter();
    }
    CHECK(!pair.Move(0));
    // While it runs, beyond the deadline, unless this machine is slow.
    pair.calls[0]->Check(began + std::chrono::milliseconds(running ? 500'290 : 499'999));
    CHECK(pair.results.num_ended() == 0);
    pair.calls[0]->Check(Clock::now() + std::chrono::milliseconds(running ? 501'000 : 500'001));
    CHECK(pair.results.error(0) == "psum at test: " + why && pair.calls[0]->failed());
  }
}

// Three nodes of a process each.
struct Nodes {
  World world{3, 3, MemoryNetworkOptions()};
  std::mt19937 random{11};
  Collective1 one;
  Results results{3};
  const Clock::time_point began = Clock::now();
  std::shared_ptr<InterProcessCall> call;  // of process 0, which has rank 6

  Nodes(const char* algorithm, int64_t block_count)
      : one(Named(Collective::kAllGather, algorithm), Gather(3, 1, block_count), {0, 1, 2}, false, random, &world, 3) {
    one.first_rank = 6;
    call = one.CallOf(world, 0, 1001, results, 500);
    call->Enter();
    Move(*call);
  }
  void Deliver() {
    while (world.fabric().Step()) {
    }
  }
};

// Rank 0 sends its input to the others, whose processes leave the call and take nothing.
TEST_CASE("a call that is done waits for its sends until its deadline") {
  Nodes nodes("direct", 50'000);
  const std::shared_ptr<InterProcessCall>& call = nodes.call;
  const auto waits = [&] {
    nodes.Deliver();
    Move(*call);
    return nodes.results.num_ended() == 0 && nodes.world.active_messages(0)->Reachable(1).ok();
  };
  CHECK(waits());
  CHECK(call->DestinationOf(1, nodes.one.program->fingerprint(), 0, Space::kOutput, 0, 4) != nullptr);
  call->OnLost(7);  // of another call
  for (const int32_t p : {1, 2}) {
    nodes.world.active_messages(p)->SendExited(0, 1001, {nodes.one.program->fingerprint(), 0}, "");
  }
  nodes.Deliver();
  call->OnLost(1);                                                         // has left
  CHECK(waits() && nodes.world.node(0).control_segment().Find(1001) < 0);  // done
  call->Check(nodes.began + std::chrono::milliseconds(499'999));
  CHECK(waits());
  const auto late = Clock::now() + std::chrono::milliseconds(500'001);
  for (const int later_ms : {0, 499}) {  // the last bytes may be on their way
    call->Check(late + std::chrono::milliseconds(later_ms));
    CHECK(waits());
  }
  call->OnPutDone();  // after each payload, the next one has as much time
  for (const int later_ms : {500, 999}) {
    call->Check(late + std::chrono::milliseconds(later_ms));
    CHECK(waits());
  }
  call->Check(late + std::chrono::milliseconds(1000));
  CHECK(!waits() && nodes.results.num_ended() == 1 && call->over() && !call->failed());
  CHECK(
      nodes.results.error(0) ==
      "psum at test: in the exit barrier, ranks [7] (process 1), [8] (process 2) did not take their data within 500 s "
      "(JAXCOMM_TIMEOUT_S)");
  CHECK(nodes.world.active_messages(0)->Reachable(1).message() == "it did not take its data in time");
}

TEST_CASE("between nodes, the error at the deadline names those that have not left, or are in another call") {
  const std::string prefix = "psum at test: ", limit = " within 500 s (JAXCOMM_TIMEOUT_S)";
  const std::string exit =
      prefix + "in the exit barrier, ranks [6] (process 0) in call 1001 of 100 elements waited for ";
  for (const auto& [ring, exited, error] :
       {std::tuple{false, false, exit + "ranks [7] (process 1); ranks [8] (process 2), which did not leave the call"},
        {false, true, exit + "ranks [8] (process 2), which did not leave the call"},
        {true, false,
         prefix + "while running, rank 6 in call 1001 of 100 elements got no signal from rank 8 (process 2), "
                  "which is in pmax,"}}) {
    Nodes nodes(ring ? "ring" : "direct", 100);
    nodes.world.active_messages(2)->SendEntered(0, 2001, {}, {}, "pmax");
    nodes.Deliver();
    if (exited) nodes.call->OnExited(1, {nodes.one.program->fingerprint(), 0}, "");
    nodes.call->Check(Clock::now() + std::chrono::milliseconds(501'000));
    CHECK(nodes.results.error(0) == error + limit);
  }
}

TEST_CASE("between nodes, the error names the process that has failed, is lost or is in another call") {
  const std::string another =
      "calls do not match: ranks [6] (process 0) are in call 1001 of 100 elements, ranks [8] (process 2) are in pmax";
  using Act = std::function<void(World&)>;
  for (const auto& [act, error] : std::initializer_list<std::pair<Act, std::string>>{
           {[](World& world) { world.fabric().Lose(2); },
            "the process of ranks [8] (process 2) cannot be reached: the connection was lost"},
           {[](World& world) { world.active_messages(2)->SendRunFailed(0, 1, "had enough"); },
            "ranks [8] (process 2) aborted: had enough"},
           {[](World& world) { world.active_messages(2)->SendEntered(0, 1001, {}, {}, "pmax"); }, another},
           {[](World& world) { world.active_messages(2)->SendExited(0, 1001, {}, "pmax"); }, another}}) {
    Nodes nodes("ring", 100);
    act(nodes.world);
    nodes.Deliver();
    nodes.call->Check(Clock::now());
    CHECK(nodes.results.error(0) == "psum at test: while running, " + error);
    Results later(3);  // a loss is also that of the next call, and the others are over
    const auto next = nodes.one.CallOf(nodes.world, 0, 2001, later);
    next->Enter();
    Move(*next);
    next->Check(Clock::now());
    CHECK(later.error(0) == (Has(error, "cannot be reached") ? nodes.results.error(0) : ""));
  }
}

TEST_CASE("a warning on standard error names late processes, again whenever the wait has doubled") {
  Pair pair = Pair::Ring();
  pair.calls[0] = pair.one.CallOf(pair.world, 0, 1000, pair.results, 600, -1, 100);
  pair.calls[0]->Enter();
  CHECK(!pair.Move(0));
  const Clock::time_point began = Clock::now();
  std::string text;
  {
    const StandardError error;
    for (const int seconds : {10, 150, 190, 450, 590}) pair.calls[0]->Check(began + std::chrono::seconds(seconds));
    text = error.text();
  }
  const std::string late =
      "warning: psum at test: in the entry barrier, ranks [7] (process 0) in call 1000 of 100 elements waited for "
      "ranks [6] (process 1) in no collective, which did not enter the call ";
  const std::string by = "; an error follows after 600 s (JAXCOMM_TIMEOUT_S)\n";
  CHECK(text == late + "within 100 s (JAXCOMM_WARN_S)" + by + late + "within 400 s" + by);  // a late check warns once
  CHECK(pair.results.num_ended() == 0);
}

TEST_CASE("late processes are named together with their current calls, and no others") {
  World world(3);
  std::mt19937 random(11);
  Collective1 one(Named(Collective::kAllReduce, "ring"), Sum(3, 100), {0, 1, 2}, false, random);
  Results results(3), more(3);
  const auto call = one.CallOf(world, 0, 1000, results), same = one.CallOf(world, 1, 1000, results),
             other = one.CallOf(world, 2, 2000, more);
  for (const auto& entered : {call, same, other}) entered->Enter();
  CHECK(call->Advance() != InterProcessCall::AdvanceResult::kOver);
  call->Check(Clock::now() + std::chrono::seconds(70));
  CHECK(results.error(0) ==
        "psum at test: in the entry barrier, ranks [0] (process 0) in call 1000 of 100 elements waited for ranks [2] "
        "(process 2) in call 2000 of 100 elements, which did not enter the call within 60 s (JAXCOMM_TIMEOUT_S)");
  const auto late = one.CallOf(world, 2, 1000, results);
  late->Enter();
  CHECK(Move(*late) && Has(results.error(2), "ranks [0] (process 0) aborted: psum at test: in the entry barrier"));
}

// Remote reads of large buffers fail if their owner has ended or has aborted and freed them.
TEST_CASE("unreadable memory of a peer") {
  if (!Node::AllowSingleCopy()) return;
  constexpr int64_t kCount = 50'000;
  for (const auto& [collective, says_why] : {std::pair<Collective, bool>{Collective::kAllGather, true},
                                             {Collective::kAllGather, false},
                                             {Collective::kAllReduce, false}}) {
    Request request = Sum(2, kCount);
    request.collective = collective;
    Pair pair(Named(collective, "direct"), request, true);
    CHECK(!pair.one.program->windowed(Space::kInput));
    pair.Enter(1000);
    void* const gone = mmap(nullptr, kCount * sizeof(int32_t), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(gone != MAP_FAILED);
    // The published addresses of process 1's buffers.
    Peer* const peer = pair.world.node(0).Find(1);
    const ControlSegment& control_segment = peer->control_segment();
    char* const block = ValueOf(peer->BlockOf(control_segment.slots[control_segment.Find(1000)]));
    *reinterpret_cast<uint64_t*>(block + pair.one.program->addresses(0)) = reinterpret_cast<uint64_t>(gone);
    if (says_why) pair.world.node(1).control_segment().AddFailure(1, "had enough");
    CHECK(pair.Move(0));
    CHECK(pair.results.error(0) ==
          (says_why ? "psum at test: while running, ranks [6] (process 1) aborted: had enough"
                    : "psum at test: while running, the memory of ranks [6] (process 1) cannot be read: their process "
                      "has ended"));
    munmap(gone, kCount * sizeof(int32_t));
  }
}

// The functions of MessageHandler that the network's thread calls.
TEST_CASE("payloads and signals of other nodes have valid destinations or are dropped") {
  World world(2, 2);
  std::mt19937 random(11);
  Request request = Gather(2, 2, 10);
  for (const bool reduce : {false, true}) {
    if (reduce) request.collective = Collective::kAllReduce;
    Collective1 one(Named(request.collective, "ring"), request, {0, 0, 1, 1}, false, random, &world, 2);
    Results results(2);
    const auto call = one.CallOf(world, 0, reduce ? 2000 : 1000, results);
    call->Enter();
    const uint64_t fingerprint = one.program->fingerprint();
    const int64_t size = one.program->output_bytes();
    const auto place = [&](int32_t rank, Space space, int64_t offset, int64_t bytes, uint64_t brings) {
      void* const at = call->DestinationOf(1, brings, rank, space, offset, bytes);
      if (at != nullptr) call->OnPutDone();
      return static_cast<char*>(at);
    };
    char* const first = place(1, Space::kOutput, 0, size, fingerprint);
    CHECK(first != nullptr);
    if (!one.program->windowed(Space::kOutput)) CHECK(first == reinterpret_cast<char*>(one.outputs[1].data()));
    CHECK(place(1, Space::kOutput, 8, size - 8, fingerprint) == first + 8);
    CHECK(place(0, Space::kOutput, 0, size, fingerprint) != first);
    CHECK(place(1, Space::kOutput, 8, size - 7, fingerprint) == nullptr);
    CHECK(place(1, Space::kOutput, 0, size + 1, fingerprint) == nullptr);
    CHECK(place(1, Space::kOutput, -1, 1, fingerprint) == nullptr);
    CHECK(place(1, Space::kInput, 0, 1, fingerprint) == nullptr);
    CHECK(place(2, Space::kOutput, 0, size, fingerprint) == nullptr);  // of the other process
    CHECK(place(4, Space::kOutput, 0, size, fingerprint) == nullptr);
    CHECK(place(-1, Space::kOutput, 0, size, fingerprint) == nullptr);
    CHECK(place(1, Space::kOutput, 0, size, fingerprint + 1) == nullptr);
    for (int32_t r = 0; r < 2; ++r) {
      const int64_t scratch = one.program->program()->plans[r].scratch_count * 4;
      if (scratch > 0) CHECK(place(r, Space::kScratch, scratch - 4, 4, fingerprint) != nullptr);
      CHECK(place(r, Space::kScratch, scratch, 4, fingerprint) == nullptr);
    }
    for (const int32_t rank : {-1, 2, 4}) call->OnSignal(0, rank);
    for (const int32_t rank : {-1, 4}) call->OnSignal(rank, 0);
    CHECK(Rings(world.node(0), [&] { call->OnSignal(2, 0); }));
    CHECK(Rings(world.node(0), [&] { call->OnExited(1, fingerprint, ""); }));
    CHECK(results.num_ended() == 0);
    // The call does not end while a payload has a destination.
    CHECK(call->DestinationOf(1, fingerprint, 1, Space::kOutput, 0, size) != nullptr);
    call->Fail(kEnough);
    CHECK(results.num_ended() == 0);
    CHECK(call->DestinationOf(1, fingerprint, 1, Space::kOutput, 0, size) == nullptr);
    CHECK(results.num_ended() == 0);
    call->OnPutDone();
    CHECK(results.num_ended() == 1 && results.error(0) == "had enough");
  }
}

}  // namespace
}  // namespace jaxcomm
