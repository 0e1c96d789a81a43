// Programs never fill NCCL's queues to other nodes: a put or signal that finds a queue full waits in NCCL's code
// without a deadline. In a model, the network takes no entry out of a queue before a rank waits for it, and ranks run
// as far ahead of each other as they can.
#include <algorithm>
#include <cstdio>
#include <deque>
#include <map>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "../../ffi/cuda/program/packing.h"
#include "../../ffi/cuda/program/program.h"
#include "../../ffi/plan/algorithms.h"
#include "../check.h"
#include "fakes/random_request.h"
#include "fakes/seed.h"

namespace jaxcomm {
namespace cuda {
namespace {

constexpr int64_t kItemBytes = 4;
constexpr int kCalls = 3;

// One channel of all ranks, which run the program kCalls times.
class Channel {
 public:
  Channel(const std::vector<RankProgram>& programs, size_t channel, const Geometry& geometry,
          const Fragments& fragments)
      : programs_(programs), channel_(channel), geometry_(geometry), fragments_(fragments), next_(programs.size()) {}

  // One rank after the other runs until it has to wait for another, always in an order of its own.
  void Run(std::mt19937_64& random) {
    std::vector<int32_t> order(next_.size());
    std::iota(order.begin(), order.end(), 0);
    for (bool moved = true; moved;) {
      moved = false;
      std::shuffle(order.begin(), order.end(), random);
      for (const int32_t rank : order) {
        while (RunStep(rank)) moved = true;
      }
    }
    for (const int32_t rank : order) CHECK(next_[rank] == kCalls * StepsOf(rank));
  }

  // The largest number of entries of a queue, and of puts.
  int64_t most_entries = 0, most_puts = 0;

 private:
  // From a rank to another.
  struct Link {
    std::deque<StepKind> queue;  // entries of NCCL's queue, in order
    int64_t signals = 0, arrived = 0, waits = 0;

    int64_t num_puts() const { return std::count(queue.begin(), queue.end(), StepKind::kPut); }
    void Leave() {
      arrived += queue.front() == StepKind::kSignal;
      queue.pop_front();
    }
  };

  int32_t StepsOf(int32_t rank) const { return programs_[rank].channels[channel_].num_steps + 1; }
  bool IsInterNode(int32_t rank, int32_t peer) const { return geometry_.node(rank) != geometry_.node(peer); }

  // False: the rank has to wait, or is done.
  bool RunStep(int32_t rank) {
    if (next_[rank] == kCalls * StepsOf(rank)) return false;
    const int32_t next = next_[rank] % StepsOf(rank);
    if (next + 1 == StepsOf(rank)) {
      Flush(rank);
    } else {
      const ProgramStep& step = programs_[rank].steps[programs_[rank].channels[channel_].first_step + next];
      if (step.flush) Flush(rank);
      const int32_t peer = step.step.peer;
      if (step.step.kind == StepKind::kWait) {
        if (!Receive(peer, rank)) return false;
      } else if (step.step.kind == StepKind::kSignal) {
        ++links_[{rank, peer}].signals;
        Post(rank, peer, StepKind::kSignal);
      } else if (step.step.kind == StepKind::kPut) {
        const int64_t num_puts = step.flat ? 1 : fragments_.MostPuts(step.step);
        for (int64_t i = 0; i < num_puts; ++i) Post(rank, peer, StepKind::kPut);
      }
    }
    ++next_[rank];
    return true;
  }

  // The k-th wait is for the k-th signal. What is in front of it leaves the queue with it.
  bool Receive(int32_t from, int32_t to) {
    Link& link = links_[{from, to}];
    if (link.waits >= link.signals) return false;
    ++link.waits;
    while (IsInterNode(from, to) && link.arrived < link.waits) link.Leave();
    return true;
  }

  void Post(int32_t from, int32_t to, StepKind kind) {
    if (!IsInterNode(from, to)) return;
    Link& link = links_[{from, to}];
    link.queue.push_back(kind);
    most_entries = std::max(most_entries, static_cast<int64_t>(link.queue.size()));
    most_puts = std::max(most_puts, link.num_puts());
  }

