// Asynchronous calls: no thread of XLA does their work.
#include <algorithm>
#include <future>
#include <memory>
#include <vector>

#include "../../ffi/cpu/worker_pool.h"
#include "participants.h"

namespace jaxcomm {
namespace {

// A call of some ranks, which all arrive on the calling thread. The result of rank r is output[r].
struct Arrivals {
  Arrivals(const CallSpec& spec, int64_t count)
      : site(ValueOf(Rendezvous::Make(spec))),
        input(spec.groups.size(), std::vector<int32_t>(count, 3)),
        output(spec.groups.size(), std::vector<int32_t>(count, -1)) {
    CompletionPool::Get().EnsureThreads(static_cast<int64_t>(spec.groups.size()));
    Rendezvous::SetLimits({60, 30});
    for (size_t rank = 0; rank < input.size(); ++rank) {
      site->Arrive(MakeParticipant(1, static_cast<int64_t>(rank), input[rank].data(), output[rank].data(), count),
                   std::make_unique<CountCompletion>(counter));
    }
  }

  std::shared_ptr<Rendezvous> site;
  std::vector<std::vector<int32_t>> input, output;
  Counter counter;
};

CallSpec Asynchronous() {
  CallSpec spec = Spec(Collective::kAllReduce, 4, 4, "psum_start");
  spec.asynchronous = 1;
  return spec;
}

TEST_CASE("the thread of the last rank does no work") {
  // All workers are busy, so nothing can happen before they are released.
  std::promise<void> release;
  const std::shared_future<void> released = release.get_future().share();
  Counter busy;
  const int num_workers = std::max(static_cast<int>(WorkerPool::Get().num_threads()), 1);
  for (int i = 0; i < num_workers; ++i) {
    WorkerPool::Get().SubmitOnce([&busy, released] {
      busy.Add(OkStatus());
      released.wait();
    });
  }
  CHECK(busy.WaitFor(num_workers));
  constexpr int64_t kLarge = 1 << 19;  // split between workers
  Arrivals small(Asynchronous(), 5), large(Asynchronous(), kLarge);
  CHECK(small.counter.count() == 0 && large.counter.count() == 0);
  for (const auto& row : small.output) CHECK(row == std::vector<int32_t>(5, -1));
  for (const auto& row : large.output) CHECK(row == std::vector<int32_t>(kLarge, -1));
  release.set_value();
  CHECK(small.counter.WaitFor(4) && large.counter.WaitFor(4));
  CHECK(small.counter.errors().empty() && large.counter.errors().empty());
  for (const auto& row : small.output) CHECK(row == std::vector<int32_t>(5, 12));
  for (const auto& row : large.output) CHECK(row == std::vector<int32_t>(kLarge, 12));
}

}  // namespace
}  // namespace jaxcomm
