// For tests of call sites: completions that are counted, and call specifications.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <type_traits>
#include <vector>

#include "../../ffi/cpu/rendezvous.h"
#include "../check.h"

namespace jaxcomm {

// Counts completions and waits for them with a deadline.
class Counter {
 public:
  void Add(const Status& status) {
    std::lock_guard<std::mutex> lock(mutex_);
    ++count_;
    if (!status.ok()) errors_.push_back(status.message());
    changed_.notify_all();
  }
  bool WaitFor(int count) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(60), [&] { return count_ >= count; });
  }
  int count() {
    std::lock_guard<std::mutex> lock(mutex_);
    return count_;
  }
  std::vector<std::string> errors() {
    std::lock_guard<std::mutex> lock(mutex_);
    return errors_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int count_ = 0;
  std::vector<std::string> errors_;
};

class CountCompletion : public Completion {
 public:
  explicit CountCompletion(Counter& counter) : counter_(counter) {}
  void Succeed() override { counter_.Add(OkStatus()); }
  void Fail(const Status& error) override { counter_.Add(error); }

 private:
  Counter& counter_;
};

// A participant with float32 or int32 data. output_count: that of the input if negative.
template <typename T>
Participant MakeParticipant(int64_t run_id, int64_t rank, const T* input, void* output, int64_t count,
                            int64_t output_count = -1) {
  static_assert(std::is_same_v<T, float> || std::is_same_v<T, int32_t>);
  Participant participant;
  participant.run_id = run_id;
  participant.rank = rank;
  participant.input = reinterpret_cast<const char*>(input);
  participant.output = static_cast<char*>(output);
  participant.dtype = std::is_same_v<T, float> ? DType::kF32 : DType::kS32;
  participant.input_count = count;
  participant.output_count = output_count < 0 ? count : output_count;
  return participant;
}

inline CallSpec Spec(Collective collective, int64_t num_ranks, int64_t group_size, const char* op) {
  CallSpec spec;
  spec.op = op;
  spec.site = "test_rendezvous.cc";
  spec.collective = collective;
  spec.group_size = group_size;
  spec.ranks_per_node = group_size;
  for (int64_t r = 0; r < num_ranks; ++r) spec.groups.push_back(r);
  return spec;
}

}  // namespace jaxcomm
