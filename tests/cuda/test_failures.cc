// Kernels whose peers stop, arrive late or run other programs, or whose host aborts: all of them end in time, and their
// reports match a model of signals and waits.
#include <algorithm>
#include <cstdlib>
#include <map>
#include <random>
#include <tuple>
#include <utility>

#include "../../ffi/plan/algorithms.h"
#include "../check.h"
#include "fakes/random_request.h"
#include "fakes/seed.h"
#include "fakes/signal_model.h"
#include "fakes/virtual_gin.h"

namespace jaxcomm {
namespace cuda {
namespace {

constexpr Operation kSum{DType::kS32, ReduceOp::kSum};
bool Same(const device::Report& a, const device::Report& b) {
  return a.state == b.state && a.call_id == b.call_id && a.channel == b.channel && a.step == b.step &&
         a.rank == b.rank && a.peer == b.peer && a.expected == b.expected && a.seen == b.seen;
}

// A group that has completed some calls and is about to run them again with a fault.
class Trial {
 public:
  explicit Trial(uint64_t seed) : random_(seed), geometry_(DrawGeometry()), model_(n(), num_channels_) {
    for (int i = 0; i < 2; ++i) calls_.push_back(Prepare(DrawChoice()));
    Number(1);
    const uint64_t begin = emulation::NowNs();
    Launch({}, begin);
    duration_ns_ = emulation::NowNs() - begin;
    model_.Run(calls_, {});
    CHECK(model_.stuck().empty());
    for (int32_t rank = 0; rank < n(); ++rank) CHECK(ranks_.reports()[rank].state == device::Report::kNone);
    Number(calls_.size() + 1);
    timeout_ns_ = 4 * (duration_ns_ + RoundNs());
    ForAll([&](device::Comm& comm) { comm.timeout_ns = timeout_ns_; });
  }

  // A rank never starts, runs one call less, or stops at some step of some channel.
  void StopSomewhere() {
    const int32_t rank = Draw(n());
    const int32_t kind = Draw(4);
    std::map<Block, Stop> stops;
    for (int32_t channel = 0; channel < num_channels_ && kind < 2; ++channel) {
      stops[{rank, channel}] = {static_cast<size_t>(kind), 0};
    }
    if (kind >= 2) {
      const int32_t channel = Draw(num_channels_);
      stops[{rank, channel}] = {static_cast<size_t>(Draw(2)), 0};
      Stop& stop = stops[{rank, channel}];
      const RankArgs& args = calls_[stop.call].args[rank];
      const ChannelProgram& program = args.channels[channel];
      for (int32_t left = Draw(program.num_steps + 1); stop.num_steps < left;) {
        stop.num_steps += args.steps[program.first_step + stop.num_steps].num_concurrent;
      }
    }
    const uint64_t begin = emulation::NowNs();
    Launch(stops, begin);
    model_.Run(calls_, stops);
    CheckReports(begin, rank);
  }

  // A rank begins when the others have aborted, and must detect that.
  void ComeLate() {
    const int32_t rank = Draw(n());
    std::map<Block, Stop> itself;
    for (int32_t channel = 0; channel < num_channels_; ++channel) itself[{rank, channel}] = {};
    const uint64_t begin = emulation::NowNs();
    late_ = rank;
    late_ns_ = 2 * (duration_ns_ + timeout_ns_) + RoundNs();
    Launch({}, begin);
    model_.Run(calls_, itself);
    // Every rank that was not stuck has ended.
    std::map<Block, Stop> others;
    for (const auto& [block, end] : ends_) {
      if (block.first != rank) others[block] = {};
    }
    model_.Run(calls_, others);
    CheckReports(begin, rank);
  }

