#include "plan/staging.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "plan/builder.h"
#include "plan/partition.h"

namespace jaxcomm {
namespace {

// The GPUs that one NVLink domain connects at most (NVL72). A staged plan is built from the plans of all ranks, so the
// plans of all ranks take time proportional to the cube of their number: on 256 ranks, `explain` took more than 15 s.
constexpr int32_t kMaxRanks = 72;
// Limit on the chunks of a call times its ranks. A chunk has at most about four steps per rank, so this bounds the
// steps for any size. Slots grow beyond it, and if a move has more than kConcurrentBytes, moves run one after another.
// For an all_gather with 32 channels, this begins at a result of about 1 TiB.
constexpr int64_t kMaxStagedParts = 1 << 17;
// Layouts with fragments are staged only if the moves have at least this size: moves of fragments run one after
// another, so each pays its own overhead. Not measured.
constexpr int64_t kMinFragmentedBytes = 32 << 10;
// Chunks have a multiple of this, unless a block has less. All but the last then keep the alignment of elements.
constexpr int64_t kChunkGrainBytes = 128;

int64_t RoundedUp(int64_t count, int64_t grain) { return CeilDiv(count, grain) * grain; }

// The largest power of two, up to 128, that divides a number of elements.
int64_t GrainOf(int64_t count) { return std::min<int64_t>(count & -count, 128); }

bool IsData(const Step& step) { return step.kind != StepKind::kSignal && step.kind != StepKind::kWait; }

std::vector<Place> SourcesOf(const Plan& plan, const Step& step) {
  if (step.kind == StepKind::kZero) return {};
  if (step.kind != StepKind::kReduce) return {step.src};
  const auto first = plan.sources.begin() + step.first_source;
  return {first, first + step.num_sources};
}

// The ranges of one buffer that peers read, by the first element.
using Ranges = std::map<int64_t, int64_t>;

// The smallest range that contains all of them and begins and ends at a multiple of `grain`.
Range HullOf(const Ranges& ranges, int64_t grain) {
  if (ranges.empty()) return {};
  const int64_t begin = ranges.begin()->first / grain * grain;
  int64_t end = begin;
  for (const auto& [first, count] : ranges) end = std::max(end, first + count);
  return {begin, RoundedUp(end - begin, grain)};
}

// The plans of all ranks for one chunk of every block, and the accesses of each rank to memory of others.
struct ChunkPlans {
  // `grain`: the parts of a chunk in a slot keep their offset from a multiple of this.
  ChunkPlans(const Algorithm& algorithm, Request request, int64_t count, int64_t grain)
      : inputs(request.geometry.num_ranks()), outputs(inputs.size()), partners(inputs.size()) {
    request.block_count = count;
    request.chunk_count = request.staged_count = 0;
    for (int32_t r = 0; r < request.geometry.num_ranks(); ++r) {
      plans.push_back(algorithm.build(request, r));
      for (const Step& step : plans.back().steps) {
        exchanges = exchanges || step.kind == StepKind::kWait;
        if (!IsData(step)) continue;
        for (const Place& source : SourcesOf(plans.back(), step)) {
          if (source.rank == r) continue;
          Ranges& ranges = (source.space == Space::kInput ? inputs : outputs)[source.rank];
          int64_t& known = ranges[source.offset];
          known = std::max(known, step.count);
          partners[r].insert(source.rank);
          partners[source.rank].insert(r);
        }
      }
    }
    for (const Ranges& ranges : inputs) input_hulls.push_back(HullOf(ranges, grain));
    for (const Ranges& ranges : outputs) output_hulls.push_back(HullOf(ranges, grain));
  }

