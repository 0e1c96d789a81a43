#include "plan/select.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <utility>
#include <vector>

#include "plan/partition.h"
#include "plan/staging.h"

namespace jaxcomm {
namespace {

// The smallest chunk and the chunk that it is copied or added to fit well into the L2 cache of a core (512 KiB to 2 MiB
// on the processors of 2026). Larger chunks suit networks of high latency.
constexpr int64_t kChunkBytes[] = {128 << 10, 1 << 20, 8 << 20};
// Limit on the chunks of all blocks of a plan. It bounds the number of steps for any size.
constexpr int64_t kMaxChunks = 1 << 17;
// Algorithms with more scratch are meant for short blocks. They are selected only if no other algorithm is supported.
constexpr int64_t kMaxScratchBytes = 64 << 20;

// Predictions within this factor count as equal, because the model is not more accurate.
constexpr double kEqual = 1.05;

// A hierarchical plan is preferred where it takes at most this many times the lowest cost. It sends the fewest bytes
// between nodes, and the model ignores contention there. Predictions for networks are typically within 25 percent of
// the measured times (docs/guide/choosing.md), so the order of two of them is uncertain up to this factor.
constexpr double kHierarchyMargin = 1.25 * 1.25;
// The same where the model cannot see what the nodes cost. In one address space the declared nodes describe another
// machine. The sizes of lists are not part of the request.
constexpr double kDeclaredMargin = 10;

// Made for links that messages share, or that take one message at a time.
bool IsForNetworks(const Algorithm& algorithm) {
  constexpr const char* kNames[] = {"ring", "bruck", "tree", "pairwise"};
  return std::any_of(std::begin(kNames), std::end(kNames),
                     [&](const char* name) { return std::strcmp(name, algorithm.name) == 0; });
}

struct Candidate {
  const Algorithm* algorithm = nullptr;
  Request request;
  Cost cost;
  bool Large() const { return cost.scratch_bytes > kMaxScratchBytes; }
  bool operator<(const Candidate& other) const {
    return Large() != other.Large() ? other.Large() : cost.time_s < other.cost.time_s;
  }
};

// The first candidate whose cost counts as equal to the lowest cost.
Candidate Best(const std::vector<Candidate>& candidates) {
  const Candidate& least = *std::min_element(candidates.begin(), candidates.end());
  return *std::find_if(candidates.begin(), candidates.end(), [&](const Candidate& candidate) {
    return candidate.Large() == least.Large() && candidate.cost.time_s <= kEqual * least.cost.time_s;
  });
}

// The algorithm with the best chunk size, or with the chunk size of the request if that is set.
Candidate Tune(const Algorithm& algorithm, Request request, int64_t item_bytes, const Machine& machine) {
  const bool walked = algorithm.protocol != Protocol::kMultimem && !LlLink(algorithm, machine);
  request.staged_count = machine.arena && walked ? StagedCount(algorithm, request, item_bytes) : 0;
  if (request.staged_count > 0) {  // chunks of the ring replace those of the algorithm
    request.chunk_count = request.block_count;
    return {&algorithm, request, CostOf(algorithm, request, item_bytes, machine)};
  }
  if (request.chunk_count > 0) {
    return {&algorithm, request, CostOf(algorithm, request, item_bytes, machine)};
  }
  const int64_t least_count =
      CeilDiv(request.block_count, std::max<int64_t>(1, kMaxChunks / request.geometry.num_ranks()));
  std::vector<Candidate> candidates;
  const int64_t most_bytes = request.geometry.num_nodes > 1 ? machine.most_message_bytes : 0;
  for (int64_t bytes : kChunkBytes) {
    if (most_bytes > 0) bytes = std::min(bytes, most_bytes);
    request.chunk_count = std::max({int64_t{1}, least_count, bytes / std::max<int64_t>(item_bytes, 1)});
    candidates.push_back({&algorithm, request, CostOf(algorithm, request, item_bytes, machine)});
    // One chunk, or the longest message: larger ones are the same.
    if (request.chunk_count >= request.block_count || bytes == most_bytes) break;
    if (request.geometry.nvlink) break;  // GPUs: a guessed cost must not tell a call from those that were measured
  }
  return Best(candidates);
}

std::string Joined(const std::vector<Algorithm>& table) {
  std::string names;
  for (const Algorithm& algorithm : table) names += (names.empty() ? "" : ", ") + std::string(algorithm.name);
  return names;
}

std::string Micros(double time_s) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f us", time_s * 1e6);
  return text;
}

std::string WhyNot(const Algorithm& algorithm, const Request& request) {
  const Geometry& geometry = request.geometry;
  const bool lacks_switch = algorithm.protocol == Protocol::kMultimem && !geometry.multimem;
  return std::string("needs ") + algorithm.supports.requirement + ", got " + std::to_string(geometry.num_nodes) +
         " nodes of " + std::to_string(geometry.ranks_per_node) + " ranks" +
         (lacks_switch ? " without NVLink SHARP" : "");
}

}  // namespace

