// Kernels whose peers stop or arrive late, or whose host aborts: all of them end in time, and their
// reports name waits for signals that never came.
#include <algorithm>
#include <cstdlib>
#include <map>
#include <random>
#include <utility>

#include "../../ffi/plan/algorithms.h"
#include "../check.h"
#include "fakes/random_request.h"
#include "fakes/seed.h"
#include "fakes/virtual_gin.h"

namespace jaxcomm {
namespace cuda {
namespace {

constexpr Operation kSum{DType::kS32, ReduceOp::kSum};

using Block = std::pair<int32_t, int32_t>;  // rank, channel

// The point at which a thread block ends for good: it runs the calls before `call`, and `num_steps` steps of that call.
struct Stop {
  size_t call = 0;
  int32_t num_steps = 0;
};

// A group that has completed some calls and is about to run them again with a fault.
class Trial {
 public:
  explicit Trial(uint64_t seed) : random_(seed), geometry_(DrawGeometry()) {
    for (int i = 0; i < 2; ++i) calls_.push_back(Prepare(DrawChoice()));
    Number(1);
    const uint64_t begin = emulation::NowNs();
    Launch({}, begin);
    duration_ns_ = emulation::NowNs() - begin;
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
    CheckReports(begin, rank);
  }

  // A rank begins when the others have aborted, and must detect that.
  void ComeLate() {
    const int32_t rank = Draw(n());
    const uint64_t begin = emulation::NowNs();
    late_ = rank;
    late_ns_ = 2 * (duration_ns_ + timeout_ns_) + RoundNs();
    Launch({}, begin);
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
    CheckReports(begin, rank);  // what they waited for
  }

  // Reports of the ranks that aborted.
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
      return {algorithm, request};
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

  // Numbers of calls, for reports.
  void Number(uint64_t first) {
    first_id_ = first;
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
    gin_.Reopen();
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
        return gin_.Leave();
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
        Execute(args, calls_[i].network[block.first], gin[i][block.first], block.second);
        EndCall(i, block.first, num_ended[block.first]);
      }
      if (threadIdx.x == 0) ends_.at(block) = emulation::NowNs();
      gin_.Leave();
    });
  }

  void Host(uint64_t begin) {
    if (blockIdx.x != 0 || threadIdx.x != 0 || abort_ns_ == 0) return;
    while (emulation::NowNs() < begin + abort_ns_) emulation::Pause();
    for (int32_t rank = 0; rank < n(); ++rank) device::StoreRelease(&ranks_.reports()[rank].abort, 1);
  }

  // A rank that has reported nothing has ended all calls. The others have reported a wait of their program for a signal
  // that did not come from the failed rank, or from one that has reported too. At least one report names the failed
  // rank, and all blocks have ended in time.
  void CheckReports(uint64_t begin, int32_t culprit) {
    bool named = false, failed = false;
    for (int32_t rank = 0; rank < n(); ++rank) {
      const device::Report& report = ranks_.reports()[rank];
      if (report.state == device::Report::kNone) {
        for (size_t i = 0; i < calls_.size() && rank != culprit; ++i) CHECK(passed_.at({i, rank}));
        continue;
      }
      ++num_reports_;
      failed = true;
      CheckWait(rank, report);
      CHECK(rank == culprit || report.peer == culprit ||
            ranks_.reports()[report.peer].state == device::Report::kComplete);
      named = named || rank == culprit || report.peer == culprit;
    }
    CHECK(named || !failed);
    const uint64_t latest = duration_ns_ + timeout_ns_ + RoundNs();
    for (const auto& [block, end] : ends_) {
      CHECK(end - begin <= latest + (block.first == late_ ? late_ns_ : 0));
    }
  }

  void CheckWait(int32_t rank, const device::Report& report) {
    CHECK(report.state == device::Report::kComplete && report.rank == rank && report.channel < num_channels_);
    const size_t call = report.call_id - first_id_;
    CHECK(call < calls_.size());
    const RankArgs& args = calls_[call].args[rank];
    const ChannelProgram& program = args.channels[report.channel];
    const ProgramStep* const steps = args.steps + program.first_step;
    CHECK(std::any_of(steps, steps + program.num_steps, [&](const ProgramStep& step) {
      return step.step.kind == StepKind::kWait && step.origin == report.step && step.step.peer == report.peer;
    }));
    const bool inside = geometry_.node(rank) == geometry_.node(report.peer);
    const device::Comm& comm = inside ? args.comm : calls_[call].network[rank].comm;
    const int64_t counter = int64_t{report.channel} * comm.local.size + report.peer - comm.local.first;
    CHECK(report.expected == comm.signals.received[counter] + 1 && report.seen + 1 == report.expected);
    // Signals of a late rank may have come since.
    if (late_ >= 0 || (uses_gin_ && !inside)) return;
    CHECK(comm.signals.pad.At<uint64_t>(comm.local.rank)[counter] < report.expected);
  }

  std::mt19937_64 random_;
  const Geometry geometry_;
  const int32_t num_channels_ = 1 + Draw(3);
  const unsigned threads_ = 1 + static_cast<unsigned>(Draw(4));
  HostMemory memory_;
  const VirtualRanks ranks_{memory_, geometry_, num_channels_, 1'000'000'000'000};
  const bool uses_gin_ = Draw(2) == 0;  // between nodes
  VirtualGin gin_{n(), num_channels_, random_()};
  std::vector<VirtualRanks::Call> calls_;
  uint64_t first_id_ = 0;
  uint64_t duration_ns_ = 0;
  uint64_t timeout_ns_ = 0;
  int32_t late_ = -1;
  uint64_t late_ns_ = 0;
  uint64_t abort_ns_ = 0;
  std::map<Block, uint64_t> ends_;
  std::map<std::pair<size_t, int32_t>, bool> passed_;  // by call and rank: not yet aborted
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

TEST_CASE("the host aborts") { Repeat(&Trial::Abort, 30, 350); }

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