  std::vector<Plan> plans;                       // by rank
  std::vector<Ranges> inputs, outputs;           // by owner
  std::vector<Range> input_hulls, output_hulls;  // by owner
  std::vector<std::set<int32_t>> partners;       // by rank: the ranks that it reads from or that read from it
  bool exchanges = false;                        // some rank waits, so that peers read results
};

// Whether the steps of the plan can be split into those before and those after a single exchange of signals, and access
// the memory of peers by reads only.
bool CanStage(const Plan& plan, int64_t block_count) {
  if (plan.scratch_count > 0) return false;
  bool waited = false;
  for (const Step& step : plan.steps) {
    waited = waited || step.kind == StepKind::kWait;
    if (step.kind == StepKind::kPut || (step.kind == StepKind::kSignal && waited)) return false;
    if (!IsData(step)) continue;
    std::vector<Place> places = SourcesOf(plan, step);
    for (const Place& source : places) {
      if (source.rank == plan.rank && source.space == Space::kOutput) return false;
    }
    places.push_back(step.dst);
    for (const Place& place : places) {
      if (place.offset / block_count != (place.offset + step.count - 1) / block_count) return false;
    }
  }
  return true;
}

// Builds the staged plan of one rank, iteration by iteration.
class Stager {
 public:
  Stager(const Algorithm& algorithm, const Request& request, int32_t rank)
      : request_(request),
        rank_(rank),
        chunk_count_(std::min(request.staged_count, request.block_count)),
        num_chunks_(CeilDiv(request.block_count, chunk_count_)),
        whole_(algorithm, request, chunk_count_, GrainOf(chunk_count_)),
        last_(algorithm, request, request.block_count - (num_chunks_ - 1) * chunk_count_, GrainOf(chunk_count_)),
        plan_(request, rank) {
    for (const ChunkPlans* plans : {&whole_, &last_}) {
      for (const Range& hull : plans->input_hulls) input_slot_ = std::max(input_slot_, hull.count);
      for (const Range& hull : plans->output_hulls) output_slot_ = std::max(output_slot_, hull.count);
    }
  }

  // Iteration t stages chunk t, runs the steps of chunk t - lead before the exchange of signals, and those of chunk t -
  // 2 * lead after it. The signal at its end states that this rank has written the chunks of this iteration and has
  // read those of its peers. The wait at its start is for the signal of iteration t - lead. These signals replace those
  // of the algorithm.
  Plan Build() && {
    const int64_t last_delay = (whole_.exchanges ? 2 : 1) * kStagingLead;
    const int64_t num_iterations = num_chunks_ + last_delay;
    const auto for_chunk = [&](int64_t chunk, auto run) {
      if (chunk >= 0 && chunk < num_chunks_) run(chunk);
    };
    for (int64_t t = 0; t < num_iterations; ++t) {
      if (t >= kStagingLead) ForEachPartner([&](int32_t peer) { plan_.Wait(peer); }, -1);
      for_chunk(t, [&](int64_t chunk) { Stage(chunk); });
      // Moves come before sums, so that all moves of an iteration run at once.
      for_chunk(t - 2 * kStagingLead, [&](int64_t chunk) { RunAfterExchange(chunk); });
      for_chunk(t - kStagingLead, [&](int64_t chunk) { RunBeforeExchange(chunk); });
      if (t + kStagingLead < num_iterations) ForEachPartner([&](int32_t peer) { plan_.Signal(peer); }, 1);
    }
    return std::move(plan_).Finish(kStagingSlots * (input_slot_ + output_slot_));
  }

 private:
  const ChunkPlans& PlansOf(int64_t chunk) const { return chunk + 1 < num_chunks_ ? whole_ : last_; }

  // All partners, from this rank's neighbour on in `direction`.
  template <typename Visit>
  void ForEachPartner(Visit visit, int32_t direction) {
    const int32_t n = request_.geometry.num_ranks();
    for (int32_t s = 1; s < n; ++s) {
      const int32_t peer = (rank_ + n + direction * s) % n;
      if (whole_.partners[rank_].count(peer) + last_.partners[rank_].count(peer) > 0) visit(peer);
    }
  }

  // A place of the chunk's plan in this rank's operand or result.
  Place InWhole(int64_t chunk, Place place) const {
    const int64_t count = CountOf(chunk);
    place.offset = place.offset / count * request_.block_count + chunk * chunk_count_ + place.offset % count;
    return place;
  }
  // A place of the chunk's plan in the ring.
  Place InSlot(int64_t chunk, const Place& place) const {
    const bool input = place.space == Space::kInput;
    const ChunkPlans& plans = PlansOf(chunk);
    const int64_t begin = (input ? plans.input_hulls : plans.output_hulls)[place.rank].begin;
    const int64_t slot = chunk % kStagingSlots;
    const int64_t area = input ? slot * input_slot_ : kStagingSlots * input_slot_ + slot * output_slot_;
    return {place.rank, Space::kScratch, area + place.offset - begin};
  }
  int64_t CountOf(int64_t chunk) const { return std::min(chunk_count_, request_.block_count - chunk * chunk_count_); }