  // One rank runs another algorithm than the others. No rank moves data, because ranks with different programs would
  // overwrite each other's memory.
  void DifferOnce() {
    const int32_t rank = Draw(n());
    Choice other = choices_.back();
    const std::vector<Algorithm>& table = Algorithms(other.request.collective);
    do {
      other.algorithm = &table[Draw(static_cast<int32_t>(table.size()))];
    } while (!other.algorithm->supports(other.request));
    const VirtualRanks::Call call = Prepare(other);
    calls_.back().args[rank] = call.args[rank];
    calls_.back().network[rank] = call.network[rank];
    for (int32_t r = 0; r < n(); ++r) DropData(calls_.back().args[r]);
    Number(calls_.size() + 1);
    ForAll([&](device::Comm& comm) { comm.timeout_ns = timeout_ns_; });
    const uint64_t begin = emulation::NowNs();
    Launch({}, begin);
    model_.Run(calls_, {});
    CheckReports(begin, rank);
  }

  // The host aborts long before the kernels would.
  void Abort() {
    const int32_t rank = Draw(n());
    std::map<Block, Stop> stops;
    for (int32_t channel = 0; channel < num_channels_; ++channel) stops[{rank, channel}] = {};
    ForAll([&](device::Comm& comm) { comm.timeout_ns = 4 * timeout_ns_; });
    const uint64_t begin = emulation::NowNs();
    abort_ns_ = 2 * duration_ns_;
    Launch(stops, begin);
    for (const auto& [block, end] : ends_) CHECK(end - begin < 3 * duration_ns_ + RoundNs());
    model_.Run(calls_, stops);
    CheckReports(begin, rank);  // what they waited for
  }

  // A rank stops for a while in the middle of a call, until others have aborted and have ended the calls that follow.
  // If a rank completes a call without aborting, its result must be right. This includes the paused rank, which finds
  // the signals of the others.
  void PauseInBetween() {
    calls_.push_back(calls_[0]);
    calls_.back().args = memory_.Upload(std::vector<RankArgs>(calls_[0].args, calls_[0].args + n()));
    ShareAnArena();
    Launch({}, emulation::NowNs());
    const auto expected = results_;
    const int32_t rank = Draw(n());
    for (int32_t channel = 0; channel < num_channels_; ++channel) {
      const RankArgs& args = calls_[0].args[rank];
      const ChannelProgram& program = args.channels[channel];
      int32_t& pause = pauses_[{rank, channel}];
      for (int32_t left = Draw(program.num_steps + 1); pause < left;) {
        pause += args.steps[program.first_step + pause].num_concurrent;
      }
    }
    for (auto& of_call : results_) {
      for (auto& result : of_call) result.assign(result.size(), -1);
    }
    ForAll([&](device::Comm& comm) { comm.timeout_ns = timeout_ns_; });
    late_ns_ = 2 * (duration_ns_ + timeout_ns_) + RoundNs();
    Launch({}, emulation::NowNs());
    for (size_t i = 0; i < calls_.size(); ++i) {
      for (int32_t r = 0; r < n(); ++r) {
        if (!passed_.at({i, r})) continue;
        CHECK(results_[i][r] == expected[i][r]);
        const bool others_gave_up = *calls_[0].args[(r + 1) % n()].comm.abort_flag != 0;
        if (i == 0 && r == rank && others_gave_up) ++num_reports_;
      }
    }
  }

  // Reports of the ranks that aborted. For PauseInBetween also: ranks that could continue where others had aborted.
  int num_reports() const { return num_reports_; }

 private:
  int32_t n() const { return geometry_.num_ranks(); }
  int32_t Draw(int32_t below) { return static_cast<int32_t>(random_() % below); }

  Geometry DrawGeometry() {
    constexpr int32_t kShapes[][2] = {{1, 2}, {1, 3}, {1, 5}, {2, 2}, {2, 3}, {3, 1}};
    const auto& shape = kShapes[Draw(static_cast<int32_t>(std::size(kShapes)))];
    return {shape[0], shape[1], false, Draw(2) == 0};
  }

