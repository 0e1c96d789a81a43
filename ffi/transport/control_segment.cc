#include "transport/control_segment.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <ctime>

namespace jaxcomm {
namespace {

// Keys are hashes already.
int FirstSlot(uint64_t key, int probe) {
  return static_cast<int>((key + static_cast<uint64_t>(probe)) % ControlSegment::kBuckets) * ControlSegment::kWays;
}

long Futex(std::atomic<uint32_t>* word, int op, uint32_t value, const timespec* timeout) {
  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "a futex is a plain word");
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), op, value, timeout, nullptr, 0);
}

}  // namespace

int ControlSegment::SlotWith(uint64_t value, uint64_t key) const {
  for (int probe = 0; probe < kProbes; ++probe) {
    const int first = FirstSlot(key, probe);
    for (int way = 0; way < kWays; ++way) {
      if (keys[first + way].load() == value) return first + way;
    }
  }
  return -1;
}

void ControlSegment::AddFailure(int64_t run_id, const std::string& text) {
  const uint32_t number = num_failures.load(std::memory_order_relaxed);
  Failure& failure = failures[number % kNumFailures];
  failure.version.fetch_add(1);
  failure.run_id.store(run_id);
  for (size_t word = 0; word < kFailureWords; ++word) {
    uint64_t bytes = 0;
    if (word * 8 < text.size())
      std::memcpy(&bytes, text.data() + word * 8, std::min<size_t>(8, text.size() - word * 8));
    failure.text[word].store(bytes);
  }
  failure.version.fetch_add(1);
  num_failures.store(number + 1);
}

std::optional<std::string> ControlSegment::FindFailure(int64_t run_id) const {
  if (num_failures.load() == 0) return std::nullopt;
  for (const Failure& failure : failures) {
    const uint32_t version = failure.version.load();
    if (version % 2 != 0 || version == 0 || failure.run_id.load() != run_id) continue;
    char copy[kFailureWords * 8];
    for (size_t word = 0; word < kFailureWords; ++word) {
      const uint64_t bytes = failure.text[word].load();
      std::memcpy(copy + word * 8, &bytes, 8);
    }
    if (failure.version.load() != version) continue;
    return std::string(copy, strnlen(copy, sizeof(copy)));
  }
  return std::nullopt;
}

void ControlSegment::RingDoorbell() {
  // Keys, counters and `sleeping` are stored and loaded in one total order (sequentially consistent). So either the
  // owner sees earlier stores of this thread after PrepareToSleep, or this thread sees that the owner sleeps.
  if (sleeping.load() == 0) return;
  doorbell.fetch_add(1);
  Futex(&doorbell, FUTEX_WAKE, INT_MAX, nullptr);
}

uint32_t ControlSegment::PrepareToSleep() {
  const uint32_t seen = doorbell.load();
  sleeping.store(1);
  return seen;
}

void ControlSegment::Sleep(uint32_t seen, int64_t max_ns) {
  const timespec timeout{max_ns / 1'000'000'000, max_ns % 1'000'000'000};
  Futex(&doorbell, FUTEX_WAIT, seen, &timeout);
  StayAwake();
}

}  // namespace jaxcomm