  // Whether peers read what the step writes to the result. They read all of it.
  bool IsRead(int64_t chunk, const Step& step) const {
    return PlansOf(chunk).outputs[rank_].count(step.dst.offset) > 0;
  }

  // Copies what peers read of the operand.
  void Stage(int64_t chunk) {
    for (const auto& [first, count] : PlansOf(chunk).inputs[rank_]) {
      const Place place = {rank_, Space::kInput, first};
      plan_.Move(InWhole(chunk, place), InSlot(chunk, place), count);
    }
  }

  void RunBeforeExchange(int64_t chunk) {
    for (const Step& step : PlansOf(chunk).plans[rank_].steps) {
      if (step.kind == StepKind::kWait) return;
      if (IsData(step)) Run(chunk, step, IsRead(chunk, step));
    }
  }

  void RunAfterExchange(int64_t chunk) {
    if (!whole_.exchanges) return;
    bool after = false;
    for (const Step& step : PlansOf(chunk).plans[rank_].steps) {
      after = after || step.kind == StepKind::kWait;
      if (!IsData(step)) continue;
      if (after) {
        Run(chunk, step, false);
      } else if (IsRead(chunk, step)) {
        plan_.Move(InSlot(chunk, step.dst), InWhole(chunk, step.dst), step.count);
      }
    }
  }

  void Run(int64_t chunk, const Step& step, bool to_slot) {
    const Place dst = to_slot ? InSlot(chunk, step.dst) : InWhole(chunk, step.dst);
    std::vector<Place> sources = SourcesOf(PlansOf(chunk).plans[rank_], step);
    for (Place& source : sources) source = source.rank == rank_ ? InWhole(chunk, source) : InSlot(chunk, source);
    if (step.kind == StepKind::kZero) {
      plan_.Zero(dst, step.count);
    } else {
      plan_.Reduce(sources, dst, step.count);  // a move if there is one source
    }
  }

  const Request& request_;
  const int32_t rank_;
  const int64_t chunk_count_;
  const int64_t num_chunks_;
  const ChunkPlans whole_, last_;             // of the last chunk, which may be shorter
  int64_t input_slot_ = 0, output_slot_ = 0;  // elements
  Builder plan_;
};

// The same call with small blocks. The kinds of steps do not depend on the size.
Request Small(Request request) {
  request.block_count = request.geometry.num_ranks();
  request.chunk_count = request.staged_count = 0;
  return request;
}

bool ReadsFromPeers(const Algorithm& algorithm, const Request& request) {
  for (int32_t r = 0; r < request.geometry.num_ranks(); ++r) {
    const Plan plan = algorithm.build(Small(request), r);
    for (const Step& step : plan.steps) {
      if (!IsData(step)) continue;
      for (const Place& source : SourcesOf(plan, step)) {
        if (source.rank != r) return true;
      }
    }
  }
  return false;
}

}  // namespace

bool CanStage(const Algorithm& algorithm, const Request& request) {
  if (request.geometry.num_nodes > 1 || TraitsOf(request.collective).elements != ElementKind::kArray) return false;
  const Request small = Small(request);
  for (int32_t r = 0; r < request.geometry.num_ranks(); ++r) {
    if (!CanStage(algorithm.build(small, r), small.block_count)) return false;
  }
  return true;
}

int64_t StagedCount(const Algorithm& algorithm, const Request& request, int64_t item_bytes) {
  const int32_t n = request.geometry.num_ranks();
  const int64_t bytes = InputCount(request) * item_bytes;
  if (n > kMaxRanks || bytes <= kStagingSlots * kStagingSlotBytes) return 0;
  if (!CanStage(algorithm, request) || !ReadsFromPeers(algorithm, request)) return 0;
  const int64_t grain = std::max<int64_t>(kChunkGrainBytes / item_bytes, 1);
  const int64_t of_slot = kStagingSlotBytes / (bytes / request.block_count) / grain * grain;
  const int64_t least = RoundedUp(CeilDiv(request.block_count, kMaxStagedParts / n), grain);
  const int64_t count = std::max({of_slot, grain, least});
  return request.fragmented && count * item_bytes < kMinFragmentedBytes ? 0 : count;
}

Plan BuildStaged(const Algorithm& algorithm, const Request& request, int32_t rank) {
  return Stager(algorithm, request, rank).Build();
}

}  // namespace jaxcomm