  Choice DrawChoice() {
    for (;;) {
      Request request;
      request.collective = kCollectives[Draw(static_cast<int32_t>(std::size(kCollectives)))];
      request.geometry = geometry_;
      request.block_count = request.collective == Collective::kBarrier ? 0 : 60 + Draw(100);
      request.chunk_count = Draw(2) == 0 ? 0 : 7;
      request.root = Draw(n());
      if (request.collective == Collective::kPermute) {
        const int32_t shift = Draw(2);  // 0: ranks that are alone on their node communicate with no rank
        for (int32_t r = 0; r < n(); ++r) request.source_of.push_back((r + shift) % n());
      }
      const std::vector<Algorithm>& table = Algorithms(request.collective);
      const Algorithm& algorithm = table[Draw(static_cast<int32_t>(table.size()))];
      if (!algorithm.supports(request)) continue;
      choices_.emplace_back(algorithm, request);
      return choices_.back();
    }
  }

  VirtualRanks::Call Prepare(const Choice& choice) {
    return ranks_.Prepare(memory_, choice, choice.request.block_count, {}, kSum, num_channels_);
  }

  void ForAll(const std::function<void(device::Comm&)>& f) {
    for (const VirtualRanks::Call& call : calls_) {
      for (int32_t rank = 0; rank < n(); ++rank) {
        f(call.args[rank].comm);
        f(call.network[rank].comm);
      }
    }
  }

  // Like calls on a communicator, with operands and results elsewhere.
  void ShareAnArena() {
    int64_t bytes = 0;
    for (const VirtualRanks::Call& call : calls_) {
      bytes = std::max(bytes, call.args->input.stride + call.args->output.stride + call.args->scratch.stride);
    }
    char* const arena = memory_.Take(n() * bytes);
    results_.resize(calls_.size());
    for (size_t i = 0; i < calls_.size(); ++i) {
      for (int32_t r = 0; r < n(); ++r) {
        RankArgs& args = calls_[i].args[r];
        PeerNetworkArgs& network = calls_[i].network[r];
        std::vector<int32_t> operand(args.input.stride / sizeof(int32_t));
        for (int32_t& value : operand) value = Draw(1 << 20);
        results_[i].emplace_back(args.output.stride / sizeof(int32_t), -1);
        int64_t offset = 0;
        const auto move = [&](device::Window& of_node, device::Window& of_all) {
          const int64_t taken = of_node.stride;
          of_node = {arena + args.comm.local.first * bytes + offset, bytes};
          of_all = {arena + offset, bytes};
          offset += taken;
        };
        move(args.input, network.input);
        move(args.output, network.output);
        move(args.scratch, network.scratch);
        const int32_t local = args.comm.local.rank;
        args.copy_in = {args.input.At(local), reinterpret_cast<const char*>(memory_.Upload(operand))};
        args.copy_out = {reinterpret_cast<char*>(results_[i][r].data()), args.output.At(local)};
      }
    }
  }

  void DropData(RankArgs& args) {
    int32_t num_steps = 0;
    for (int32_t channel = 0; channel < num_channels_; ++channel) {
      num_steps = std::max(num_steps, args.channels[channel].first_step + args.channels[channel].num_steps);
    }
    std::vector<ProgramStep> steps(args.steps, args.steps + num_steps);
    for (ProgramStep& step : steps) step.step.count = 0;
    args.steps = memory_.Upload(steps);
  }

  // Numbers of calls, for reports.
  void Number(uint64_t first) {
    for (size_t i = 0; i < calls_.size(); ++i) {
      for (int32_t rank = 0; rank < n(); ++rank) {
        calls_[i].args[rank].comm.call_id = first + i;
        calls_[i].network[rank].comm.call_id = first + i;
      }
    }
  }

  // Upper bound of the time in which a block polls for a signal between two reads of the clock.
  uint64_t RoundNs() const { return uint64_t{100} * 64 * num_channels_ * (n() + 2) * threads_ * 4; }