  // All puts have left, and what was in front of them.
  void Flush(int32_t rank) {
    for (auto& [ranks, link] : links_) {
      while (ranks.first == rank && link.num_puts() > 0) link.Leave();
    }
  }

  const std::vector<RankProgram>& programs_;
  const size_t channel_;
  const Geometry geometry_;
  const Fragments& fragments_;
  std::vector<int32_t> next_;  // by rank: steps of all calls, of which each ends with a flush
  std::map<std::pair<int32_t, int32_t>, Link> links_;
};

// Runs the programs of all ranks. Returns the largest number of entries of a queue, and of puts.
std::pair<int64_t, int64_t> MostInQueues(const Algorithm& algorithm, const Request& request,
                                         ContiguousCounts contiguous, int32_t num_channels, PackLimits limits,
                                         std::mt19937_64& random) {
  std::vector<RankProgram> programs;
  for (int32_t r = 0; r < request.geometry.num_ranks(); ++r) {
    programs.push_back(MakeRankProgram(Choice(algorithm, request), request.block_count, contiguous, kItemBytes,
                                       num_channels, r, limits));
  }
  int64_t entries = 0, puts = 0;
  for (size_t c = 0; c < programs[0].channels.size(); ++c) {
    const Fragments fragments(programs[0].channels[c].input.count, request.block_count, contiguous);
    Channel channel(programs, c, request.geometry, fragments);
    channel.Run(random);
    entries = std::max(entries, channel.most_entries);
    puts = std::max(puts, channel.most_puts);
  }
  return {entries, puts};
}

// Returns the largest number of entries.
int64_t TestCollectives(int32_t most_nodes, int32_t most_locals, int repeats) {
  std::mt19937_64 random(FirstSeed());
  int64_t most = 0;
  for (const Collective collective : kCollectives) {
    for (const Algorithm& algorithm : Algorithms(collective)) {
      for (int32_t nodes = 2; nodes <= most_nodes; ++nodes) {
        for (int repeat = 0; repeat < repeats; ++repeat) {
          const Request request =
              RandomRequest(collective, nodes, 1 + static_cast<int32_t>(random() % most_locals), random);
          const ContiguousCounts contiguous = {RandomContiguousCount(random), RandomContiguousCount(random)};
          const PackLimits limits = {static_cast<int64_t>(random() % 100), static_cast<int64_t>(random() % 3000)};
          if (!algorithm.supports(request)) continue;
          const auto [entries, puts] =
              MostInQueues(algorithm, request, contiguous, static_cast<int32_t>(1 + random() % 2), limits, random);
          if (entries > device::kMostEntries || puts > kMostPutsUnderWay) {
            std::fprintf(stderr, "%s/%s, %d nodes: %d entries, %d puts\n", Name(collective), algorithm.name, nodes,
                         static_cast<int>(entries), static_cast<int>(puts));
            CHECK(false);
          }
          most = std::max(most, entries);
        }
      }
    }
  }
  return most;
}

// A channel without elements would have signals only, and no flush shows that these have left.
TEST_CASE("a channel without elements does nothing") {
  std::mt19937_64 random(1);
  Request request;
  request.collective = Collective::kAllGather;
  request.geometry = {20, 1, false, false};
  request.block_count = 1;
  const Algorithm& ring = *FindAlgorithm(Collective::kAllGather, "ring");
  CHECK(MostInQueues(ring, request, {}, 2, {}, random).first == device::kMostEntries);
  const RankProgram program = MakeRankProgram(Choice(ring, request), 1, {}, kItemBytes, 2, 0);
  CHECK((program.channels[0].num_steps == 0) != (program.channels[1].num_steps == 0));
}

// The plans come to the limit: with fewer flushes, they would exceed it.
TEST_CASE("no program fills a queue") { CHECK(TestCollectives(10, 2, 2) == device::kMostEntries); }

TEST_CASE("no program fills a queue [full]") { TestCollectives(10, 4, 10); }

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
