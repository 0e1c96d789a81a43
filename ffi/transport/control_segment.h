// The control segment of a process, which the other processes of its host read: the calls that it has entered, where
// their memory is, and what has failed. Lies in shared memory; only plain data and lock-free atomics.
//
// A process writes to its own control segment only, with three exceptions: peers count themselves out of a slot, count
// signals in the memory that a slot points to, and ring the doorbell.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>

namespace jaxcomm {

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free,
              "processes can share only lock-free atomics");

// One call that the owner has entered.
struct alignas(64) Slot {
  std::atomic<uint32_t> exited{0};  // peers that will not touch this slot, its block or the owner's buffers any more
  std::atomic<uint32_t> failed{0};  // the owner has aborted
  std::atomic<uint32_t> over{0};    // and touches nothing of its peers' any more
  uint32_t memory = 0;              // ControlSegment::memories
  uint64_t offset = 0;              // of the block in it
  uint64_t fingerprint = 0;         // of everything that all processes must agree on
  char what[224] = {};              // for people: op, call site, sizes
};

struct ControlSegment {
  static constexpr uint64_t kMagic = 0x6a6178636f6d6d31;
  // A call can stand in one of kWays * kProbes slots, which its key determines.
  static constexpr int kBuckets = 512;
  static constexpr int kWays = 8;  // a cache line of keys
  static constexpr int kProbes = 4;
  static constexpr int kNumSlots = kBuckets * kWays;
  static constexpr int kMaxMemories = 1024;
  static constexpr int kNumFailures = 16;
  static constexpr int kFailureWords = 128;
  static constexpr uint64_t kRetired = 2;  // no call's key: can't be found, but isn't free either

  struct Memory {
    int32_t fd = -1;
    uint64_t bytes = 0;
  };
  struct Failure {
    std::atomic<uint32_t> version{0};  // odd while it is written
    std::atomic<int64_t> run_id{0};
    std::atomic<uint64_t> text[kFailureWords] = {};  // cut if longer
  };

  uint64_t magic = kMagic;
  uint64_t token[2] = {};
  alignas(64) std::atomic<uint32_t> doorbell{0};           // raised for a sleeping owner
  alignas(64) std::atomic<uint32_t> sleeping{0};           // the owner waits for the doorbell
  alignas(64) std::atomic<uint64_t> keys[kNumSlots] = {};  // 0: free
  Slot slots[kNumSlots];
  std::atomic<uint32_t> num_memories{0};
  Memory memories[kMaxMemories];
  std::atomic<uint32_t> num_failures{0};
  Failure failures[kNumFailures];  // the latest

  // The slot of a call, or -1.
  int Find(uint64_t key) const;
  // For the owner, one thread at a time: a free slot for the key, or -1. Visible to others once Publish is called.
  int Reserve(uint64_t key) const;
  void Publish(int slot, uint64_t key) { keys[slot].store(key); }
  void Free(int slot) { keys[slot].store(0); }
  void Retire(int slot) { keys[slot].store(kRetired); }

  // For the owner, one thread at a time.
  void AddFailure(int64_t run_id, const std::string& text);
  // Why the owner has aborted a run; none if it has not.
  std::optional<std::string> FindFailure(int64_t run_id) const;

  // Wakes the owner if it sleeps. Everything stored before is visible to it.
  void RingDoorbell();
  // For the owner: announces that it will sleep, and returns the doorbell to wait for. After that it must look again.
  uint32_t PrepareToSleep();
  void StayAwake() { sleeping.store(0); }  // after all
  // Returns when the doorbell has been rung since PrepareToSleep, or after some time.
  void Sleep(uint32_t seen, int64_t max_ns);
};

}  // namespace jaxcomm