  void Execute(const RankArgs& args, const PeerNetworkArgs& peers, const GinNetworkArgs& gin, int32_t channel) {
    if (!uses_gin_) {
      PeerNetwork network(peers);
      return cuda::ChannelExecutor<PeerNetwork>(args, network, channel).Run();
    }
    const ncclDevComm comm = gin_.CommOf(args.comm.world.rank);
    GinNetwork network(gin, comm);
    cuda::ChannelExecutor<GinNetwork>(args, network, channel).Run();
  }

  // With a pause before step `pause` of the channel.
  void ExecuteSlowly(RankArgs args, const PeerNetworkArgs& peers, const GinNetworkArgs& gin, int32_t channel,
                     int32_t pause, uint64_t end) {
    std::vector<ChannelProgram> programs(args.channels, args.channels + num_channels_);
    const ChannelProgram whole = programs[channel];
    const BufferCopy copy_out = std::exchange(args.copy_out, {});
    args.channels = programs.data();
    programs[channel].num_steps = pause;
    Execute(args, peers, gin, channel);
    while (emulation::NowNs() < end) emulation::Pause();
    programs[channel].first_step = whole.first_step + pause;
    programs[channel].num_steps = whole.num_steps - pause;
    args.copy_in = {};
    args.copy_out = copy_out;
    Execute(args, peers, gin, channel);
  }

  // A kernel begins when all blocks of the previous one have ended.
  void EndCall(size_t call, int32_t rank, uint64_t& num_ended) {
    __syncthreads();
    if (threadIdx.x == 0) {
      __atomic_fetch_add(&num_ended, 1, __ATOMIC_ACQ_REL);
      while (device::LoadAcquire(&num_ended) < (call + 1) * num_channels_) emulation::Pause();
      if (blockIdx.x == 0) passed_.at({call, rank}) = device::LoadAcquire(calls_[call].args[rank].comm.abort_flag) == 0;
    }
    __syncthreads();
  }

  // The grid has a row per rank, then one row for the host and one for the network.
  void Launch(const std::map<Block, Stop>& stops, uint64_t begin) {
    std::vector<std::vector<GinNetworkArgs>> gin;
    for (const VirtualRanks::Call& call : calls_) gin.push_back(gin_.Args(call));
    gin_.network().Reopen();
    std::vector<uint64_t> num_ended(n());  // thread blocks of all calls, by rank
    for (int32_t rank = 0; rank < n(); ++rank) {
      for (int32_t channel = 0; channel < num_channels_; ++channel) ends_[{rank, channel}] = begin;
      for (size_t i = 0; i < calls_.size(); ++i) passed_[{i, rank}] = false;
    }
    emulation::Launch(num_channels_, n() + 2, threads_, random_(), [&] {
      const Block block(static_cast<int32_t>(blockIdx.y), static_cast<int32_t>(blockIdx.x));
      if (block.first == n() + 1) return gin_.Serve();
      if (block.first == n()) {
        Host(begin);
        return gin_.network().Leave();
      }
      while (block.first == late_ && emulation::NowNs() < begin + late_ns_) emulation::Pause();
      const auto stop = stops.find(block);
      for (size_t i = 0; i < calls_.size(); ++i) {
        RankArgs args = calls_[i].args[block.first];
        if (stop != stops.end() && i > stop->second.call) {
          EndCall(i, block.first, num_ended[block.first]);
          continue;
        }
        // The last call is cut short, for this block only.
        std::vector<ChannelProgram> programs(args.channels, args.channels + num_channels_);
        if (stop != stops.end() && i == stop->second.call) {
          programs[block.second].num_steps = stop->second.num_steps;
          args.channels = programs.data();
        }
        const auto pause = pauses_.find(block);
        if (i == 0 && pause != pauses_.end()) {
          ExecuteSlowly(args, calls_[i].network[block.first], gin[i][block.first], block.second, pause->second,
                        begin + late_ns_);
        } else {
          Execute(args, calls_[i].network[block.first], gin[i][block.first], block.second);
        }
        EndCall(i, block.first, num_ended[block.first]);
      }
      if (threadIdx.x == 0) ends_.at(block) = emulation::NowNs();
      gin_.network().Leave();
    });
  }

