// Validate on plans written by hand. Each correct plan is one step away from a wrong one. Every message of Validate
// occurs here, word for word.
#include <limits>

#include "../../ffi/plan/boxes.h"
#include "written.h"

namespace jaxcomm {
namespace {

const Request kBroadcast = Ask(Collective::kBroadcast, 1, 3, 4);  // rank 0 to ranks 1 and 2
const Step kOwn = Copy(Output(0), Input(0), 4);
const Step kDown = Put(Output(1), Input(0), 4);
const Step kOn = Put(Output(2), Output(1), 4);

// The first step of rank 0 is `step`, of an otherwise correct group with 3 elements of scratch.
void ExpectStep(const std::string& fault, const Step& step, const Request& request = kBroadcast) {
  static const char* const kinds[] = {"copy", "put", "get", "reduce", "zero", "signal", "wait"};
  const std::string kind = kinds[static_cast<int>(step.kind)];
  const std::string peer = step.peer >= 0 ? " " + std::to_string(step.peer) : "";
  Expect("rank 0, step 0 (" + kind + peer + "): " + fault, Group({{step}, {}, {}}, 3), request);
}

TEST_CASE("a chain needs a signal after its put, and only that") {
  Expect("", Group({{kDown, Signal(1), kOwn}, {Wait(0), kOn}, {}}), kBroadcast);
  Expect("", Group({{kOwn, kDown, Signal(1)}, {Wait(0), kOn}, {}}), kBroadcast);
  const std::string early = "(put 2): reads output [0, 4) of rank 1, which rank 0 may not have written yet";
  Expect("rank 1, step 0 " + early, Group({{kDown, kOwn}, {kOn}, {}}), kBroadcast);
  Expect("rank 1, step 1 " + early, Group({{Signal(1), kDown, kOwn}, {Wait(0), kOn}, {}}), kBroadcast);
  Expect("rank 1, step 0 " + early, Group({{kDown, Signal(1), kOwn}, {kOn, Wait(0)}, {}}), kBroadcast);
}

TEST_CASE("the k-th wait matches the k-th signal") {
  const Step first = Put(Output(1), Input(0), 2), second = Put(Output(1, 2), Input(0, 2), 2);
  const Step first_on = Put(Output(2), Output(1), 2), second_on = Put(Output(2, 2), Output(1, 2), 2);
  const std::vector<Step> down = {first, Signal(1), second, Signal(1), kOwn};
  Expect("", Group({down, {Wait(0), first_on, Wait(0), second_on}, {}}), kBroadcast);
  Expect("rank 1, step 1 (put 2): reads output [2, 4) of rank 1, which rank 0 may not have written yet",
         Group({down, {Wait(0), second_on, Wait(0), first_on}, {}}), kBroadcast);
}

TEST_CASE("waits and signals must match") {
  Expect("rank 1, step 0 (wait 0): waits forever: rank 1 waits for rank 0, which has ended",
         Group({{kDown, kOwn}, {Wait(0), kOn}, {}}), kBroadcast);
  const std::string cycle = "waits forever: rank 0 waits for rank 1, which waits for rank 0";
  Expect("rank 0, step 0 (wait 1): " + cycle, Group({{Wait(1), Signal(1)}, {Wait(0), Signal(0)}, {}}), kBroadcast);
  Expect("rank 1 never waits for a signal of rank 0", Group({{kDown, Signal(1), Signal(1), kOwn}, {Wait(0), kOn}, {}}),
         kBroadcast);
  Expect("rank 2 never waits for a signal of rank 1", Group({{kDown, Signal(1), kOwn}, {Wait(0), kOn, Signal(2)}, {}}),
         kBroadcast);
}

TEST_CASE("two writes need an order") {
  const Step read = Get(Output(1), Input(0), 4);
  Expect("rank 1, step 0 (get 0): writes output [0, 4) of rank 1, which rank 0 may write later",
         Group({{kDown, kOwn}, {read}, {Get(Output(2), Input(0), 4)}}), kBroadcast);
  Expect("", Group({{kDown, Signal(1), kOwn}, {Wait(0), read}, {Get(Output(2), Input(0), 4)}}), kBroadcast);
  // Only the last element is written twice.
  Expect("rank 1, step 0 (get 0): writes output [3, 4) of rank 1, which rank 0 may write later",
         Group({{Put(Output(1, 3), Input(0, 3), 1), kOwn}, {read}, {Get(Output(2), Input(0), 4)}}), kBroadcast);
}

// Rank 1 forwards its output and reads it, in some order. Then rank 0 writes the output again.
std::vector<Plan> WrittenAgain(std::vector<Step> reader, int num_waits) {
  std::vector<Step> writer = {kOwn, kDown, Signal(1)};
  for (int i = 0; i < num_waits; ++i) writer.push_back(Wait(1));
  writer.push_back(kDown);
  return Group({writer, std::move(reader), {}}, 4);
}

TEST_CASE("elements that are read twice may not be overwritten after the first read") {
  const Step keep = Copy(Scratch(1), Output(1), 4);
  const std::string fault = "(put 1): writes output [0, 4) of rank 1, which rank 1 may not have read yet";
  Expect("", WrittenAgain({Wait(0), kOn, Signal(0)}, 1), kBroadcast);
  Expect("rank 1, step 1 (put 2): reads output [0, 4) of rank 1, which rank 0 may not have written yet",
         WrittenAgain({Wait(0), kOn}, 0), kBroadcast);
  Expect("rank 0, step 4 " + fault, WrittenAgain({Wait(0), Signal(0), kOn}, 1), kBroadcast);
  // Read twice: the signal must follow the second read, not just the first.
  Expect("", WrittenAgain({Wait(0), kOn, keep, Signal(0)}, 1), kBroadcast);
  Expect("rank 0, step 4 " + fault, WrittenAgain({Wait(0), kOn, Signal(0), keep}, 1), kBroadcast);
  Expect("", WrittenAgain({Wait(0), kOn, Signal(0), keep, Signal(0)}, 2), kBroadcast);
  // All elements are read, and some are written again.
  Expect("rank 0, step 4 (put 1): writes output [2, 4) of rank 1, which rank 1 may not have read yet",
         Group({{kOwn, kDown, Signal(1), Wait(1), Put(Output(1, 2), Input(0, 2), 2)}, {Wait(0), Signal(0), kOn}, {}}),
         kBroadcast);
  // Read twice, the second time only a part.
  Expect("rank 0, step 4 (put 1): writes output [1, 3) of rank 1, which rank 1 may not have read yet",
         WrittenAgain({Wait(0), kOn, Signal(0), Copy(Scratch(1), Output(1, 1), 2)}, 1), kBroadcast);
}

TEST_CASE("every read must be ordered before the next write") {
  // Ranks 1 and 2 read scratch of rank 0, which then changes it.
  const Step fill = Copy(Scratch(0), Input(0), 4), again = Zero(Scratch(0), 4);
  const auto plans = [&](std::vector<Step> rest) {
    std::vector<Step> first = {kOwn, fill, Signal(1), Signal(2)};
    first.insert(first.end(), rest.begin(), rest.end());
    const auto reads = [](int32_t rank) {
      return std::vector<Step>{Wait(0), Get(Output(rank), Scratch(0), 4), Signal(0)};
    };
    return Group({first, reads(1), reads(2)}, 4);
  };
  Expect("", plans({Wait(1), Wait(2), again}), kBroadcast);
  Expect("", plans({Wait(2), Wait(1), again}), kBroadcast);
  const std::string fault = "(zero): writes scratch [0, 4) of rank 0, which rank ";
  Expect("rank 0, step 5 " + fault + "2 may not have read yet", plans({Wait(1), again, Wait(2)}), kBroadcast);
  Expect("rank 0, step 5 " + fault + "1 may not have read yet", plans({Wait(2), again, Wait(1)}), kBroadcast);
}

TEST_CASE("outputs must be complete and correct") {
  Expect("output [0, 4) of rank 2 is never written", Group({{kDown, kOwn}, {}, {}}), kBroadcast);
  Expect("output [3, 4) of rank 2 is never written", Group({{kDown, kOwn, Put(Output(2), Input(0), 3)}, {}, {}}),
         kBroadcast);
  const Step to_2 = Put(Output(2), Input(0), 4);
  Expect("", Group({{kDown, kOwn, to_2}, {}, {}}), kBroadcast);
  Expect(
      "output [0, 4) of rank 0 ends with the wrong contents: zeros by rank 0, step 1 (zero), expected input [0, 4) of "
      "rank 0",
      Group({{kDown, Zero(Output(0), 4), to_2}, {}, {}}), kBroadcast);
  Expect(
      "output [0, 4) of rank 1 ends with the wrong contents: input [0, 4) of rank 1 by rank 1, step 0 (copy), expected "
      "input [0, 4) of rank 0",
      Group({{kOwn, to_2}, {Copy(Output(1), Input(1), 4)}, {}}), kBroadcast);
  // The right elements in wrong places: the middle two exchanged.
  const std::vector<Step> exchanged = {kOwn,
                                       kDown,
                                       Put(Output(2), Input(0), 1),
                                       Put(Output(2, 1), Input(0, 2), 1),
                                       Put(Output(2, 2), Input(0, 1), 1),
                                       Put(Output(2, 3), Input(0, 3), 1)};
  Expect(
      "output [1, 2) of rank 2 ends with the wrong contents: input [2, 3) of rank 0 by rank 0, step 3 (put 2), "
      "expected input [1, 2) of rank 0",
      Group({exchanged, {}, {}}), kBroadcast);
}

TEST_CASE("a permute without a source must give zeros") {
  const Request request = Ask(Collective::kPermute, 1, 2, 4);  // of rank 0 to rank 1; rank 0 gets zeros
  Expect("", Group({{Zero(Output(0), 4), kDown}, {}}), request);
  Expect(
      "",
      Group({{Zero(Scratch(0), 2), Copy(Output(0, 2), Scratch(0), 2), Copy(Output(0), Scratch(0), 2), kDown}, {}}, 2),
      request);
  Expect("output [0, 4) of rank 0 is never written", Group({{kDown}, {}}), request);
  Expect(
      "output [0, 4) of rank 0 ends with the wrong contents: input [0, 4) of rank 0 by rank 0, step 0 (copy), expected "
      "zeros",
      Group({{kOwn, kDown}, {}}), request);
}

TEST_CASE("puts across the network arrive with the next signal to their target") {
  // Rank 0 puts to rank 1 but signals rank 2, which signals rank 1: in order, yet not in the order of a network.
  const std::vector<std::vector<Step>> around = {{kDown, Signal(2), kOwn}, {Wait(2), kOn}, {Wait(0), Signal(1)}};
  const std::string fault =
      "rank 1, step 1 (put 2): reads output [0, 4) of rank 1, which rank 0 may not have written yet";
  for (const Request& one : {Ask(Collective::kBroadcast, 3, 1, 4), AskApart(Collective::kBroadcast, 1, 3, 4)})
    Expect("", Group(around), one);
  Expect(fault, Group(around), AskApart(Collective::kBroadcast, 3, 1, 4));
  // With a signal to rank 1, before or after the other signal, rank 1 may read it.
  for (const auto& first :
       {std::vector<Step>{kDown, Signal(1), Signal(2), kOwn}, {kDown, Signal(2), Signal(1), kOwn}}) {
    Expect("", Group({first, {Wait(0), Wait(2), kOn}, around[2]}), AskApart(Collective::kBroadcast, 3, 1, 4));
  }
  // A signal before the put does not cover it.
  Expect(fault, Group({{Signal(1), kDown, Signal(1), kOwn}, {Wait(0), kOn, Wait(0)}, {}}),
         AskApart(Collective::kBroadcast, 3, 1, 4));
  // A peer in the target's node may read it after a signal of the target, not after a signal of the sender.
  const std::vector<Step> root = {kOwn, kDown, Put(Output(2), Input(0), 4), Signal(2), Signal(3)};
  const Step read = Get(Output(3), Output(2), 4);
  Expect("", Group({root, {}, {Wait(0), Signal(3)}, {Wait(0), Wait(2), read}}),
         AskApart(Collective::kBroadcast, 2, 2, 4));
  Expect("", Group({root, {}, {Wait(0)}, {Wait(0), read}}), Ask(Collective::kBroadcast, 2, 2, 4));
  const std::string late = "(get 2): reads output [0, 4) of rank 2, which rank 0 may not have written yet";
  Expect("rank 3, step 1 " + late, Group({root, {}, {Wait(0)}, {Wait(0), read}}),
         AskApart(Collective::kBroadcast, 2, 2, 4));
  Expect("rank 3, step 2 " + late, Group({root, {}, {Signal(3), Wait(0)}, {Wait(2), Wait(0), read}}),
         AskApart(Collective::kBroadcast, 2, 2, 4));  // no signal after its wait
}

TEST_CASE("memory of other nodes may not be read") {
  const Request one_space = Ask(Collective::kBroadcast, 2, 1, 4), apart = AskApart(Collective::kBroadcast, 2, 1, 4);
  const std::vector<Plan> read = Group({{kOwn}, {Get(Output(1), Input(0), 4)}});
  Expect("", read, one_space);
  Expect("rank 1, step 0 (get 0): reads from another node", read, apart);
  Expect("", Group({{kOwn, kDown}, {}}), apart);
  Expect("", Group({{kOwn, kDown, kDown}, {}}), apart);  // puts of a pair arrive in order

  const Request sum = Ask(Collective::kAllReduce, 1, 2, 4);
  const std::vector<Plan> sums = Build("one_shot", sum);
  Expect("", sums, sum);
  Expect("rank 0, step 0 (reduce): reads from another node", sums, AskApart(Collective::kAllReduce, 2, 1, 4));
}

TEST_CASE("sums count every rank once") {
  const Request request = Ask(Collective::kAllReduce, 1, 2, 4);
  const auto plans = [](std::vector<Place> sources, std::vector<Step> before = {}) {
    before.push_back(Reduce(Output(0), 0, static_cast<int32_t>(sources.size()), 4));
    before.push_back(Put(Output(1), Output(0), 4));
    std::vector<Plan> group = Group({before, {}}, 8);
    group[0].sources = std::move(sources);
    return group;
  };
  Expect("", plans({Input(0), Input(1)}), request);
  Expect("", plans({Input(1), Input(0)}), request);
  const std::string twice = "adds the same rank's input twice, or zeros";
  Expect("rank 0, step 0 (reduce): " + twice, plans({Input(0), Input(0)}), request);
  Expect("rank 0, step 0 (reduce): " + twice, plans({Input(0), Input(1), Input(0)}), request);
  Expect("rank 0, step 1 (reduce): " + twice, plans({Input(0), Scratch(0), Input(1)}, {Zero(Scratch(0), 4)}), request);
  Expect(
      "output [0, 4) of rank 0 ends with the wrong contents: input [0, 4) of rank 0 by rank 0, step 0 (reduce), "
      "expected the sum of input [0, 4) of rank 0 over ranks 0, 1",
      plans({Input(0)}), request);
  std::vector<Plan> alone = plans({Input(0), Input(1)});
  alone[0].steps.pop_back();
  Expect("output [0, 4) of rank 1 is never written", alone, request);
  std::vector<Plan> shifted = Group({{Reduce(Output(0), 0, 2, 3), Reduce(Output(0, 3), 2, 2, 1)}, {}});
  shifted[0].sources = {Input(0, 1), Input(1, 1), Input(0, 3), Input(1, 3)};
  Expect(
      "output [0, 3) of rank 0 ends with the wrong contents: the sum of input [1, 4) of rank 0 over ranks 0, 1 "
      "by rank 0, step 0 (reduce), expected the sum of input [0, 3) of rank 0 over ranks 0, 1",
      shifted, request);
  const Step last = Copy(Scratch(0, 3), Input(0, 3), 1);
  Expect("", plans({Input(1), Scratch(0)}, {Copy(Scratch(0), Input(0), 3), last}), request);
  Expect("rank 0, step 2 (reduce): adds elements of different offsets",
         plans({Input(1), Scratch(0)}, {Copy(Scratch(0), Input(0, 1), 3), last}), request);
}

TEST_CASE("a step may move parts of different contents") {
  const Request gather = Ask(Collective::kAllGather, 1, 2, 2);
  const std::vector<Step> across = {Copy(Scratch(0), Input(0, 1), 1), Get(Scratch(0, 1), Input(1), 1),
                                    Copy(Output(0), Input(0), 1), Copy(Output(0, 1), Scratch(0), 2),
                                    Get(Output(0, 3), Input(1, 1), 1)};
  Expect("", Group({across, {Get(Output(1), Input(0), 2), Copy(Output(1, 2), Input(1), 2)}}, 2), gather);
  // The first two elements of scratch are sums of ranks 1 and 2, the others have `sources`. Then rank 0 adds its own.
  const Request sum = Ask(Collective::kAllReduce, 1, 3, 4);
  const auto plans = [](const std::vector<Place>& sources) {
    std::vector<Plan> group =
        Group({{Reduce(Scratch(0), 0, 2, 2), Reduce(Scratch(0, 2), 4, static_cast<int32_t>(sources.size()), 2),
                Reduce(Output(0), 2, 2, 4), Put(Output(1), Output(0), 4), Put(Output(2), Output(0), 4)},
               {},
               {}},
              4);
    group[0].sources = {Input(1), Input(2), Scratch(0), Input(0)};
    group[0].sources.insert(group[0].sources.end(), sources.begin(), sources.end());
    return group;
  };
  Expect("", plans({Input(2, 2), Input(1, 2)}), sum);
  Expect(
      "output [2, 4) of rank 0 ends with the wrong contents: the sum of input [2, 4) of rank 0 over ranks 0, 2 "
      "by rank 0, step 2 (reduce), expected the sum of input [2, 4) of rank 0 over ranks 0, 1, 2",
      plans({Input(2, 2)}), sum);
  Expect("rank 0, step 2 (reduce): adds elements of different offsets", plans({Input(2, 1), Input(1, 1)}), sum);
}

TEST_CASE("sums of more than 64 ranks count every rank once") {
  const Request request = Ask(Collective::kAllReduce, 1, 70, 4);
  const std::vector<Plan> plans = Build("one_shot", request);
  Expect("", plans, request);
  for (size_t operand : {63, 64, 69}) {
    std::vector<Plan> without = plans, twice = plans;
    without[1].sources.erase(without[1].sources.begin() + static_cast<std::ptrdiff_t>(operand));
    --without[1].steps[0].num_sources;
    CHECK(Validate(without, request)
              .message()
              .rfind("output [0, 4) of rank 1 ends with the wrong contents: the sum", 0) == 0);
    twice[1].sources[operand] = twice[1].sources[operand - 1];
    Expect("rank 1, step 0 (reduce): adds the same rank's input twice, or zeros", twice, request);
  }
}

TEST_CASE("sums must have the same order on all ranks") {
  const Request request = Ask(Collective::kAllReduce, 1, 3, 4);
  std::vector<Plan> plans = Build("one_shot", request);
  Expect("", plans, request);
  std::swap(plans[2].sources[0], plans[2].sources[1]);
  Expect("ranks 0 and 2 add in different orders", plans, request);
  for (Plan& plan : plans) plan.sources = {Input(2), Input(0), Input(1)};
  Expect("", plans, request);
  // 0 + (1 + 2) isn't (0 + 1) + 2.
  plans = Group({{Reduce(Output(0), 0, 3, 4)}, {}, {Reduce(Scratch(2), 0, 2, 4), Reduce(Output(2), 2, 2, 4)}}, 4);
  plans[1].steps = {Reduce(Output(1), 0, 3, 4)};
  plans[0].sources = plans[1].sources = {Input(0), Input(1), Input(2)};
  plans[2].sources = {Input(0), Input(1), Scratch(2), Input(2)};
  Expect("ranks 0 and 2 add in different orders", plans, request);
  // All ranks add in the same two orders, rank 1 in the first one for one more element.
  const auto in_two_orders = [](Plan* plan, int64_t first) {
    plan->steps = {Reduce(Output(plan->rank), 0, 3, first), Reduce(Output(plan->rank, first), 3, 3, 4 - first)};
    plan->sources = {Input(0), Input(1), Input(2), Input(1, first), Input(0, first), Input(2, first)};
  };
  for (Plan& plan : plans) in_two_orders(&plan, 2);
  Expect("", plans, request);
  in_two_orders(&plans[1], 3);
  Expect("ranks 0 and 1 add in different orders", plans, request);
}

TEST_CASE("a barrier must wait for all ranks") {
  const Request request = Ask(Collective::kBarrier, 1, 3, 0);
  Expect("", Group({{Signal(1), Wait(2)}, {Wait(0), Signal(2), Wait(2)}, {Wait(1), Signal(0), Signal(1)}}), request);
  Expect("rank 0 may end before rank 1 has begun", Group({{Signal(1)}, {Wait(0), Signal(2)}, {Wait(1)}}), request);
  Expect("rank 1 may end before rank 0 has begun", Group({{Wait(1), Wait(2)}, {Signal(0)}, {Signal(0)}}), request);
  Expect("rank 1 may end before rank 2 has begun",
         Group({{Signal(1), Wait(2)}, {Wait(0), Signal(2)}, {Wait(1), Signal(0)}}), request);
}

TEST_CASE("groups and requests must match") {
  const std::vector<Plan> chain = Group({{kDown, Signal(1), kOwn}, {Wait(0), kOn}, {}});
  Expect("", chain, kBroadcast);
  Request request = kBroadcast;
  request.root = 3;
  Expect("sizes, root or permutation of the request are not valid", chain, request);
  Expect("got 2 plans for 3 ranks", {chain[0], chain[1]}, kBroadcast);
  Expect("got 0 plans for 3 ranks", {}, kBroadcast);
  for (int i = 0; i < 3; ++i) {
    std::vector<Plan> plans = chain;
    if (i == 0) plans[1].rank = 2;
    if (i == 1) plans[1].num_ranks = 4;
    if (i == 2) plans[1].scratch_count = -1;
    Expect("plan 1 has wrong rank, num_ranks or scratch_count", plans, kBroadcast);
  }
}

TEST_CASE("peers are other ranks") {
  for (StepKind kind : {StepKind::kPut, StepKind::kGet, StepKind::kSignal, StepKind::kWait}) {
    for (int32_t peer : {-1, 0, 3})
      ExpectStep("the peer must be another rank of the group", Move(kind, peer, Output(0), Input(0), 1));
  }
}

TEST_CASE("data steps need a count, a source and a destination") {
  for (int64_t count : {0, -1}) {
    ExpectStep("moves no elements", Put(Output(1), Input(0), count));
    ExpectStep("moves no elements", Zero(Output(0), count));
  }
  ExpectStep("dst is at the wrong rank", Move(StepKind::kPut, 1, Output(2), Input(0), 4));
  ExpectStep("dst is at the wrong rank", Move(StepKind::kGet, 1, Output(1), Input(1), 4));
  ExpectStep("dst is at the wrong rank", Copy(Output(1), Input(0), 4));
  ExpectStep("dst is at the wrong rank", Zero(Output(1), 4));
  ExpectStep("src is at the wrong rank", Copy(Output(0), Input(1), 4));
  ExpectStep("src is at the wrong rank", Put(Output(1), Input(1), 4));
  ExpectStep("src is at the wrong rank", Move(StepKind::kGet, 1, Output(0), Input(2), 4));
  ExpectStep("writes to an input", Put(Input(1), Input(0), 4));
  ExpectStep("writes to an input", Zero(Input(0), 4));
  ExpectStep("src is at a rank outside of the group", Copy(Output(0), Input(-1), 4));
  ExpectStep("src is at a rank outside of the group", Copy(Output(0), Input(3), 4));
  ExpectStep("unknown space", Copy({0, static_cast<Space>(3), 0}, Input(0), 4));
}

TEST_CASE("places must lie inside of their buffers") {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const std::string last = std::to_string(kMost);
  ExpectStep("output [1, 5) of rank 1 exceeds the buffer of 4 elements", Put(Output(1, 1), Input(0), 4));
  ExpectStep("output [-1, 3) of rank 1 exceeds the buffer of 4 elements", Put(Output(1, -1), Input(0), 4));
  ExpectStep("input [1, 5) of rank 0 exceeds the buffer of 4 elements", Put(Output(1), Input(0, 1), 4));
  ExpectStep("scratch [0, 4) of rank 1 exceeds the buffer of 3 elements", Put(Scratch(1), Input(0), 4));
  ExpectStep("scratch [3, 4) of rank 0 exceeds the buffer of 3 elements", Zero(Scratch(0, 3), 1));
  ExpectStep("output [0, " + last + ") of rank 0 exceeds the buffer of 4 elements", Copy(Output(0), Input(0), kMost));
  // All of it is inside. What counts is the scratch of the rank that owns it.
  std::vector<Plan> plans = Group({{kDown, kOwn, Put(Output(2), Input(0), 4)}, {}, {}});
  plans[0].steps.push_back(Put(Scratch(2, 1), Input(0), 4));
  plans[0].scratch_count = 9;
  plans[2].scratch_count = 5;
  Expect("", plans, kBroadcast);
  plans[2].scratch_count = 4;
  Expect("rank 0, step 3 (put 2): scratch [1, 5) of rank 2 exceeds the buffer of 4 elements", plans, kBroadcast);
}

TEST_CASE("a step may not write what it reads") {
  ExpectStep("dst overlaps a source", Copy(Output(0, 1), Output(0), 3));
  ExpectStep("dst overlaps a source", Copy(Output(0), Output(0, 1), 3));
  ExpectStep("dst overlaps a source", Copy(Output(0), Output(0), 4));
  ExpectStep("reads output [0, 2) of rank 0, which no rank has written", Copy(Output(0, 2), Output(0), 2));
  ExpectStep("reads output [2, 4) of rank 0, which no rank has written", Copy(Output(0), Output(0, 2), 2));
  ExpectStep("reads scratch [0, 2) of rank 0, which no rank has written", Copy(Output(0), Scratch(0), 2));
}

TEST_CASE("operands of a reduce are among the plan's sources") {
  const Request request = Ask(Collective::kAllReduce, 1, 2, 4);
  const auto expect = [&](const std::string& fault, Step step, std::vector<Place> sources) {
    std::vector<Plan> plans = Group({{Copy(Scratch(0, 4), Input(0), 3), step}, {}}, 8);
    plans[0].sources = std::move(sources);
    Expect("rank 0, step 1 (reduce): " + fault, plans, request);
  };
  const std::string outside = "the operands are not in the plan's list of sources";
  expect(outside, Reduce(Output(0), 0, 0, 4), {Input(0), Input(1)});
  expect(outside, Reduce(Output(0), -1, 2, 4), {Input(0), Input(1)});
  expect(outside, Reduce(Output(0), 1, 2, 4), {Input(0), Input(1)});
  expect(outside, Reduce(Output(0), 0, 3, 4), {Input(0), Input(1)});
  expect("src is at a rank outside of the group", Reduce(Output(0), 0, 2, 4), {Input(0), Input(2)});
  expect("input [1, 5) of rank 1 exceeds the buffer of 4 elements", Reduce(Output(0), 0, 2, 4),
         {Input(0), Input(1, 1)});
  // The destination may be an operand itself, but may not overlap one partly.
  expect("dst overlaps a source", Reduce(Scratch(0, 4), 0, 2, 3), {Input(0), Scratch(0, 3)});
  std::vector<Plan> plans = Group({{Copy(Output(0), Input(0), 4), Reduce(Output(0), 0, 2, 4)}, {Wait(0)}});
  plans[0].sources = {Output(0), Input(1)};
  plans[0].steps.push_back(Signal(1));
  plans[1].steps.push_back(Get(Output(1), Output(0), 4));
  Expect("", plans, request);
}

// A global array of 6 elements: ranks 0 and 1 hold [0, 4), and rank 2 holds [4, 6). Rank 0 wants [3, 6), rank 1
// nothing.
Request AskForBoxes() {
  Request request = Ask(Collective::kReshard, 1, 3, 3);
  const std::vector<Box> sources = {{{0}, {4}}, {{0}, {4}}, {{4}, {6}}};
  const std::vector<Box> destinations = {{{3}, {6}}, {{0}, {0}}, {{0}, {2}}};
  request.boxes = *MakeBoxes(sources, destinations, request.geometry);
  return request;
}

TEST_CASE("a copy may come from any replica, and from its own element only") {
  const Request request = AskForBoxes();
  const Step own = Copy(Output(0), Input(0, 3), 1), rest = Get(Output(0, 1), Input(2), 2);
  const auto plans = [&](std::vector<Step> of_first, Step of_last) {
    return Group({std::move(of_first), {}, {std::move(of_last)}});
  };
  Expect("", plans({own, rest}, Get(Output(2), Input(0), 2)), request);
  Expect("", plans({rest, Get(Output(0), Input(1, 3), 1)}, Get(Output(2), Input(1), 2)), request);
  Expect("output [1, 3) of rank 0 is never written", plans({own}, Get(Output(2), Input(0), 2)), request);
  Expect(
      "output [0, 1) of rank 0 ends with the wrong contents: input [2, 3) of rank 1 by rank 0, step 0 (get 1), "
      "expected input [3, 4) of rank 0 or a replica",
      plans({Get(Output(0), Input(1, 2), 1), rest}, Get(Output(2), Input(0), 2)), request);
  Expect(
      "output [1, 2) of rank 2 ends with the wrong contents: input [0, 1) of rank 2 by rank 2, step 0 (copy), expected "
      "input [1, 2) of rank 0 or a replica",
      plans({own, rest, Put(Output(2), Input(0), 1)}, Copy(Output(2, 1), Input(2), 1)), request);
  Expect("rank 2, step 0 (get 0): output [0, 3) of rank 2 exceeds the buffer of 2 elements",
         plans({own, rest}, Get(Output(2), Input(0), 3)), request);
}

TEST_CASE("a box reaches to the last element of its last cell") {
  const Box all = {{0, 0, 0}, {2, 3, 4}}, inner = {{0, 1, 2}, {2, 3, 4}}, none = {{0, 0, 0}, {0, 0, 0}};
  const auto boxes = ValueOf(MakeBoxes({all, none, none}, {inner, all, none}, AskForBoxes().geometry));
  CHECK(boxes->input_span(0) == 24 && boxes->input_span(1) == 0);
  CHECK(boxes->output_span(0) == 8 && boxes->output_span(1) == 24);
}

TEST_CASE("boxes that do not fit each other are refused") {
  const Geometry geometry = AskForBoxes().geometry;
  const Box none = {{0}, {0}}, all = {{0}, {6}};
  const auto fault = [&](const std::vector<Box>& sources, const std::vector<Box>& destinations) {
    return MakeBoxes(sources, destinations, geometry).status().message();
  };
  CHECK(fault({all, none, none}, {none, none, {{1}, {5}}}).empty());
  CHECK(fault({{{0}, {4}}, none, none}, {none, all, all}) ==
        "no source has elements [4, 6) of the destination of rank 1");  // the first of two
  CHECK(fault({all, none}, {none, none, all}) == "there must be a source and a destination for each of 3 ranks");
  CHECK(fault({all, none, {{}, {}}}, {none, none, all}) == "the source of rank 2 must have 1 dimensions");
  CHECK(fault({all, none, none}, {none, {{3}, {2}}, all}) == "the destination of rank 1 is [3, 2) in dimension 0");
  const auto in_arrays = [&](const std::vector<int64_t>& from, const std::vector<int64_t>& to) {
    return MakeBoxes({all, none, none}, {none, none, {{1}, {5}}}, geometry, from, to).status().message();
  };
  CHECK(in_arrays({6}, {4}).empty() && in_arrays({9}, {5}).empty());
  CHECK(in_arrays({5}, {4}) == "the source of rank 0 is [0, 6) in dimension 0");
  CHECK(in_arrays({6}, {3}) == "the destination of rank 2 is [1, 5) in dimension 0");
  CHECK(in_arrays({6, 1}, {4}) == "the array of the source of rank 0 must have 1 dimensions");
  CHECK(!FindAlgorithm(Collective::kReshard, "direct")->supports(Ask(Collective::kReshard, 1, 3, 4)));
}

}  // namespace
}  // namespace jaxcomm
