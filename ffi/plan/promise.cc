#include "plan/promise.h"

#include "plan/boxes.h"

namespace jaxcomm {

std::vector<Promise> PromisesOf(const Request& request, int32_t rank) {
  if (request.boxes != nullptr) return request.boxes->promises[static_cast<size_t>(rank)];
  const CollectiveTraits& traits = TraitsOf(request.collective);
  const int64_t b = request.block_count;
  const int64_t num_blocks = b > 0 && traits.expected != nullptr ? OutputCount(request, rank) / b : 0;
  const int32_t source = request.source_of.empty() ? -1 : request.source_of[static_cast<size_t>(rank)];
  std::vector<Promise> promises;
  for (int32_t block = 0; block < num_blocks; ++block) {
    const Expected expected = traits.expected({rank, block, request.root, source});
    Promise& promise = promises.emplace_back();
    promise.begin = block * b;
    promise.end = promise.begin + b;
    if (expected.rank == Expected::kZeros) continue;
    promise.kind = expected.rank == Expected::kSum ? PromiseKind::kSum : PromiseKind::kCopy;
    for (int32_t from = 0; from < request.geometry.num_ranks(); ++from) {
      if (promise.kind == PromiseKind::kCopy && from != expected.rank) continue;
      promise.sources.push_back({from, Space::kInput, expected.block * b});
    }
  }
  return promises;
}

}  // namespace jaxcomm
