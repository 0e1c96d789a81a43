#include "plan/algorithms.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "plan/partition.h"
#include "plan/staging.h"

namespace jaxcomm {

const std::vector<Algorithm>& Algorithms(Collective collective) {
  switch (collective) {
#define JAXCOMM_COLLECTIVE(enumerator, name, ...) \
  case Collective::enumerator:                    \
    return Table<Collective::enumerator>();
#include "collectives.def"
#undef JAXCOMM_COLLECTIVE
  }
  static const std::vector<Algorithm> none;
  return none;
}

const Algorithm* FindAlgorithm(Collective collective, const char* name) {
  for (const Algorithm& algorithm : Algorithms(collective)) {
    if (std::strcmp(algorithm.name, name) == 0) return &algorithm;
  }
  return nullptr;
}

Plan BuildPlan(const Algorithm& algorithm, const Request& request, int32_t rank) {
  const bool staged = request.staged_count > 0 && request.block_count > 0;
  return staged ? BuildStaged(algorithm, request, rank) : algorithm.build(request, rank);
}

std::vector<Plan> BuildAll(const Algorithm& algorithm, const Request& request) {
  std::vector<Plan> plans;
  const int32_t n = request.geometry.num_ranks();
  plans.reserve(n);
  for (int32_t rank = 0; rank < n; ++rank) plans.push_back(BuildPlan(algorithm, request, rank));
  return plans;
}

bool WellFormed(const Request& request) {
  const Geometry& geometry = request.geometry;
  if (geometry.num_nodes < 1 || geometry.ranks_per_node < 1) return false;
  if (geometry.num_nodes > std::numeric_limits<int32_t>::max() / geometry.ranks_per_node) return false;
  const int32_t n = geometry.num_ranks();
  // Subrange multiplies an offset into the whole buffer by a number of parts; the product must not overflow.
  if (request.block_count < 0 || request.block_count > std::numeric_limits<int64_t>::max() / n / n) return false;
  if (request.chunk_count < 0 || request.staged_count < 0) return false;
  const CollectiveTraits& traits = TraitsOf(request.collective);
  if (traits.OfBoxes() != (request.boxes != nullptr)) return false;
  if (traits.TakesRoot() && (request.root < 0 || request.root >= n)) return false;
  if (!traits.TakesPermutation()) return true;
  return request.source_of.size() == static_cast<size_t>(n) &&
         std::all_of(request.source_of.begin(), request.source_of.end(),
                     [&](int32_t source) { return source >= -1 && source < n; });
}

bool Support::operator()(const Request& request) const { return WellFormed(request) && predicate(request); }

const Support kAnyGeometry = {[](const Request&) { return true; }, "nothing"};
const Support kOneAddressSpace = {
    [](const Request& request) { return request.geometry.all_addressable || request.geometry.num_nodes == 1; },
    "ranks that can read each other's memory"};
const Support kOneNodeWithMultimem = {
    [](const Request& request) { return request.geometry.num_nodes == 1 && request.geometry.multimem; },
    "one node of GPUs with NVLink SHARP"};
const Support kPowerOfTwoRanks = {[](const Request& request) { return IsPowerOfTwo(request.geometry.num_ranks()); },
                                  "a power of two of ranks"};
const Support kSeveralNodes = {
    [](const Request& request) { return request.geometry.num_nodes > 1 && request.geometry.ranks_per_node > 1; },
    "several nodes of several ranks", true};
// Preferred between hosts only: where rows can be read in place, a second copy saves nothing.
const Support kNetworkOfNodes = {[](const Request& request) { return request.geometry.num_nodes > 1; }, "several nodes",
                                 true};

}  // namespace jaxcomm