StatusOr<Resolution> Select(const Request& request, const std::string& name, int64_t item_bytes,
                            const Machine& machine) {
  const std::vector<Algorithm>& table = Algorithms(request.collective);
  const auto lacks_ll = [&](const Algorithm& algorithm) {
    return (algorithm.protocol == Protocol::kLl || algorithm.protocol == Protocol::kLlTwoShot) &&
           !LlLink(algorithm, machine);
  };
  const auto resolution_of = [&](const Candidate& candidate, std::string reason) {
    Resolution resolution;
    resolution.backend = Backend::kPlan;
    resolution.algorithm = candidate.algorithm->name;
    resolution.reason = std::move(reason);
    resolution.plan = candidate.algorithm;
    resolution.request = candidate.request;
    resolution.call_request = request;
    resolution.item_bytes = item_bytes;
    resolution.ll = LlLink(*candidate.algorithm, machine).has_value();
    resolution.machine = machine;
    resolution.cost = candidate.cost;
    return resolution;
  };
  const std::string shape = std::to_string(request.geometry.num_nodes) + " nodes of " +
                            std::to_string(request.geometry.ranks_per_node) + " ranks";
  if (!WellFormed(request)) {
    return InvalidArgumentError("sizes, root or permutation are not valid for " + shape);
  }
  if (!name.empty()) {
    const Algorithm* wanted = FindAlgorithm(request.collective, name.c_str());
    if (wanted == nullptr) {
      return InvalidArgumentError("unknown algorithm \"" + name + "\"; choose one of " + Joined(table));
    }
    if (!wanted->supports(request)) {
      return InvalidArgumentError("algorithm \"" + name + "\" " + WhyNot(*wanted, request));
    }
    return resolution_of(
        Tune(*wanted, request, item_bytes, machine),
        lacks_ll(*wanted) ? "asked for; runs step by step, because LL is not available here" : "asked for");
  }

  std::vector<Candidate> candidates;
  for (const Algorithm& algorithm : table) {
    // Rows of a list that can be read in place are best read there: a message to a node saves no copies.
    const bool in_place = OfLists(request.collective) && request.geometry.all_addressable;
    const bool over_nvlink = request.geometry.nvlink && request.geometry.num_nodes == 1;
    if (algorithm.supports(request) && !lacks_ll(algorithm) && algorithm.protocol != Protocol::kMultimem &&
        !(in_place && algorithm.supports.hierarchical) && !(over_nvlink && IsForNetworks(algorithm)))
      candidates.push_back(Tune(algorithm, request, item_bytes, machine));
  }
  if (candidates.empty()) return InvalidArgumentError("no algorithm supports this request");
  Candidate best = Best(candidates);
  std::string reason = "lowest predicted cost of " + std::to_string(candidates.size());
  const bool only_declared = request.geometry.all_addressable || OfLists(request.collective);
  const double margin = only_declared ? kDeclaredMargin : kHierarchyMargin;
  for (const Candidate& candidate : candidates) {
    if (!candidate.algorithm->supports.hierarchical) continue;
    if (candidate.cost.time_s > margin * best.cost.time_s) break;
    best = candidate;
    reason = "made for " + shape;
  }
  std::sort(candidates.begin(), candidates.end());
  std::string costs;
  for (const Candidate& candidate : candidates) {
    costs += (costs.empty() ? ": " : ", ") + std::string(candidate.algorithm->name) + " " +
             Micros(candidate.cost.time_s) + (candidate.Large() ? " (too much scratch)" : "");
  }
  return resolution_of(best, reason + costs);
}

}  // namespace jaxcomm
