// The flight recorder of this process: a ring of its latest calls in a mapped file (layout.h).
//
// Nothing here waits for a peer or fails a call. Without a file, nothing is recorded. Open calls are not overwritten
// while the ring has room for others, so a call that hangs stays in the file.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/status.h"
#include "recorder/fast_clock.h"
#include "recorder/layout.h"

namespace jaxcomm {

// One call in the ring. A copyable handle; all functions do nothing if the call is not recorded or was overwritten.
class CallRecord {
 public:
  CallRecord() = default;

  bool begun() const { return call_ != nullptr; }
  // The ranks of this process that have arrived. `mask`: as RecordedCall::arrived_mask.
  void Arrived(uint64_t mask) const {
    if (Valid()) Store(call_->arrived_mask, mask);
  }
  static uint64_t ArrivedBit(int64_t i) { return i < 64 ? uint64_t{1} << i : 0; }
  void Started(uint64_t key) const;  // all devices of this process have arrived
  void Running() const;              // all processes of this host have entered
  void SetPhase(CallPhase phase) const {
    if (Valid()) call_->phase.store(static_cast<uint32_t>(phase), std::memory_order_relaxed);
  }
  void Waits(int64_t rank, int64_t peer) const;  // -1: none
  // Ends the call, and counts it at its call site. The caller must not have completed the call: calls of one site and
  // group that follow each other count one after the other. `counts`: false if the calls between are not seen.
  void End(bool ok, bool counts = true) const;

 private:
  friend class Recorder;
  CallRecord(RecordedCall* call, uint64_t number) : call_(call), number_(number) {}
  bool Valid() const { return call_ != nullptr && Load(call_->number) == number_; }
  static uint64_t Load(const Number64& number) { return number.load(std::memory_order_relaxed); }
  static void Store(Number64& number, uint64_t value) { number.store(value, std::memory_order_relaxed); }

  RecordedCall* call_ = nullptr;
  uint64_t number_ = 0;
};

// Who writes the file.
struct RecorderOwner {
  int64_t process = 0, num_processes = 1;
  std::string version, kernel, node, job;
};

class Recorder {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr uint32_t kNoSite = UINT32_MAX;

  static Recorder& Get();  // never destroyed: its thread runs until the process ends
  // Makes `recorder` that of this module, before anything else. The modules of a process have one recorder.
  static void Use(Recorder* recorder);

  // Creates the file, and starts the thread that shows that the process is alive. A second call fails.
  Status Start(const std::string& path, int64_t num_calls, const RecorderOwner& owner);
  bool started() const { return file_.load(std::memory_order_acquire) != nullptr; }
  const std::string& path() const { return path_; }

  // A call site in one group, whose ranks and their processes come by position: its index, or kNoSite.
  uint32_t AddSite(const std::string& site, const std::string& algorithm, uint64_t identity, uint64_t group_hash,
                   const std::vector<int64_t>& ranks, const std::vector<int32_t>& processes);
  void SetAlgorithm(uint32_t site, const std::string& algorithm);
  // `sequence`: of the call in its group, if the caller counts; 0: one more than that of the group's last call.
  CallRecord Begin(uint32_t site, int64_t run_id, int64_t iteration, uint32_t dtype, int64_t input_count,
                   int64_t output_count, Clock::time_point arrived, uint64_t sequence = 0);

  // The first error of a run. The thread of the recorder then copies the file to Dump's default path.
  void AddError(int64_t run_id, const std::string& text);
  // A rank has waited for long: creates `<folder>/trigger`, on which all processes of the folder write their stacks.
  void Trigger();
  // Copies the file, as it is now.
  Status Dump(const std::string& path) const;
  void SetEnding(const std::string& ending);

  // Stops or continues recording, for measurements of its cost.
  void Pause(bool paused) { paused_.store(paused, std::memory_order_relaxed); }

 private:
  friend class CallRecord;
  void LiveForever();
  std::vector<uint64_t> Words() const;
  void Count(const RecordedCall& call, uint64_t now, bool ok);
  // The time, but not before `earlier_ns`, which may be the system's: it differs by some ns.
  uint64_t NowNs(uint64_t earlier_ns) const { return std::max(clock_.NowNs(), earlier_ns); }
  template <typename Row>
  Row* Table(int64_t offset) const {
    return reinterpret_cast<Row*>(file_.load(std::memory_order_relaxed) + offset);
  }
  RecorderHeader& header() const { return *Table<RecorderHeader>(0); }
  bool AddText(const std::string& text, Number64& at, Number64& bytes);
  int64_t GroupOf(uint64_t hash, const std::vector<int64_t>& ranks, const std::vector<int32_t>& processes);

  std::atomic<char*> file_{nullptr};  // mapped; null: nothing is recorded
  FastClock clock_;
  std::atomic<bool> paused_{false};
  std::atomic<bool> dump_wanted_{false}, trigger_wanted_{false};
  int64_t num_calls_ = 0;
  RecorderOffsets at_{0};
  std::string path_;
  mutable std::mutex mutex_;  // guards the tables of texts, groups, sites and errors
  std::unordered_map<uint64_t, int64_t> groups_;
  std::unordered_map<uint64_t, uint32_t> sites_;  // programs that are compiled again have the same
};

}  // namespace jaxcomm
