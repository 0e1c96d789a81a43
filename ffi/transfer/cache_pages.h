// Copies between the caches of programs and the cache pages of this process that are pulled or offered.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "common/status.h"
#include "transfer/endpoint.h"
#include "transfer/strided.h"

namespace jaxcomm {

// Thread-safe. Programs name pulls and offers by numbers, which are run-time data.
class CachePages {
 public:
  // Never destroyed: threads of XLA may call it until the process ends.
  static CachePages& Get();

  // layers: the reads of each. arrays: the pages that they fill, one per layer.
  int32_t AddPull(std::shared_ptr<Endpoint> endpoint, std::vector<std::vector<std::shared_ptr<Call>>> layers,
                  std::vector<StridedArray> arrays);
  int32_t AddOffer(std::shared_ptr<Endpoint> endpoint, uint64_t exposure, std::vector<StridedArray> arrays);
  // Waits for copies. Afterwards, the memory of the arrays is not used.
  void Remove(int32_t id);

  // Calls `then` once the layer has arrived, or with the error of the pull: on the thread of the endpoint, or at once.
  void WhenArrived(int32_t pull, int32_t layer, std::chrono::steady_clock::time_point deadline,
                   std::function<void(const Status&)> then);
  // Copies the pages of a layer, which has arrived, into pages of a cache.
  Status Insert(int32_t pull, int32_t layer, const StridedArray& cache);
  // Copies pages of a cache into those of an offer, and gives the layer to the reader. Does nothing if the offer is
  // over.
  Status Emit(int32_t offer, int32_t layer, const StridedArray& cache);

 private:
  struct Entry {
    std::shared_ptr<Endpoint> endpoint;
    std::vector<std::vector<std::shared_ptr<Call>>> layers;  // of a pull
    uint64_t exposure = 0;                                   // of an offer
    std::vector<StridedArray> arrays;
    std::mutex copying;
    bool removed = false;  // guarded by `copying`
  };

  int32_t Add(std::shared_ptr<Entry> entry);
  std::shared_ptr<Entry> Find(int32_t id);
  // The pages of a layer if `cache` has the same number of pages of the same sizes.
  StatusOr<const StridedArray*> PagesFor(const Entry& entry, int32_t layer, const StridedArray& cache) const;

  std::mutex mutex_;
  std::map<int32_t, std::shared_ptr<Entry>> entries_;
  int32_t next_id_ = 1;
};

}  // namespace jaxcomm
