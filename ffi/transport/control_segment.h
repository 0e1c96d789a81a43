// The control segment of a process, which the other processes of its host read: the calls that it has entered, the
// location of their memory, and its failures. It lies in shared memory and holds only plain data and lock-free atomics.
//
// Only the owner writes to its control segment, with three exceptions. Peers increment `exited` of a slot, count
// signals in the memory that a slot refers to, and ring the doorbell.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>

#include "transport/fingerprint.h"

namespace jaxcomm {

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free,
              "processes can share only lock-free atomics");

// One call that the owner has entered.
struct alignas(64) Slot {
  std::atomic<uint32_t> exited{0};  // peers that no longer touch this slot, its block or the owner's buffers
  std::atomic<uint32_t> failed{0};  // the owner has aborted
  std::atomic<uint32_t> over{0};    // the owner has aborted and no longer touches memory of its peers
  uint32_t memory = 0;              // index in ControlSegment::memories
  uint64_t offset = 0;              // of the block in that memory
  Fingerprint fingerprint;
  std::atomic<int64_t> run_id{0};
  std::atomic<uint64_t> group{0};  // as in RunAndGroup
  char what[200] = {};             // op, call site, sizes and algorithm, for messages; longer texts are cut

  std::string What() const { return {what, strnlen(what, sizeof(what))}; }
};

struct ControlSegment {
  static constexpr uint64_t kMagic = 0x6a6178636f6d6d32;
  // The key of a call determines the kWays * kProbes slots that it may use.
  static constexpr int kBuckets = 512;
  static constexpr int kWays = 8;  // a cache line of keys
  static constexpr int kProbes = 4;
  static constexpr int kNumSlots = kBuckets * kWays;
  static constexpr int kMaxMemories = 1024;
  static constexpr int kNumFailures = 16;
  static constexpr int kFailureWords = 128;
  static constexpr uint64_t kRetired = 2;  // never the key of a call: marks a slot that is neither free nor findable

  struct Memory {
    int32_t fd = -1;
    uint64_t bytes = 0;
  };
  struct Failure {
    std::atomic<uint32_t> version{0};  // odd while the owner writes
    std::atomic<int64_t> run_id{0};
    std::atomic<uint64_t> text[kFailureWords] = {};  // longer texts are truncated
  };

  uint64_t magic = kMagic;
  uint64_t token[2] = {};
  alignas(64) std::atomic<uint32_t> doorbell{0};           // incremented to wake the owner
  alignas(64) std::atomic<uint32_t> sleeping{0};           // 1: the owner waits for the doorbell
  alignas(64) std::atomic<uint64_t> keys[kNumSlots] = {};  // 0: free
  Slot slots[kNumSlots];
  std::atomic<uint32_t> num_memories{0};
  Memory memories[kMaxMemories];
  std::atomic<uint32_t> num_failures{0};
  Failure failures[kNumFailures];  // the most recent ones

  // The first of the slots for `key` whose entry in `keys` is `value`, or -1.
  int SlotWith(uint64_t value, uint64_t key) const;
  // The slot of a call, or -1.
  int Find(uint64_t key) const { return SlotWith(key, key); }
  // For the owner, one thread at a time: a free slot for the key, or -1. Publish makes it visible to others.
  int Reserve(uint64_t key) const { return SlotWith(0, key); }
  void Publish(int slot, uint64_t key) { keys[slot].store(key); }
  void Free(int slot) { keys[slot].store(0); }
  void Retire(int slot) { keys[slot].store(kRetired); }

  // A copy of a slot.
  struct Call {
    uint64_t key = 0;
    int64_t run_id = 0;
    uint64_t group = 0;
    uint32_t exited = 0;
    std::string what;
  };
  // Calls visit(call) for each call that the owner has entered and has not aborted. The owner may leave a call and
  // reuse its slot at any time. So the slot is copied, and the copy is dropped if the slot has another key by then.
  template <typename Visit>
  void VisitCalls(const Visit& visit) const {
    for (int slot = 0; slot < kNumSlots; ++slot) {
      const uint64_t key = keys[slot].load();
      const Slot& at = slots[slot];
      if (key == 0 || key == kRetired || at.failed.load() != 0) continue;
      const Call call{key, at.run_id.load(), at.group.load(), at.exited.load(), at.What()};
#if !defined(__SANITIZE_THREAD__)  // it does not support fences
      std::atomic_thread_fence(std::memory_order_acquire);
#endif
      if (keys[slot].load() == key) visit(call);
    }
  }

  // For the owner, one thread at a time.
  void AddFailure(int64_t run_id, const std::string& text);
  // The error with which the owner aborted a run; none if it did not.
  std::optional<std::string> FindFailure(int64_t run_id) const;

  // Wakes the owner if it sleeps. All earlier stores of the caller are visible to the owner.
  void RingDoorbell();
  // For the owner: announces that it will sleep, and returns the value for Sleep. The owner must check for work once
  // more before it calls Sleep.
  uint32_t PrepareToSleep();
  void StayAwake() { sleeping.store(0); }  // revokes PrepareToSleep
  // Returns when the doorbell has been rung since PrepareToSleep, or after `max_ns`.
  void Sleep(uint32_t seen, int64_t max_ns);
};

}  // namespace jaxcomm
