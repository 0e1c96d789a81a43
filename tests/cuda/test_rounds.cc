// The predicted time of rounds of sends and receives, by their size. Prints the table of
// docs/internals/cuda-bandwidth.md.
#include <algorithm>
#include <cstdio>
#include <iterator>
#include <vector>

#include "../../ffi/cuda/program/send_recv_schedule.h"
#include "../../ffi/plan/algorithms.h"
#include "../../ffi/plan/request.h"
#include "../../ffi/plan/channels.h"
#include "../check.h"

namespace jaxcomm {
namespace cuda {
namespace {

constexpr int64_t kItemBytes = 4;
constexpr int32_t kMostChannels = 32;

struct Prediction {
  double time_s = 0;
  size_t num_rounds = 0;
};

// Both streams of rank 0, while all other ranks do the same at the same time. Parameters are those of GpuMachine. A
// round takes the overhead and the latency of a message; a launch takes launch_s.
Prediction Predict(Collective collective, int64_t bytes, int64_t round_bytes) {
  const Machine machine = GpuMachine(InterNode::kSendRecv);
  const LinkModel& node = machine.links[static_cast<size_t>(Link::kNode)];
  const LinkModel& network = machine.links[static_cast<size_t>(Link::kNetwork)];
  Request request;
  request.collective = collective;
  request.geometry = GpuGeometry(16, 8, false);
  const bool blocks = collective == Collective::kAllToAll || collective == Collective::kReduceScatter;
  request.block_count = bytes / kItemBytes / (blocks ? 16 : 1);
  const Selection selection = *SelectForGpus(request, "", kItemBytes, kMostChannels, InterNode::kSendRecv);
  SendRecvSchedule schedule;
  SplitLimits limits;
  limits.round_bytes = round_bytes;
  const RankProgram program = MakeSendRecvProgram(selection.choice, request.block_count, {}, kItemBytes,
                                                  selection.num_channels, 0, limits, &schedule);
  const auto launch_s = [&](int32_t number) {
    double moved = 0;
    for (int32_t c = 0; c < selection.num_channels; ++c) {
      const ChannelProgram& launch = program.channels[number * selection.num_channels + c];
      for (int32_t i = 0; i < launch.num_steps; ++i) {
        const Step& step = program.steps[launch.first_step + i].step;
        moved += static_cast<double>(step.count * std::max(step.num_sources, 1) * kItemBytes);
      }
    }
    return machine.launch_s + moved / node.bytes_per_s;
  };
  double first_s = 0, second_s = 0;  // when the streams become free
  std::vector<double> ends_s;        // of rounds
  for (const Action& action : schedule.actions) {
    if (action.kind == Action::kLaunch) {
      first_s += launch_s(action.number);
    } else if (action.kind == Action::kAwait) {
      first_s = std::max(first_s, ends_s[action.number]);
    } else {
      const Round& round = schedule.rounds[action.number];
      int64_t sent = 0;
      for (const Transfer& transfer : round.sends) sent += transfer.count * kItemBytes;
      second_s = std::max(second_s, first_s) + network.overhead_s + network.latency_s +
                 static_cast<double>(sent) / network.bytes_per_s;
      if (round.unpack >= 0) second_s += launch_s(round.unpack);
      ends_s.push_back(second_s);
    }
  }
  return {std::max(first_s, second_s), schedule.rounds.size()};
}

// Larger rounds need fewer launches, but a round that waits for a second chunk overlaps less with work inside the node.
TEST_CASE("no other size of rounds is faster over all collectives") {
  constexpr int64_t kRounds[] = {1 << 20, 2 << 20, 4 << 20, 8 << 20};
  std::vector<double> sums(std::size(kRounds), 0);  // of times relative to the fastest
  std::printf("| collective | bytes | 1 MiB | 2 MiB | 4 MiB | 8 MiB |\n|---|---|---|---|---|---|\n");
  for (const auto& [collective, name] : {std::pair{Collective::kAllToAll, "all_to_all"},
                                         {Collective::kAllGather, "all_gather"},
                                         {Collective::kReduceScatter, "reduce_scatter"},
                                         {Collective::kAllReduce, "all_reduce"}}) {
    for (const int64_t bytes : {16 << 20, 256 << 20, 1 << 30}) {
      if (collective == Collective::kAllGather && bytes > 256 << 20) continue;  // results of 16 GiB
      std::printf("| %s | %d MiB |", name, static_cast<int>(bytes >> 20));
      std::vector<double> times_s;
      for (const int64_t round_bytes : kRounds) {
        const Prediction found = Predict(collective, bytes, round_bytes);
        CHECK(found.num_rounds > 0);
        std::printf(" %.0f us, %d |", found.time_s * 1e6, static_cast<int>(found.num_rounds));
        times_s.push_back(found.time_s);
      }
      std::printf("\n");
      const double least_s = *std::min_element(times_s.begin(), times_s.end());
      for (size_t i = 0; i < times_s.size(); ++i) sums[i] += times_s[i] / least_s;
    }
  }
  const size_t chosen = std::find(std::begin(kRounds), std::end(kRounds), SplitLimits().round_bytes) - kRounds;
  CHECK(chosen < sums.size());
  for (const double sum : sums) CHECK(sums[chosen] <= 1.0001 * sum);
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