  void Host(uint64_t begin) {
    if (blockIdx.x != 0 || threadIdx.x != 0 || abort_ns_ == 0) return;
    while (emulation::NowNs() < begin + abort_ns_) emulation::Pause();
    for (int32_t rank = 0; rank < n(); ++rank) device::StoreRelease(&ranks_.reports()[rank].abort, 1);
  }

  // Ranks with a stuck block have reported one of these, and no other rank has reported anything. At least one report
  // names the failed rank, and all blocks have ended in time.
  void CheckReports(uint64_t begin, int32_t culprit) {
    bool named = model_.stuck().empty();
    for (int32_t rank = 0; rank < n(); ++rank) {
      std::vector<device::Report> possible;
      for (const auto& [block, reports] : model_.stuck()) {
        if (block.first == rank) possible.insert(possible.end(), reports.begin(), reports.end());
      }
      const device::Report& report = ranks_.reports()[rank];
      if (possible.empty()) {
        CHECK(report.state == device::Report::kNone);
        continue;
      }
      ++num_reports_;
      CHECK(std::any_of(possible.begin(), possible.end(), [&](const auto& other) { return Same(report, other); }));
      const bool names = rank == culprit || report.peer == culprit;
      const auto& stuck = model_.stuck();  // or a rank that waits too, and so starts nothing else
      CHECK(names ||
            std::any_of(stuck.begin(), stuck.end(), [&](const auto& b) { return b.first.first == report.peer; }));
      named = named || names;
    }
    CHECK(named);
    const uint64_t latest = duration_ns_ + timeout_ns_ + RoundNs();
    for (const auto& [block, end] : ends_) {
      CHECK(end - begin <= latest + (block.first == late_ ? late_ns_ : 0));
    }
  }

  std::mt19937_64 random_;
  const Geometry geometry_;
  const int32_t num_channels_ = 1 + Draw(3);
  const unsigned threads_ = 1 + static_cast<unsigned>(Draw(4));
  HostMemory memory_;
  const VirtualRanks ranks_{memory_, geometry_, num_channels_, 1'000'000'000'000};
  const bool uses_gin_ = Draw(2) == 0;  // between nodes
  VirtualGin gin_{n(), num_channels_, random_()};
  std::vector<Choice> choices_;
  Calls calls_;
  Model model_;
  uint64_t duration_ns_ = 0;
  uint64_t timeout_ns_ = 0;
  int32_t late_ = -1;
  uint64_t late_ns_ = 0;
  uint64_t abort_ns_ = 0;
  std::map<Block, uint64_t> ends_;
  std::map<Block, int32_t> pauses_;                         // steps of the first call before which a block pauses
  std::map<std::pair<size_t, int32_t>, bool> passed_;       // by call and rank: not yet aborted
  std::vector<std::vector<std::vector<int32_t>>> results_;  // by call and rank
  int num_reports_ = 0;
};

// Returns the number of ranks that have aborted.
int Repeat(void (Trial::*fault)(), int times, uint64_t first_seed) {
  int num_reports = 0;
  for (int i = 0; i < times; ++i) {
    Trial trial(FirstSeed() + first_seed + i);
    (trial.*fault)();
    num_reports += trial.num_reports();
  }
  return num_reports;
}

TEST_CASE("a rank stops") { CHECK(Repeat(&Trial::StopSomewhere, 200, 0) > 100); }

TEST_CASE("a rank arrives late") { CHECK(Repeat(&Trial::ComeLate, 50, 200) > 20); }

TEST_CASE("a rank runs another program") { Repeat(&Trial::DifferOnce, 100, 250); }

TEST_CASE("the host aborts") { Repeat(&Trial::Abort, 30, 350); }

TEST_CASE("a rank pauses") { CHECK(Repeat(&Trial::PauseInBetween, 200, 380) > 20); }

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
