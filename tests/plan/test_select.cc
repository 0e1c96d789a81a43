// Selection: the lowest cost, preferences, chunks and reasons. test_select.py has the lowest cost of each collective.
#include <cmath>

#include "../../ffi/plan/select.h"
#include "formulas.h"
#include "written.h"

namespace jaxcomm {
namespace {

// Fails the test if no algorithm fits.
Resolution Selected(const Request& request, const std::string& name, int64_t item_bytes, const Machine& machine) {
  return ValueOf(Select(request, name, item_bytes, machine));
}

bool IsNamed(const Resolution& choice, const char* name) {
  if (choice.algorithm != name) std::fprintf(stderr, "%s: %s\n", choice.algorithm.c_str(), choice.reason.c_str());
  return choice.algorithm == name && choice.algorithm == choice.plan->name;
}

TEST_CASE("of algorithms with almost equal cost, the first in the table is selected") {
  // 4 nodes, links without overhead, b / beta = 1 ms: direct broadcast takes 3 ms + lambda, tree 2 ms + 2 lambda.
  const auto choose = [](double latency_s) {
    const LinkModel link = {0, 4e6, latency_s};
    return Selected(AskApart(Collective::kBroadcast, 4, 1, 1000, 1000), "", 4, MakeMachine(kFree, link, link));
  };
  CHECK(IsNamed(choose(0.80e-3), "tree"));    // direct takes 5.6 percent more
  CHECK(IsNamed(choose(0.83e-3), "direct"));  // 4.6 percent more
  CHECK(std::abs(choose(0.80e-3).cost.time_s - 3.6e-3) < 1e-12);
}

// Compares the selected plan with the plan of lowest cost, on 2 nodes to 64 nodes and links of different latency.
void CheckPreference(bool apart, double margin) {
  int hierarchical = 0, dearer = 0, others = 0;
  for (int32_t nodes : {2, 4, 8, 64}) {
    for (double latency_s = 1e-8; latency_s < 1e-4; latency_s *= 3) {
      const LinkModel link = {1e-6, 1e9, latency_s};
      const Machine machine = MakeMachine(kFree, link, link);
      const Request request =
          apart ? AskApart(Collective::kAllReduce, nodes, 2, 1, 1) : Ask(Collective::kAllReduce, nodes, 2, 1, 1);
      double least_s = 1e30;
      int fitting = 0;
      for (const Algorithm& algorithm : Algorithms(request.collective)) {
        if (!algorithm.supports(request) || algorithm.protocol != Protocol::kSteps) continue;
        least_s = std::min(least_s, Selected(request, algorithm.name, 4, machine).cost.time_s);
        ++fitting;
      }
      const double ratio = Selected(request, "hierarchical", 4, machine).cost.time_s / least_s;
      if (std::abs(ratio / margin - 1) < 0.06) continue;  // the first of equal costs is compared
      const Resolution choice = Selected(request, "", 4, machine);
      if (ratio < margin) {
        CHECK(IsNamed(choice, "hierarchical"));
        CHECK(choice.reason.rfind("made for " + std::to_string(nodes) + " nodes of 2 ranks: ", 0) == 0);
        ++hierarchical;
        dearer += ratio > 1.06;
      } else {
        CHECK(choice.cost.time_s <= 1.05 * least_s);
        CHECK(choice.reason.rfind("lowest predicted cost of " + std::to_string(fitting) + ": ", 0) == 0);
        ++others;
      }
    }
  }
  CHECK(hierarchical > 3 && dearer > 1 && others > 3);
}

TEST_CASE(
    "the hierarchical plan is preferred within the error of two predictions, or up to ten times the lowest cost") {
  CheckPreference(true, 1.25 * 1.25);
  CheckPreference(false, 10);  // declared nodes of one address space
}

TEST_CASE("plans with more than 64 MiB of scratch come after those with less") {
  const LinkModel link = {1e-6, 1e9, 1e-6};
  const Machine machine = MakeMachine(kFree, link, link);
  const auto choose = [&](int64_t block_count, int64_t chunk_count) {
    return Selected(AskApart(Collective::kReduceScatter, 8, 1, block_count, chunk_count), "", 4, machine);
  };
  // Recursive halving keeps 7 blocks of 4-byte items: 2396745 of them are the last that fit. The ring keeps 8 chunks.
  const Resolution fits = choose(2396745, 1000000), large = choose(2396746, 1000000);
  CHECK(IsNamed(fits, "recursive_halving") && fits.cost.scratch_bytes == 67108860);
  CHECK(IsNamed(large, "ring") && large.reason.find("(too much scratch)") != std::string::npos);
  CHECK(fits.reason.find("scratch") == std::string::npos);
  CHECK(IsNamed(choose(2396746, 2396746), "recursive_halving"));  // both keep too much
  CHECK(IsNamed(Selected(AskApart(Collective::kReduceScatter, 8, 1, 2396746), "recursive_halving", 4, machine),
                "recursive_halving"));
}

TEST_CASE("chunks have 128 KiB, 1 MiB or 8 MiB, whichever gives the lowest cost of a chain") {
  constexpr int64_t kBytes = 64 << 20;
  constexpr int32_t kRanks = 16;
  std::vector<int64_t> chosen;
  for (double overhead_s = 1e-8; overhead_s < 1e-1; overhead_s *= 1.3) {
    const LinkModel link = {overhead_s, 1e10, 0};
    double least_s = 1e30;
    const auto time_s = [&](int64_t chunk_bytes) {
      const double step_s = overhead_s + static_cast<double>(chunk_bytes) / 1e10;
      return (static_cast<double>(kBytes / chunk_bytes) + kRanks - 3) * (step_s + overhead_s) + step_s;
    };
    for (int64_t bytes : {128 << 10, 1 << 20, 8 << 20}) least_s = std::min(least_s, time_s(bytes));
    int64_t expected = 0;
    bool close = false;
    for (int64_t bytes : {8 << 20, 1 << 20, 128 << 10}) {
      close = close || std::abs(time_s(bytes) / least_s - 1.05) < 1e-6;
      if (time_s(bytes) <= 1.05 * least_s) expected = bytes;
    }
    if (close) continue;
    for (int64_t item_bytes : {1, 4, 16}) {
      const Request request = Ask(Collective::kBroadcast, 1, kRanks, kBytes / item_bytes);
      const Resolution choice = Selected(request, "ring", item_bytes, MakeMachine(kFree, link, link));
      CHECK(choice.request.chunk_count * item_bytes == expected);
      CHECK(std::abs(choice.cost.time_s / time_s(expected) - 1) < 1e-9);
    }
    if (chosen.empty() || chosen.back() != expected) chosen.push_back(expected);
  }
  CHECK((chosen == std::vector<int64_t>{128 << 10, 1 << 20, 8 << 20}));
}

TEST_CASE("a plan has at most 2^17 chunks of all ranks together") {
  const LinkModel link = {1e-9, 1e9, 0};
  const Machine machine = MakeMachine(link, link, link);
  for (int32_t n : {2, 8, 512}) {
    for (int64_t block_bytes : {int64_t{1} << 40, int64_t{1} << 36, (int64_t{1} << 36) + 1}) {
      const Request request = AskApart(Collective::kBroadcast, 1, n, block_bytes);
      const Resolution choice = Selected(request, "direct", 1, machine);
      // Chunks of 128 KiB would be best; otherwise the smallest chunks within the limit.
      const int64_t most = (1 << 17) / n;
      const int64_t least_count = (block_bytes + most - 1) / most;
      CHECK(choice.request.chunk_count >= std::max<int64_t>(128 << 10, least_count));
      CHECK(choice.request.chunk_count <= std::max<int64_t>(8 << 20, least_count));
      CHECK((block_bytes + choice.request.chunk_count - 1) / choice.request.chunk_count <= most);
    }
  }
  // More ranks than that: whole blocks.
  const Resolution whole = Selected(AskApart(Collective::kBroadcast, 200000, 1, 1 << 24), "tree", 1, machine);
  CHECK(whole.request.chunk_count == 1 << 24);
}

TEST_CASE("a given chunk size is kept, and chunk_count is filled in even for one chunk") {
  const LinkModel link = {1e-6, 1e9, 1e-6};
  const Machine machine = MakeMachine(link, link, link);
  CHECK(Selected(Ask(Collective::kAllReduce, 1, 8, 1 << 20, 777), "ring", 4, machine).request.chunk_count == 777);
  CHECK(Selected(Ask(Collective::kAllReduce, 1, 8, 10), "", 4, machine).request.chunk_count == 32 << 10);
  CHECK(Selected(Ask(Collective::kBarrier, 1, 8, 0), "", 0, machine).request.chunk_count > 0);
}

TEST_CASE("the reason names every candidate with its time, the lowest first") {
  Machine machine = MakeMachine(kFree, {1e-6, 1e30, 5e-7}, {});
  machine.launch_s = 1e-5;
  const Resolution choice = Selected(Ask(Collective::kAllGather, 1, 8, 4, 4), "", 4, machine);
  CHECK(IsNamed(choice, "recursive_doubling") && !choice.ll);
  // 3 messages and 2 signals; 7 messages; 3 messages, of which two wrap, and 2 signals; 7 messages and 6 signals.
  Expect("lowest predicted cost of 4: recursive_doubling 16.0 us, direct 17.0 us, bruck 18.0 us, ring 26.0 us",
         choice.reason);
}

TEST_CASE("the reason explains why an algorithm cannot be used") {
  const Machine machine = MakeMachine(kFree, kFree, kFree);
  const auto reason = [&](const Request& request, const char* name) {
    return Select(request, name, 4, machine).status().message();
  };
  CHECK(reason(Ask(Collective::kAllGather, 2, 3, 8), "recursive_doubling") ==
        "algorithm \"recursive_doubling\" needs a power of two of ranks, got 2 nodes of 3 ranks");
  CHECK(reason(Ask(Collective::kAllGather, 6, 1, 8), "hierarchical") ==
        "algorithm \"hierarchical\" needs several nodes of several ranks, got 6 nodes of 1 ranks");
  CHECK(reason(AskApart(Collective::kAllReduce, 2, 3, 8), "one_shot") ==
        "algorithm \"one_shot\" needs ranks that can read each other's memory, got 2 nodes of 3 ranks");
  CHECK(reason(Ask(Collective::kAllReduce, 1, 6, 8), "multimem") ==
        "algorithm \"multimem\" needs one node of GPUs with NVLink SHARP, got 1 nodes of 6 ranks without NVLink SHARP");
  Request with_switch = Ask(Collective::kAllReduce, 2, 3, 8);
  with_switch.geometry.multimem = true;
  CHECK(reason(with_switch, "multimem") ==
        "algorithm \"multimem\" needs one node of GPUs with NVLink SHARP, got 2 nodes of 3 ranks");
  CHECK(reason(Ask(Collective::kBarrier, 1, 6, 0), "fast") ==
        "unknown algorithm \"fast\"; choose one of direct, dissemination, hierarchical");
  Request request = Ask(Collective::kBroadcast, 1, 6, 8);
  request.root = 6;
  CHECK(reason(request, "") == "sizes, root or permutation are not valid for 1 nodes of 6 ranks");
}

TEST_CASE("LL is used only on machines that support it, and multimem only by name") {
  const LinkModel link = {1e-6, 1e9, 1e-6};
  Machine machine = MakeMachine(kFree, link, link);
  Request request = Ask(Collective::kAllReduce, 1, 8, 16);
  request.geometry.multimem = true;
  Resolution choice = Selected(request, "ll", 4, machine);
  CHECK(!choice.ll && choice.reason == "asked for; runs step by step, because LL is not available here");
  CHECK(Selected(request, "", 4, machine).reason.find("ll") == std::string::npos);
  machine.ll = LinkModel{1e-9, 1e12, 1e-9};
  choice = Selected(request, "", 4, machine);
  CHECK(IsNamed(choice, "ll") && choice.ll);
  CHECK(choice.reason.find("ll_two_shot") == std::string::npos);
  CHECK(choice.reason.find("multimem") == std::string::npos);
  choice = Selected(request, "ll", 4, machine);
  CHECK(choice.ll && choice.reason == "asked for");
  choice = Selected(request, "multimem", 4, machine);
  CHECK(IsNamed(choice, "multimem") && !choice.ll && choice.reason == "asked for");
  // Two shots send less of a longer block. Without barriers, both are faster than steps.
  machine.sync_overhead_s = 1e-3;
  machine.ll = machine.ll_two_shot = LinkModel{1e-7, 2e11, 1e-6};
  CHECK(IsNamed(Selected(request, "", 4, machine), "ll"));
  request.block_count = 100'001;
  CHECK(IsNamed(Selected(request, "", 4, machine), "ll_two_shot"));
}

}  // namespace
}  // namespace jaxcomm
