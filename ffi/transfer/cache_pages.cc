#include "transfer/cache_pages.h"

#include <string>
#include <utility>

namespace jaxcomm {
namespace {

// The reads of one layer, from several sources.
struct Arrival {
  std::mutex mutex;
  size_t missing;
  Status status;
  std::function<void(const Status&)> then;
};

Status Ended() { return UnavailableError("jaxcomm.transfer: insert: the pull has ended: its pages are free"); }

}  // namespace

CachePages& CachePages::Get() {
  static auto* pages = new CachePages;
  return *pages;
}

int32_t CachePages::Add(std::shared_ptr<Entry> entry) {
  const std::lock_guard<std::mutex> lock(mutex_);
  entries_[next_id_] = std::move(entry);
  return next_id_++;
}

int32_t CachePages::AddPull(std::shared_ptr<Endpoint> endpoint, std::vector<std::vector<std::shared_ptr<Call>>> layers,
                            std::vector<StridedArray> arrays) {
  auto entry = std::make_shared<Entry>();
  entry->endpoint = std::move(endpoint);
  entry->layers = std::move(layers);
  entry->arrays = std::move(arrays);
  return Add(std::move(entry));
}

int32_t CachePages::AddOffer(std::shared_ptr<Endpoint> endpoint, uint64_t exposure, std::vector<StridedArray> arrays) {
  auto entry = std::make_shared<Entry>();
  entry->endpoint = std::move(endpoint);
  entry->exposure = exposure;
  entry->arrays = std::move(arrays);
  return Add(std::move(entry));
}

std::shared_ptr<CachePages::Entry> CachePages::Find(int32_t id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = entries_.find(id);
  return found == entries_.end() ? nullptr : found->second;
}

void CachePages::Remove(int32_t id) {
  const std::shared_ptr<Entry> entry = Find(id);
  if (entry == nullptr) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    entries_.erase(id);
  }
  const std::lock_guard<std::mutex> lock(entry->copying);
  entry->removed = true;
}

void CachePages::WhenArrived(int32_t pull, int32_t layer, std::chrono::steady_clock::time_point deadline,
                             std::function<void(const Status&)> then) {
  const std::shared_ptr<Entry> entry = Find(pull);
  if (entry == nullptr) return then(Ended());
  if (layer < 0 || static_cast<size_t>(layer) >= entry->layers.size()) {
    return then(InvalidArgumentError("jaxcomm.transfer: insert: layer must be in [0, " +
                                     std::to_string(entry->layers.size()) + "), got " + std::to_string(layer)));
  }
  const std::vector<std::shared_ptr<Call>>& calls = entry->layers[static_cast<size_t>(layer)];
  auto arrival = std::make_shared<Arrival>();
  arrival->missing = calls.size();
  arrival->then = std::move(then);
  for (const std::shared_ptr<Call>& call : calls) {
    entry->endpoint->Then(call, deadline, [arrival](const Call& ended) {
      {
        const std::lock_guard<std::mutex> lock(arrival->mutex);
        if (!ended.error.ok()) {
          arrival->status = {
              ended.error.code == Code::kTimeout ? StatusCode::kDeadlineExceeded : StatusCode::kUnavailable,
              "jaxcomm.transfer: insert: " + ended.error.text};
        }
        if (--arrival->missing > 0) return;
      }
      arrival->then(arrival->status);
    });
  }
}

StatusOr<const StridedArray*> CachePages::PagesFor(const Entry& entry, int32_t layer, const StridedArray& cache) const {
  if (layer < 0 || static_cast<size_t>(layer) >= entry.arrays.size()) {
    return InvalidArgumentError("jaxcomm.transfer: layer must be in [0, " + std::to_string(entry.arrays.size()) +
                                "), got " + std::to_string(layer));
  }
  const StridedArray& pages = entry.arrays[static_cast<size_t>(layer)];
  if (pages.sizes == cache.sizes && pages.item_bytes == cache.item_bytes) return &pages;
  std::string text = "jaxcomm.transfer: pages of (";
  for (const auto* each : {&cache, &pages}) {
    for (const int64_t size : each->sizes) text += std::to_string(size) + ", ";
    text += std::to_string(each->item_bytes) + " bytes)" + (each == &cache ? " of the cache for pages of (" : "");
  }
  return InvalidArgumentError(text + ": kv, pages, tokens, heads, dim, element");
}

Status CachePages::Insert(int32_t pull, int32_t layer, const StridedArray& cache) {
  const std::shared_ptr<Entry> entry = Find(pull);
  if (entry == nullptr) return Ended();
  StatusOr<const StridedArray*> pages = PagesFor(*entry, layer, cache);
  JAXCOMM_RETURN_IF_ERROR(pages.status());
  const std::lock_guard<std::mutex> lock(entry->copying);
  if (entry->removed) return Ended();
  CopyAll(**pages, cache);
  return OkStatus();
}

Status CachePages::Emit(int32_t offer, int32_t layer, const StridedArray& cache) {
  const std::shared_ptr<Entry> entry = Find(offer);
  if (entry == nullptr) return OkStatus();
  StatusOr<const StridedArray*> pages = PagesFor(*entry, layer, cache);
  JAXCOMM_RETURN_IF_ERROR(pages.status());
  {
    const std::lock_guard<std::mutex> lock(entry->copying);
    if (entry->removed || !entry->endpoint->InUse(entry->exposure)) return OkStatus();
    CopyAll(cache, **pages);
  }
  entry->endpoint->MarkReady(entry->exposure, static_cast<uint32_t>(layer));
  return OkStatus();
}

}  // namespace jaxcomm
