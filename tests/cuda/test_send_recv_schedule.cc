// Properties of the split at messages between nodes: no rank waits forever, both sides of a message agree on it, and
// chunks overlap. test_executor.cc checks the results.
#include <algorithm>
#include <cstdio>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "../../ffi/cuda/program/send_recv_schedule.h"
#include "../../ffi/plan/algorithms.h"
#include "../../ffi/plan/partition.h"
#include "../check.h"

namespace jaxcomm {
namespace cuda {
namespace {

struct Cut {
  std::vector<RankProgram> programs;  // by rank
  std::vector<SendRecvSchedule> schedules;
  int32_t num_channels;
};

Cut MakeCut(const Algorithm& algorithm, const Request& request, int32_t num_channels, SplitLimits limits) {
  const Choice choice(algorithm, request);
  Cut cut;
  cut.num_channels = num_channels;
  cut.schedules.resize(request.geometry.num_ranks());
  for (int32_t r = 0; r < request.geometry.num_ranks(); ++r) {
    cut.programs.push_back(
        MakeSendRecvProgram(choice, request.block_count, {}, 4, num_channels, r, limits, &cut.schedules[r]));
  }
  return cut;
}

// Runs the two streams of all ranks. The thread blocks of a launch do not wait for each other. Returns false if no step
// can run although some remain.
bool Ends(const Cut& cut, const Geometry& geometry) {
  const auto n = static_cast<int32_t>(cut.programs.size());
  struct Rank {
    size_t action = 0;
    std::vector<int32_t> step;  // of the launch, by channel
    int32_t posted = 0;         // rounds that the second stream may begin
    int32_t begun = 0, over = 0;
  };
  std::vector<Rank> ranks(n);
  for (Rank& rank : ranks) rank.step.resize(cut.num_channels);
  std::map<std::vector<int32_t>, int64_t> signals;                // channel, from, to
  std::map<std::vector<int32_t>, std::vector<int64_t>> messages;  // from, to: counts
  std::map<std::vector<int32_t>, size_t> received;
  const auto run_steps = [&](int32_t r, const ChannelProgram* launch) {
    bool moved = false;
    for (int32_t c = 0; c < cut.num_channels; ++c) {
      for (int32_t& i = ranks[r].step[c]; i < launch[c].num_steps; ++i) {
        const Step& step = cut.programs[r].steps[launch[c].first_step + i].step;
        if (step.peer >= 0) CHECK(geometry.node(step.peer) == geometry.node(r));
        if (step.kind == StepKind::kWait && signals[{c, step.peer, r}]-- == 0) {
          ++signals[{c, step.peer, r}];
          break;
        }
        if (step.kind == StepKind::kSignal) ++signals[{c, r, step.peer}];
        moved = true;
      }
    }
    return moved;
  };
  const auto run_second = [&](int32_t r) {
    Rank& rank = ranks[r];
    if (rank.over == rank.posted) return false;
    const Round& round = cut.schedules[r].rounds[rank.over];
    const bool begins = rank.begun == rank.over;
    if (begins) {
      for (const Transfer& transfer : round.sends) messages[{r, transfer.peer}].push_back(transfer.count);
      ++rank.begun;
    }
    for (const Transfer& transfer : round.receives) {
      if (messages[{transfer.peer, r}].size() <= received[{transfer.peer, r}]) return begins;
    }
    for (const Transfer& transfer : round.receives) {
      const int64_t count = messages[{transfer.peer, r}][received[{transfer.peer, r}]++];
      CHECK(count == transfer.count);
    }
    ++rank.over;
    return true;
  };
  const auto run_first = [&](int32_t r) {
    Rank& rank = ranks[r];
    if (rank.action == cut.schedules[r].actions.size()) return false;
    const Action& action = cut.schedules[r].actions[rank.action];
    bool moved = false;
    if (action.kind == Action::kLaunch) {
      const ChannelProgram* launch = cut.programs[r].channels.data() + action.number * cut.num_channels;
      moved = run_steps(r, launch);
      for (int32_t c = 0; c < cut.num_channels; ++c) {
        if (rank.step[c] < launch[c].num_steps) return moved;
      }
    } else if (action.kind == Action::kPost) {
      rank.posted = action.number + 1;
    } else if (rank.over <= action.number) {
      return false;
    }
    std::fill(rank.step.begin(), rank.step.end(), 0);
    ++rank.action;
    return true;
  };
  for (bool moved = true; moved;) {
    moved = false;
    for (int32_t r = 0; r < n; ++r) {
      while (run_first(r)) moved = true;
      while (run_second(r)) moved = true;
    }
  }
  for (int32_t r = 0; r < n; ++r) {
    if (ranks[r].action < cut.schedules[r].actions.size()) return false;
  }
  for (const auto& [link, counts] : messages) CHECK(received[link] == counts.size());
  for (const auto& [link, count] : signals) CHECK(count == 0);
  return true;
}

void CheckShape(const Cut& cut) {
  for (const SendRecvSchedule& schedule : cut.schedules) {
    // Every posted round is awaited, and none twice.
    int32_t posted = 0, awaited = -1;
    for (const Action& action : schedule.actions) {
      if (action.kind == Action::kPost) CHECK(action.number == posted++);
      if (action.kind != Action::kAwait) continue;
      CHECK(action.number > awaited && action.number < posted);
      awaited = action.number;
    }
    CHECK(posted == static_cast<int32_t>(schedule.rounds.size()) && awaited == posted - 1);
    for (const Round& round : schedule.rounds) {
      CHECK(!round.sends.empty() || !round.receives.empty());
      for (const Transfer& transfer : round.sends) CHECK(transfer.count > 0);  // also of signals without data
    }
  }
}

TEST_CASE("all plans terminate") {
  int num_cuts = 0;
  for (int c = 0; c <= static_cast<int>(Collective::kBarrier); ++c) {
    Request request;
    request.collective = static_cast<Collective>(c);
    for (const Algorithm& algorithm : Algorithms(request.collective)) {
      for (const auto& [nodes, locals] : {std::pair{2, 1}, {2, 2}, {2, 4}, {3, 2}, {3, 3}, {4, 1}, {4, 4}, {16, 1}}) {
        for (const bool pull : {false, true}) {
          request.geometry = {nodes, locals, false, pull};
          request.source_of.clear();
          for (int32_t r = 0; r < nodes * locals; ++r) request.source_of.push_back((r + locals + 1) % (nodes * locals));
          for (const int64_t block_count : {5, 1000}) {
            request.block_count = request.collective == Collective::kBarrier ? 0 : block_count;
            request.chunk_count = 40;
            if (!algorithm.supports(request)) continue;
            for (const SplitLimits limits : {SplitLimits{1, 1}, SplitLimits{300, 2}, SplitLimits{}}) {
              const Cut cut = MakeCut(algorithm, request, block_count == 5 ? 1 : 3, limits);
              CheckShape(cut);
              if (!Ends(cut, request.geometry)) {
                std::fprintf(stderr, "%s/%s, %d nodes of %d: stuck\n", Name(request.collective), algorithm.name, nodes,
                             locals);
                CHECK(false);
              }
              ++num_cuts;
            }
          }
        }
      }
    }
  }
  CHECK(num_cuts > 1000);
}

// Counts rounds that are in progress while steps run that precede another round.
int32_t NumOverlapped(const RankProgram& program, const SendRecvSchedule& schedule, int32_t num_channels) {
  int32_t posted = 0, awaited = 0, overlapped = 0;
  bool planned = false;
  for (const Action& action : schedule.actions) {
    if (action.kind == Action::kLaunch) {
      for (int32_t c = 0; c < num_channels; ++c) {
        const ChannelProgram& launch = program.channels[action.number * num_channels + c];
        for (int32_t i = 0; i < launch.num_steps; ++i) {
          const StepKind kind = program.steps[launch.first_step + i].step.kind;
          planned = planned || (kind != StepKind::kSignal && kind != StepKind::kWait);
        }
      }
    } else if (action.kind == Action::kPost) {
      if (planned && posted > awaited) ++overlapped;
      planned = false;
      posted = action.number + 1;
    } else {
      awaited = action.number + 1;
    }
  }
  return overlapped;
}

TEST_CASE("rounds overlap with the steps of later chunks") {
  constexpr int32_t kChunks = 8;
  for (const Collective collective :
       {Collective::kAllToAll, Collective::kAllGather, Collective::kAllReduce, Collective::kReduceScatter}) {
    Request request;
    request.collective = collective;
    request.geometry = {2, 2, false, true};
    request.block_count = 8 * 4096;
    request.chunk_count = collective == Collective::kAllReduce ? 512 : 2048;  // half a block in each channel
    const Algorithm& algorithm = *FindAlgorithm(collective, "hierarchical");
    const Cut cut = MakeCut(algorithm, request, 2, {1, 2});
    for (size_t r = 0; r < cut.programs.size(); ++r) {
      const int32_t overlapped = NumOverlapped(cut.programs[r], cut.schedules[r], 2);
      if (overlapped < kChunks / 2) std::fprintf(stderr, "%s: %d\n", Name(collective), overlapped);
      CHECK(static_cast<int32_t>(cut.schedules[r].rounds.size()) >= kChunks && overlapped >= kChunks / 2);
    }
  }
}

TEST_CASE("small messages travel together") {
  Request request;
  request.collective = Collective::kAllToAll;
  request.geometry = {4, 2, false, true};
  request.block_count = 100;
  for (const char* name : {"direct", "hierarchical"}) {
    const Cut cut = MakeCut(*FindAlgorithm(Collective::kAllToAll, name), request, 3, {});
    for (const SendRecvSchedule& schedule : cut.schedules) {
      CHECK(schedule.rounds.size() == 1);
      // One message per peer, for any number of channels.
      std::set<int32_t> peers;
      for (const Transfer& transfer : schedule.rounds[0].sends) CHECK(peers.insert(transfer.peer).second);
      CHECK(peers.size() == (std::string(name) == "direct" ? 6u : 3u));
      // Each message has 1 or 2 blocks, of which the channels have 64, 32 and 4 elements. Each part is padded to a
      // multiple of 128 bytes.
      const int64_t count = std::string(name) == "direct" ? 64 + 32 + 32 : 128 + 64 + 32;
      for (const Transfer& transfer : schedule.rounds[0].sends) CHECK(transfer.count == count);
    }
  }
}

// Kernels need not compute the position of each element.
TEST_CASE("contiguous blocks are moved flat") {
  Request request;
  request.collective = Collective::kAllToAll;
  request.geometry = {2, 2, false, true};
  request.block_count = 100;
  for (const char* name : {"direct", "hierarchical"}) {
    const Cut cut = MakeCut(*FindAlgorithm(Collective::kAllToAll, name), request, 1, {});
    for (const RankProgram& program : cut.programs) {
      for (const ProgramStep& step : program.steps) {
        const bool synchronizes = step.step.kind == StepKind::kSignal || step.step.kind == StepKind::kWait;
        CHECK(step.flat != synchronizes);
      }
    }
  }
}

// Messages of one round do not overlap. Those of concurrent rounds are in different slots.
TEST_CASE("messages do not overlap") {
  Request request;
  request.collective = Collective::kAllToAll;
  request.geometry = {3, 2, false, true};
  request.block_count = 1000;
  request.chunk_count = 100;
  for (const int32_t num_slots : {1, 2, 3}) {
    const Cut cut = MakeCut(*FindAlgorithm(Collective::kAllToAll, "hierarchical"), request, 2, {1, num_slots});
    for (size_t r = 0; r < cut.schedules.size(); ++r) {
      const std::vector<Round>& rounds = cut.schedules[r].rounds;
      CHECK(rounds.size() > 6);
      std::set<int64_t> begins;
      for (const Round& round : rounds) {
        for (const std::vector<Transfer>& messages : {round.sends, round.receives}) {
          for (size_t i = 0; i < messages.size(); ++i) {
            CHECK(messages[i].begin + messages[i].count <= cut.programs[r].scratch_count);
            if (i > 0) CHECK(messages[i].begin == messages[i - 1].begin + messages[i - 1].count);
          }
        }
        if (!round.sends.empty()) begins.insert(round.sends[0].begin);
      }
      CHECK(static_cast<int32_t>(begins.size()) == num_slots);
      CHECK(cut.programs[r].scratch_count == cut.programs[0].scratch_count);
    }
  }
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
